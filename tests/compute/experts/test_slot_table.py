from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.experts.slot_table import SlotTable
from protocol.errors import ProtocolError
from protocol.wire.messages import Welcome

N_LAYERS, N_EXPERTS, N_SLOTS = 2, 3, 4


def _welcome(table: list[int], version: int = 0) -> Welcome:
    return Welcome(
        session=1,
        generation=1,
        arena_id=bytes(16),
        arena_bytes=0,
        n_layers=N_LAYERS,
        n_experts=N_EXPERTS,
        n_slots=N_SLOTS,
        slot_bytes=4096,
        max_experts=2,
        lease_quota=0,
        descriptor_address="arena.sock",
        version=version,
        table=np.array(table, "<i4").tobytes(),
        scores=bytes(4 * N_SLOTS),
    )


def _table() -> SlotTable:
    table = SlotTable()
    table.reset(_welcome([0, -1, -1, -1, 1, -1], version=5))
    return table


def test_the_whole_table_is_taken() -> None:
    table = _table()
    assert table.slots == [[0, -1, -1], [-1, 1, -1]]
    assert table.version == 5


def test_a_change_that_continues_is_applied() -> None:
    table = _table()
    assert table.apply(5, 7, [(0, 0, -1), (0, 2, 0)])
    assert table.slots[0] == [-1, -1, 0]
    assert table.version == 7


def test_a_change_that_overlaps_is_applied_and_an_old_one_is_not() -> None:
    table = _table()
    assert table.apply(3, 6, [(0, 0, -1)])
    assert table.version == 6
    assert table.apply(4, 6, [(0, 0, 3)])
    assert table.slots[0][0] == -1


def test_a_gap_is_reported_and_changes_nothing() -> None:
    table = _table()
    assert not table.apply(6, 9, [(0, 0, -1)])
    assert table.slots[0][0] == 0
    assert table.version == 5


def test_a_cleared_table_takes_nothing_before_the_next_reset() -> None:
    table = _table()
    table.clear()
    assert not table.apply(5, 6, [(0, 0, 1)])
    assert table.slots == [[-1] * 3] * 2


@pytest.mark.parametrize("table", [[0, 1], [0, -1, -1, -1, N_SLOTS, -1], [-2, 0, 0, 0, 0, 0]])
def test_a_table_of_the_wrong_size_or_with_foreign_slots_is_refused(table: list[int]) -> None:
    with pytest.raises(ProtocolError, match="table"):
        SlotTable().reset(_welcome(table))


@given(st.data())
def test_any_interleaving_of_answers_ends_in_the_daemons_table(data: st.DataObject) -> None:
    """The daemon's history; messages of any ranges of it, late ones too; gaps answered by reset."""
    states = [{(layer, e): -1 for layer in range(N_LAYERS) for e in range(N_EXPERTS)}]
    history: list[tuple[tuple[int, int], int]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        key = data.draw(st.sampled_from(sorted(states[0])))
        history.append((key, data.draw(st.integers(-1, N_SLOTS - 1))))
        states.append(states[-1] | {key: history[-1][1]})

    def as_list(version: int) -> list[int]:
        return [states[version][key] for key in sorted(states[0])]

    table = SlotTable()
    table.reset(_welcome(as_list(0)))
    for _ in range(data.draw(st.integers(0, 12))):
        to_version = data.draw(st.integers(0, len(history)))
        from_version = data.draw(st.integers(0, to_version))
        keys = {key for key, _ in history[from_version:to_version]}
        changes = [(*key, states[to_version][key]) for key in sorted(keys)]
        if not table.apply(from_version, to_version, changes):
            table.reset(_welcome(as_list(to_version), to_version))
        flat = [slot for row in table.slots for slot in row]
        assert flat == as_list(table.version)
