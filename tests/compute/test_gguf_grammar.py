"""A grammar over a GGUF's vocabulary allows what it allows over the tokenizer.json's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compute.grammar import Grammars
from compute.serving.service import tokenizer_text
from protocol.files.checkpoint import open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.fake_gguf import Typed
from tests.support.gguf_tokens import token_metadata


def test_the_same_ids_are_allowed(demo_dir: Path, tmp_path: Path) -> None:
    llguidance = pytest.importorskip("llguidance")
    official = open_checkpoint(demo_dir)
    own = official.config
    token_map = json.loads((demo_dir / "engram_token_map.json").read_text())
    more = token_metadata(demo_dir / "tokenizer.json") | {
        "deepseek41.engram.token_map": Typed("array:u32", token_map),
        "deepseek41.engram.pad_id": Typed("u32", token_map[2]),
    }
    path = convert(official, tmp_path / "m.gguf", more=more)
    allowed = []
    for checkpoint in (official, open_checkpoint(path)):
        grammars = Grammars(tokenizer_text(checkpoint), own.vocab_size, own.eos_id)
        grammar = grammars.start(llguidance.grammar_from("regex", "[0-9]+ sheep"))
        logits = np.zeros(own.vocab_size, np.float32)
        grammar.forbid(logits)
        allowed.append(np.flatnonzero(np.isfinite(logits)).tolist())
    assert allowed[0] == allowed[1] != []
