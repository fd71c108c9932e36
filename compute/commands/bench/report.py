"""What a benchmark leaves: runs of one temperature together, with the machine's facts.

Invariant: cold and warm runs are never summed or averaged; `summary` refuses a mixture.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, why_unread

FORMAT = 1
KINDS = ("cold", "warm", "resident")
FIGURES = (
    "first_token_s",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "hit_rate",
    "stall_ms_per_token",
)
DEFINITION = {
    "hit_rate": "hits / (hits + misses) of the picks of decoded tokens: a hit is a pick whose "
    "expert was in memory when its layer asked for it; the prompt's picks do not count",
    "cold": "the first request to an expert daemon that has read nothing; text not used before",
    "warm": "a request to a daemon that has served others; text not used before",
    "resident": "the last warm text again, where every pick is found: no read at all",
    "medians": "of runs of one temperature; cold and warm are never averaged",
}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One request."""

    kind: str  # one of KINDS
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    hits: int  # of decoded tokens, as the next three
    misses: int
    bytes_read: int
    stall_ms: float
    prompt_misses: int

    @property
    def hit_rate(self) -> float:
        """See DEFINITION; 1 where nothing was picked."""
        n_picks = self.hits + self.misses
        return self.hits / n_picks if n_picks else 1.0

    @property
    def stall_ms_per_token(self) -> float:
        """The wait for reads of a decoded token."""
        return self.stall_ms / max(1, self.new_tokens - 1)


def summary(runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Return the medians of runs of one kind, and the runs. Raises ValueError on a mixture."""
    kinds = {run.kind for run in runs}
    if len(kinds) != 1:
        raise ValueError(f"{' and '.join(sorted(kinds)) or 'no'} runs have no common figure")
    found: dict[str, Any] = {
        name: statistics.median(getattr(run, name) for run in runs) for name in FIGURES
    }
    rates = [run.decode_tokens_per_second for run in runs]
    return found | {
        "decode_spread": [min(rates), max(rates)],
        "runs": [asdict(run) | {"hit_rate": run.hit_rate} for run in runs],
    }


def machine_facts(shard: Path) -> dict[str, Any]:
    """Return what a reader must know of this machine; `shard` is a file of the model."""
    import torch

    import headrace
    from compute.commands.doctor.command import printed
    from compute.commands.gpu_facts import gpu_facts
    from compute.commands.machine_memory import machine_memory
    from expert_daemon.file_system import file_system_of

    memory = machine_memory()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "gpus": [asdict(gpu) for gpu in gpu_facts(printed)],
        "file_system": file_system_of(shard).name,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "headrace": headrace.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_report(path: Path) -> dict[str, Any]:
    """Return a report that `headrace bench` wrote. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise ConfigError(f"{path}: cannot be read as a report: {why_unread(error)}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: no report of `headrace bench` of format {FORMAT}")
    wanted = {"machine", "model", "settings", "definition", *KINDS}
    missing = sorted(wanted - set(found))
    if missing:
        raise ConfigError(f"{path}: the report lacks {', '.join(missing)}")
    return found
