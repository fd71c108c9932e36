"""An id drawn from its logits, in whole numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .expf import expf

ONE = 2.0**40  # what the likeliest id weighs


def draw(logits: Tensor, likeliest: Tensor, numbers: Tensor) -> Tensor:
    """Return [2] i64: the id that `numbers` draw, and 0; where a logit is NaN what `likeliest` has.

    logits     [vocab] f32
    likeliest  [2] i64: the id of the largest logit, and 1 where one is NaN
    numbers    [5] i64: bits of the temperature f32, top_k, share, least weight, random word, the
               third and the last as unsigned numbers

    Id i weighs w[i] = floor(2^40 * e^((logits[i] - largest) / temperature)). Likeliest first, of
    equals the lower id first, the top_k first ids are kept, 0: all; of those the fewest whose sum
    is floor(share * sum of all kept / 2^64), or 1 where that is 0; share 0: all. Of those the ones
    that weigh the least weight. In ascending order, the first whose running sum is above
    floor(word * sum of all kept / 2^64) is drawn.
    """
    if likeliest[1]:
        return likeliest.clone()
    temperature, top_k, share, least, word = numbers.tolist()
    weights = weigh(logits, likeliest, torch.tensor([temperature], dtype=torch.int32))
    order = logits.sort(descending=True, stable=True).indices
    if top_k:
        order = order[:top_k]
    if share:
        sums = weights[order].cumsum(0)
        wanted = max(1, _share_of(int(sums[-1]), share))
        order = order[: 1 + int((sums < wanted).sum())]
    ids = order.sort().values
    ids = ids[weights[ids] >= least]
    sums = weights[ids].cumsum(0)
    place = int((sums <= _share_of(int(sums[-1]), word)).sum())
    return torch.stack([ids[place], torch.zeros((), dtype=torch.int64)])


def weigh(logits: Tensor, likeliest: Tensor, temperature: Tensor) -> Tensor:
    """Return the weights [vocab] i64; temperature [1] i32 is the bits of the f32.

    Those that equal the largest logit weigh 2^40, infinite ones too; -inf weighs 0 beside another.
    """
    largest = logits[likeliest[0]]
    gaps = (logits - largest).masked_fill(logits == largest, 0)
    return (expf(gaps / temperature.view(torch.float32)) * ONE).long()


def _share_of(total: int, share: int) -> int:
    """Return floor(total * share / 2^64) for the bits of an unsigned share."""
    return total * (share % 2**64) >> 64
