"""Lists on a command line: no part of one is dropped."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from protocol.lists import split_list


def test_parts_lose_the_spaces_around_them():
    assert split_list("a, b ,c", "--x", "letters") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "''"),
        (" ", "' '"),
        ("a,,b", "part 2 of 'a,,b'"),
        (",a", "part 1 of ',a'"),
        ("a, ", "part 2 of 'a, '"),
    ],
)
def test_an_empty_part_is_refused(text: str, found: str):
    with pytest.raises(ConfigError) as caught:
        split_list(text, "--x", "letters")
    assert str(caught.value) == f"--x: {found} is empty, wanted letters"
