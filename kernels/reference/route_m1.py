"""The router's decision as the experts' kernels and the host want it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tensor_checks import check_contiguous, check_tensor

from .route_select import route_select

MAX_EXPERTS = 1024
MAX_TOP_K = 16


def route_m1(
    logits: Tensor,
    bias: Tensor,
    table: Tensor,
    addresses: Tensor,
    piece_offsets: tuple[int, int, int],
    *,
    top_k: int,
    routed_scale: float,
    header: Tensor | None = None,
    pointers: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return header, pointers and weights as `kernels.route_m1.route_m1` does, of any size."""
    header, pointers, weights = route_outputs(
        table, addresses, logits, top_k, header, pointers, weights
    )
    picks, weighed = route_rows(logits, bias, top_k=top_k, routed_scale=routed_scale)
    weights.copy_(weighed[0])
    slots = table[picks[0].long()]
    absent = (slots < 0) | (slots >= addresses.shape[0])
    slots = slots.masked_fill(absent, -1)
    header[0] = absent.sum()
    header[1:] = torch.cat([picks[0], weighed[0].view(torch.int32), slots])
    bases = addresses[slots.masked_fill(absent, 0).long()] if len(addresses) else slots.long()
    offsets = torch.tensor(piece_offsets, device=bases.device)
    pointers.copy_((bases + offsets[:, None]).masked_fill(absent, 0))
    return header, pointers, weights


def route_rows(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    routed_scale: float,
    picks: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return picks [T, K] i32, ascending, and weights [T, K] f32 of logits [T, E]."""
    ranked, weighed = route_select(logits, bias, top_k, routed_scale)
    plan = ranked.sort(dim=1)
    found, beside = plan.values.int(), weighed.gather(1, plan.indices)
    return (
        found if picks is None else picks.copy_(found),
        beside if weights is None else weights.copy_(beside),
    )


def check_route(name: str, logits: Tensor, bias: Tensor, top_k: int) -> None:
    """Raise ValueError where a router's kernels cannot work on these."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"{name}: logits {tuple(logits.shape)} {logits.dtype}, wanted [T, E] f32")
    n_experts = logits.shape[1]
    check_contiguous(name, logits=logits)
    check_tensor(name, "bias", bias, (n_experts,), torch.float32)
    if n_experts > MAX_EXPERTS or not 1 <= top_k <= min(MAX_TOP_K, n_experts):
        raise ValueError(
            f"{name}: {top_k} of {n_experts} experts, "
            f"wanted at most {MAX_TOP_K} of at most {MAX_EXPERTS}"
        )


def route_outputs(
    table: Tensor,
    addresses: Tensor,
    logits: Tensor,
    top_k: int,
    header: Tensor | None,
    pointers: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return header, pointers and weights, made where not given; raise ValueError on bad ones."""
    if header is None:
        header = torch.empty(1 + 3 * top_k, dtype=torch.int32, device=logits.device)
    if pointers is None:
        pointers = torch.empty((3, top_k), dtype=torch.int64, device=logits.device)
    if weights is None:
        weights = torch.empty(top_k, dtype=torch.float32, device=logits.device)
    for name, tensor, shape, dtype in (
        ("table", table, (logits.shape[1],), torch.int32),
        ("addresses", addresses, (addresses.numel(),), torch.int64),
        ("header", header, (1 + 3 * top_k,), torch.int32),
        ("pointers", pointers, (3, top_k), torch.int64),
        ("weights", weights, (top_k,), torch.float32),
    ):
        check_tensor("route_m1", name, tensor, shape, dtype)
    return header, pointers, weights
