"""One file of an expert pack: its header, its index, and where a record's bytes lie in it.

A pack has one such file a layer, or one a layer and drive where records are striped. A record is
one expert's slot image, byte for byte. PACK.md gives the format byte by byte.

Invariants: nothing in a file is believed. A header that decodes describes a file of exactly the
given size; an index is read only where its size follows from the header. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ShardError

from .slice_map import PIECES, ExpertLayout, SlotImage, piece_bytes
from .tensor_table import ExpectedTensor

MAGIC = b"HRDPACK\n"
VERSION = 1
HEADER_BYTES = 4096
ALIGN = 4096
PART_BYTES = 1 << 20  # of a record in one file: what one hash covers
STRIPE_UNIT = 256 << 10
STRIPES_MAX = 64
LAYERS_MAX = 1 << 12
EXPERTS_MAX = 1 << 12
RECORD_BYTES_MAX = 1 << 36
ID_BYTES = 16

_FIELDS = struct.Struct("<8sII16s16sIIIIQQQQQQQQ")
_PIECE = struct.Struct("<16sQQII")
_PIECES_AT = 256
_HASH_AT = HEADER_BYTES - 8

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Which part of every record one file holds: units `number`, `number + n`, ... of it."""

    number: int = 0
    n_stripes: int = 1
    unit_bytes: int = STRIPE_UNIT

    def share_bytes(self, record_bytes: int) -> int:
        """Return how many bytes of each record the file holds."""
        return sum(n_bytes for _, _, n_bytes in self.spans(record_bytes))

    def spans(self, record_bytes: int) -> list[tuple[int, int, int]]:
        """Return (offset in the record, offset in the file's share, bytes), ascending."""
        if self.n_stripes == 1:
            return [(0, 0, record_bytes)]
        unit = self.unit_bytes
        starts = range(self.number * unit, record_bytes, self.n_stripes * unit)
        return [
            (start, turn * unit, min(unit, record_bytes - start))
            for turn, start in enumerate(starts)
        ]


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What the first 4096 bytes of a pack file say; every other size follows from it."""

    pack_id: bytes  # 16: the same in all files of one pack
    fingerprint: bytes  # 16: of the model that was packed
    layer: int
    n_experts: int
    stripe: Stripe
    layout: ExpertLayout

    @property
    def share_bytes(self) -> int:
        """Bytes of each record in this file."""
        return self.stripe.share_bytes(self.layout.image.slot_bytes)

    @property
    def n_parts(self) -> int:
        """Hashes of a record in this file."""
        return -(-self.share_bytes // PART_BYTES)

    @property
    def index_offset(self) -> int:
        """Where the index begins."""
        return HEADER_BYTES + self.n_experts * self.share_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index: a checksum and the parts' hashes of each record."""
        return self.n_experts * (1 + self.n_parts) * 8

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.index_offset + self.index_bytes

    def record_offset(self, expert: int) -> int:
        """Where an expert's record begins in this file."""
        return HEADER_BYTES + expert * self.share_bytes

    def part_span(self, expert: int, part: int) -> tuple[int, int]:
        """Return (file offset, bytes) of one hashed part of a record."""
        start = part * PART_BYTES
        return self.record_offset(expert) + start, min(PART_BYTES, self.share_bytes - start)

    def encode(self, index: bytes) -> bytes:
        """Return the header's 4096 bytes for a file with this index."""
        stripe, image = self.stripe, self.layout.image
        page = bytearray(HEADER_BYTES)
        _FIELDS.pack_into(
            page, 0,
            MAGIC, VERSION, HEADER_BYTES, self.pack_id, self.fingerprint,
            self.layer, self.n_experts, stripe.number, stripe.n_stripes,
            stripe.unit_bytes, image.slot_bytes, self.share_bytes, HEADER_BYTES,
            self.index_offset, self.index_bytes, PART_BYTES, xxhash.xxh3_64_intdigest(index),
        )  # fmt: skip
        for number, piece in enumerate(self.layout.pieces):
            rows, columns = piece.shape if image.piece_bytes[number] else (0, 0)
            _PIECE.pack_into(
                page, _PIECES_AT + number * _PIECE.size,
                piece.dtype.encode("ascii"), image.piece_offsets[number],
                image.piece_bytes[number], rows, columns,
            )  # fmt: skip
        page[_HASH_AT:] = xxhash.xxh3_64_intdigest(bytes(page[:_HASH_AT])).to_bytes(8, "little")
        return bytes(page)


def encode_index(checksums: Hashes, parts: Hashes) -> bytes:
    """Return an index of slot checksums [n_experts] and part hashes [n_experts, n_parts]."""
    return np.concatenate([checksums[:, None], parts], axis=1).astype("<u8").tobytes()


def decode_index(header: PackHeader, data: bytes) -> tuple[Hashes, Hashes]:
    """Return (checksums [n_experts], part hashes [n_experts, n_parts]) of a checked index."""
    table = np.frombuffer(data, "<u8").reshape(header.n_experts, 1 + header.n_parts)
    return table[:, 0].copy(), table[:, 1:].copy()


def check_index(path: Path, page: bytes, data: bytes) -> None:
    """Raise ShardError where the index is not the one that the header was written with."""
    wanted = _FIELDS.unpack_from(page)[-1]
    found = xxhash.xxh3_64_intdigest(data)
    if found != wanted:
        raise ShardError(f"{path}: its index has hash {found:016x}, wanted {wanted:016x}")


def root_hash(page: bytes, index: bytes) -> str:
    """Return 32 hex digits that stand for every byte of a pack file: of its header and index."""
    return xxhash.xxh3_128_hexdigest(page + index)


