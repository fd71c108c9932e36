"""How many slots an arena needs, and the text of the refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.budget import common_slots, minimum_slots, plan_arena, slot_budget
from protocol.arena.rooms import Rooms
from protocol.errors import ConfigError


@pytest.mark.parametrize("top_k_batch", [0, 1, 2, 6, 48, 384])
def test_the_minimum_is_the_smallest_number_that_holds_its_own_addends(top_k_batch):
    def holds(n):
        return n >= 2 * top_k_batch + min(64, n // 8) + 2 + min(64, n // 4) + 16

    budget = minimum_slots(top_k_batch)
    assert budget.n_slots == next(n for n in range(10_000) if holds(n))
    assert budget.needed <= budget.n_slots


@given(top_k_batch=st.integers(0, 400), extra=st.integers(0, 2000))
def test_every_size_from_the_minimum_on_is_legal(top_k_batch, extra):
    minimum = minimum_slots(top_k_batch)
    budget = slot_budget(minimum.n_slots + extra, top_k_batch)
    assert budget.needed <= budget.n_slots
    assert 0 < budget.lease_quota <= min(128, budget.n_slots // 4)
    assert budget.max_experts >= 2 * top_k_batch + 16


def test_leases_take_no_room_that_a_request_needs_where_few_slots_take_any_expert():
    sizes = [8 << 20] + [4 << 20] * 9
    rooms = Rooms.of(sizes, common_slots(48))
    for n_slots in range(minimum_slots(48).n_slots, 3000, 7):
        budget = slot_budget(n_slots, 48, rooms)
        assert budget.max_experts >= 2 * 48 + 16 or budget.lease_quota <= 64
    assert budget.lease_quota == 128
    assert slot_budget(800, 6).lease_quota == 128
    assert slot_budget(rooms.n_common, 48, rooms).lease_quota <= 66


def test_a_plan_takes_the_most_slots_that_fit():
    plan = plan_arena(100_000, top_k_batch=2, n_keys=1000, bytes_of=lambda n: 5000 + 1000 * n)
    assert (plan.n_slots, plan.n_bytes) == (95, 100_000)
    assert plan.budget.n_slots == 95


def test_a_plan_takes_no_more_slots_than_all_keys_can_use():
    plan = plan_arena(10**9, top_k_batch=2, n_keys=100, bytes_of=lambda n: 1000 * n)
    assert plan.n_slots - plan.budget.free_pool - plan.budget.hedge >= 100
    assert plan.n_slots < 120


def test_a_model_with_few_experts_still_gets_the_minimum():
    plan = plan_arena(10**9, top_k_batch=6, n_keys=4, bytes_of=lambda n: 1000 * n)
    assert plan.n_slots == minimum_slots(6).n_slots


def _addends(lines: list[str]) -> dict[str, int]:
    return {line.rsplit(maxsplit=1)[0].strip(): int(line.split()[-1]) for line in lines}


def test_a_size_too_small_is_refused_with_each_addend_and_the_smallest():
    minimum = minimum_slots(6)
    with pytest.raises(ConfigError) as refused:
        plan_arena(30_000, top_k_batch=6, n_keys=1000, bytes_of=lambda n: 5000 + 1000 * n)
    lines = str(refused.value).splitlines()
    assert lines[0] == f"an arena of 30000 bytes holds 25 slots, wanted {minimum.n_slots}:"
    between = lines.index("in bytes:")
    addends = _addends(lines[1:between])
    assert addends["2 x top-k x batch"] == 12
    assert addends.pop("slots needed") == sum(addends.values())
    smallest = 5000 + 1000 * minimum.n_slots
    assert lines[-1] == f"smallest: {smallest} bytes"
    of_bytes = {f"{minimum.n_slots} slots": 1000 * minimum.n_slots, "tables": 5000}
    assert _addends(lines[between + 1 : -1]) == of_bytes
    plan = plan_arena(smallest, top_k_batch=6, n_keys=1000, bytes_of=lambda n: 5000 + 1000 * n)
    assert plan.n_slots == minimum.n_slots
