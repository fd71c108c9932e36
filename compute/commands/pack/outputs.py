"""What pack writes: plain files of segments, and layers of records. Each runs unit by unit.

Invariants: a unit's bytes depend on the source alone, so that whatever was written before a kill is
what would be written now. A unit that the journal names is read back and compared before it counts.
`run` may be called by many threads at once, each unit once; `finish` comes after all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from protocol.files.pack_format import (
    HEADER_BYTES,
    PART_BYTES,
    Hashes,
    PackHeader,
    encode_index,
    part_hashes,
    root_hash,
    share_hashes,
    slot_checksum,
)
from protocol.files.pack_manifest import PackFile, tree_hash
from protocol.files.safetensors_header import Shard

from .journal import Journal
from .part_file import Bytes, PartFile
from .scale_bytes import Scales
from .source_files import Scratch, SourceReader

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that pack will write."""

    name: str
    place: str
    kind: str
    n_bytes: int
    layer: int = -1

    def written(self, digest: str) -> PackFile:
        """Return the file as the manifest has it."""
        return PackFile(self.name, self.place, self.kind, self.n_bytes, digest, self.layer)


@dataclass(frozen=True, slots=True)
class Site:
    """Where outputs are written and what they are made from."""

    directory: Callable[[str], Path]  # of a place
    notes: Path  # the directory of the journals
    reader: SourceReader


class Output(Protocol):
    """Files that are written together, unit by unit."""

    @property
    def name(self) -> str:
        """A name of its own, fit for a file."""
        ...

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """What will be there in the end."""
        ...

    @property
    def n_units(self) -> int:
        """How many calls of `run` it takes."""
        ...

    @property
    def frame_bytes(self) -> int:
        """Bytes that `finish` writes around the units."""
        ...

    def open(self, site: Site) -> None:
        """Create or take up the part files."""
        ...

    def run(self, unit: int, scratch: Scratch) -> tuple[int, bool]:
        """Have one unit written; return its bytes and whether they were there already."""
        ...

    def finish(self) -> list[PackFile]:
        """Write what stands around the units, and give the files their names."""
        ...

    def note_finished(self) -> None:
        """Drop the journal: the manifest's rows are on the drive."""
        ...

    def close(self) -> None:
        """Let go of everything; what was written stays for next time."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """`n_bytes` of a plain file: literal bytes, or a range of a shard."""

    n_bytes: int
    data: bytes = b""
    shard: Shard | None = None
    offset: int = 0
    scales: Scales | None = None


class _Written:
    """Part files and journal of one output while it is being written."""

    def __init__(self, name: str, files: Sequence[PlannedFile], site: Site) -> None:
        self.site = site
        self.parts = [
            PartFile(site.directory(file.place) / file.name, file.n_bytes) for file in files
        ]
        self.journal = Journal(site.notes / f"{name}.journal")

    def publish(self) -> None:
        for part in self.parts:
            part.sync()
        for part in self.parts:
            part.publish()

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.journal.close()


class PlainOutput:
    """One file of segments, in units of 16 MiB."""

    def __init__(self, file: PlannedFile, segments: Sequence[Segment]) -> None:
        self.name = file.name
        self.files: tuple[PlannedFile, ...] = (file,)
        self.n_units = -(-file.n_bytes // CHUNK_BYTES)
        self.frame_bytes = 0
        self._segments = tuple(segments)
        ends = np.cumsum([0, *(segment.n_bytes for segment in segments)], dtype=np.int64)
        self._starts: list[int] = ends[:-1].tolist()
        assert int(ends[-1]) == file.n_bytes
        self._written: _Written | None = None

    def open(self, site: Site) -> None:
        """Create or take up the part file."""
        self._written = _Written(self.name, self.files, site)

    def run(self, unit: int, scratch: Scratch) -> tuple[int, bool]:
        """Have one chunk written; return its bytes and whether they were there already."""
        written = self._open_file
        start = unit * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self.files[0].n_bytes)
        chunk = scratch.target[: stop - start]
        known = written.journal.get(unit)
        if (
            known is not None
            and written.parts[0].read([chunk], start)
            and np.array_equal(part_hashes(chunk), known)
        ):
            return stop - start, True
        self.fill(start, chunk, scratch)
        hashes = part_hashes(chunk)
        body = len(chunk) // HEADER_BYTES * HEADER_BYTES  # so that most of it goes O_DIRECT
        written.parts[0].write([chunk[:body]], start)
        written.parts[0].write([chunk[body:]], start + body)
        written.journal.add(unit, hashes)
        return stop - start, False

    def fill(self, start: int, chunk: Bytes, scratch: Scratch) -> None:
        """Fill `chunk` with what the file has from `start` on."""
        reader, stop = self._open_file.site.reader, start + len(chunk)
        fragments = []
        scaled: list[tuple[Scales, int, Bytes]] = []
        for number in range(bisect_right(self._starts, start) - 1, len(self._segments)):
            segment, first = self._segments[number], self._starts[number]
            if first >= stop:
                break
            a, b = max(start, first), min(stop, first + segment.n_bytes)
            if a >= b:
                continue
            if segment.shard is None:
                chunk[a - start : b - start] = np.frombuffer(
                    segment.data[a - first : b - first], np.uint8
                )
            else:
                offset = segment.offset + a - first
                fragments.append(reader.fragment(segment.shard, offset, b - a, a - start))
                if segment.scales is not None:
                    scaled.append((segment.scales, a - first, chunk[a - start : b - start]))
        reader.read(fragments, chunk, scratch.bounce)
        for scales, first, part in scaled:
            scales.check(part, first)

    def finish(self) -> list[PackFile]:
        """Give the file its name; its hash is over the journal's."""
        written = self._open_file
        hashes = [_known(written.journal, unit) for unit in range(self.n_units)]
        written.publish()
        digest = tree_hash(np.concatenate(hashes) if hashes else np.zeros(0, np.uint64))
        return [self.files[0].written(digest)]

    def note_finished(self) -> None:
        """Drop the journal."""
        self._open_file.journal.remove()
        self._written = None

    def close(self) -> None:
        """Let go of the part file."""
        if self._written is not None:
            self._written.close()
            self._written = None

    @property
    def _open_file(self) -> _Written:
        assert self._written is not None
        return self._written


