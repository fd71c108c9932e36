"""What `headrace verify` holds each file of a directory to: a pack's own hashes, or kept ones."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint
from protocol.files.pack_directory import read_record_file
from protocol.files.pack_manifest import Manifest, PackFile, SourceFile, tree_hash
from protocol.files.pack_plain import header_hash
from protocol.files.safetensors_header import Shard, TensorEntry
from protocol.files.slice_map import PIECES
from protocol.files.tensor_table import expert_key, expert_piece_names, is_stack, tensor_label

from .file_checks import CheckedFile, Fault, whole_file
from .kept_hashes import KeptHashes

Hashes = NDArray[np.uint64]


class KeptCheck:
    """Files without hashes of their own: compared with kept ones, or only read."""

    def __init__(self, kept: KeptHashes, *, record: bool) -> None:
        self._kept = kept
        self._record = record
        self.uncompared: list[Shard] = []
        self.n_recorded = 0

    def file(
        self,
        shard: Shard,
        entries: Sequence[TensorEntry] = (),
        packed: SourceFile | None = None,
    ) -> CheckedFile:
        """Return the check of one file; `entries` say what is in a bad place.

        `packed` is a linked file as it was when it was packed. Without hashes to hold it to, one
        that was written to since counts as bad, unless its hashes are to be recorded as they are.
        """
        wanted = self._kept.load(shard.name, shard.n_bytes)
        inside = sorted(entries, key=lambda entry: entry.offset)

        def judge(file: CheckedFile) -> list[Fault]:
            faults = [_named(fault, inside) for fault in file.unread_faults()]
            if wanted is None:
                self.uncompared.append(shard)
                if packed is not None and not self._record:
                    faults += _written_since(shard, packed)
                if self._record and not faults:
                    self._kept.save(shard.name, shard.n_bytes, file.found)
                    self.n_recorded += 1
                return faults
            unread = {part for part, _ in file.unread}
            for part in np.flatnonzero(file.found != wanted).tolist():
                if part not in unread:
                    text = _differs(int(file.found[part]), int(wanted[part]))
                    _, offset, n_bytes = file.part_span(part)
                    faults.append(_named(Fault(shard.path, text, offset, n_bytes), inside))
            return faults

        return CheckedFile(shard, whole_file(shard), judge)

    @property
    def n_uncompared_bytes(self) -> int:
        """Bytes that were read and held to nothing."""
        return sum(shard.n_bytes for shard in self.uncompared)


def shard_checks(checkpoint: Checkpoint, kept: KeptCheck) -> list[CheckedFile]:
    """Every shard of a checkpoint whose files carry no hashes."""
    entries: dict[Shard, list[TensorEntry]] = defaultdict(list)
    for entry in checkpoint.tensors.values():
        if not is_stack(entry.name):
            entries[entry.shard].append(entry)
    if checkpoint.kind == "gguf":  # each expert by itself, so that a fault names it
        for entry in _stacked_experts(checkpoint):
            entries[entry.shard].append(entry)
    return [kept.file(shard, entries[shard]) for shard in checkpoint.shards]


def _stacked_experts(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    config = checkpoint.config
    for layer in range(config.n_layers):
        for expert in range(config.n_experts):
            names = expert_piece_names(layer, expert)
            for part in checkpoint.slice_map.slices(layer, expert):
                name = names[PIECES.index(part.piece)]
                yield TensorEntry(
                    name, part.dtype, part.shape, part.shard, part.offset, part.n_bytes
                )


def pack_checks(
    directory: Path, manifest: Manifest, kept: KeptCheck
) -> tuple[list[CheckedFile], list[Fault]]:
    """Every file of a pack, and the faults that show without reading it whole."""
    checks: list[CheckedFile] = []
    faults: list[Fault] = []
    for file in manifest.files:
        path = manifest.directory(directory, file.place) / file.name
        try:
            if file.kind == "experts":
                checks.append(record_check(path, file, manifest))
            else:
                checks.append(whole_file_check(path, file))
        except ShardError as error:
            faults.append(_of_error(path, error, file))
    for link in manifest.links:
        path = directory / link.name
        try:
            checks.append(kept.file(_linked_shard(path, link), packed=link))
        except ShardError as error:
            faults.append(_of_error(path, error))
    return checks, faults


def record_check(path: Path, wanted_file: PackFile, manifest: Manifest) -> CheckedFile:
    """Return the check of a record file's records; raises ShardError on its header or index."""
    record = read_record_file(path, wanted_file, manifest)
    header, shard = record.header, record.shard
    regions = [
        (header.record_offset(expert), header.share_bytes) for expert in range(header.n_experts)
    ]
    wanted = record.parts.reshape(-1)

    def judge(file: CheckedFile) -> list[Fault]:
        why = dict(file.unread)
        faults = []
        for part in sorted({*np.flatnonzero(file.found != wanted).tolist(), *why}):
            expert, offset, n_bytes = file.part_span(part)
            text = why.get(part) or _differs(int(file.found[part]), int(wanted[part]))
            faults.append(Fault(shard.path, text, offset, n_bytes, header.layer, expert))
        return faults

    return CheckedFile(shard, [region for region in regions if region[1]], judge)


def whole_file_check(path: Path, wanted: PackFile) -> CheckedFile:
    """Return the check of any other file of a pack; raises ShardError on its size."""
    shard = _shard(path, wanted.n_bytes)

    def judge(file: CheckedFile) -> list[Fault]:
        faults = file.unread_faults()
        found = tree_hash(file.found)
        if not faults and found != wanted.hash:
            faults.append(Fault(shard.path, f"its bytes have hash {found}, wanted {wanted.hash}"))
        return faults

    return CheckedFile(shard, whole_file(shard), judge)


def _shard(path: Path, n_bytes: int) -> Shard:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from None
    if found != n_bytes:
        raise ShardError(f"{path}: has {found} bytes, the manifest says {n_bytes}")
    return Shard(path, found)


def _linked_shard(path: Path, link: SourceFile) -> Shard:
    shard = _shard(path, link.n_bytes)
    if header_hash(path) != link.header:
        raise ShardError(f"{path}: its header is no longer the one that was packed")
    return shard


def _written_since(shard: Shard, packed: SourceFile) -> list[Fault]:
    if shard.path.stat().st_mtime_ns == packed.mtime_ns:
        return []
    text = (
        "was written to since it was packed (its modification time differs), and no hashes are "
        "kept of it; --record takes it as it is"
    )
    return [Fault(shard.path, text)]


def _of_error(path: Path, error: ShardError, file: PackFile | None = None) -> Fault:
    text = str(error).removeprefix(f"{path}: ")
    return Fault(path, text, layer=file.layer if file else -1)


def _differs(found: int, wanted: int) -> str:
    return f"hash {found:016x}, wanted {wanted:016x}"


def _named(fault: Fault, entries: Sequence[TensorEntry]) -> Fault:
    """Say which tensors lie in a fault's range; a routed expert's first."""
    stop = fault.offset + fault.n_bytes
    first = bisect_right(entries, fault.offset, key=lambda entry: entry.offset) - 1
    inside = [
        entry
        for entry in entries[max(0, first) :]
        if entry.offset < stop and entry.offset + entry.n_bytes > fault.offset
    ]
    if not inside:
        return fault
    chosen = next((entry for entry in inside if expert_key(entry.name)), inside[0])
    more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
    text = f"{tensor_label(chosen.name)}{more}: {fault.text}"
    return Fault(fault.path, text, fault.offset, fault.n_bytes)
