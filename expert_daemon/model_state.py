"""What the daemon keeps about one model beyond its own life: files in the state directory.

They stand in a folder named by the model's fingerprint, so that another model, or a changed one,
finds nothing. What is only true of the shards as they are carries their stamp, and is void once one
of them was replaced.

Invariants: a file is replaced whole or not at all; one that does not read back as it was written
counts as absent; a daemon that may not save writes nothing, and reads what is there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from protocol.files.safetensors_index import Shard

from .log import log
from .whole_file import remove_leftovers, replace_file

MAGIC = b"HRSTATE\n"
VERSION = 1
# magic, version, kind, fingerprint, stamp, bytes of the content, xxh3_64 of the content
_HEADER = struct.Struct("<8sI12s16sQQQ")


def state_directory(state_dir: Path, fingerprint: bytes) -> Path:
    """Return the folder of one model's files."""
    return state_dir / fingerprint.hex()


def shards_stamp(shards: Sequence[Shard]) -> int:
    """Return a number that differs once a shard was replaced or written to; never 0.

    The fingerprint is that of the layout: two models that differ in their weights alone share it.
    """
    digest = xxhash.xxh3_64()
    for shard in shards:
        found = shard.path.stat()
        digest.update(f"{shard.path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.intdigest() or 1


def pack_state(kind: str, fingerprint: bytes, stamp: int, content: bytes) -> bytes:
    """Return a file's bytes: a header that can be checked, then the content."""
    checksum = xxhash.xxh3_64_intdigest(content)
    name = kind.encode()
    return _HEADER.pack(MAGIC, VERSION, name, fingerprint, stamp, len(content), checksum) + content


def unpack_state(kind: str, fingerprint: bytes, raw: bytes) -> tuple[int, bytes]:
    """Return a file's (stamp, content); raises ValueError saying what is wrong with it."""
    if len(raw) < _HEADER.size:
        raise ValueError(f"{len(raw)} bytes, wanted {_HEADER.size} at least")
    magic, version, found, model, stamp, n_bytes, checksum = _HEADER.unpack_from(raw)
    content = raw[_HEADER.size :]
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"begins with {magic!r}, version {version}")
    if found.rstrip(b"\0") != kind.encode() or model != fingerprint:
        raise ValueError(f"is {found!r} of model {model.hex()}, wanted {kind}, {fingerprint.hex()}")
    if n_bytes != len(content) or checksum != xxhash.xxh3_64_intdigest(content):
        raise ValueError(f"{len(content)} bytes do not agree with its header")
    return stamp, content


class ModelState:
    """The files of one model. `read` and `write` may be called from any one thread at a time."""

    def __init__(
        self, state_dir: Path, fingerprint: bytes, stamp: int, *, save: bool = True
    ) -> None:
        """`stamp` is that of the shards now, see `shards_stamp`."""
        self.directory = state_directory(state_dir, fingerprint)
        self.may_save = save
        self.stamp = stamp
        self._fingerprint = fingerprint
        self._has_failed = False
        if save:
            remove_leftovers(self.directory)

    def read(self, name: str, *, stamped: bool = True) -> bytes | None:
        """Return a file's content, None where there is none; a damaged or void one is logged.

        stamped  void once a shard has changed
        """
        path = self.directory / name
        try:
            stamp, content = unpack_state(name, self._fingerprint, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log(f"{path}: not used: {error}")
            return None
        if stamped and stamp != self.stamp:
            log(f"{path}: not used: the shards have changed since")
            return None
        return content

    def write(self, name: str, content: bytes) -> bool:
        """Replace a file; False where that is not wanted or fails, which is logged once."""
        if not self.may_save:
            return False
        try:
            packed = pack_state(name, self._fingerprint, self.stamp, content)
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.directory / name, packed)
        except OSError as error:
            if not self._has_failed:
                log(f"{self.directory / name}: not saved: {error.strerror}")
            self._has_failed = True
            return False
        self._has_failed = False
        return True
