"""Hashes of files that carry none of their own, kept in the state directory from one verify to the
next: `hashes/<fingerprint>-<directory>/<file>.xxh3`.

A file holds 8 bytes of magic, the size of the hashed file, the xxh3_64 of each of its 1 MiB parts,
and the xxh3_64 of all that; numbers are u64, little endian. A damaged file counts as none.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.pack_format import PART_BYTES, hash_bytes

MAGIC = b"HRDHASH\n"

Hashes = NDArray[np.uint64]


class KeptHashes:
    """The kept hashes of one model directory."""

    def __init__(self, state_dir: Path, fingerprint: bytes, directory: Path) -> None:
        place = f"{hash_bytes(os.fsencode(directory.resolve())):016x}"
        self.directory = state_dir / "hashes" / f"{fingerprint.hex()}-{place}"

    def load(self, name: str, n_bytes: int) -> Hashes | None:
        """Return the hashes of a file's parts, None where none of its size are kept."""
        try:
            data = self._path(name).read_bytes()
        except OSError:
            return None
        body = data[:-8]
        is_whole = (
            body.startswith(MAGIC)
            and len(body) == len(MAGIC) + 8 * (1 + -(-n_bytes // PART_BYTES))
            and hash_bytes(body) == int.from_bytes(data[-8:], "little")
        )
        if not is_whole:
            return None
        numbers = np.frombuffer(body, "<u8", offset=len(MAGIC)).astype(np.uint64)
        return numbers[1:] if int(numbers[0]) == n_bytes else None

    def save(self, name: str, n_bytes: int, hashes: Hashes) -> None:
        """Keep the hashes of a file's parts; raises ConfigError where that cannot be written."""
        body = MAGIC + n_bytes.to_bytes(8, "little") + hashes.astype("<u8").tobytes()
        path = self._path(name)
        temporary = path.with_name(path.name + ".new")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(body + hash_bytes(body).to_bytes(8, "little"))
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.xxh3"
