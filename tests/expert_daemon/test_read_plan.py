from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert_daemon.read_plan import CUT_BYTES, MAX_PARTS, Fragment, plan_parts

SIZES = st.lists(st.integers(1, 3 << 20), min_size=1, max_size=6)
GAPS = st.lists(st.sampled_from([0, 0, 0, 8, 4096, 5000, 9 << 20]), min_size=6, max_size=6)


def fragments_of(sizes, gaps, start, shards):
    fragments, offset, slot_offset = [], start, 0
    for size, gap, shard in zip(sizes, gaps, shards, strict=False):
        offset += gap
        fragments.append(Fragment(shard, offset, size, slot_offset))
        offset += size
        slot_offset += -(-size // 256) * 256
    return fragments


def joined(fragments):
    """The bytes that fragments name, as maximal ranges; fails where two name one byte."""
    ranges: list[list[int]] = []
    for f in sorted(fragments, key=lambda f: f.slot_offset):
        last = ranges[-1] if ranges else None
        assert last is None or last[0] + last[1] <= f.slot_offset
        if last and [last[0] + last[1], last[2] + last[1], last[3]] == [
            f.slot_offset,
            f.offset,
            f.shard,
        ]:
            last[1] += f.n_bytes
            continue
        ranges.append([f.slot_offset, f.n_bytes, f.offset, f.shard])
    return ranges


@given(SIZES, GAPS, st.integers(0, 5 << 20), st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_parts_cover_every_byte_once(sizes, gaps, start, shards):
    fragments = fragments_of(sizes, gaps, start, shards)
    pieces: list[Fragment] = []
    for part in plan_parts(fragments):
        assert part.start < part.stop
        for piece in part.fragments:
            assert piece.shard == part.shard
            assert part.start <= piece.offset
            assert piece.offset + piece.n_bytes <= part.stop
        pieces += part.fragments
    assert joined(pieces) == joined(fragments)


@given(SIZES, st.integers(0, 5 << 20))
def test_slices_that_touch_are_cut_into_no_more_parts_than_the_shape_allows(sizes, start):
    parts = plan_parts(fragments_of(sizes, [0] * 6, start, [0] * 6))
    assert len(parts) <= MAX_PARTS + 1
    for part in parts[1:]:
        assert part.start % CUT_BYTES == 0


def test_an_official_expert_is_read_in_parts_of_at_most_one_mebibyte():
    sizes = [5898240, 368640, 5898240, 368640, 5898240, 368640]
    parts = plan_parts(fragments_of(sizes, [0] * 6, 12345, [0] * 6))
    assert len(parts) <= MAX_PARTS
    assert max(part.stop - part.start for part in parts) <= 1 << 20


def test_a_striped_record_has_a_job_for_each_drive_from_the_first_on():
    unit, n_drives, n_units = 256 << 10, 3, 60
    fragments = [
        Fragment(number % n_drives, 4096 + number // n_drives * unit, unit, number * unit)
        for number in range(n_units)
    ]
    parts = plan_parts(fragments)
    assert [part.shard for part in parts] == [0, 1, 2] * (len(parts) // 3)
    assert len(parts) >= 6
    for shard in range(n_drives):
        starts = [part.start for part in parts if part.shard == shard]
        assert starts == sorted(starts)
