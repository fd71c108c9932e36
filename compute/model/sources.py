"""Where the model gets the bytes that it does not hold: routed experts and Engram rows.

Both are seams: in a running engine they speak to the expert daemon, in tests they may read the
checkpoint themselves. How a source groups its work never changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class ExpertMatrices(NamedTuple):
    """One expert's bytes, all u8: packed fp4 [out, in / 2] and its E8M0 scales [out, in / 32].

    gate and up are [expert_width, hidden_size], down is [hidden_size, expert_width]. In a block
    format a matrix is [out, bytes of its blocks] and its scales are [0, 0].
    """

    gate: Tensor
    gate_scale: Tensor
    up: Tensor
    up_scale: Tensor
    down: Tensor
    down_scale: Tensor


class ExpertSource(Protocol):
    """Gives the experts of one layer, one after the other."""

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield (expert, matrices) of all of `experts`, which ascend, in that order.

        On the CPU the tensors may be views of memory that changes once the iterator is advanced.
        On a GPU they lie in slots alike and hold until the layer is done, for as long as they are
        kept.
        Raises ShardError where an expert cannot be read, DaemonLost where nobody answers.
        """
        ...


class Resident(NamedTuple):
    """Which of some experts lie in memory of the device, in slots alike."""

    starts: NDArray[np.int64]  # where each one's slot begins, 0 where it does not lie there
    offsets: tuple[int, ...]  # of the pieces in a slot, in the order of ExpertMatrices
    shapes: tuple[tuple[int, int], ...]  # of the pieces


@runtime_checkable
class ResidentSource(Protocol):
    """An ExpertSource that knows where experts lie on the device without giving each of them."""

    def resident(self, layer: int, experts: Sequence[int]) -> Resident:
        """Say which of `experts`, which ascend, need not be streamed; they count as picked.

        They stay where they are until the layer is done. Raises as `stream` does.
        """
        ...


@runtime_checkable
class SlotsSource(ResidentSource, Protocol):
    """A ResidentSource that is told by each slot, too, which expert it has."""

    def held(self, layer: int, expert: int) -> ExpertMatrices | None:
        """Return the expert of the slot that has it, None where none has or more than one.

        To compare with: `resident` knows by what slot each expert has.
        """
        ...


class RowSource(Protocol):
    """Gives rows of the Engram tables; asking comes early, taking when the layer needs them."""

    def request_all(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Ask for rows [n] of each (table, rows) and return their handles; duplicates may be."""
        ...

    def take(self, handle: int) -> Tensor:
        """Return the rows asked for, in that order: [n, bytes] u8.

        Each row begins with its stored bytes: E4M3 values, then E8M0 scales, or the blocks of
        another format. It may be longer: rows of all tables are of one length. A handle is taken
        once.
        """
        ...
