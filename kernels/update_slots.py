"""The device's slot table takes in what changed, in one launch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import can_be_read, runs_kernels
from .reference import update_slots as reference
from .tensor_checks import check_contiguous

Triple = tuple[int, int, int]  # layer, expert, slot or -1
_BLOCK = 128


@triton.jit
def _update_slots_kernel(table, triples, n, n_layers, n_experts, n_slots, BLOCK: tl.constexpr):
    change = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = change < n
    layer = tl.load(triples + change * 3, mask=inside, other=-1)
    expert = tl.load(triples + change * 3 + 1, mask=inside, other=-1)
    slot = tl.load(triples + change * 3 + 2, mask=inside, other=-2)
    good = (layer >= 0) & (layer < n_layers) & (expert >= 0) & (expert < n_experts)
    good &= (slot >= -1) & (slot < n_slots)
    tl.store(table + layer.to(tl.int64) * n_experts + expert, slot, mask=inside & good)


def update_slots(table: Tensor, triples: Tensor, n_slots: int) -> None:
    """Write slot changes into the slot table: table[layer, expert] = slot.

    table    [L, E] i32, contiguous: a slot, or -1
    triples  [n, 3] i32, contiguous, on the same device or in page-locked memory of the host: layer,
             expert, slot or -1; no two of one layer and expert, and none out of range:
             `unique_triples` sees to both
    n_slots  slots that exist

    One of layer -1 writes nothing, nor does any other that is out of range. Bits equal
    `reference.update_slots`. Capturable, n being the graph's. Raises ValueError on a shape or dtype
    that differs.
    """
    if table.dim() != 2 or table.dtype != torch.int32:
        raise ValueError(f"update_slots: table {tuple(table.shape)} {table.dtype}, wanted i32")
    if triples.dim() != 2 or triples.shape[1] != 3 or triples.dtype != torch.int32:
        raise ValueError(
            f"update_slots: triples {tuple(triples.shape)} {triples.dtype}, wanted [n, 3] i32"
        )
    check_contiguous("update_slots", table=table, triples=triples)
    if not can_be_read(triples, table):
        raise ValueError("update_slots: triples must be page-locked or lie beside the table")
    if not runs_kernels(table):
        reference.update_slots(table, triples, n_slots)
    elif n := triples.shape[0]:
        _update_slots_kernel[(triton.cdiv(n, _BLOCK),)](
            table, triples, n, *table.shape, n_slots, BLOCK=_BLOCK, num_warps=4
        )


def unique_triples(
    changes: Iterable[Triple], n_layers: int, n_experts: int, n_slots: int
) -> list[Triple]:
    """Return the last change of each layer and expert.

    changes  (layer, expert, slot or -1), oldest first; the order of first mention is kept

    Raises ValueError on the first that is out of range, before any of them is used.
    """
    last: dict[tuple[int, int], int] = {}
    for layer, expert, slot in changes:
        if not (0 <= layer < n_layers and 0 <= expert < n_experts and -1 <= slot < n_slots):
            raise ValueError(
                f"update_slots: layer {layer} expert {expert} slot {slot}, wanted below "
                f"{n_layers}, {n_experts}, {n_slots}"
            )
        last[layer, expert] = slot
    return [(*key, slot) for key, slot in last.items()]
