"""Compute reads no byte of an expert or an Engram table, and holds no shard once it has loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compute.commands.opening import opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import blank_daemon_bytes
from tests.support.generation import generate
from tests.support.running_daemon import daemon_process


@pytest.fixture
def blank_demo(demo_dir: Path, tmp_path: Path) -> Path:
    """The demo with zeros where the daemon's bytes are; its fingerprint is the true one's."""
    copy = tmp_path / "blank"
    shutil.copytree(demo_dir, copy, ignore=shutil.ignore_patterns("*.py", "heldout.txt", "__py*"))
    blank_daemon_bytes(copy)
    assert open_checkpoint(copy).fingerprint == open_checkpoint(demo_dir).fingerprint
    return copy


def test_the_ids_are_right_when_only_the_daemon_has_the_experts(
    runtime_dir: Path, demo_dir: Path, blank_demo: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    wanted = samples[0]["unrounded"]["continuation_ids"][:12]
    with daemon_process(demo_dir, runtime_dir):
        assert generate(runtime_dir, 12, model=str(blank_demo))["ids"] == wanted


def test_the_ids_are_wrong_when_the_daemon_has_zeros(
    runtime_dir: Path, demo_dir: Path, blank_demo: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    wanted = samples[0]["unrounded"]["continuation_ids"][:12]
    with daemon_process(blank_demo, runtime_dir):
        assert generate(runtime_dir, 12, model=str(demo_dir))["ids"] != wanted


def test_no_shard_is_open_or_mapped_once_the_model_is_loaded(
    runtime_dir: Path, demo_dir: Path
) -> None:
    with (
        daemon_process(demo_dir, runtime_dir),
        opened(ComputeConfig(runtime_dir=runtime_dir), Display(quiet=True)),
    ):
        links = list(Path("/proc/self/fd").iterdir())
        held = {str(link.readlink()) for link in links if link.is_symlink()}
        assert not [path for path in held if path.endswith(".safetensors")]
        assert ".safetensors" not in Path("/proc/self/maps").read_text()
