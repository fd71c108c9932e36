"""A token whose daemon, rows or request end between its pieces: the next is as if it had not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compute.experts import device_copies, registered_arena
from compute.experts.request_io import RequestCancelled, Waiting
from compute.graph.runner import Runner
from compute.graph.timings import StepTimer
from compute.model.sequence import Sequence
from protocol.arena.layout import Rooms
from protocol.errors import ConfigError, DaemonLost, ShardError
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.decode_rig import (
    CONTEXT,
    Rig,
    Wanted,
    demo,
    make_experts,
    make_rig,
    model_of,
    wanted,
)
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.in_turn import in_turn
from tests.support.mortal_daemon import MortalDaemon

PROMPT = [3, 911, 17, 2045, 88]
WHOLE: dict[str, Any] = {"boundaries": "whole"}
FOUND_IN = ["take_rows", "request_rows", "changes", "touch"]


def mortal_rig(
    *,
    checkpoint: Checkpoint | None = None,
    new_arena: bool = False,
    n_device: int = 0,
    **settings: Any,
) -> tuple[Rig, MortalDaemon]:
    """Return a rig whose daemon can die."""
    checkpoint = checkpoint or demo()
    model = model_of(checkpoint, "cpu")
    daemon = MortalDaemon(checkpoint, checkpoint.config.n_keys, new_arena=new_arena)
    experts = make_experts(daemon, checkpoint, n_device, model.device)
    experts.waiting = Waiting(daemon_wait_s=5)
    sequence = Sequence(model.config, CONTEXT, model.device, model.precision)
    return Rig(model, daemon, experts, Runner(model, sequence, experts, **settings)), daemon


def note_launches(made: Rig) -> None:
    """Write launches and waits down among what the daemon sees, and a prompt's reads."""
    runner, events, launches = made.runner, made.daemon.events, made.runner._launches

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calls(*args: Any, **more: Any) -> Any:
            events.append(name)
            return call(*args, **more)

        return calls

    launches._launch = noted("launch", launches._launch)  # type: ignore[method-assign]
    launches.at_once = noted("launch", launches.at_once)  # type: ignore[method-assign]
    runner._wait = noted("wait", runner._wait)  # type: ignore[method-assign]
    made.experts._matrices = noted("launch", made.experts._matrices)  # type: ignore[method-assign]


def same_state(one: Rig, other: Rig) -> bool:
    return all(map(np.array_equal, one.state(), other.state()))


def check_loss(
    made: Rig, daemon: MortalDaemon, eager: Wanted, ids: list[int], found_in: str
) -> None:
    """Go on from `ids` with a daemon that dies: to `eager`, and no launch stands between the loss
    and the whole table.
    """
    note_launches(made)
    daemon.events.clear()
    daemon.dies_in = found_in
    ids = ids + made.greedy(3, ids[-1])
    assert ids == eager.ids
    assert all(map(np.array_equal, made.state(), eager.state))
    lost, back = daemon.events.index("lost"), daemon.events.index("resync")
    assert "launch" not in daemon.events[lost:back]


@pytest.mark.parametrize(
    ("settings", "found_in", "new_arena"),
    [
        *((WHOLE, found_in, place % 2 == 0) for place, found_in in enumerate(FOUND_IN)),
        *(
            pytest.param(WHOLE, found_in, place % 2 == 1, marks=pytest.mark.accept)
            for place, found_in in enumerate(FOUND_IN)
        ),
        ({"boundaries": "source-layers"}, "touch", False),
        (WHOLE | {"mode": "oracle", "checks": True}, "take_rows", True),
        (WHOLE | {"mode": "oracle", "checks": True}, "touch", False),
    ],
)
def test_nothing_reads_the_arena_between_a_loss_and_the_whole_table(
    settings: dict[str, Any], found_in: str, new_arena: bool
) -> None:
    made, daemon = mortal_rig(new_arena=new_arena, n_device=10, **settings)
    made.prefill(PROMPT)
    ids = made.greedy(3)
    check_loss(made, daemon, wanted("cpu", (*PROMPT,), 6), ids, found_in)


