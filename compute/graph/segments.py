"""Which layers go together: a choice between boundaries and work thrown away.

Pure. Boundaries that are asked for are fixed; between them segments are of one length, chosen by
the recent rate of misses, but for a step's first, which is never very short. Source: DESIGN.md,
section 3, but that a boundary before the first Engram layer is none of segments but of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.files.model_config import ModelConfig

Segment = tuple[int, int]  # layers first to end - 1

KINDS = ("auto", "whole", "source-layers")
FIRST = 4  # layers at a step's beginning: beside them the host tells what the last token left
LENGTHS = (1, 2, 4, 8, 16)  # and the whole rest
# A boundary costs about as much as so many layers; only the ratio matters. Behind a single layer it
# costs more: the host does not get through its work while one runs.
WAIT_LAYERS = 0.05
SHORT_WAIT_LAYERS = 0.12
_KEPT = 0.98  # of the old rate at each step


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where segments end at the latest."""

    n_layers: int
    fixed: tuple[int, ...]  # layers that begin a segment, ascending, the first is 0
    cuts_between: bool  # whether segments may be shorter than what is between them

    @classmethod
    def of(cls, config: ModelConfig, kind: str) -> Boundaries:
        """Return the boundaries of a kind.

        auto           none, and segments may be shorter
        whole          none
        source-layers  one before each index source, none between
        """
        fixed = {0}
        if kind == "source-layers":
            fixed |= set(config.index_source_layers)
        return cls(config.n_layers, tuple(sorted(fixed)), kind == "auto")

    def segments(self, length: int) -> list[Segment]:
        """Cut the layers: at the fixed ones, and between them into `length` each; the first is
        longer where `length` is very short.
        """
        found: list[Segment] = []
        for first, end in zip(self.fixed, (*self.fixed[1:], self.n_layers), strict=True):
            step = length if self.cuts_between else end - first
            begin = min(first + max(step, FIRST), end)
            found.append((first, begin))
            found += [(at, min(at + step, end)) for at in range(begin, end, step)]
        return found


class MissRate:
    """The recent share of layers with a miss, and the segment length that suits it."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._n_layers = boundaries.n_layers
        self._rate = 0.0
        # Of each length its segments, its waits, and what is repeated where every layer misses.
        self._known = {
            length: _Cuts.of(boundaries.segments(length))
            for length in sorted({*LENGTHS, boundaries.n_layers})
        }

    @property
    def rate(self) -> float:
        """Layers with a miss, of all layers, decaying over some fifty steps."""
        return self._rate

    def assume(self, n_flagged: int) -> None:
        """Begin anew with a rate of so many layers a step."""
        self._rate = n_flagged / self._n_layers

    def note(self, n_flagged: int) -> None:
        """Count a step's layers that missed."""
        self._rate = _KEPT * self._rate + (1 - _KEPT) * n_flagged / self._n_layers

    def length(self) -> int:
        """Return the length with the least expected cost, the longer one among equals."""
        return min(reversed(self._known), key=self.cost)

    def segments(self) -> list[Segment]:
        """Return the segments of that length."""
        return self._known[self.length()].segments

    def cost(self, length: int) -> float:
        """Return the expected work of a step in layers: its own, what is repeated, the waits."""
        cuts = self._known[length]
        return cuts.waits + self._rate * cuts.repeated


@dataclass(frozen=True, slots=True)
class _Cuts:
    segments: list[Segment]
    waits: float
    repeated: float  # layers that run again: after each miss all later ones, and a wait

    @classmethod
    def of(cls, segments: list[Segment]) -> _Cuts:
        repeated = sum(
            end - layer - 1 + 0.5 + WAIT_LAYERS
            for first, end in segments
            for layer in range(first, end)
        )
        lengths = [end - first for first, end in segments]
        waits = sum(WAIT_LAYERS if length > 1 else SHORT_WAIT_LAYERS for length in lengths)
        return cls(segments, waits, repeated)


def pieces(first: int, end: int) -> list[Segment]:
    """Cut a segment into what one graph launches: a layer, then twice as many each time.

    A graph takes the host a quarter of its own time to launch: so the device begins at once, and
    what runs lasts until the next piece is there.
    """
    found: list[Segment] = []
    while first < end:
        length = 2 * (found[-1][1] - found[-1][0]) if found else 1
        found.append((first, min(first + length, end)))
        first += length
    return found
