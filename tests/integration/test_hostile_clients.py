"""Clients that stop, flood or send garbage, and the others beside them."""

from __future__ import annotations

import time

import pytest

from protocol.errors import DaemonBusy
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def engine_of(runtime_dir, checkpoint, **options):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K, **options)


def load(engine, layer, experts):
    answer = engine.miss(layer, experts)
    engine.applied = answer.to_version
    assert answer.errors == ()
    return answer


def test_a_stopped_engine_is_shown_as_stuck_and_keeps_its_slots(
    model, checkpoint, runtime_dir, monkeypatch
):
    monkeypatch.setattr("expert_daemon.liveness.SILENT_S", 0.1)
    monkeypatch.setattr("expert_daemon.liveness.STUCK_S", 0.2)
    monkeypatch.setattr("expert_daemon.server.TICK_S", 0.02)
    with (
        daemon_thread(model, runtime_dir),
        engine_of(runtime_dir, checkpoint) as engine,
        ExpertClient(runtime_dir) as reader,
    ):
        slots = load(engine, 2, range(8)).slots
        end = time.monotonic() + 10
        while not reader.stats()["stuck"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        stats = reader.stats()
        assert stats["stuck"].startswith("engine ")
        assert (stats["stuck_clients"], stats["n_clients"]) == (1, 2)
        with pytest.raises(DaemonBusy):
            engine_of(runtime_dir, checkpoint, hello_ms=100)
        for expert, slot in enumerate(slots):
            assert slot_bytes(engine, slot) == expert_bytes(checkpoint, 2, expert)
        engine.poll()  # answers the Ping
        end = time.monotonic() + 10
        while reader.stats()["stuck"]:
            engine.poll()
            assert time.monotonic() < end
        assert load(engine, 2, range(8)).slots == slots