@in_turn(mode=["segment", "layer", "oracle"], found_in=["miss", "answer"], new_arena=[False, True])
def test_a_request_that_was_not_answered_is_asked_of_the_next_daemon(
    mode: str, found_in: str, new_arena: bool
) -> None:
    made, daemon = mortal_rig(new_arena=new_arena, n_device=10, mode=mode, boundaries="whole")
    made.prefill(PROMPT)
    ids = made.greedy(3)
    for expert in range(demo().config.n_experts):
        daemon.drop(4, expert)
    made.experts.take_changes()
    check_loss(made, daemon, wanted("cpu", (*PROMPT,), 6), ids, found_in)


def test_a_model_without_engrams_finds_its_lost_daemon_before_it_launches(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path, text_config={"engram_layer_ids": []})
    checkpoint = open_checkpoint(tmp_path)
    made, daemon = mortal_rig(checkpoint=checkpoint, mode="segment")
    eager = make_rig(checkpoint=checkpoint, mode="eager")
    for one in (made, eager):
        one.prefill([3, 11, 17])
    ids = made.greedy(2)
    note_launches(made)
    daemon.events.clear()
    daemon.dies_in = "changes"
    ids += made.greedy(2, ids[-1])
    assert ids == eager.greedy(4)
    assert daemon.events[:2] == ["lost", "resync"]


def test_a_prompt_reads_nothing_of_a_daemon_that_is_known_to_be_lost() -> None:
    eager = make_rig(mode="eager")
    made, daemon = mortal_rig(mode="segment")
    for one in (eager, made):
        one.prefill(PROMPT)
    note_launches(made)
    daemon.dies_in = "changes"
    made.runner.finish()
    assert daemon.lost
    daemon.events.clear()
    for one in (eager, made):
        one.runner.sequence.reset()
        one.prefill(PROMPT[::-1])
    assert daemon.events[0] == "resync"
    assert made.greedy(2) == eager.greedy(2)


def test_who_asks_after_a_daemon_stayed_away_waits_anew() -> None:
    made, daemon = mortal_rig(mode="segment")
    made.prefill(PROMPT)
    made.runner.step(7)
    made.experts.waiting = Waiting(daemon_wait_s=0.03)
    daemon.dies_in, daemon.n_absent = "take_rows", 1000
    with pytest.raises(DaemonLost, match=r"waited 0\.03 s"):
        made.runner.step(8)
    daemon.n_absent = 1
    made.runner.step(8)
    eager = make_rig(mode="eager")
    eager.prefill(PROMPT)
    eager.greedy(1, 7)
    eager.runner.step(8)
    assert same_state(made, eager)


def failing(error: Exception, after: int) -> Callable[[Rig], None]:
    """Make the rows of a token fail after so many of its tables came."""

    def spoil(made: Rig) -> None:
        take, calls = made.experts.take_rows, []

        def fails(handle: int) -> Any:
            calls.append(1)
            if len(calls) == after + 1:
                made.experts.take_rows = take  # type: ignore[method-assign]
                raise error
            return take(handle)

        made.experts.take_rows = fails  # type: ignore[method-assign]

    return spoil


def no_expert(made: Rig) -> None:
    """Make the next request for experts fail, and let there be one in the last layer."""
    for expert in range(demo().config.n_experts):
        made.daemon.drop(7, expert)
    fetch = made.experts._fetch

    def fails(*_: Any) -> Any:
        made.experts._fetch = fetch  # type: ignore[method-assign]
        raise ShardError("no such expert")

    made.experts._fetch = fails  # type: ignore[assignment, method-assign]


@in_turn(
    spoil=[
        failing(ShardError("row 7: EIO"), 0),
        failing(ShardError("row 7: EIO"), 1),
        failing(RequestCancelled(), 0),
        no_expert,
    ],
    boundaries=["whole", "source-layers"],
)
def test_a_token_that_broke_can_be_taken_again(
    spoil: Callable[[Rig], None], boundaries: str
) -> None:
    eager = make_rig(mode="eager")
    made = make_rig(mode="segment", boundaries=boundaries)
    for one in (eager, made):
        one.prefill(PROMPT)
        one.runner.step(7)
    made.daemon.touched.clear()
    position, ids = made.runner.sequence.position, made.runner.sequence.last_ids.copy()
    untold = made.experts._untold
    assert untold is not None
    spoil(made)
    note_launches(made)
    with pytest.raises((ShardError, RequestCancelled)):
        made.runner.step(8)
    assert made.daemon.events[-1] == "wait"
    assert made.runner.sequence.position == position
    assert (made.runner.sequence.last_ids == ids).all()
    for one in (eager, made):
        one.runner.step(9)
        one.runner.step(10)
    assert same_state(made, eager)
    made.runner.finish()
    steps = [step for step, _ in made.daemon.touched]
    assert steps[0] == untold[0]
    assert all(after == before + 1 for before, after in pairwise(steps))


