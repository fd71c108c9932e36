"""How one expert's slices are cut into reads. Pure: no I/O.

Slices that touch in the file are one run; runs are cut at multiples of 1 MiB of the file into at
most 20 parts an expert (more only where its slices lie in more than 20 places), so that one missing
expert is read by several threads and no read is smaller than it need be. Both numbers are those of
a ReadShape, which tuning may have found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

CUT_BYTES = 1 << 20
MAX_PARTS = 20  # the released model's are of 1 MiB: what is copied next is still in a cache
MAX_GAP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReadShape:
    """How finely an expert is cut."""

    cut_bytes: int = CUT_BYTES  # a part is a multiple of it, and begins at one of the file
    max_parts: int = MAX_PARTS  # of one run of slices


DEFAULT_SHAPE = ReadShape()


class Fragment(NamedTuple):  # made in a quarter of a dataclass's time, while somebody waits
    """`n_bytes` at `offset` of a shard belong at `slot_offset` of the slot."""

    shard: int
    offset: int
    n_bytes: int
    slot_offset: int


class Part(NamedTuple):
    """A range of one shard that one thread reads, and what it is read for.

    whole  the fragments that have bytes in it, ascending, as they are: they are cut by who reads,
           since planning is what the first byte waits for
    """

    shard: int
    start: int
    stop: int
    whole: tuple[Fragment, ...]

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """What lies in the range of each of them."""
        return tuple([_clip(fragment, self.start, self.stop) for fragment in self.whole])

    @property
    def first_place(self) -> int:
        """Where in the slot its lowest byte belongs."""
        places = [f.slot_offset + max(self.start - f.offset, 0) for f in self.whole]
        return min(places)


def plan_parts(
    fragments: Iterable[Fragment], shape: ReadShape = DEFAULT_SHAPE, *, small: bool = False
) -> list[Part]:
    """Return parts that cover every byte of the fragments exactly once; `small`: of 1 MiB each.

    Parts of several shards take turns: a record may be striped over drives, and whoever reads a few
    parts at once has a job for each drive then.
    """
    runs = _runs(sorted(fragments, key=lambda f: (f.shard, f.offset)))
    n_bytes = sum(run.stop - run.start for run in runs)
    cut = CUT_BYTES if small else shape.cut_bytes
    part_bytes = cut if small else max(cut, -(-n_bytes // (shape.max_parts * cut)) * cut)
    by_shard: dict[int, list[Part]] = {}
    for run in runs:
        by_shard.setdefault(run.shard, []).extend(_cut(run, part_bytes, cut))
    turns = zip_longest(*by_shard.values())
    return [part for turn in turns for part in turn if part is not None]


def _runs(fragments: list[Fragment]) -> list[Part]:
    runs: list[Part] = []
    group: list[Fragment] = []
    stop = 0
    for fragment in fragments:
        touches = group and fragment.shard == group[0].shard
        if group and not (touches and fragment.offset - stop <= MAX_GAP_BYTES):
            runs.append(Part(group[0].shard, group[0].offset, stop, tuple(group)))
            group = []
        group.append(fragment)
        stop = fragment.offset + fragment.n_bytes
    if group:
        runs.append(Part(group[0].shard, group[0].offset, stop, tuple(group)))
    return runs


def _cut(run: Part, part_bytes: int, cut: int) -> list[Part]:
    """Return the parts of a run; what lies in a gap is none."""
    shard, start, end, whole = run
    parts = []
    first, n = 0, len(whole)
    while start < end:
        # From a rounded-down start on: a run may then have a first part shorter than the others.
        stop = min(end, start // cut * cut + part_bytes)
        while whole[first].offset + whole[first].n_bytes <= start:
            first += 1
        last = first
        while last < n and whole[last].offset < stop:
            last += 1
        if first < last:
            parts.append(Part(shard, start, stop, whole[first:last]))
        start = stop
    return parts


def _clip(fragment: Fragment, start: int, stop: int) -> Fragment:
    first = max(fragment.offset, start)
    last = min(fragment.offset + fragment.n_bytes, stop)
    return Fragment(
        fragment.shard, first, last - first, fragment.slot_offset + first - fragment.offset
    )
