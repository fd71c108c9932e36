r"""The bytes of a routing trace: a header, then blocks, each with a checksum over all of it.

Pure. All numbers are little-endian.

    header, 72 bytes: magic "HRTRACE\n", version u16, n_layers u16, n_experts u16, top_k u16,
        part u32 (raised with each rotation), reserved u32, started_ms u64 (Unix time),
        expert_bytes u64, slot_bytes u64, fingerprint 16 bytes, xxh3_64 of what stands before it
    block, 32 bytes and its payload: magic "HRB\n", kind u16, reserved u16, n_records u32,
        n_bytes u32 (of the payload), written_ms u64, xxh3_64 of these 24 bytes and the payload
    kind 1, tokens: a record is step u32, then for each layer from 0 the top_k experts that one
        token picked, u16 each and ascending: 12 bytes a layer where top_k is 6
    kind 2, chunks: a record is step u32, n_picks u32, then (layer u16, expert u16) n_picks times,
        ascending: what the tokens of a prompt's chunk, or of a batch, picked together

A block that is cut short or damaged is passed over; the next whole one is found by its magic. What
earlier layers would have picked stands in files of its own: protocol/files/guess_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.block_file import whole_blocks

from .routing_trace import TraceShape

MAGIC = b"HRTRACE\n"
VERSION = 1
TOKENS, CHUNKS = 1, 2
MAX_BLOCK_BYTES = 1 << 18  # a payload is closed at this size; one record may be larger

PICK = np.dtype([("layer", "<u2"), ("expert", "<u2")])

_HEADER = struct.Struct("<8sHHHHIIQQQ16sQ")
_BLOCK_MAGIC = b"HRB\n"
_BLOCK = struct.Struct("<4sHHIIQQ")
_CHECKED = _BLOCK.size - 8  # bytes of a block's head that its checksum covers
_RECORD = struct.Struct("<II")

HEADER_BYTES = _HEADER.size
BLOCK_BYTES = _BLOCK.size

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's picks: keys, ascending and distinct."""

    number: int  # as the engine counts, modulo 2^32
    keys: Keys
    is_token: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a file's bytes held."""

    steps: list[Step]
    end: int  # where the last whole block ends: a writer goes on there
    n_bytes_skipped: int  # damaged, between whole blocks
    n_bytes_torn: int  # behind the last whole block


def encode_header(shape: TraceShape, part: int, started_ms: int) -> bytes:
    """Return a file's first bytes."""
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        shape.n_layers,
        shape.n_experts,
        shape.top_k,
        part,
        0,
        started_ms,
        shape.expert_bytes,
        shape.slot_bytes,
        shape.fingerprint,
        0,
    )[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def decode_header(data: bytes, where: str) -> tuple[TraceShape, int]:
    """Return (shape, part) of a trace's first bytes; raises ConfigError for anything else."""
    if not data.startswith(MAGIC):
        raise ConfigError(f"{where}: not a routing trace, it begins with {bytes(data[:8])!r}")
    if len(data) < HEADER_BYTES:
        raise ConfigError(f"{where}: {len(data)} bytes, a trace has {HEADER_BYTES} at least")
    fields = _HEADER.unpack_from(data)
    if fields[1] != VERSION:
        raise ConfigError(f"{where}: trace version {fields[1]}, this program reads {VERSION}")
    if fields[-1] != xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8]):
        raise ConfigError(f"{where}: the trace's header is damaged")
    _, _, n_layers, n_experts, top_k, part, _, _, expert_bytes, slot_bytes, fingerprint, _ = fields
    if not 0 < top_k <= n_experts or not n_layers or slot_bytes < expert_bytes or not expert_bytes:
        raise ConfigError(f"{where}: the trace's header makes no sense: {fields[2:5]}")
    return TraceShape(n_layers, n_experts, top_k, expert_bytes, slot_bytes, fingerprint), part


def step_of_picks(number: int, picks: bytes, shape: TraceShape) -> Step:
    """Return the step of (layer u16, expert u16) pairs in any order; pairs out of range left out.

    It is a token where every layer has exactly top_k picks.
    """
    pairs = np.frombuffer(picks, PICK)
    within = (pairs["layer"] < shape.n_layers) & (pairs["expert"] < shape.n_experts)
    keys = pairs["layer"][within].astype(np.int64) * shape.n_experts + pairs["expert"][within]
    return _step(number, np.unique(keys), shape)


def _step(number: int, keys: Keys, shape: TraceShape) -> Step:
    return Step(number & 0xFFFFFFFF, keys, bool(is_token(keys, shape)))


