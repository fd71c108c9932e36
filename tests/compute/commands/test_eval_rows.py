from __future__ import annotations

import pytest

import headrace
from compute.commands.eval import cut_rows
from protocol.errors import ConfigError


def test_rows_are_full_and_the_rest_is_left_out() -> None:
    assert cut_rows(list(range(7)), 3, 32) == [[0, 1, 2], [3, 4, 5]]
    assert cut_rows(list(range(7)), 3, 1) == [[0, 1, 2]]


def test_a_text_shorter_than_a_row_is_one_row() -> None:
    assert cut_rows([4, 5], 3, 32) == [[4, 5]]


def test_no_rows_means_all_rows() -> None:
    assert len(cut_rows(list(range(100)), 2, 0)) == 50


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no tokens"):
        cut_rows([], 3, 32)


def test_a_text_that_is_not_there_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace.main(["eval", "--model", "demo", "--text", "/nope"]) == 2
    assert capsys.readouterr().err == "headrace: --text: /nope: cannot be read: no such file\n"
