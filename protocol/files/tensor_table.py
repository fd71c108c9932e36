"""The tensors that a DeepSeek-V4.1 text model consists of: name, dtype, shape, kind.

Source: model specification, section 6. Tensors of the vision tower, the aligner, the draft stages and
the image bias are skipped (`is_skipped`); everything else in a checkpoint has to stand here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model_config import ModelConfig

Kind = Literal["dense", "expert", "engram"]


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """dtype and shape that a tensor has to have; "expert" and "engram" belong to the daemon."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind


def is_skipped(name: str) -> bool:
    """Whether a text-only engine knows the tensor and leaves it alone."""
    raise NotImplementedError


def dense_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors that compute loads whole, in the order of the forward pass."""
    raise NotImplementedError


def expert_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors of routed experts; the six values are shared between the experts."""
    raise NotImplementedError


def engram_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Values and scales of each Engram table."""
    raise NotImplementedError


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors of the text model by name."""
    return dense_tensors(config) | expert_tensors(config) | engram_tensors(config)
