"""The slot table takes in what changed."""

from __future__ import annotations

from torch import Tensor


def update_slots(table: Tensor, triples: Tensor, n_slots: int) -> None:
    """Write table[layer, expert] = slot, in place, for each triple that is in range.

    table    [L, E] i32
    triples  [n, 3] i32: layer, expert, slot or -1
    """
    n_layers, n_experts = table.shape
    for layer, expert, slot in triples.tolist():
        if 0 <= layer < n_layers and 0 <= expert < n_experts and -1 <= slot < n_slots:
            table[layer, expert] = slot
