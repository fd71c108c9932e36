"""A chunk's routing held to the host's: the same logits through the chain of references.

Only where it was asked for: the host waits for every layer then. Nothing that a layer computes
depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.reference.plan_pairs import plan_pairs
from kernels.reference.route_select import route_select
from protocol.errors import ShardError

Pairs = tuple[Tensor, Tensor, Sequence[int]]


class ChunkCheck:
    """Compares what a layer decided for each of a chunk's tokens; `counted` takes how many.

    Raises ShardError at the first difference. Two weights that are no numbers are equal.
    """

    def __init__(self, counted: Callable[[int], None]) -> None:
        self._counted = counted

    def routes(
        self,
        layer: int,
        first: int,
        logits: Tensor,
        bias: Tensor,
        routed_scale: float,
        picks: Tensor,
        weights: Tensor,
        pairs: Pairs,
    ) -> None:
        """Compare picks and weights [T, K], a token's in any order, and what the experts are given.

        first   position of the chunk's first token
        logits  [T, E] f32, and bias [E] f32: what the picks were made from
        pairs   tokens [T * K] and weights [T * K] f32 of the pairs, by expert, then token, and how
                many each of the E experts has
        """
        top_k = picks.shape[1]
        wanted = _ascending(*route_select(logits.cpu(), bias.cpu(), top_k, routed_scale))
        found = _ascending(picks.cpu(), weights.cpu())
        for what, here, there in (
            ("pick", found[0], wanted[0]),
            ("weight bits", _bits(found[1]), _bits(wanted[1])),
        ):
            place = _first(here, there)
            if place is not None:
                token, at = divmod(place, top_k)
                text = f"{what} {at} of the plan is {_both(what, here, there, place)}"
                raise _differs(layer, f"position {first + token}", text)
        self._pairs(layer, first, pairs, wanted, logits.shape[1])
        self._counted(len(picks))

    @staticmethod
    def _pairs(
        layer: int, first: int, pairs: Pairs, wanted: tuple[Tensor, Tensor], n_experts: int
    ) -> None:
        """Compare a chunk's plan with the one made of the wanted picks and weights."""
        tokens, weights, _, counts = plan_pairs(wanted[0].int(), wanted[1], n_experts)
        found = torch.tensor(pairs[2], dtype=torch.int32)
        for what, here, there in (
            ("number of tokens of expert", found, counts),
            ("token of pair", pairs[0].cpu().int(), tokens),
            ("weight bits of pair", _bits(pairs[1].cpu()), _bits(weights)),
        ):
            place = _first(here, there)
            if place is not None:
                text = f"{what} {place} is {_both(what, here, there, place)}"
                raise _differs(layer, f"chunk from position {first}", text)

    @staticmethod
    def pointers(layer: int, experts: Sequence[int], given: Tensor, wanted: Tensor) -> None:
        """Compare the addresses [3, G] that a launch was given with where its experts are."""
        place = _first(given.cpu(), wanted)
        if place is not None:
            piece, at = divmod(place, wanted.shape[1])
            here, there = int(given.cpu().flatten()[place]), int(wanted.flatten()[place])
            name = ("gate", "up", "down")[piece]
            text = f"{name} pointer of expert {experts[at]} is {here:#x}, wanted {there:#x}"
            raise _differs(layer, "a chunk", text)


def _ascending(picks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    ascending, order = picks.long().sort(dim=1)
    return ascending, weights.gather(1, order)


def _bits(weights: Tensor) -> Tensor:
    """The bits of f32 values, the same ones for all that are no numbers."""
    return weights.masked_fill(weights.isnan(), torch.nan).view(torch.int32)


def _first(here: Tensor, there: Tensor) -> int | None:
    """Where two tensors of one shape differ first; 0 where the shapes do."""
    if here.shape != there.shape:
        return 0
    places = (here != there).flatten().nonzero()
    return int(places[0]) if len(places) else None


def _both(what: str, here: Tensor, there: Tensor, place: int) -> str:
    if here.shape != there.shape:
        return f"one of {here.numel()}, wanted {there.numel()}"
    pair = [int(values.flatten()[place]) for values in (here, there)]
    shown = [f"{v & 0xFFFFFFFF:#010x}" if "bits" in what else str(v) for v in pair]
    return f"{shown[0]}, wanted {shown[1]}"


def _differs(layer: int, where: str, text: str) -> ShardError:
    return ShardError(f"{where}: the device routes otherwise than the host: layer {layer}: {text}")
