"""`bench/load.py` over the demo: the memory limit holds, and the last line is one object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)


def test_loading_stays_under_its_memory_limit(root: Path) -> None:
    command = [sys.executable, "bench/load.py", "--model", "demo"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["within"] is True
    assert 0 < found["worst_share"] < 1
    row = found["model"]
    assert row["limit_bytes"] == row["largest_tensor_bytes"] + (1 << 30)
    assert row["weight_bytes"] > row["stored_bytes"]
