from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.reference import one_order


@pytest.mark.parametrize(
    ("processors", "before", "after"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", None, "AUTO,STRICT"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "COMPATIBLE", "COMPATIBLE"),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", None, None),
        (None, None, None),
    ],
)
def test_intels_library_is_asked_for_one_order_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    processors: str | None,
    before: str | None,
    after: str | None,
) -> None:
    monkeypatch.setattr(one_order, "_PROCESSORS", tmp_path / "cpuinfo")
    if processors is not None:
        (tmp_path / "cpuinfo").write_text(processors)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if before is not None:
        monkeypatch.setenv("MKL_CBWR", before)
    one_order.ask_for_one_order()
    assert os.environ.get("MKL_CBWR") == after
