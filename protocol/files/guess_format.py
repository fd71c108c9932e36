r"""The bytes of a guess trace: what routers picked, and would have of earlier inputs.

Pure. All numbers are little-endian; blocks are built as those of a routing trace.

    header, 56 bytes: magic "HRAHEAD\n", version u16, n_layers u16, n_experts u16, top_k u16,
        n_distances u16, reserved u16, reserved u32, started_ms u64 (Unix time),
        fingerprint of the checkpoint 16 bytes, xxh3_64 of what stands before it
    block, 24 bytes and its payload: magic "HRG\n", n_records u32, n_bytes u32 (of the payload),
        reserved u32, xxh3_64 of these 16 bytes and the payload
    record, one token: position u32, then for each layer from 0 the top_k experts that it picked,
        u16 each and ascending, then for each layer, and each distance from 1 on, the top_k that it
        picked of the expert site's input so many layers before; 65535 each where there is no such
        layer

A block that is cut short or damaged is passed over; the next whole one is found by its magic.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .block_file import whole_blocks

MAGIC = b"HRAHEAD\n"
VERSION = 1
N_DISTANCES = 3
NO_EXPERT = 0xFFFF

_HEADER = struct.Struct("<8sHHHHHHIQ16sQ")
_BLOCK_MAGIC = b"HRG\n"
_BLOCK = struct.Struct("<4sIIIQ")
HEADER_BYTES = _HEADER.size
BLOCK_BYTES = _BLOCK.size


@dataclass(frozen=True, slots=True)
class GuessShape:
    """The model that a guess trace belongs to."""

    n_layers: int
    n_experts: int
    top_k: int
    fingerprint: bytes = bytes(16)
    n_distances: int = N_DISTANCES

    @property
    def record(self) -> np.dtype[np.void]:
        """One token's bytes."""
        picks = (self.n_layers, self.top_k)
        guesses = (self.n_layers, self.n_distances, self.top_k)
        return np.dtype([("position", "<u4"), ("picks", "<u2", picks), ("guesses", "<u2", guesses)])


@dataclass(frozen=True, slots=True)
class FoundGuesses:
    """What a file's bytes held."""

    records: NDArray[np.void]  # of GuessShape.record
    end: int  # where the last whole block ends: a writer goes on there
    n_bytes_skipped: int  # damaged, between whole blocks
    n_bytes_torn: int  # behind the last whole block


def encode_header(shape: GuessShape, started_ms: int) -> bytes:
    """Return a file's first bytes."""
    sizes = (shape.n_layers, shape.n_experts, shape.top_k, shape.n_distances)
    fields = (MAGIC, VERSION, *sizes, 0, 0, started_ms, shape.fingerprint, 0)
    head = _HEADER.pack(*fields)[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def decode_header(data: bytes, where: str) -> GuessShape:
    """Return the shape in a guess trace's first bytes; raises ConfigError for anything else."""
    if not data.startswith(MAGIC):
        raise ConfigError(f"{where}: not a guess trace, it begins with {bytes(data[:8])!r}")
    if len(data) < HEADER_BYTES:
        raise ConfigError(f"{where}: {len(data)} bytes, a guess trace has {HEADER_BYTES} at least")
    _, version, n_layers, n_experts, top_k, n_distances, _, _, _, fingerprint, checksum = (
        _HEADER.unpack_from(data)
    )
    if version != VERSION:
        raise ConfigError(f"{where}: guess trace version {version}, this program reads {VERSION}")
    if checksum != xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8]):
        raise ConfigError(f"{where}: the guess trace's header is damaged")
    if not 0 < top_k <= n_experts or not n_layers or not n_distances:
        sizes = (n_layers, n_experts, top_k, n_distances)
        raise ConfigError(f"{where}: the guess trace's header makes no sense: {sizes}")
    return GuessShape(n_layers, n_experts, top_k, fingerprint, n_distances)


def encode_block(records: NDArray[np.void]) -> bytes:
    """Return a block of records of GuessShape.record."""
    payload = records.tobytes()
    head = _BLOCK.pack(_BLOCK_MAGIC, len(records), len(payload), 0, 0)[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload)) + payload


def decode_blocks(data: bytes, shape: GuessShape) -> FoundGuesses:
    """Read the blocks of a whole file's bytes, past its header."""
    block_at = partial(_block_at, data, shape=shape)
    found = whole_blocks(data, HEADER_BYTES, _BLOCK_MAGIC, block_at)
    joined = np.concatenate(found.blocks) if found.blocks else np.zeros(0, shape.record)
    return FoundGuesses(joined, found.end, found.n_bytes_skipped, found.n_bytes_torn)


def _block_at(data: bytes, place: int, shape: GuessShape) -> tuple[NDArray[np.void], int] | None:
    """Return the records of the block at `place` and where it ends, or None: no whole block."""
    if len(data) - place < BLOCK_BYTES:
        return None
    magic, n_records, n_bytes, _, checksum = _BLOCK.unpack_from(data, place)
    first, end = place + BLOCK_BYTES, place + BLOCK_BYTES + n_bytes
    whole = end <= len(data) and n_bytes == n_records * shape.record.itemsize
    if magic != _BLOCK_MAGIC or not whole:
        return None
    digest = xxhash.xxh3_64(data[place : first - 8])
    digest.update(memoryview(data)[first:end])
    if digest.intdigest() != checksum:
        return None
    records = np.frombuffer(data, shape.record, n_records, first)
    return (records, end) if _make_sense(records, shape) else None


def _make_sense(records: NDArray[np.void], shape: GuessShape) -> bool:
    picks, guesses = records["picks"].astype(np.int64), records["guesses"].astype(np.int64)
    fine = bool((np.diff(picks, axis=2) > 0).all() and (picks < shape.n_experts).all())
    for distance in range(1, shape.n_distances + 1):
        made = guesses[:, distance:, distance - 1]
        none = guesses[:, :distance, distance - 1]
        ascending = (np.diff(made, axis=2) > 0).all() and (made < shape.n_experts).all()
        fine = fine and bool(ascending and (none == NO_EXPERT).all())
    return fine