def test_rows_that_nobody_takes_may_be_unreadable() -> None:
    made = make_rig(mode="segment")
    made.prefill(PROMPT)
    take = made.daemon.take_rows
    made.runner.expect(99)

    def fails(handle: int) -> Any:
        made.daemon.take_rows = take  # type: ignore[method-assign]
        raise ShardError("row 7: EIO")

    made.daemon.take_rows = fails  # type: ignore[method-assign]
    made.runner.step(7)
    plain = make_rig(mode="segment")
    plain.prefill(PROMPT)
    plain.runner.step(7)
    assert same_state(made, plain)


def test_a_token_that_broke_has_no_line_of_timings_and_its_marks_count_nowhere() -> None:
    lines: list[str] = []
    timer = StepTimer(torch.device("cpu"), lines.append)
    made = make_rig(mode="segment", timer=timer)
    made.prefill(PROMPT)
    failing(ShardError("row 7: EIO"), 0)(made)
    with pytest.raises(ShardError):
        made.runner.step(7)
    assert not timer._marks
    made.runner.step(8)
    made.runner.finish()
    assert [line.split()[2] for line in lines] == ["5:"]


def test_a_token_that_could_not_begin_has_no_line_of_timings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    made = make_rig(mode="segment", timer=StepTimer(torch.device("cpu"), lines.append))
    made.prefill(PROMPT)
    made.runner.step(5)

    def fails() -> None:
        raise ConfigError("cudaHostRegister")

    with monkeypatch.context() as patched:
        patched.setattr(made.experts, "take_arrived", fails)
        with pytest.raises(ConfigError):
            made.runner.step(6)
    made.runner.finish()
    assert [line.split()[2] for line in lines] == ["5:"]


def test_what_was_launched_has_ended_before_a_lost_daemons_successor_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that finds it dead has not waited for the rest of its segment."""
    made, daemon = mortal_rig(mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    daemon.drop(3, int(made.runner._headers.all_picks()[3, 0]))
    made.runner.sequence.position -= 1
    monkeypatch.setattr(made.experts, "_drain", lambda: daemon.events.append("drain"))
    daemon.dies_in = "miss"
    made.runner.step(7)
    events = daemon.events[daemon.events.index("lost") :]
    assert events[1:3] == ["drain", "resync"]


def test_an_arena_that_grew_before_its_daemon_was_lost_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registered_arena, "CHUNK_BYTES", 1)
    monkeypatch.setattr(Rooms, "chunk_slots", 24)
    made, daemon = mortal_rig(mode="segment")
    n_slots = daemon.n_slots

    class Free:
        """Registers at once."""

        def register(self, start: int, n_bytes: int) -> None: ...
        def unregister(self, start: int) -> None: ...

    daemon.n_slots = 100
    daemon._owner = [None] * 100
    daemon.table[:] = -1
    daemon._changed.clear()
    daemon.welcome = daemon._welcome()
    experts = make_experts(daemon, demo(), 0, made.model.device, Free())
    experts.waiting = Waiting(daemon_wait_s=5)
    grown = Rig(made.model, daemon, experts, Runner(made.model, made.runner.sequence, experts))
    plain = make_rig(mode="segment")
    for one in (grown, plain):
        one.prefill(PROMPT)
    assert grown.greedy(3) == plain.greedy(3)
    daemon.n_slots = n_slots
    daemon.dies_in = "take_rows"
    assert grown.greedy(30) == plain.greedy(30)
    assert max(daemon.table.flat) >= 100
    assert same_state(grown, plain)


def test_a_copy_that_ends_between_two_pieces_is_no_fault_of_the_routing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[int, int] = {}

    def at_the_third_time(copy: Any) -> bool:
        asked[id(copy)] = asked.get(id(copy), 0) + 1
        return asked[id(copy)] > 2

    monkeypatch.setattr(device_copies, "_has_ended", at_the_third_time)
    made = make_rig(mode="segment", boundaries="whole", n_device=20, checks=True)
    made.prefill(PROMPT)
    for _ in range(6):
        made.runner.step(42)
    assert made.experts.cache.n_promoted
