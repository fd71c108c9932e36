"""What the host does for a layer's chunk on a GPU: few launches, and one wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "chunk_launches.py"
LAUNCHES = {"any": 37, "engram": 4, "source": 11, "index": 6}  # groups that fill one size of tile
FREE = 150  # operators that only look at memory another way


def test_a_layers_chunk_is_few_launches_and_waits_for_nothing_but_its_picks() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found = json.loads(line)
        kernels, operators = found["kernels"], found["torch"]
        most = LAUNCHES["any"]
        most += LAUNCHES["engram"] if "_engram_gate_kernel" in kernels else 0
        if "_pool_latents_kernel" in kernels:
            most += LAUNCHES["source"]
        elif "_select_rows_kernel" in kernels:
            most += LAUNCHES["index"]
        assert sum(kernels.values()) + sum(operators.values()) <= most, found
        assert found["free"] <= FREE, found
        assert found["waits"] == {"event": 1}, found
