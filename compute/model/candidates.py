"""Candidate blocks: what the candidate source lets the later index sources choose from.

Source: model specification, section 3.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.select_blocks import select_blocks
from protocol.files.model_config import ModelConfig


def candidate_blocks(scores: Tensor, visible: Tensor, config: ModelConfig) -> Tensor | None:
    """Return the kept blocks [T, blocks] bool of scores [T, G]; None = all blocks."""
    if not restricts(scores.shape[1], config):
        return None
    return select_blocks(scores, visible, config.candidate_block_size, config.candidate_top_blocks)


def restricts(n_rows: int, config: ModelConfig) -> bool:
    """Whether n_rows compressed rows are more blocks than are kept."""
    n_blocks = -(-n_rows // config.candidate_block_size)
    return n_blocks > config.candidate_top_blocks


def mask_scores(scores: Tensor, blocks: Tensor, config: ModelConfig) -> Tensor:
    """Set scores [T, G] outside the kept blocks to -inf."""
    kept = blocks.repeat_interleave(config.candidate_block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~kept, -torch.inf)
