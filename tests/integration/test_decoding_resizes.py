"""Tokens by launches while the arena is resized and registered anew: the same ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compute.assembly import make_experts
from compute.experts import device_experts, registered_arena
from compute.experts.device_experts import DeviceExperts
from compute.experts.registered_arena import RegisteredArena
from compute.experts.request_io import Waiting
from compute.graph.runner import Runner
from compute.model.sequence import Sequence
from protocol.arena.layout import ArenaView, Rooms
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.decode_rig import close_rigs, make_rig, model_of
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_thread, smallest_arena

pytestmark = pytest.mark.timeout(90)

TOP_K = 2
CONTEXT = 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model") / "model"
    return open_checkpoint(write_fake_checkpoint(directory, n_experts=64, top_k=TOP_K))


class Registrar:
    """Takes some time; knows what is registered, and that nothing is so twice."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.n_registered = 0

    def register(self, start: int, n_bytes: int) -> None:
        time.sleep(0.01)
        for other, size in self.registered.items():
            assert start + n_bytes <= other or other + size <= start
        self.registered[start] = n_bytes
        self.n_registered += 1

    def unregister(self, start: int) -> None:
        del self.registered[start]


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registrar]:
    """What every arena is registered by, a few slots at a time."""
    made = Registrar()

    def arena(view: ArenaView, n_slots: int, device: torch.device, _own: object) -> RegisteredArena:
        return RegisteredArena(view, n_slots, device, made)

    monkeypatch.setattr(registered_arena, "CHUNK_BYTES", 1)
    monkeypatch.setattr(Rooms, "chunk_slots", 16)
    monkeypatch.setattr(device_experts, "RegisteredArena", arena)
    yield made
    close_rigs()


class Resizes(threading.Thread):
    """Sizes, one after the other, until all were had."""

    def __init__(self, runtime_dir: Path, sizes: list[int]) -> None:
        super().__init__(daemon=True)
        self._runtime_dir = runtime_dir
        self._sizes = sizes
        self.texts: list[str] = []
        self.start()

    def run(self) -> None:
        with ExpertClient(self._runtime_dir) as client:
            for size in self._sizes:
                self.texts.append(client.resize(size, timeout_ms=20_000).text)


@pytest.mark.slow
@pytest.mark.parametrize("n_device", [pytest.param(0, marks=pytest.mark.accept), 30])
def test_tokens_are_the_same_through_resizes(
    checkpoint: Checkpoint, runtime_dir: Path, registrar: Registrar, n_device: int
) -> None:
    least = smallest_arena(checkpoint, TOP_K)
    most = least + (1 << 20)
    model = model_of(checkpoint, "cpu")
    with (
        daemon_thread(
            str(checkpoint.path), runtime_dir, arena_bytes=most, arena_max_bytes=most
        ) as daemon,
        ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K) as client,
    ):
        experts: DeviceExperts = make_experts(
            checkpoint, client, Waiting(), n_device, torch.device("cpu")
        )
        sequence = Sequence(model.config, CONTEXT, model.device, model.precision)
        runner = Runner(model, sequence, experts, mode="segment")
        small, large = least + (512 << 10), least + (800 << 10)
        resizes = Resizes(runtime_dir, [small, most, large, most])
        ids: list[int] = []
        token = 7
        while (resizes.is_alive() or len(ids) < 60) and len(ids) < CONTEXT:
            runner.step(token)
            token = runner.likeliest()
            ids.append(token)
        runner.finish()
        resizes.join(10)
        assert resizes.texts == [""] * 4
        assert registrar.n_registered > len(registrar.registered) > 0
        daemon.daemon.cache.check()
        experts.close()
        assert not registrar.registered
    eager = make_rig(checkpoint=checkpoint, context=CONTEXT, n_slots=512, mode="eager")
    eager.experts._registered.wait_for(range(512))  # type: ignore[union-attr]
    found: list[int] = []
    token = 7
    for _ in ids:
        eager.runner.step(token)
        token = eager.runner.likeliest()
        found.append(token)
    assert found == ids
