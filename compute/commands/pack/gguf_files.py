"""Plain files of a pack that is made from a GGUF: a GGUF without experts, tables of their own.

The dense file has the source's metadata byte for byte, but for the keys of a split set: config,
tokenizer and token map stay as they are, and every tensor keeps its type. Order is the source's.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint, GgufPart
from protocol.files.gguf_cursor import Cursor
from protocol.files.gguf_header import (
    ALIGNMENT_DEFAULT,
    ALIGNMENT_KEY,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    MAGIC,
    GgufTensor,
    read_gguf_header,
)
from protocol.files.gguf_names import official_name
from protocol.files.gguf_values import read_value
from protocol.files.pack_manifest import HOME
from protocol.files.tensor_table import is_engram_table, is_expert

from .outputs import PlainOutput, PlannedFile, Segment
from .scale_bytes import Scales

DENSE_NAME = "dense-00001-of-00001.gguf"
SPLIT_PREFIX = "split."
VERSION = 3


def gguf_dense_output(part: GgufPart) -> PlainOutput:
    """Every tensor but experts and Engram tables, with the source's metadata."""
    path = part.index.shards[0].path
    tensors = [
        tensor
        for tensor in part.index.tensors.values()
        if not is_expert(_name(tensor)) and not is_engram_table(_name(tensor))
    ]
    alignment = read_gguf_header(path).alignment
    return _gguf_output("dense", DENSE_NAME, _metadata(path), tensors, alignment)


def gguf_engram_outputs(checkpoint: Checkpoint) -> list[PlainOutput]:
    """Each Engram table as it is, in a GGUF of its own."""
    assert checkpoint.gguf is not None
    tables = {
        _name(tensor): tensor
        for tensor in checkpoint.gguf.index.tensors.values()
        if is_engram_table(_name(tensor))
    }
    return [
        _gguf_output(
            "engram",
            f"engram-{table.index + 1:05d}-of-{len(tables):05d}.gguf",
            [],
            [tables[f"layers.{table.layer}.engram.embed.weight"]],
            ALIGNMENT_DEFAULT,
        )
        for table in checkpoint.engram_tables
    ]


def _gguf_output(
    kind: str, name: str, metadata: Sequence[bytes], tensors: Sequence[GgufTensor], alignment: int
) -> PlainOutput:
    head = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata)), *metadata]
    segments: list[Segment] = []
    end = 0
    for tensor in tensors:
        text = tensor.name.encode()
        head.append(struct.pack("<Q", len(text)) + text)
        head.append(struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims))
        head.append(struct.pack("<IQ", tensor.block.type_id, end))
        padding = -tensor.n_bytes % alignment
        scales = Scales.of(_name(tensor), tensor.block.name, tensor.dims[:1])
        segments.append(
            Segment(tensor.n_bytes, shard=tensor.shard, offset=tensor.offset, scales=scales)
        )
        segments.append(Segment(padding, bytes(padding)))
        end += tensor.n_bytes + padding
    header = b"".join(head)
    header += bytes(-len(header) % alignment)
    n_bytes = len(header) + end
    return PlainOutput(
        PlannedFile(name, HOME, kind, n_bytes), [Segment(len(header), header), *segments]
    )


def _metadata(path: Path) -> list[bytes]:
    """Each key with its value as the first file has them, those of a split set left out."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        n_file = os.fstat(descriptor).st_size
        return list(_pairs(descriptor, Cursor(descriptor, path, min(n_file, HEADER_BYTES_MAX))))
    finally:
        os.close(descriptor)


def _pairs(descriptor: int, cursor: Cursor) -> Iterable[bytes]:
    cursor.skip(len(MAGIC) + 4 + 8, "the head")
    for _ in range(cursor.u64("the number of metadata keys")):
        start = cursor.offset
        key = cursor.counted("a metadata key", KEY_BYTES_MAX).decode()
        read_value(cursor, key)
        if key.startswith(SPLIT_PREFIX):
            continue
        n_bytes = cursor.offset - start
        pair = os.pread(descriptor, n_bytes, start)
        if len(pair) != n_bytes:
            raise ShardError(f"{cursor.path}: ends at byte {start + len(pair)}, inside its header")
        yield pair


def _name(tensor: GgufTensor) -> str:
    return official_name(tensor.name) or tensor.name


assert ALIGNMENT_KEY.startswith("general.")  # it is kept: the offsets depend on it
