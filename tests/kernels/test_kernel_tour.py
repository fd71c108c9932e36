"""The tour of all kernels, for compute-sanitizer: it leaves no kernel out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.jit_kernels import jit_kernels
from tests.support.kernel_stops import STOPS
from tests.support.kernel_tour import chosen

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "tests" / "support" / "kernel_tour.py"
# In a process of its own, where a tensor on no device poses as a GPU's.
LAUNCHED = """
import json
from tests.support import kernel_stops, offline_gpu

found = {}
with offline_gpu.recorded() as launches:
    for kernel, stop in kernel_stops.STOPS.items():
        if stop not in found:
            launches.clear()
            stop()
            found[stop] = sorted({launch.name for launch in launches})
print(json.dumps({kernel: found[stop] for kernel, stop in kernel_stops.STOPS.items()}))
"""


def tour(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOUR), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_every_kernel_of_the_room_has_a_stop() -> None:
    kernels = jit_kernels()
    assert len(kernels) > 40
    assert all(name.endswith("_kernel") for name in kernels), "kernels are named so"
    missing = sorted(kernels - set(STOPS))
    assert not missing, f"tests/support/kernel_stops.py or expert_stops.py has no stop: {missing}"
    assert set(STOPS) == kernels


def test_each_stop_launches_the_kernels_that_it_is_for() -> None:
    command = [sys.executable, "-c", LAUNCHED]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    launched: dict[str, Sequence[str]] = json.loads(done.stdout)
    missing = [one for one, names in launched.items() if f"kernels.{one}" not in names]
    assert not missing


def test_kernels_are_chosen_by_name_or_module() -> None:
    assert chosen(["hc_mix"]) == ["hc_mix._hc_mix_dot_kernel", "hc_mix._hc_mix_finish_kernel"]
    assert chosen(["gemv._gemv_kernel"]) == ["gemv._gemv_kernel"]
    assert chosen([]) == list(STOPS)
    with pytest.raises(ValueError, match="no kernel hc_max"):
        chosen(["hc_max"])


def test_the_tour_lists_its_kernels_and_says_where_it_cannot_run() -> None:
    listed = tour("--list", "--kernel", "gemv")
    assert listed.stdout == "gemv._gemv_kernel\n"
    unknown = tour("--kernel", "hc_max")
    assert (unknown.returncode, unknown.stderr) == (2, "no kernel hc_max: --list names them\n")
    if not torch.cuda.is_available():
        nowhere = tour()
        said = "no CUDA device here: kernels are launched on one\n"
        assert (nowhere.returncode, nowhere.stderr) == (2, said)


@pytest.mark.gpu
@pytest.mark.timeout(200)  # compiles every kernel, beside whatever else compiles
def test_the_tour_runs_on_a_device() -> None:
    done = tour()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split(" ")[0] for line in lines} >= set(STOPS)
