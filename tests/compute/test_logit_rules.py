from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compute.frontend.tokenizer import Tokenizer
from compute.grammar import Grammars
from compute.logit_rules import LogitRules
from compute.sampler import Sampling, choose
from protocol.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "demo"
VOCAB, END, THINK_END = 4096, 1, 8
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO / "tokenizer.json", VOCAB, END)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def _json_grammar(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _regex_grammar(regex: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{regex}/"}]})


def _drawn(rules: LogitRules, n: int = 200, seed: int = 0) -> list[int]:
    """Ids drawn from noise until the rules or the end id end it."""
    noise = np.random.default_rng(seed)
    ids: list[int] = []
    while not rules.ended and len(ids) < n:
        logits = noise.normal(size=VOCAB).astype(np.float32)
        ruled = rules.applied(logits)
        ids.append(choose(logits, len(ids), Sampling(seed=seed), ruled=ruled).id)
        if ids[-1] == END:
            break
        rules.commit(ids[-1])
    return ids


@pytest.mark.parametrize("seed", range(5))
def test_noise_under_a_schema_is_json_of_that_schema(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    rules = LogitRules(grammar=grammars.start(_json_grammar(SCHEMA)))
    found = json.loads(tokenizer.decode(_drawn(rules, seed=seed)))
    assert sorted(found) == ["age", "name"]
    assert found["name"] in ("Ann", "Bo")
    assert isinstance(found["age"], int)


def test_a_grammar_that_can_go_on_no_further_ends_by_itself(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    rules = LogitRules(grammar=grammars.start(_regex_grammar("(abc|xyz)!")))
    assert tokenizer.decode(_drawn(rules)) in ("abc!", "xyz!")
    assert rules.ended


def test_no_special_token_passes_a_grammar_but_the_end_where_it_may_come(
    grammars: Grammars,
) -> None:
    grammar = grammars.start(_regex_grammar("a*"))
    logits = np.zeros(VOCAB, np.float32)
    grammar.forbid(logits)
    assert np.flatnonzero(np.isfinite(logits))[0] == END
    assert not np.isfinite(logits[2:11]).any()


def test_a_grammar_begins_to_bind_behind_its_marker(grammars: Grammars) -> None:
    grammar = grammars.start(_regex_grammar("b"), after=THINK_END)
    logits = np.zeros(VOCAB, np.float32)
    grammar.forbid(logits)
    assert np.isfinite(logits).all()
    for token_id in (300, 301, THINK_END):
        assert not grammar.ended
        grammar.commit(token_id)
    grammar.forbid(logits)
    assert np.isfinite(logits).sum() == 1


def test_logprobs_are_those_of_the_plain_logits(grammars: Grammars) -> None:
    rules = LogitRules(grammar=grammars.start(_regex_grammar("b")))
    logits = np.zeros(VOCAB, np.float32)
    choice = choose(logits, 0, Sampling(), ruled=rules.applied(logits), logprobs=True)
    assert choice.logprob == pytest.approx(-np.log(VOCAB))


def test_what_is_no_grammar_is_refused_without_the_librarys_state(grammars: Grammars) -> None:
    with pytest.raises(ConfigError, match="grammar: "):
        grammars.start("rubbish")
    grammar = grammars.start(_regex_grammar("b"))
    with pytest.raises(ConfigError, match="satisfy") as caught:
        grammar.commit(300)
    assert len(str(caught.value)) < 200


def test_penalties_count_committed_ids_and_biases_add() -> None:
    rules = LogitRules(bias={5: 2.0, 6: -100.0}, frequency=0.5, presence=1.0)
    logits = np.ones(8, np.float32)
    assert rules.applied(logits).tolist() == [1, 1, 1, 1, 1, 3, -99, 1]
    for token_id in (2, 2, 3):
        rules.commit(token_id)
    assert rules.applied(logits).tolist() == [1, 1, -1, -0.5, 1, 3, -99, 1]
    assert logits.tolist() == [1] * 8
