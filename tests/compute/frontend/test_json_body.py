from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.frontend.http.errors import ApiError
from compute.frontend.http.json_body import depth, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


def _depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth_of, value), default=0)
    return 0


@given(VALUES, st.booleans())
def test_depth_is_that_of_the_value_whatever_its_strings_hold(value: object, ascii_: bool) -> None:
    assert depth(json.dumps(value, ensure_ascii=ascii_).encode()) == _depth_of(value)


@given(st.dictionaries(st.text(max_size=4), VALUES))
def test_an_object_within_the_limit_is_read_as_it_is(value: dict[str, object]) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    assert parse_object(body, 100) == value
    with pytest.raises(ApiError, match="nested deeper than 0"):
        parse_object(body, 0)


@given(st.binary(max_size=60))
def test_bytes_are_an_object_or_an_error(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(parse_object(body, 64), dict)
