from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon.checksums import slot_checksum
from expert_daemon.prefix_hash import PrefixHash
from expert_daemon.read_plan import Fragment, ReadShape, plan_parts

SLOT = 6000


@st.composite
def slots(draw):
    """Pieces of a slot with gaps, and the fragments of a file that fill them, or all of it."""
    cuts = sorted(draw(st.sets(st.integers(0, SLOT), min_size=2, max_size=12)))
    pieces = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    if draw(st.booleans()):  # one record, gaps and all
        return pieces, [Fragment(0, 17, SLOT, 0)]
    order = draw(st.permutations(range(len(pieces))))
    offset, fragments = 5, []
    for number in order:
        offset += draw(st.sampled_from([0, 0, 3, 9000]))
        start, n_bytes = pieces[number]
        fragments.append(Fragment(0, offset, n_bytes, start))
        offset += n_bytes
    return pieces, fragments


@settings(max_examples=150, deadline=None)
@given(slot=slots(), cut=st.integers(64, 2000), data=st.data())
def test_parts_in_any_order_give_the_checksum_of_the_whole_slot(slot, cut, data):
    pieces, fragments = slot
    content = np.random.default_rng(0).integers(0, 256, SLOT, dtype=np.uint8)
    memory = np.zeros(SLOT, np.uint8)
    parts = plan_parts(fragments, ReadShape(cut, 8))
    prefix = PrefixHash(memory, parts, pieces)
    for number in data.draw(st.permutations(range(len(parts)))):
        part = parts[number]
        if data.draw(st.booleans()):
            prefix.offer(number, window_of(part, content), part.start)
        for fragment in part.fragments:
            place = slice(fragment.slot_offset, fragment.slot_offset + fragment.n_bytes)
            memory[place] = content[place]
        prefix.arrived(number)
    assert prefix.finish() == slot_checksum(content, pieces)


def window_of(part, content):
    """The part's bytes of the shard; between its fragments there are others."""
    window = np.full(part.stop - part.start, 255, np.uint8)
    for fragment in part.fragments:
        start = fragment.offset - part.start
        place = slice(fragment.slot_offset, fragment.slot_offset + fragment.n_bytes)
        window[start : start + fragment.n_bytes] = content[place]
    return window


def test_what_is_offered_in_its_turn_is_not_read_again():
    content = np.random.default_rng(2).integers(0, 256, 4000, dtype=np.uint8)
    parts = plan_parts([Fragment(0, 7, 4000, 0)], ReadShape(1000, 8))
    slot = np.zeros(4000, np.uint8)
    prefix = PrefixHash(slot, parts, [(0, 4000)])
    for number, part in enumerate(parts):
        prefix.offer(number, window_of(part, content), part.start)
        prefix.arrived(number)
    assert prefix.finish() == slot_checksum(content, [(0, 4000)])


def test_a_part_that_is_missing_is_no_checksum():
    parts = plan_parts([Fragment(0, 0, 4000, 0)], ReadShape(1000, 8))
    prefix = PrefixHash(np.zeros(4000, np.uint8), parts, [(0, 4000)])
    prefix.arrived(0)
    with pytest.raises(AssertionError, match="not arrived"):
        prefix.finish()


def test_threads_that_arrive_together_hash_each_byte_once():
    memory = np.random.default_rng(1).integers(0, 256, 8 << 20, dtype=np.uint8)
    parts = plan_parts([Fragment(0, 0, len(memory), 0)], ReadShape(1 << 18, 32))
    for _ in range(20):
        prefix = PrefixHash(memory, parts, [(0, len(memory))])
        threads = [
            threading.Thread(target=prefix.arrived, args=(number,)) for number in range(len(parts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert prefix.finish() == slot_checksum(memory, [(0, len(memory))])
