"""`headrace simulate --predictions FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import headrace
from compute.commands.simulate_recall import recalls
from protocol.files.guess_format import NO_EXPERT, GuessShape, encode_block, encode_header

SHAPE = GuessShape(4, 50, 2)


def file_of(path: Path, shape: GuessShape = SHAPE, n: int = 2) -> Path:
    """Layer 1 is foretold wholly at distance 1, layer 2 by half, layer 3 in the first token."""
    made = np.zeros(n, shape.record)
    made["picks"] = np.arange(shape.n_layers)[:, None] * 10 + np.arange(shape.top_k)
    made["guesses"] = 48 + np.arange(shape.top_k)
    for distance in range(1, shape.n_distances + 1):
        made["guesses"][:, :distance, distance - 1] = NO_EXPERT
    if n:
        made["guesses"][:, 1, 0] = [10, 11]
        made["guesses"][:, 2, 0] = [21, 30]
        made["guesses"][0, 3, 0] = [30, 31]
        made["guesses"][:, 3, 2] = [5, 31]
    path.write_bytes(encode_header(shape, 1) + (encode_block(made) if n else b""))
    return path


def test_recall_is_the_share_of_picks_that_were_foretold(tmp_path: Path) -> None:
    path = file_of(tmp_path / "guesses")
    records = np.frombuffer(path.read_bytes()[-2 * SHAPE.record.itemsize :], SHAPE.record)
    one, two, three = recalls(SHAPE, records)
    assert list(one.by_layer) == [1, 0.5, 0.5]
    assert one.mean == pytest.approx(2 / 3)
    assert one.worst == 2
    assert list(two.by_layer) == [0, 0]
    assert list(three.by_layer) == [0.5]
    assert three.worst == 3


def test_it_is_a_table_or_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path / "guesses")
    path.write_bytes(path.read_bytes() + b"torn")
    assert headrace.main(["simulate", "--predictions", str(path)]) == 0
    captured = capsys.readouterr()
    assert "4 bytes at the end are no whole block" in captured.err
    out = " ".join(captured.out.split())
    assert "2 tokens through 4 layers of 50 experts, 2 picked" in out
    assert "1 66.7% 2 50.0% 2 0.0% 2 0.0% 3 50.0% 3 50.0%" in out
    assert headrace.main(["simulate", "--predictions", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chance"] == 0.04
    assert [one["distance"] for one in facts["distances"]] == [1, 2, 3]
    assert facts["distances"][0]["by_layer"] == [1, 0.5, 0.5]


def test_a_model_of_two_layers_has_one_distance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = GuessShape(2, 50, 2)
    made = np.zeros(1, shape.record)
    made["picks"] = made["guesses"][:, :, 0] = [1, 2]
    made["guesses"][:, 0] = made["guesses"][:, :, 1:] = NO_EXPERT
    path = tmp_path / "guesses"
    path.write_bytes(encode_header(shape, 1) + encode_block(made))
    assert headrace.main(["simulate", "--predictions", str(path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["distances"]
    assert (one["distance"], one["recall"]) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["{}/none"], "No such file"),
        (["{}/empty"], "no token in it"),
        (["{}/guesses", "--synthetic", "flat"], "stands alone"),
        (["{}/guesses", "picks.trace"], "stands alone"),
    ],
)
def test_what_cannot_be_read_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(tmp_path / "guesses")
    file_of(tmp_path / "empty", n=0)
    arguments = [flag.format(tmp_path) for flag in flags]
    assert headrace.main(["simulate", "--predictions", *arguments]) == 2
    assert said in capsys.readouterr().err
