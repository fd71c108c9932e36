"""Plain files of a pack: dense tensors as `dense-*.safetensors`, Engram tables, small copies.

Every tensor that is neither a routed expert nor an Engram table goes into a dense file, the ones
that a text engine skips too: the pack is the whole model. Files follow the source's order; inside
one the wide dtypes come first, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from protocol.files.checkpoint import Checkpoint
from protocol.files.pack_manifest import HOME
from protocol.files.safetensors_header import DTYPE_BITS, LENGTH_BYTES, TensorEntry
from protocol.files.slice_map import EngramTable
from protocol.files.tensor_table import engram_rows_name, is_engram_table

from .outputs import PlainOutput, PlannedFile, Segment
from .part_file import Bytes
from .scale_bytes import Scales
from .source_files import Scratch

DENSE_FILE_BYTES = 4 << 30


def copied_output(path: Path) -> PlainOutput:
    """A small file as it is."""
    data = path.read_bytes()
    file = PlannedFile(path.name, HOME, "copied", len(data))
    return PlainOutput(file, [Segment(len(data), data)])


def dense_outputs(entries: Iterable[TensorEntry]) -> list[PlainOutput]:
    """All dense tensors, in files of at most 4 GiB or of one tensor."""
    groups: list[list[TensorEntry]] = []
    n_bytes = 0
    for entry in entries:
        if not groups or n_bytes + entry.n_bytes > DENSE_FILE_BYTES:
            groups.append([])
            n_bytes = 0
        groups[-1].append(entry)
        n_bytes += entry.n_bytes
    return [
        _tensor_output(f"dense-{number:05d}-of-{len(groups):05d}.safetensors", "dense", group)
        for number, group in enumerate(groups, 1)
    ]


def engram_copies(checkpoint: Checkpoint) -> list[PlainOutput]:
    """Each Engram table as it is, in a file of its own."""
    return [
        _tensor_output(
            _engram_name(table),
            "engram",
            [
                entry
                for entry in checkpoint.tensors.values()
                if is_engram_table(entry.name, table.layer)
            ],
        )
        for table in checkpoint.engram_tables
    ]


def engram_rows(checkpoint: Checkpoint) -> list[PlainOutput]:
    """Each Engram table in a file of its own, a row's values and scales together."""
    return [
        _tensor_output(
            _engram_name(table),
            "engram",
            [
                entry
                for entry in checkpoint.tensors.values()
                if is_engram_table(entry.name, table.layer)
            ],
        )
        if table.scale_bytes == 0
        else InterleavedOutput(table)
        for table in checkpoint.engram_tables
    ]


class InterleavedOutput(PlainOutput):
    """A table whose rows are written as values, then scales."""

    def __init__(self, table: EngramTable) -> None:
        n_bytes = table.n_rows * table.row_bytes
        shape = (table.n_rows, table.row_bytes)
        header = safetensors_header([(engram_rows_name(table.layer), "U8", shape, n_bytes)])
        file = PlannedFile(_engram_name(table), HOME, "engram", len(header) + n_bytes)
        super().__init__(file, [Segment(len(header), header), Segment(n_bytes)])
        self._header = np.frombuffer(header, np.uint8)
        self._table = table
        name = f"layers.{table.layer}.engram.embed.scale"
        self._scales = Scales.of(name, "F8_E8M0", (table.n_rows, table.scale_bytes))

    def fill(self, start: int, chunk: Bytes, scratch: Scratch) -> None:
        """Fill `chunk` with what the file has from `start` on."""
        n_header, width = len(self._header), self._table.row_bytes
        head = self._header[start : start + len(chunk)]
        chunk[: len(head)] = head
        first, stop = start + len(head) - n_header, start + len(chunk) - n_header
        if first >= stop:
            return
        row, end = first // width, -(-stop // width)
        rows = self._rows(row, end, scratch.bounce).reshape(-1)
        chunk[len(head) :] = rows[first - row * width : stop - row * width]

    def _rows(self, row: int, end: int, bounce: Bytes) -> Bytes:
        """Rows `row` to `end` as u8 [n, row_bytes]."""
        table, reader = self._table, self._open_file.site.reader
        out = np.empty((end - row, table.row_bytes), np.uint8)
        for place, width, columns in (
            (table.values, table.value_bytes, slice(table.value_bytes)),
            (table.scales, table.scale_bytes, slice(table.value_bytes, None)),
        ):
            part = np.empty((end - row) * width, np.uint8)
            offset = place.offset + row * width
            reader.read([reader.fragment(place.shard, offset, len(part), 0)], part, bounce)
            if place is table.scales and self._scales is not None:
                self._scales.check(part, row * width)
            out[:, columns] = part.reshape(-1, width)
        return out


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return length and header of a file of tensors (name, dtype, shape, bytes) without holes.

    Padded with spaces to a multiple of 8, as the library does.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, n_bytes in tensors:
        assert dtype in DTYPE_BITS
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + n_bytes],
        }
        end += n_bytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % LENGTH_BYTES)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _tensor_output(name: str, kind: str, entries: Sequence[TensorEntry]) -> PlainOutput:
    entries = sorted(entries, key=lambda entry: -DTYPE_BITS[entry.dtype])
    header = safetensors_header(
        (entry.name, entry.dtype, entry.shape, entry.n_bytes) for entry in entries
    )
    segments = [Segment(len(header), header)]
    segments += [
        Segment(
            entry.n_bytes,
            shard=entry.shard,
            offset=entry.offset,
            scales=Scales.of(entry.name, entry.dtype, entry.shape),
        )
        for entry in entries
    ]
    n_bytes = sum(segment.n_bytes for segment in segments)
    return PlainOutput(PlannedFile(name, HOME, kind, n_bytes), segments)


def _engram_name(table: EngramTable) -> str:
    return f"engram-{table.index + 1:05d}.safetensors"
