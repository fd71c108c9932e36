"""The arena's registration in the background: what is ready when, and what a resize touches."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compute.experts import registered_arena
from compute.experts.registered_arena import CudaRegistrar, RegisteredArena
from protocol.arena.layout import Rooms
from protocol.errors import ConfigError
from tests.support.arena_daemon import ArenaDaemon
from tests.support.decode_rig import close_rigs, demo, make_rig

CPU = torch.device("cpu")


class SlowRegistrar:
    """Registers a chunk each time that it is let."""

    def __init__(self, *, held: bool = True, fails_at: int = -1) -> None:
        self.let = threading.Semaphore(0 if held else 1000)
        self.registered: dict[int, int] = {}
        self.log: list[str] = []
        self.fails_at = fails_at
        self.begun = threading.Semaphore(0)
        self.base = 0

    def register(self, start: int, n_bytes: int) -> None:
        self.begun.release()
        self.let.acquire()
        self.base = self.base or start
        if len(self.log) == self.fails_at:
            raise ConfigError("cudaHostRegister failed with CUDA error 2")
        self.log.append(f"+{start}")
        self.registered[start] = n_bytes

    def unregister(self, start: int) -> None:
        self.log.append(f"-{start}")
        del self.registered[start]


@pytest.fixture
def daemon() -> ArenaDaemon:
    return ArenaDaemon(demo(), 200, full=False)


@pytest.fixture(autouse=True)
def _chunks_are_of_few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered_arena, "CHUNK_BYTES", 1)
    monkeypatch.setattr(Rooms, "chunk_slots", 24)
    yield
    close_rigs()


class Held:
    """`ready` that is written only once somebody has asked for news, or has had the time to."""

    def __init__(self, ready: NDArray[np.bool_]) -> None:
        self.values = ready
        self.asked = threading.Event()

    def __getitem__(self, place: int) -> bool:
        return bool(self.values[place])

    def __setitem__(self, place: slice, value: bool) -> None:
        self.asked.wait(0.2)
        self.values[place] = value


def test_news_asked_for_just_before_a_chunk_is_ready_come_again(daemon: ArenaDaemon) -> None:
    """Else a table is built without the chunk, and nobody asks for it again."""
    registrar = SlowRegistrar()
    arena = RegisteredArena(daemon.arena, 24, CPU, registrar)
    held = arena.ready = Held(arena.ready)  # type: ignore[assignment]
    registrar.let.release()
    knows, end = False, time.monotonic() + 5
    while not (held[0] and held.asked.is_set()) and time.monotonic() < end:
        if arena.take_news():
            knows = held[0]
            held.asked.set()
    assert held[0]
    assert knows or arena.take_news()


def test_without_a_gpu_every_slot_is_ready_and_nothing_is_registered(daemon: ArenaDaemon) -> None:
    arena = RegisteredArena(daemon.arena, 50, CPU)
    assert arena.ready.all()
    arena.wait_for(range(50))
    arena.resize(20)
    arena.close()


def test_slots_become_ready_chunk_after_chunk(daemon: ArenaDaemon) -> None:
    registrar = SlowRegistrar()
    arena = RegisteredArena(daemon.arena, 200, CPU, registrar)
    step = daemon.layout.rooms.chunk_slots
    assert not arena.ready.any()
    registrar.begun.acquire()
    registrar.let.release()
    registrar.begun.acquire()  # the second one has begun, so the first is there
    assert arena.ready[:step].all()
    assert not arena.ready[step:].any()
    assert arena.take_news()
    registrar.let.release(1000)
    arena.wait_for(range(200))
    assert arena.ready.all()
    starts = sorted(registrar.registered)
    ends = [start + registrar.registered[start] for start in starts]
    assert starts[1:] == ends[:-1]
    assert starts[0] == arena.starts()[0]
    arena.close()
    assert not registrar.registered
    assert not arena.ready.any()


def test_a_slot_that_is_waited_for_is_registered_next(daemon: ArenaDaemon) -> None:
    registrar = SlowRegistrar()
    arena = RegisteredArena(daemon.arena, 200, CPU, registrar)
    registrar.begun.acquire()  # the first chunk is under way
    waits = threading.Thread(target=arena.wait_for, args=([199],), daemon=True)
    waits.start()
    while not arena._wanted:
        pass
    registrar.let.release()
    registrar.let.release()
    waits.join(10)
    assert not waits.is_alive()
    step = daemon.layout.rooms.chunk_slots
    assert arena.ready[199]
    assert arena.ready[:step].all()
    assert not arena.ready[step : 2 * step].any()
    registrar.let.release(1000)
    arena.close()


def test_a_resize_touches_the_chunks_concerned_alone(daemon: ArenaDaemon) -> None:
    registrar = SlowRegistrar(held=False)
    arena = RegisteredArena(daemon.arena, 100, CPU, registrar)
    arena.wait_for(range(100))
    step, starts = daemon.layout.rooms.chunk_slots, arena.starts()
    kept = registrar.registered.copy()
    registrar.log.clear()
    n_slots = step + step // 2  # ends within the second chunk
    arena.resize(n_slots)
    arena.wait_for(range(n_slots))
    assert f"-{starts[0]}" not in registrar.log
    assert f"+{starts[step]}" in registrar.log  # what remains of the second one
    assert not arena.ready[n_slots:].any()
    assert registrar.registered[int(starts[0])] == kept[int(starts[0])]
    registrar.log.clear()
    arena.resize(150)
    arena.wait_for(range(150))
    assert not [line for line in registrar.log if line.startswith("-")]
    assert arena.ready[:150].all()
    assert not arena.ready[150:].any()
    arena.close()
    assert not registrar.registered


def test_a_chunk_that_is_never_registered_is_not_waited_for_without_end(
    daemon: ArenaDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_arena, "WAIT_S", 0.05)
    registrar = SlowRegistrar()
    arena = RegisteredArena(daemon.arena, 50, CPU, registrar)
    with pytest.raises(ConfigError, match=r"a chunk took more than 0\.05 s"):
        arena.wait_for([0])
    with pytest.raises(ConfigError, match="a chunk took more"):
        arena.close()
    registrar.let.release(10)


def test_a_registration_that_fails_is_an_error_for_whoever_needs_it(daemon: ArenaDaemon) -> None:
    arena = RegisteredArena(daemon.arena, 200, CPU, SlowRegistrar(held=False, fails_at=0))
    with pytest.raises(ConfigError, match="CUDA error 2"):
        arena.wait_for([199])
    with pytest.raises(ConfigError, match="CUDA error 2"):
        arena.take_news()
    arena.close()


@pytest.mark.parametrize("n_device", [0, 40])
def test_tokens_are_the_same_while_the_arena_is_being_registered(n_device: int) -> None:
    registrar = SlowRegistrar()
    plain = make_rig(mode="segment")
    made = make_rig(mode="segment", registrar=registrar, n_device=n_device)
    for one in (plain, made):
        one.prefill([3, 911, 17])  # by copies: nothing is registered yet
    arena = made.experts._registered
    assert arena is not None
    assert not arena.ready.any()
    ticking = threading.Event()

    def tick() -> None:
        while not ticking.wait(0.002):
            if arena._wanted:
                registrar.let.release()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    token = 42
    for _ in range(6):
        for one in (plain, made):
            one.runner.step(token)
        assert (plain.runner.logits() == made.runner.logits()).all()
        token = plain.runner.likeliest()
        registrar.let.release()  # one that nobody waits for
    assert made.runner.counters.misses > 0
    assert made.experts.io.misses == 0  # all of them lay in the arena
    registrar.let.release(1000)
    close_rigs()
    ticking.set()
    thread.join()
    assert not registrar.registered


class FakeRuntime:
    """Answers cudaHostRegister by its flags; 0 for those that it has no code for."""

    def __init__(self, codes: dict[int, int]) -> None:
        self.codes = codes
        self.flags: list[int] = []

    def cudaHostRegister(self, _start: int, _n_bytes: int, flags: int) -> int:  # noqa: N802
        self.flags.append(flags)
        return self.codes.get(flags, 0)


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> CudaRegistrar:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return CudaRegistrar(torch.device("cuda:0"))


def runtime_of(codes: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(codes)
    monkeypatch.setattr(registered_arena, "_runtime", lambda: runtime)
    return runtime


def test_what_a_device_cannot_register_as_read_only_is_registered_without(
    registrar: CudaRegistrar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of({8: 801}, monkeypatch)
    with caplog.at_level(logging.WARNING, "headrace.compute"):
        for start in (4096, 8192, 12288):
            registrar.register(start, 4096)
    assert runtime.flags == [8, 0, 0, 0]
    said = "cuda:0 registers nothing as read-only: the arena goes without"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize(
    ("codes", "code", "flags"),
    [({8: 2}, 2, [8]), ({8: 1}, 1, [8]), ({8: 801, 0: 801}, 801, [8, 0])],
)
def test_another_error_of_the_device_ends_it(
    codes: dict[int, int],
    code: int,
    flags: list[int],
    registrar: CudaRegistrar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = runtime_of(codes, monkeypatch)
    with pytest.raises(ConfigError, match=f"4096 bytes of the arena failed with CUDA error {code}"):
        registrar.register(4096, 4096)
    assert runtime.flags == flags
