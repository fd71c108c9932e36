"""`headrace verify --runtime`, and its matrix over a real daemon whose reads end in any order."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headrace
from compute.assembly import make_experts
from compute.connecting import connect_engine
from compute.experts.device_experts import DeviceExperts
from compute.experts.request_io import Waiting
from compute.graph.exactness import run_matrix, sizes_of
from compute.graph.runner import Runner
from tests.support.decode_rig import demo, demo_model
from tests.support.faulty_source import Faults
from tests.support.running_daemon import daemon_thread

SMALL_ARENA = 3_000_000


@pytest.mark.slow
def test_the_command_prints_a_line_a_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace.main(["verify", "--runtime", "demo", "--tokens", "2"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "mode", "device", "cache", "tokens", "ids", "streams", "misses", "tokens/s", "result",
    ]  # fmt: skip
    assert len(lines) == 16
    assert lines[0].endswith("reference")
    assert all(line.endswith("same") for line in lines[1:])
    assert last == "16 ways, none different"


@pytest.mark.accept
def test_a_difference_ends_with_status_1_and_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    likeliest = Runner.likeliest

    def other(runner: Runner) -> int:
        return likeliest(runner) ^ (runner.mode == "segment")

    monkeypatch.setattr(Runner, "likeliest", other)
    assert headrace.main(["verify", "--runtime", "--tokens", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["n_different"] == 4
    bad = [case for case in found["cases"] if case["difference"]]
    assert {case["case"]["mode"] for case in bad} == {"segment"}
    # It is seen where the step's first segment ends, whose length is what the misses before say.
    assert all(re.match(r"position 3 layer [0-3]: hidden ", case["difference"]) for case in bad)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--runtime", "--tokens", "0"], "--tokens"),
        (["--runtime", "--precision", "unrounded", "--tokens", "1"], "unrounded"),
        ([], "no model"),
        (["demo", "--model", "demo"], "one of them"),
        (["demo", "--tokens", "5"], "--runtime"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace.main(["verify", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.accept
@pytest.mark.timeout(1800)
def test_two_hundred_tokens_over_a_daemon_whose_reads_end_in_any_order(runtime_dir: Path) -> None:
    model, faults = demo_model("cpu"), Faults()
    checkpoint = demo()

    @contextlib.contextmanager
    def opened(n_device: int) -> Iterator[DeviceExperts]:
        with connect_engine(runtime_dir, checkpoint, 10) as client:
            experts = make_experts(checkpoint, client, Waiting(), n_device, torch.device("cpu"))
            yield experts
            experts.close()

    def shuffle(seed: int | None) -> None:
        faults.shuffle = None if seed is None else random.Random(seed)

    own = checkpoint.config
    with daemon_thread("demo", runtime_dir, faults, arena_bytes=SMALL_ARENA) as daemon:
        outcomes = run_matrix(
            model,
            opened,
            sizes=sizes_of(own.n_keys, own.top_k, own.n_keys),
            n_tokens=200,
            prompt=[0, 209, 711, 63],
            shuffle=shuffle,
        )
        daemon.daemon.cache.check()
    assert not [outcome for outcome in outcomes if outcome.difference]
    assert all(outcome.n_misses for outcome in outcomes if outcome.case.n_device < own.n_keys)
