from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.frontend.stop_strings import StopStrings


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watcher.feed(piece)
        if watcher.found is not None:
            return shown, watcher.found
    return shown + watcher.finish(), None


def _one_by_one(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition, written plainly: the first place where any stop string ends."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_what_may_become_a_stop_string_is_held_back() -> None:
    watcher = StopStrings(["\n\nKING"])
    assert watcher.feed("a man.\n") == "a man."
    assert watcher.feed("\nKI") == ""
    assert watcher.feed("D") == "\n\nKID"
    assert watcher.found is None


def test_text_before_the_stop_is_shown_and_nothing_after() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("one EN") == "one "
    assert watcher.feed("D two") == ""
    assert watcher.found == "END"
    assert watcher.feed("more") == ""


def test_held_text_comes_out_when_the_text_ends() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("an EN") == "an "
    assert watcher.finish() == "EN"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopStrings().feed("all of it") == "all of it"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_the_result_does_not_depend_on_the_cut(stops: list[str], pieces: list[str]) -> None:
    assert _run(stops, pieces) == _one_by_one(stops, "".join(pieces))
