"""The source's bytes, read as the daemon reads them, and what says that a source has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint
from protocol.files.pack_format import HEADER_BYTES, hash_bytes
from protocol.files.pack_manifest import SourceFile
from protocol.files.pack_plain import header_hash
from protocol.files.safetensors_header import Shard

if TYPE_CHECKING:
    from expert_daemon.read_plan import Fragment
    from expert_daemon.source import Bytes

MAX_ALIGNMENT = 1 << 16
HEADER_SUFFIXES = (".safetensors", ".gguf")
SHARD_SUFFIXES = (".safetensors", ".gguf", ".pack")
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
COPIED_BYTES_MAX = 64 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "engram_token_map.json")
NOT_COPIED = ("model.safetensors.index.json", "pack.json")


@dataclass(frozen=True, slots=True)
class Scratch:
    """One thread's page-aligned buffers, u8."""

    target: Bytes  # a slot of the pack, or a chunk of a plain file
    source: Bytes  # a slot of the source, where records are converted
    bounce: Bytes

    @classmethod
    def of(cls, target_bytes: int, source_bytes: int) -> Scratch:
        """Make buffers of at least these sizes."""
        from expert_daemon.direct_io import aligned_buffer
        from expert_daemon.range_reader import MAX_WINDOW_BYTES

        return cls(
            aligned_buffer(max(1, target_bytes)),
            aligned_buffer(max(1, source_bytes)),
            aligned_buffer(MAX_WINDOW_BYTES + 2 * MAX_ALIGNMENT),
        )


class SourceReader:
    """Ranges of the source's shards; usable by many threads, each with a bounce buffer of its own.

    Raises ShardError naming file and range where they cannot be read.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        from expert_daemon.range_reader import RangeReader
        from expert_daemon.source import FileSource

        self._shards = tuple(shards)
        self._numbers = {shard: number for number, shard in enumerate(self._shards)}
        self._files = FileSource(self._shards, direct=True)
        self._ranges = RangeReader(self._files)

    def fragment(self, shard: Shard, offset: int, n_bytes: int, at: int) -> Fragment:
        """Return the range of a shard that belongs at byte `at` of a buffer."""
        from expert_daemon.read_plan import Fragment

        return Fragment(self._numbers[shard], offset, n_bytes, at)

    def read(self, fragments: Iterable[Fragment], buffer: Bytes, bounce: Bytes) -> None:
        """Read every fragment to its place in `buffer`."""
        from expert_daemon.range_reader import ReadFailure
        from expert_daemon.read_plan import plan_parts

        address = int(buffer.__array_interface__["data"][0])
        try:
            for part in plan_parts(fragments):
                self._ranges.read_part(part, buffer, address, bounce)
        except ReadFailure as failure:
            raise ShardError(failure.text) from None

    def close(self) -> None:
        """Close every descriptor."""
        self._files.close()


def stamps(checkpoint: Checkpoint, copied: Iterable[Path]) -> tuple[SourceFile, ...]:
    """Return size, time and header of each shard, and of each file that is copied whole."""
    shards = {shard.path.name: shard.path for shard in checkpoint.shards}
    files = {path.name: path for path in copied} | shards
    return tuple(_stamp(files[name]) for name in sorted(files))


def copied_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the config, the tokenizer and what else of small text stands beside the shards.

    Beside a GGUF, which may lie among anything, the tokenizer's files alone.
    """
    return sorted(
        path
        for path in checkpoint.directory.iterdir()
        if (path.name in TOKENIZER_FILES or checkpoint.gguf is None)
        and path.suffix in COPIED_SUFFIXES
        and path.name not in NOT_COPIED
        and not path.name.startswith(".")
        and path.is_file()
        and path.stat().st_size <= COPIED_BYTES_MAX
    )


def changed(before: Iterable[SourceFile], now: Iterable[SourceFile]) -> str:
    """Return which file differs and in what, "" where none does."""
    old, new = ({file.name: file for file in files} for files in (before, now))
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            return f"{name} {'is new' if a is None else 'is gone'}"
        if a.n_bytes != b.n_bytes:
            return f"{name} had {a.n_bytes} bytes and has {b.n_bytes}"
        if a.header != b.header:
            return (
                f"{name} has another header" if _is_shard(name) else f"{name} has another content"
            )
        if a.mtime_ns != b.mtime_ns:
            return f"{name} was written to (its modification time differs)"
    return ""


def _stamp(path: Path) -> SourceFile:
    try:
        status = path.stat()
        digest = _digest(path)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from None
    return SourceFile(path.name, status.st_size, max(0, status.st_mtime_ns), digest)


def _digest(path: Path) -> str:
    """Hash of a shard's header, or of the whole of any other file."""
    if path.suffix in HEADER_SUFFIXES:
        return header_hash(path)
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES if _is_shard(path.name) else -1)
    return f"{hash_bytes(data):016x}"


def _is_shard(name: str) -> bool:
    return name.endswith(SHARD_SUFFIXES)
