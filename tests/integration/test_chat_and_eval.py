"""`headrace chat` and `headrace eval` over the demo, with the daemon that they start."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import headrace


@pytest.fixture(autouse=True)
def _own_directories(runtime_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state_dir))


def test_lines_piped_in_are_answered_one_after_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, demo_dir: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    chat = next(sample for sample in samples if sample["name"] == "chat")
    lines = "And the word of the LORD came unto me,\n\nGo on.\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    flags = ["--temperature", "0", "--max-tokens", "10", "--precision", "unrounded", "--json"]
    assert headrace.main(["chat", *flags]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["prompt_ids"] == chat["prompt_ids"]
    assert first["ids"] == chat["unrounded"]["continuation_ids"][:10]
    kept = [*first["prompt_ids"], *first["ids"], 1]
    assert second["prompt_ids"][: len(kept)] == kept
    assert second["io"]["hits"] > 0


def test_a_talk_that_grows_over_the_context_starts_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One.\nTwo.\nThree.\n"))
    flags = ["--temperature", "0", "--max-tokens", "12", "--context", "24"]
    assert headrace.main(["chat", *flags]) == 0
    assert "it starts anew" in capsys.readouterr().err


def test_perplexity_of_the_first_rows_is_the_expected_one(
    capsys: pytest.CaptureFixture[str], demo_dir: Path
) -> None:
    wanted = json.loads((demo_dir / "expected.json").read_text())["perplexity"]
    text = str(demo_dir / "heldout.txt")
    flags = ["--text", text, "--rows", "3", "--precision", "vendor", "--json"]
    assert headrace.main(["eval", *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = wanted["vendor_mean_nll_per_row"][:3]
    # A row has 511 tokens: rounding ties that fall the other way move it by up to 0.3 %.
    assert found["row_nll"] == pytest.approx(rows, rel=5e-3)
    assert found["mean_nll"] == pytest.approx(sum(rows) / 3, rel=1e-3)
    assert found["tokens"] == 3 * 511


@pytest.mark.accept
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("precision", "share"),
    [("vendor", 1e-3), ("highway", 1e-3), ("wide", 1e-3), ("unrounded", 3e-4)],
)
def test_the_perplexity_of_the_readmes_slice_is_the_expected_one(
    capsys: pytest.CaptureFixture[str], demo_dir: Path, precision: str, share: float
) -> None:
    wanted = json.loads((demo_dir / "expected.json").read_text())["perplexity"]
    text = str(demo_dir / "heldout.txt")
    assert headrace.main(["eval", "--text", text, "--precision", precision, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == wanted["tokens"]
    assert found["perplexity"] == pytest.approx(wanted[precision]["perplexity"], rel=share)


def test_a_text_is_shown_with_its_perplexity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("And it came to pass, when the people were come to the battle.")
    assert headrace.main(["eval", "--text", str(text)]) == 0
    assert "in 1 rows, precision highway" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/nowhere.txt"], "--text: /nowhere.txt"),
        (["--text", "/dev/null"], "holds no tokens"),
        (["--text", "/dev/null", "--row-tokens", "0"], "--row-tokens"),
    ],
)
def test_wrong_texts_and_rows_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert headrace.main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err
