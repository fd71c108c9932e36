"""The client library's own example, by a program of its own against the real daemon."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_thread

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_docstring_example_runs_against_the_daemon(tmp_path, runtime_dir):
    model = write_fake_checkpoint(tmp_path, n_layers=6, n_experts=16, top_k=2)
    assert ExpertClient.__doc__ is not None
    example = textwrap.dedent(ExpertClient.__doc__.partition("Engram rows:\n")[2])
    with daemon_thread(model, runtime_dir, read_threads=2):
        done = subprocess.run(
            [sys.executable, "-c", f"{example}\nshow({str(runtime_dir)!r})"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.stderr == ""
        _, resident, first, second, down, rows = done.stdout.splitlines()
        assert resident == "in the arena: 0"
        for line, key in ((first, "0 1"), (second, "1 3")):
            assert line.startswith(key + " ")
        assert int(down) == open_checkpoint(model).slice_map.slices(0, 2)[4].n_bytes
        assert rows.startswith("(2, ")
        with ExpertClient(runtime_dir) as client:
            assert len(client.keys()) == 3
