from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from protocol.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("96GiB", 96 << 30),
        ("96 gib", 96 << 30),
        ("1.5KiB", 1536),
        ("2MB", 2_000_000),
        ("0.0000001 TB", 100_000),
    ],
)
def test_sizes_are_read_exactly(text: object, n_bytes: int) -> None:
    assert parse_size(text, "--arena") == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.5.2GiB", "-1", "3 furlongs", True, -1, 1.5, None])
def test_what_is_not_a_size_is_refused_with_its_place(text: object) -> None:
    with pytest.raises(ConfigError, match=r"--arena: .* is not a size"):
        parse_size(text, "--arena")


def test_sizes_are_shown_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 15 << 20, 96 << 30, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "15.0 MiB",
        "96.0 GiB",
        "5120.0 TiB",
    ]
