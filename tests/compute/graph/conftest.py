"""What every test of launches leaves behind: nothing registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.decode_rig import close_rigs


@pytest.fixture(autouse=True)
def _rigs_are_closed() -> Iterator[None]:
    yield
    close_rigs()