def hash_bytes(data: bytes) -> int:
    """Return the xxh3_64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def digest_bytes(data: bytes) -> bytes:
    """Return the xxh3_128 of some bytes, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def part_hashes(data: NDArray[np.uint8]) -> Hashes:
    """Return the hash of each 1 MiB of contiguous bytes, the last part shorter."""
    view = data.data
    return np.array(
        [
            xxhash.xxh3_64_intdigest(view[start : start + PART_BYTES])
            for start in range(0, len(view), PART_BYTES)
        ],
        np.uint64,
    )


def share_hashes(record: NDArray[np.uint8], stripe: Stripe) -> Hashes:
    """Return the part hashes of what one file holds of a record, u8 [slot_bytes]."""
    if stripe.n_stripes == 1:
        return part_hashes(record)
    n_parts = -(-stripe.share_bytes(len(record)) // PART_BYTES)
    states = [xxhash.xxh3_64() for _ in range(n_parts)]
    for start, at, n_bytes in stripe.spans(len(record)):
        end = at + n_bytes
        while at < end:
            stop = min(end, (at // PART_BYTES + 1) * PART_BYTES)
            states[at // PART_BYTES].update(record[start : start + stop - at].data)
            start, at = start + stop - at, stop
    return np.array([state.intdigest() for state in states], np.uint64)


def slot_checksum(image: SlotImage, slot: NDArray[np.uint8]) -> int:
    """Return the checksum of a slot as the arena keeps it: its pieces, without padding."""
    state = xxhash.xxh3_64()
    for offset, n_bytes in zip(image.piece_offsets, image.piece_bytes, strict=True):
        if n_bytes:
            state.update(slot[offset : offset + n_bytes].data)
    return state.intdigest()


def decode_header(path: Path, page: bytes, file_bytes: int) -> PackHeader:
    """Return what a file's first page says; raises ShardError naming what is wrong."""
    if len(page) < HEADER_BYTES or page[: len(MAGIC)] != MAGIC:
        raise ShardError(f"{path}: is no expert pack file, or was never finished")
    found = xxhash.xxh3_64_intdigest(page[:_HASH_AT])
    wanted = int.from_bytes(page[_HASH_AT:HEADER_BYTES], "little")
    if found != wanted:
        raise ShardError(f"{path}: its header has hash {found:016x}, wanted {wanted:016x}")
    (
        _, version, header_bytes, pack_id, fingerprint, layer, n_experts, number, n_stripes,
        unit, record_bytes, share_bytes, records_at, index_at, index_bytes, part_bytes, _,
    ) = _FIELDS.unpack_from(page)  # fmt: skip
    if version != VERSION:
        raise ShardError(f"{path}: has pack version {version}, this program reads {VERSION}")
    _check_bounds(path, layer, n_experts, number, n_stripes, unit, record_bytes)
    header = PackHeader(
        pack_id, fingerprint, layer, n_experts, Stripe(number, n_stripes, unit),
        _decode_layout(path, page, record_bytes),
    )  # fmt: skip
    says = (header_bytes, share_bytes, records_at, index_at, index_bytes, part_bytes)
    follows = (
        HEADER_BYTES, header.share_bytes, HEADER_BYTES, header.index_offset, header.index_bytes,
        PART_BYTES,
    )  # fmt: skip
    if says != follows:
        raise ShardError(f"{path}: its header says sizes {says}, wanted {follows}")
    if file_bytes != header.file_bytes:
        raise ShardError(f"{path}: has {file_bytes} bytes, its header wants {header.file_bytes}")
    return header


def _check_bounds(
    path: Path, layer: int, n_experts: int, number: int, n_stripes: int, unit: int, record: int
) -> None:
    if not (layer < LAYERS_MAX and 1 <= n_experts <= EXPERTS_MAX):
        raise ShardError(f"{path}: says layer {layer} of {n_experts} experts")
    if not (1 <= n_stripes <= STRIPES_MAX and number < n_stripes):
        raise ShardError(f"{path}: says stripe {number} of {n_stripes}")
    if unit < ALIGN or unit % ALIGN or unit > RECORD_BYTES_MAX:
        raise ShardError(f"{path}: says stripes in units of {unit} bytes")
    if not 0 < record <= RECORD_BYTES_MAX or record // unit > 1 << 20:
        raise ShardError(f"{path}: says records of {record} bytes")


def _decode_layout(path: Path, page: bytes, record_bytes: int) -> ExpertLayout:
    pieces: list[ExpectedTensor] = []
    places: list[tuple[int, int]] = []
    for number, name in enumerate(PIECES):
        raw, offset, n_bytes, rows, columns = _PIECE.unpack_from(
            page, _PIECES_AT + number * _PIECE.size
        )
        shape = (rows, columns) if n_bytes else (0,)
        dtype = raw.rstrip(b"\0").decode("ascii", "replace")
        try:
            size = piece_bytes(dtype, shape)
        except (KeyError, ValueError):
            size = -1
        if size != n_bytes:
            raise ShardError(
                f"{path}: says that {name} is {dtype!r} {list(shape)} of {n_bytes} bytes"
            )
        pieces.append(ExpectedTensor(dtype, shape, "expert"))
        places.append((offset, n_bytes))
    layout = ExpertLayout.of_pieces(pieces)
    image = layout.image
    follows = list(zip(image.piece_offsets, image.piece_bytes, strict=True))
    if places != follows or image.slot_bytes != record_bytes:
        raise ShardError(
            f"{path}: says pieces at {places} in records of {record_bytes} bytes, "
            f"wanted {follows} in {image.slot_bytes}"
        )
    return layout