def is_token(keys: Keys, shape: TraceShape) -> bool:
    """Whether ascending, distinct keys are top_k experts in every layer."""
    if len(keys) != shape.picks_per_token:
        return False
    layers = (keys // shape.n_experts).reshape(shape.n_layers, shape.top_k)
    return bool((layers == np.arange(shape.n_layers)[:, None]).all())


def encode_blocks(steps: Iterable[Step], shape: TraceShape, written_ms: int) -> Iterator[bytes]:
    """Yield blocks of the steps, in their order, each of one kind."""
    for token, run in groupby(steps, key=lambda step: step.is_token):
        records: list[bytes] = []
        n_bytes = 0
        for step in run:
            record = _token_record(step, shape) if token else _chunk_record(step, shape)
            if records and n_bytes + len(record) > MAX_BLOCK_BYTES:
                yield _block(TOKENS if token else CHUNKS, records, written_ms)
                records, n_bytes = [], 0
            records.append(record)
            n_bytes += len(record)
        yield _block(TOKENS if token else CHUNKS, records, written_ms)


def _token_record(step: Step, shape: TraceShape) -> bytes:
    return struct.pack("<I", step.number) + (step.keys % shape.n_experts).astype("<u2").tobytes()


def _chunk_record(step: Step, shape: TraceShape) -> bytes:
    pairs = np.empty(len(step.keys), PICK)
    pairs["layer"], pairs["expert"] = np.divmod(step.keys, shape.n_experts)
    return _RECORD.pack(step.number, len(pairs)) + pairs.tobytes()


def _block(kind: int, records: list[bytes], written_ms: int) -> bytes:
    payload = b"".join(records)
    head = _BLOCK.pack(_BLOCK_MAGIC, kind, 0, len(records), len(payload), written_ms, 0)[:_CHECKED]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload


def decode_blocks(data: bytes, shape: TraceShape) -> Found:
    """Read the blocks of a whole file's bytes, past its header."""
    block_at = partial(_block_at, data, shape=shape)
    found = whole_blocks(data, HEADER_BYTES, _BLOCK_MAGIC, block_at)
    steps = list(chain.from_iterable(found.blocks))
    return Found(steps, found.end, found.n_bytes_skipped, found.n_bytes_torn)


def _block_at(data: bytes, place: int, shape: TraceShape) -> tuple[list[Step], int] | None:
    """Return the steps of the block at `place` and where it ends, or None: no whole block."""
    if len(data) - place < BLOCK_BYTES:
        return None
    magic, kind, _, n_records, n_bytes, _, checksum = _BLOCK.unpack_from(data, place)
    first, end = place + BLOCK_BYTES, place + BLOCK_BYTES + n_bytes
    if magic != _BLOCK_MAGIC or end > len(data):
        return None
    view = memoryview(data)
    digest = xxhash.xxh3_64(view[place : place + _CHECKED])
    digest.update(view[first:end])
    if digest.intdigest() != checksum:
        return None
    reader = {TOKENS: _read_tokens, CHUNKS: _read_chunks}.get(kind)
    steps = None if reader is None else reader(view[first:end], n_records, shape)
    return None if steps is None else (steps, end)


def _read_tokens(payload: memoryview, n_records: int, shape: TraceShape) -> list[Step] | None:
    record = np.dtype([("step", "<u4"), ("experts", "<u2", (shape.n_layers, shape.top_k))])
    if len(payload) != n_records * record.itemsize:
        return None
    records = np.frombuffer(payload, record)
    experts = records["experts"].astype(np.int64)
    ascending = (np.diff(experts, axis=2) > 0).all()
    if not ascending or (n_records and experts.max() >= shape.n_experts):
        return None
    keys = experts + np.arange(shape.n_layers)[:, None] * shape.n_experts
    flat = keys.reshape(n_records, -1)
    return [Step(number, flat[at], True) for at, number in enumerate(records["step"].tolist())]


def _read_chunks(payload: memoryview, n_records: int, shape: TraceShape) -> list[Step] | None:
    steps: list[Step] = []
    place = 0
    for _ in range(n_records):
        if len(payload) - place < _RECORD.size:
            return None
        number, n_picks = _RECORD.unpack_from(payload, place)
        place += _RECORD.size
        picks = payload[place : place + n_picks * PICK.itemsize]
        place += n_picks * PICK.itemsize
        if place > len(payload):
            return None
        step = step_of_picks(number, bytes(picks), shape)
        if len(step.keys) != n_picks:
            return None
        steps.append(step)
    return steps if place == len(payload) else None
