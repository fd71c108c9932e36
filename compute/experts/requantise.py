"""Slots in another format: dequantised exactly, then quantised by `kernels.formats`.

Invariants: the bytes do not depend on the device or on what else is converted, so that a pack that
was begun on one machine can be ended on another.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.formats import FORMATS, QUANTISERS, fp4, mxfp4
from protocol.errors import ConfigError
from protocol.files.slice_map import FP4, ExpertLayout

MXFP4 = "MXFP4"
MATRICES = ("gate", "up", "down")

Bytes = NDArray[np.uint8]


class Quantiser:
    """`convert` fills a slot of one layout from a slot of another; usable by many threads."""

    def __init__(self, device: str) -> None:
        """Use `device`, or the first GPU where it is "auto" and there is one."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--device: {device!r} cannot be used: {reason}") from error

    @torch.inference_mode()
    def convert(
        self, source: ExpertLayout, slot: Bytes, target: ExpertLayout, record: Bytes
    ) -> None:
        """Fill `record`, u8 [slot_bytes of the target], but for its padding.

        Raises ValueError on values that a format cannot take.
        """
        for number, name in enumerate(MATRICES):
            try:
                pieces = self._matrix(source, slot, target, number)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            for piece, data in pieces.items():
                offset, n_bytes = target.image.piece_offsets[piece], target.image.piece_bytes[piece]
                flat = data.reshape(-1).cpu().numpy()
                assert len(flat) == n_bytes
                record[offset : offset + n_bytes] = flat

    def _matrix(
        self, source: ExpertLayout, slot: Bytes, target: ExpertLayout, number: int
    ) -> dict[int, Tensor]:
        """The target's pieces of one matrix, by their number in PIECES."""
        matrix, scale = 2 * number, 2 * number + 1
        before, after = source.formats[number], target.formats[number]
        packed = self._piece(source, slot, matrix)
        if before == after:
            pieces = {matrix: packed}
            return pieces | {scale: self._piece(source, slot, scale)} if after == FP4 else pieces
        if (before, after) == (MXFP4, FP4):
            codes, scales = _official(packed)
            return {matrix: codes, scale: scales}
        if before == FP4:
            values = fp4.dequantise(packed, self._piece(source, slot, scale))
        else:
            values = FORMATS[before].dequantise(packed)
        if after == FP4:
            codes, scales = fp4.quantise(values)
            return {matrix: codes, scale: scales}
        return {matrix: QUANTISERS[after](values)}

    def _piece(self, layout: ExpertLayout, slot: Bytes, piece: int) -> Tensor:
        offset, n_bytes = layout.image.piece_offsets[piece], layout.image.piece_bytes[piece]
        rows = layout.pieces[piece].shape[0]
        data = torch.from_numpy(slot[offset : offset + n_bytes]).view(rows, -1)
        return data.to(self.device)


def _official(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 blocks [n, k / 32 * 17] u8 as official codes [n, k / 2] and scales [n, k / 32].

    The same values, nibble for nibble: a block has its scale first, then value i in the low and
    value i + 16 in the high nibble of byte i; officially value 2i is low and 2i + 1 high.
    """
    parts = blocks.view(blocks.shape[0], -1, mxfp4.BLOCK_BYTES)
    packed = parts[..., 1:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)
    codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes.flatten(1), parts[..., 0].contiguous()