assert CHUNK_BYTES % PART_BYTES == 0

FillRecord = Callable[[int, int, Scratch], None]


class LayerOutput:
    """One layer's records: in one file, or in a stripe a drive, and in the mirror.

    fill(layer, expert, scratch) leaves the record in scratch.target, padding included.
    """

    def __init__(
        self, headers: Sequence[PackHeader], places: Sequence[str], fill: FillRecord
    ) -> None:
        first = headers[0]
        self.layer = first.layer
        self.name = f"experts-{first.layer:05d}"
        self.files = tuple(
            PlannedFile(record_file_name(header), place, "experts", header.file_bytes, header.layer)
            for header, place in zip(headers, places, strict=True)
        )
        self.n_units = first.n_experts
        self.frame_bytes = sum(HEADER_BYTES + header.index_bytes for header in headers)
        self._headers = tuple(headers)
        self._image = first.layout.image
        n_stripes = first.stripe.n_stripes
        n_files = len(headers)
        # The files that hold a record between them: the stripes, then each mirror.
        self._copies = (slice(n_stripes), *(slice(n, n + 1) for n in range(n_stripes, n_files)))
        self._fill = fill
        self._written: _Written | None = None

    def open(self, site: Site) -> None:
        """Create or take up the part files."""
        self._written = _Written(self.name, self.files, site)

    def run(self, unit: int, scratch: Scratch) -> tuple[int, bool]:
        """Have one record written everywhere; return its bytes and whether they were there."""
        written = self._open_files
        n_bytes = sum(header.share_bytes for header in self._headers)
        known = written.journal.get(unit)
        if known is not None and self._is_there(unit, scratch, known):
            return n_bytes, True
        self._fill(self.layer, unit, scratch)
        record = scratch.target[: self._image.slot_bytes]
        hashes = self._hashes(record)
        for header, part in zip(self._headers, written.parts, strict=True):
            part.write(_views(record, header), header.record_offset(unit))
        written.journal.add(unit, hashes)
        return n_bytes, False

    def finish(self) -> list[PackFile]:
        """Write indices, then headers, and give the files their names."""
        written = self._open_files
        table = np.stack([_known(written.journal, unit) for unit in range(self.n_units)])
        rows = []
        at = 1
        for number, header in enumerate(self._headers):
            index = encode_index(table[:, 0], table[:, at : at + header.n_parts])
            at += header.n_parts
            page = header.encode(index)
            part = written.parts[number]
            part.write([np.frombuffer(index, np.uint8)], header.index_offset)
            part.sync()
            part.write([np.frombuffer(page, np.uint8)], 0)
            rows.append(self.files[number].written(root_hash(page, index)))
        written.publish()
        return rows

    def note_finished(self) -> None:
        """Drop the journal."""
        self._open_files.journal.remove()
        self._written = None

    def close(self) -> None:
        """Let go of the part files."""
        if self._written is not None:
            self._written.close()
            self._written = None

    def _hashes(self, record: Bytes) -> Hashes:
        """Slot checksum, then the part hashes of each file's share."""
        checksum = np.array([slot_checksum(self._image, record)], np.uint64)
        shares: dict[tuple[int, int], Hashes] = {}
        for header in self._headers:
            key = (header.stripe.number, header.stripe.n_stripes)
            shares.setdefault(key, share_hashes(record, header.stripe))
        return np.concatenate(
            [checksum]
            + [shares[header.stripe.number, header.stripe.n_stripes] for header in self._headers]
        )

    def _is_there(self, unit: int, scratch: Scratch, known: Hashes) -> bool:
        """Whether every file holds the record that the journal speaks of."""
        record = scratch.target[: self._image.slot_bytes]
        return all(
            self._read_copy(unit, record, copy) and np.array_equal(self._hashes(record), known)
            for copy in self._copies
        )

    def _read_copy(self, unit: int, record: Bytes, copy: slice) -> bool:
        """Read a record back from the files of one copy of it."""
        files = zip(self._headers[copy], self._open_files.parts[copy], strict=True)
        return all(
            part.read(_views(record, header), header.record_offset(unit)) for header, part in files
        )

    @property
    def _open_files(self) -> _Written:
        assert self._written is not None
        return self._written


def record_file_name(header: PackHeader) -> str:
    """Return a record file's name: by its layer, and by its stripe where there are several."""
    stripe = header.stripe
    more = f"-stripe-{stripe.number + 1}-of-{stripe.n_stripes}" if stripe.n_stripes > 1 else ""
    return f"experts-{header.layer:05d}{more}.pack"


def _views(record: Bytes, header: PackHeader) -> list[Bytes]:
    spans = header.stripe.spans(len(record))
    return [record[start : start + n_bytes] for start, _, n_bytes in spans]


def _known(journal: Journal, unit: int) -> Hashes:
    hashes = journal.get(unit)
    assert hashes is not None
    return hashes
