"""Predictions: a token's time cold and warm, the time to a first token, and what else would bring.

Cold are the first 64 tokens after a start with an empty arena; warm is what comes once the caches
have settled. Both are of new content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.errors import ConfigError

from .curve import curve_hits
from .fit import Fit, fit
from .machine import Machine
from .rates import (
    Drive,
    Hits,
    Measured,
    TokenTime,
    Work,
    compute_s,
    copies_s,
    first_token_s,
    replayed_disk_s,
    token_time,
)

if TYPE_CHECKING:
    from expert_daemon.routing_trace import RoutingTrace
    from protocol.files.checkpoint import Checkpoint

COLD_TOKENS = 64
PROMPTS = (1024, 8192, 32768)
MORE_RAM = 32 << 30


@dataclass(frozen=True, slots=True)
class Rate:
    """One temperature's prediction."""

    hits: Hits
    time: TokenTime

    def as_json(self) -> dict[str, Any]:
        """All figures by name."""
        return {
            "tokens_per_second": self.time.tokens_per_s,
            "hit_rate": self.hits.rate,
            "device_hit_rate": self.hits.device,
            "layers_that_miss": self.hits.burst,
            "compute_ms": 1000 * self.time.compute_s,
            "copies_ms": 1000 * self.time.copies_s,
            "disk_ms": 1000 * self.time.disk_s,
            "limit": self.time.limit,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, apart from the machine."""

    checkpoint: Checkpoint
    work: Work
    trace: RoutingTrace | None
    measured: Measured
    chunk: int
    arena_bytes: int | None = None  # None: all that is left


def rates(question: Question, machine: Machine, laid: Fit) -> tuple[Rate, Rate]:
    """Return the cold and the warm rate."""
    if question.trace is not None:
        return _from_trace(question, question.trace, machine, laid)
    work = question.work
    n_keys = work.n_layers * work.n_experts
    shares = min(1.0, laid.resident / n_keys), min(1.0, laid.setting.n_device / n_keys)
    found = [curve_hits(*shares, is_cold=is_cold) for is_cold in (True, False)]
    cold, warm = (
        Rate(hits, token_time(work, machine.device, machine.drive, hits, question.measured))
        for hits in found
    )
    return cold, warm


def _from_trace(
    question: Question, trace: RoutingTrace, machine: Machine, laid: Fit
) -> tuple[Rate, Rate]:
    from expert_daemon.burst_sizes import bursts_of

    from .replayed import cold_steps, hits_of, warm_steps

    bursts = bursts_of(trace, laid.setting)
    work, device = question.work, machine.device

    def rate(steps: Any) -> Rate:
        hits = hits_of(trace, bursts, steps)
        disk_s = replayed_disk_s(machine.drive, work, bursts.of(steps)) / len(steps)
        seconds = compute_s(work, device, hits, question.measured)
        return Rate(hits, TokenTime(seconds, copies_s(work, device, hits), disk_s))

    return rate(cold_steps(trace, COLD_TOKENS)), rate(warm_steps(trace))


def first_tokens(question: Question, machine: Machine, laid: Fit) -> list[dict[str, Any]]:
    """Return the times to the first token of prompts that the model can take."""
    work = question.work
    n_keys = work.n_layers * work.n_experts
    rows = []
    for n_prompt in PROMPTS:
        if n_prompt > question.checkpoint.config.max_positions:
            continue
        row: dict[str, Any] = {"prompt_tokens": n_prompt}
        for name, resident in (("cold_s", 0.0), ("warm_s", min(1.0, laid.resident / n_keys))):
            row[name] = first_token_s(
                work,
                machine.device,
                machine.drive,
                question.measured,
                n_prompt=n_prompt,
                chunk=question.chunk,
                resident=resident,
            )
        rows.append(row)
    return rows


def what_ifs(question: Question, machine: Machine) -> Iterator[tuple[str, Rate]]:
    """Yield the warm rate of this machine with one thing more; what brings nothing too."""
    drive = machine.drive
    yield (
        "one more drive like this, experts spread over both",
        _warm(question, replace(machine, drive=drive.times(2))),
    )
    richer = replace(machine, host_bytes=machine.host_bytes + MORE_RAM)
    more = question.arena_bytes
    asked = replace(question, arena_bytes=None if more is None else more + MORE_RAM)
    yield "32 GiB more RAM, for the arena", _warm(asked, richer)
    if machine.device.kind == "discrete":
        larger = replace(machine, device_bytes=2 * machine.device_bytes)
        yield "a GPU with twice the memory", _warm(question, larger)
    elif machine.device.kind == "cpu":
        card = replace(
            machine,
            device_bytes=max(32 << 30, 2 * _dense_bytes(question)),
            device=replace(
                machine.device,
                kind="discrete",
                memory_bytes_per_s=1.0e12,
                link_bytes_per_s=25e9,
                flops=1.6e14,
            ),
        )
        yield "a GPU of 1 TB/s on PCIe 4 x16", _warm(replace(question, measured=Measured()), card)


def _dense_bytes(question: Question) -> int:
    from compute.commands.checkpoint_facts import bytes_by_kind

    return bytes_by_kind(question.checkpoint)["dense"]


def _warm(question: Question, machine: Machine) -> Rate:
    laid = fit(question.checkpoint, machine, question.arena_bytes)
    return rates(question, machine, laid)[1]


def check_trace(trace: RoutingTrace, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where a trace is of another model, or too short."""
    from expert_daemon.routing_trace import shape_of

    shape = shape_of(checkpoint)
    sides = [(s.n_layers, s.n_experts, s.top_k) for s in (trace.shape, shape)]
    if sides[0] != sides[1]:
        raise ConfigError(
            f"--trace: of {sides[0][0]} layers, {sides[0][1]} experts, {sides[0][2]} picks; "
            f"the model has {sides[1][0]}, {sides[1][1]}, {sides[1][2]}"
        )
    if int(np.count_nonzero(trace.is_token)) < 2 * COLD_TOKENS:
        raise ConfigError(f"--trace: {trace.n_tokens} tokens, wanted {2 * COLD_TOKENS} or more")


def with_latency(drive: Drive, latency_ms: float | None, rate: float | None) -> Drive:
    """Return a drive with what flags say of it."""
    if latency_ms is not None:
        drive = replace(drive, latency_s=latency_ms / 1000)
    return drive if rate is None else replace(drive, bytes_per_s=rate)
