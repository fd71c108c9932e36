"""A real daemon that stops, dies and returns while a token's rows are waited for between pieces."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute.assembly import make_experts
from compute.experts.request_io import Waiting
from compute.graph.runner import Runner
from compute.model.sequence import Sequence
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.decode_rig import Rig, make_rig, model_of
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_process, smallest_arena

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TOP_K = 2
STOPS = [3]  # steps


@pytest.mark.parametrize("with_arena", [True, pytest.param(False, marks=pytest.mark.accept)])
def test_a_daemon_that_dies_while_it_owes_rows_changes_no_token(
    tmp_path: Path, *, with_arena: bool
) -> None:
    checkpoint = open_checkpoint(write_fake_checkpoint(tmp_path / "model", n_experts=64))
    model = model_of(checkpoint, "cpu")
    eager = make_rig(checkpoint=checkpoint, mode="eager")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    size = smallest_arena(checkpoint, TOP_K)
    with (
        daemon_process(tmp_path / "model", runtime, "--arena", str(size)) as daemon,
        ExpertClient(runtime, "engine", checkpoint.fingerprint, TOP_K) as client,
    ):
        experts = make_experts(checkpoint, client, Waiting(daemon_wait_s=20), 20, model.device)
        sequence = Sequence(model.config, 512, model.device, model.precision)
        runner = Runner(model, sequence, experts, boundaries="whole", checks=True)
        made: Any = Rig(model, None, experts, runner)  # type: ignore[arg-type]
        for one in (eager, made):
            one.prefill([3, 11, 17, 2, 9])
        launches = runner._launches.layers

        def kill() -> None:
            daemon.kill()
            daemon.start(with_arena=with_arena)

        def stopped_after_the_first(first: int, end: int) -> None:
            launches(first, end)
            if first == 0:
                runner._launches.layers = launches  # type: ignore[method-assign]
                threading.Timer(0.05, kill).start()

        ids, token = [], 42
        for step in range(8):
            if step in STOPS:
                assert daemon.process is not None
                os.kill(daemon.pid, signal.SIGSTOP)
                runner._launches.layers = stopped_after_the_first  # type: ignore[method-assign]
            runner.step(token)
            token = runner.likeliest()
            ids.append(token)
        runner.finish()
        assert ids == eager.greedy(8)
        assert all(map(np.array_equal, made.state(), eager.state()))
        assert experts.n_daemons_lost == len(STOPS)
        experts.close()
