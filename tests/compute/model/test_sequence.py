"""The state of a sequence: what it takes."""

from __future__ import annotations

import pytest
import torch

from compute.model.precision import Precision
from compute.model.sequence import Sequence
from tests.support.decode_rig import demo


@pytest.mark.parametrize("context", [1, 2, 301])
@pytest.mark.parametrize("precision", [Precision.HIGHWAY, Precision.WIDE])
def test_what_grows_with_the_context_is_known_before_it_is_made(
    context: int, precision: Precision
) -> None:
    config = demo().config
    made = Sequence(config, context, torch.device("cpu"), precision)
    rows = [*made.rows.values(), *made.keys.values()]
    turns = 4 * context * config.rope_head_dim * 4
    assert Sequence.bytes_of(config, context, precision) == sum(t.nbytes for t in rows) + turns
