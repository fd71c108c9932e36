"""How two decisions of a router differ, for the check of the device's against the host's."""

from __future__ import annotations

import torch
from torch import Tensor


def compare_routes(
    layer: int,
    header: Tensor,
    wanted_header: Tensor,
    pointers: Tensor | None = None,
    wanted_pointers: Tensor | None = None,
    weights: Tensor | None = None,
) -> str | None:
    """Return the first difference of two decisions in words, or None where they are equal.

    header    [1 + 3K] i32 as `route_m1` leaves it, on any device; wanted_header the host's
    pointers  [3, K] i64, compared where both are given
    weights   [K] f32, what the experts' kernels are given, compared where there are any with the
              bits of the wanted header

    Two weights that are no numbers are equal, whatever their bits.
    """
    found, wanted = header.cpu(), wanted_header.cpu()
    if found.shape != wanted.shape:
        return f"layer {layer}: header of {len(found)} words, wanted {len(wanted)}"
    top_k = (len(found) - 1) // 3
    weighed = slice(1 + top_k, 1 + 2 * top_k)
    differs = found != wanted
    nan, wanted_nan = (h[weighed].view(torch.float32).isnan() for h in (found, wanted))
    differs[weighed] &= ~(nan & wanted_nan)
    # the picks first: where they differ, so does what follows from them
    for what, first, end in (
        ("pick", 1, 1 + top_k),
        ("weight bits", 1 + top_k, 1 + 2 * top_k),
        ("slot", 1 + 2 * top_k, 1 + 3 * top_k),
        ("number of absent picks", 0, 1),
    ):
        places = differs[first:end].nonzero().flatten().tolist()
        if places:
            at = first + places[0]
            pair = int(found[at]), int(wanted[at])
            shown = [f"{v & 0xFFFFFFFF:#010x}" if what == "weight bits" else str(v) for v in pair]
            place = f" {places[0]} of the plan" if first else ""
            return f"layer {layer}: {what}{place} is {shown[0]}, wanted {shown[1]}"
    if weights is not None:
        plan, bits = weights.cpu(), wanted[weighed]
        other = (plan.view(torch.int32) != bits) & ~(plan.isnan() & wanted_nan)
        for place in other.nonzero().flatten().tolist():
            value, wish = float(plan[place]), float(bits.view(torch.float32)[place])
            return f"layer {layer}: plan weight {place} is {value!r}, wanted {wish!r}"
    if pointers is None or wanted_pointers is None:
        return None
    here, there = pointers.cpu(), wanted_pointers.cpu()
    for piece, name in enumerate(("gate", "up", "down")):
        for place in (here[piece] != there[piece]).nonzero().flatten().tolist():
            pair = int(here[piece, place]), int(there[piece, place])
            return (
                f"layer {layer}: {name} pointer {place} of the plan is {pair[0]:#x}, "
                f"wanted {pair[1]:#x}"
            )
    return None
