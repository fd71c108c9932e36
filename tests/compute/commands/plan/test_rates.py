"""The performance model's formulas, and what must hold whatever the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.commands.plan.curve import curve_hits
from compute.commands.plan.rates import (
    Device,
    Drive,
    Hits,
    Measured,
    Work,
    chunk_s,
    distinct_experts,
    first_token_s,
    layer_s,
    replayed_disk_s,
    token_time,
)

FLASH = Work(40, 384, 6, 18_800_640, 18, 8_280_000_000, 13_000_000_000, 35_389_440)
H200 = Device("discrete", 4.8e12, 55e9, 9.9e14)
GB10 = Device("unified", 2.73e11, 0.0, 1.25e14)
FAST = Drive(14e9, 1e-4, 16)
NONE = Measured()


def test_a_burst_is_waves_of_reads_then_bytes():
    drive = Drive(1e9, 0.02, n_threads=8, request_s=0.001)
    work = replace(FLASH, expert_bytes=1_000_000, reads_per_expert=2)
    waits = drive.burst_s(np.array([0, 1, 4, 5]), work)
    assert waits == pytest.approx([0, 0.001 + 0.02 + 0.001, 0.025, 0.001 + 0.04 + 0.005])


def test_waits_of_known_bursts_add_up():
    drive = Drive(1e12, 0.02, n_threads=8, request_s=0.0)
    work = replace(FLASH, expert_bytes=1, reads_per_expert=1)
    assert replayed_disk_s(drive, work, np.array([1, 2, 9])) == pytest.approx(0.08)


def test_mean_misses_between_two_numbers_lie_between_their_waits():
    work = replace(FLASH, reads_per_expert=8)
    drive = Drive(1e12, 0.02, n_threads=8, request_s=0.0)
    hits = Hits(device=0, miss=1.5 * 40 / work.picks, burst=1.0)
    time = token_time(work, GB10, drive, hits, NONE)
    assert time.disk_s == pytest.approx(40 * (0.02 + 0.04) / 2, rel=1e-3)


def test_the_released_model_is_held_to_its_published_limits():
    """Read in place over PCIe 5 without a miss: 11 tokens a second; all on the device: 328."""
    no_miss = Hits(device=0.0, miss=0.0, burst=0.0)
    over_link = token_time(FLASH, H200, FAST, no_miss, NONE)
    assert 8 < over_link.tokens_per_s < 11
    assert over_link.limit == "copies"
    resident = token_time(FLASH, H200, FAST, replace(no_miss, device=1.0), NONE)
    assert 100 < resident.tokens_per_s < 328
    assert resident.limit == "compute"


def test_a_tenth_of_misses_on_a_drive_is_bound_by_the_disk():
    hits = Hits(device=0.9, miss=0.1, burst=0.45)
    slow = token_time(FLASH, H200, Drive(7e9, 1e-4), hits, NONE)
    fast = token_time(FLASH, H200, Drive(14e9, 1e-4), hits, NONE)
    assert slow.limit == "disk"
    assert 8 < slow.tokens_per_s < 15
    assert slow.tokens_per_s < fast.tokens_per_s < 31


def test_what_was_measured_stands_for_compute():
    hits = Hits(device=0, miss=0, burst=0)
    time = token_time(FLASH, GB10, FAST, hits, Measured(token_s=0.125))
    assert time.tokens_per_s == 8


def test_a_second_drive_halves_the_latency_of_many_reads():
    one = Drive(1e12, 0.01, n_threads=8, request_s=0.0)
    work = replace(FLASH, reads_per_expert=16)
    assert one.times(2).burst_s(1, work) == pytest.approx(one.burst_s(1, work) / 2, rel=0.01)


def test_a_prompt_layer_waits_for_the_longer_of_reads_and_its_experts():
    work = replace(FLASH, active_weights=4 * FLASH.picks * FLASH.expert_weights)
    assert work.expert_share == 0.25
    assert layer_s(work, read_s=0.0, work_s=4.0) == 4.0
    assert layer_s(work, read_s=1.0, work_s=4.0) == 4.0
    assert layer_s(work, read_s=3.0, work_s=4.0) == 6.0
    assert layer_s(work, read_s=3.0, work_s=4.0, ahead_s=1.0) == 5.0
    assert layer_s(work, read_s=9.0, work_s=4.0, ahead_s=5.0) == 9.0
    assert layer_s(work, read_s=2.0, work_s=4.0, ahead_s=2.0) == 4.0


def test_a_chunk_that_picks_most_experts_reads_ahead_in_all_layers_but_the_first():
    drive = Drive(1e15, 0.001, n_threads=8, request_s=0.0)
    work = replace(FLASH, reads_per_expert=8)
    before_s = 0.002 * (1 - work.expert_share)
    work_s = 0.002 * work.n_layers
    few, most = (chunk_s(work, drive, n_picked, 200, work_s) for n_picked in (287, 288))
    assert few == pytest.approx(work.n_layers * (0.2 + before_s), rel=1e-4)
    assert most == pytest.approx(work.n_layers * 0.2 + before_s, rel=1e-4)


def test_a_request_counts_once_a_layer_that_misses():
    drive = Drive(1e15, 0.0, request_s=0.5)
    assert chunk_s(FLASH, drive, 384, 0, 0.0) == 0.0
    assert chunk_s(FLASH, drive, 384, 10, 0.0) == pytest.approx(0.5 * FLASH.n_layers, rel=1e-3)


def test_a_long_chunk_picks_nearly_every_expert():
    assert distinct_experts(FLASH, 1) == pytest.approx(6)
    assert distinct_experts(FLASH, 256) > 0.98 * 384


def test_prompts_in_larger_chunks_read_less():
    def seconds(chunk: int) -> float:
        return first_token_s(
            FLASH, H200, Drive(7e9, 1e-4), NONE, n_prompt=8192, chunk=chunk, resident=0.0
        )

    assert seconds(4096) < seconds(512) / 4


shares = st.floats(0, 1)


@given(miss=shares, more=shares, burst=st.floats(0.05, 1), rate=st.floats(1e8, 1e11))
def test_more_misses_are_never_faster(miss: float, more: float, burst: float, rate: float):
    low, high = sorted((miss, more))
    drive = Drive(rate, 1e-4)
    times = [
        token_time(FLASH, GB10, drive, Hits(0, share * burst, burst), NONE).total_s
        for share in (low, high)
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


@given(resident=shares, device=shares, is_cold=st.booleans())
def test_the_curve_never_leaves_its_bounds(resident: float, device: float, is_cold: bool):
    hits = curve_hits(resident, device, is_cold=is_cold)
    assert 0 <= hits.miss <= hits.burst <= 1
    assert 0 <= hits.device <= 1
    assert hits.rate == 1 - hits.miss


def test_the_curve_is_better_warm_than_cold_and_better_with_more_memory():
    rates = [curve_hits(share / 20, 0, is_cold=False).rate for share in range(21)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, 1)
    for share in (0.2, 0.5, 0.9):
        warm, cold = (curve_hits(share, 0, is_cold=is_cold).rate for is_cold in (False, True))
        assert cold <= warm
