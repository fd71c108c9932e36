"""The performance model: from sizes, rates and hit rates to the time of a token and of a prompt.

Pure. What each formula stands on is in docs/performance-model.md, by the same names; a change here
is a change there. Times are in seconds, rates in bytes a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compute.experts.stream_window import n_foreseen

DENSE_SHARE = 0.65  # of a device's memory rate that dense products of one row reach
EXPERT_SHARE = 0.6  # that the routed experts of one row reach
IN_PLACE_SHARE = 0.92  # of the link's copy rate that a kernel reaches, reading in place
HOST_SHARE = 0.2  # of the host's memory rate that the plain reference reaches
HOST_LAYER_S = 3.5e-3  # of a layer of the plain reference, beyond its bytes: small operators
FLOPS_SHARE = 0.3  # of a device's arithmetic that a prompt's products reach
LAYER_S = 60e-6  # of a layer on a GPU, beyond its bytes: launches, headers read back
REQUEST_S = 0.3e-3  # of a request to the daemon and its answer, beyond the drive's part


@dataclass(frozen=True, slots=True)
class Work:
    """What a token and a prompt of a model ask for."""

    n_layers: int
    n_experts: int  # a layer
    top_k: int
    expert_bytes: int
    reads_per_expert: int  # parts that one expert is read in
    dense_bytes: int  # that each token reads, beside experts
    active_weights: int  # that each token is multiplied by
    expert_weights: int  # of one expert

    @property
    def picks(self) -> int:
        """Experts that a token picks, in all layers."""
        return self.n_layers * self.top_k

    @property
    def expert_share(self) -> float:
        """The experts' share of a token's products."""
        return self.picks * self.expert_weights / self.active_weights


@dataclass(frozen=True, slots=True)
class Drive:
    """How experts come from disk: reads take `latency_s` each, `n_threads` at a time."""

    bytes_per_s: float
    latency_s: float
    n_threads: int = 8
    request_s: float = REQUEST_S  # of the daemon's and the engine's part in a layer's reads

    def burst_s(self, n_experts: NDArray[np.int64] | int, work: Work) -> NDArray[np.float64]:
        """Return how long a layer waits that misses so many experts; 0 for none."""
        n = np.asarray(n_experts)
        waves = np.ceil(n * work.reads_per_expert / self.n_threads)
        n_bytes = n * work.expert_bytes
        return np.where(
            n > 0, self.request_s + waves * self.latency_s + n_bytes / self.bytes_per_s, 0.0
        ).astype(np.float64)

    def stream_s(self, n_experts: float, work: Work) -> float:
        """Return how long so many experts of a layer take to stream through, read ahead."""
        reads = n_experts * work.reads_per_expert
        waves = math.ceil(reads / self.n_threads)
        return waves * self.latency_s + n_experts * work.expert_bytes / self.bytes_per_s

    def times(self, n_drives: float) -> Drive:
        """As many such drives, experts spread over them."""
        n_threads = max(1, round(self.n_threads * n_drives))
        return replace(self, bytes_per_s=self.bytes_per_s * n_drives, n_threads=n_threads)


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model runs. A device without memory of its own has `link_bytes_per_s` 0."""

    kind: str  # "cpu", "unified" or "discrete"
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0
    flops: float = 0.0  # bf16 operations a second; 0: not known


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run with every expert in memory took on this machine; 0: not measured."""

    token_s: float = 0.0
    prompt_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hits:
    """Where a token's picks are found, as shares of all picks, and how its misses bunch."""

    device: float  # on the device
    miss: float  # on disk
    burst: float  # share of the layers that miss something

    @property
    def rate(self) -> float:
        """The share that no read is needed for."""
        return 1 - self.miss


@dataclass(frozen=True, slots=True)
class TokenTime:
    """A token's time by what it goes to. The parts follow one another."""

    compute_s: float
    copies_s: float  # experts read over the link
    disk_s: float  # waits for reads

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.copies_s + self.disk_s

    @property
    def tokens_per_s(self) -> float:
        """How many a second."""
        return 1 / self.total_s

    @property
    def limit(self) -> str:
        """What most of it goes to."""
        parts = {"compute": self.compute_s, "copies": self.copies_s, "disk": self.disk_s}
        return max(parts, key=lambda name: parts[name])


def compute_s(work: Work, device: Device, hits: Hits, measured: Measured) -> float:
    """Return a token's time without any wait: as measured, else by the bytes that it reads."""
    if measured.token_s:
        return measured.token_s
    expert_bytes = work.picks * work.expert_bytes
    if device.kind == "cpu":
        read_s = (work.dense_bytes + expert_bytes) / (device.memory_bytes_per_s * HOST_SHARE)
        return read_s + work.n_layers * HOST_LAYER_S
    here = hits.device if device.kind == "discrete" else 1.0
    return (
        work.dense_bytes / (device.memory_bytes_per_s * DENSE_SHARE)
        + here * expert_bytes / (device.memory_bytes_per_s * EXPERT_SHARE)
        + work.n_layers * LAYER_S
    )


