"""Pooling of the tokens of one compressed group."""

from __future__ import annotations

from torch import Tensor


def pool_groups(kv: Tensor, scores: Tensor) -> Tensor:
    """Average each group's tokens, channel by channel, with a softmax of their scores.

    kv       [G, r, k] f32, r tokens a group
    scores   [G, r, k] f32
    returns  [G, k] f32

    Source: model specification, section 3.4, ratio 2.
    """
    return (scores.softmax(1) * kv).sum(1)
