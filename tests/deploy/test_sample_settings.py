"""deploy/headrace.toml is read by all three processes, as it is and with all of it turned on."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from compute.config import COMPUTE_KEYS, load_config
from compute.frontend.config import FrontendConfig, load_frontend_config
from expert_daemon import config as daemon

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "headrace.toml"
SETTING = re.compile(r"^# ([a-z_]+ = .+)$", re.MULTILINE)


@pytest.fixture(params=["as it is", "all turned on"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    text = SAMPLE.read_text()
    if request.param == "all turned on":
        text = SETTING.sub(r"\1", text.replace('model = "demo"\n', ""))
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return path


def test_the_daemon_reads_it(file: Path, tmp_path: Path):
    flags = ["--config", str(file), "--runtime-dir", str(tmp_path)]
    found = daemon.load_config(flags, {})
    assert found.metrics == "127.0.0.1:9464"


def test_compute_reads_it(file: Path):
    found = load_config(argparse.Namespace(config=str(file)), {})
    assert found.device == "auto"


def test_the_frontend_reads_it(file: Path):
    found = load_frontend_config(argparse.Namespace(config=str(file)), {}, COMPUTE_KEYS)
    assert (found.host, found.port) == ("127.0.0.1", 8080)


def test_what_is_commented_out_shows_the_default_or_an_example():
    examples = {"served_name", "token_file"}
    defaults = {field.name: field.default for field in fields(FrontendConfig)}
    table = SAMPLE.read_text().partition("[frontend]")[2]
    for line in SETTING.findall(table):
        name, _, value = line.partition(" = ")
        if name not in examples:
            assert str(defaults[name]).lower().removesuffix(".0") == value.removesuffix(".0"), name