def copies_s(work: Work, device: Device, hits: Hits) -> float:
    """Return how long a token's picks take that a discrete GPU reads from the arena in place."""
    if device.kind != "discrete":
        return 0.0
    n_bytes = (1 - hits.device) * work.picks * work.expert_bytes
    return n_bytes / (device.link_bytes_per_s * IN_PLACE_SHARE)


def token_time(
    work: Work, device: Device, drive: Drive, hits: Hits, measured: Measured
) -> TokenTime:
    """Return a token's time from mean shares: each layer that misses has the mean of misses."""
    n_bursts = hits.burst * work.n_layers
    n_misses = hits.miss * work.picks
    disk = 0.0
    if n_bursts:
        each = n_misses / n_bursts
        low = math.floor(each)  # between the two whole numbers about the mean
        share = each - low
        waits = drive.burst_s(np.array([low, low + 1]), work)
        disk = n_bursts * float((1 - share) * waits[0] + share * waits[1])
    return TokenTime(compute_s(work, device, hits, measured), copies_s(work, device, hits), disk)


def replayed_disk_s(drive: Drive, work: Work, sizes: NDArray[np.int64]) -> float:
    """Return the waits of bursts of known sizes."""
    return float(drive.burst_s(sizes, work).sum())


def distinct_experts(work: Work, n_tokens: int) -> float:
    """Return how many experts of a layer a chunk picks, were all alike: its upper bound."""
    return work.n_experts * (1 - (1 - work.top_k / work.n_experts) ** n_tokens)


def first_token_s(
    work: Work,
    device: Device,
    drive: Drive,
    measured: Measured,
    *,
    n_prompt: int,
    chunk: int,
    resident: float,
) -> float:
    """Return the time to the first token of a prompt, read and computed layer by layer.

    resident   share of a layer's experts that need no read when the prompt begins

    A layer's reads begin when its router has run, and run ahead of its experts' arithmetic.
    """
    seconds = 0.0
    for begin in range(0, n_prompt, chunk):
        n_tokens = min(chunk, n_prompt - begin)
        n_experts = distinct_experts(work, n_tokens)
        work_s = chunk_compute_s(work, device, measured, n_tokens, n_experts)
        seconds += chunk_s(work, drive, n_experts, n_experts * (1 - resident), work_s)
    return seconds


def chunk_s(work: Work, drive: Drive, n_picked: float, n_missing: float, work_s: float) -> float:
    """Return a chunk's time: so many experts of a layer picked and missing, all arithmetic's time.

    While a layer's last experts are computed and the next one's router runs, the experts that are
    foreseen there are read; none is for the first layer.
    """
    foreseen = min(n_missing, n_foreseen(n_picked, work.n_experts))
    read_s, ahead_s = drive.stream_s(n_missing, work), drive.stream_s(foreseen, work)
    if n_missing:
        read_s += drive.request_s
    each_s = work_s / work.n_layers
    others_s = (work.n_layers - 1) * layer_s(work, read_s, each_s, ahead_s)
    return layer_s(work, read_s, each_s) + others_s


def layer_s(work: Work, read_s: float, work_s: float, ahead_s: float = 0.0) -> float:
    """Return a prompt layer's time from its reads' and its arithmetic's.

    ahead_s  of its reads that may lie behind the arithmetic before its experts
    """
    experts_s = work_s * work.expert_share
    before_s = work_s - experts_s
    return before_s + max(read_s - min(ahead_s, before_s), experts_s)


def chunk_compute_s(
    work: Work, device: Device, measured: Measured, n_tokens: int, n_experts: float
) -> float:
    """Return the time of a chunk whose experts are all there."""
    if measured.prompt_token_s:
        return measured.prompt_token_s * n_tokens
    expert_bytes = work.n_layers * n_experts * work.expert_bytes
    if device.kind == "cpu":
        once = (work.dense_bytes + expert_bytes) / (device.memory_bytes_per_s * HOST_SHARE)
        return max(once, n_tokens * compute_s(work, device, Hits(1, 0, 0), measured) / 8)
    reads = work.dense_bytes / device.memory_bytes_per_s
    if device.kind == "discrete":
        reads += expert_bytes / (device.link_bytes_per_s * IN_PLACE_SHARE)
    else:
        reads += expert_bytes / device.memory_bytes_per_s
    operations = 2 * work.active_weights * n_tokens
    return max(reads, operations / (device.flops * FLOPS_SHARE) if device.flops else 0.0)
