"""The demo against `expected.json`."""

import json

import pytest

from compute.model.record import Record


@pytest.fixture(scope="session")
def samples(demo_dir):
    return {s["name"]: s for s in json.loads((demo_dir / "expected.json").read_text())["samples"]}


def greedy(demo, precision, prompt, n, record=None):
    """Greedy ids, and the five largest logits of each step as (id, logit)."""
    model = demo.at(precision)
    sequence = model.new_sequence(len(prompt) + n)
    logits = model.forward(sequence, prompt, demo.source, demo.source, record=record)
    ids, top5 = [], []
    for _ in range(n):
        values, indices = logits[0].topk(5)
        top5.append(list(zip(indices.tolist(), values.tolist(), strict=True)))
        ids.append(top5[-1][0][0])
        if len(ids) == n or ids[-1] == 1:
            break
        logits = model.forward(sequence, ids[-1:], demo.source, demo.source)
    return ids, top5


@pytest.mark.parametrize("name", ["play", "scripture", "chat", "long"])
def test_unrounded_gives_ids_top_five_and_picks(demo, samples, name):
    sample, wanted = samples[name], samples[name]["unrounded"]
    record = Record()
    ids, top5 = greedy(
        demo, "unrounded", sample["prompt_ids"], len(wanted["continuation_ids"]), record
    )
    assert ids == wanted["continuation_ids"]
    for step, expected in zip(top5, wanted["top5"], strict=True):
        assert [token for token, _ in step] == [token for token, _ in expected]
        assert [logit for _, logit in step] == pytest.approx([v for _, v in expected], abs=1e-3)
    for layer, picks in wanted.get("router_picks", {}).items():
        assert record.picks[int(layer)].tolist() == picks


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "highway") for name in ("play", "scripture", "chat", "long")),
        *((name, precision) for name in ("chat", "long") for precision in ("vendor", "wide")),
        *(
            pytest.param(name, precision, marks=pytest.mark.accept)
            for name in ("play", "scripture")
            for precision in ("vendor", "wide")
        ),
    ],
)
def test_rounded_precisions_agree_as_far_as_they_must(demo, samples, name, precision):
    sample = samples[name]
    n = sample["agreed_prefix"]
    ids, _ = greedy(demo, precision, sample["prompt_ids"], n)
    assert ids == sample["vendor"]["continuation_ids"][:n]
