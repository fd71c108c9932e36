"""2,000 mutated safetensors files and 2,000 mutated pack files: refused by name, or harmless.

Never another error, never a read beyond the file, never more memory than the header needs.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from protocol.errors import ShardError
from protocol.files.model_config import parse_model_config
from protocol.files.pack_directory import read_record_file
from protocol.files.pack_format import HEADER_BYTES, root_hash
from protocol.files.pack_manifest import Manifest, PackFile, read_manifest
from protocol.files.safetensors_index import read_header
from tests.support.fake_checkpoint import (
    fake_config,
    fake_tensors,
    write_fake_checkpoint,
    write_safetensors,
)
from tests.support.packing import pack

N_MUTATED = 2000
EDGES = [0, 1, 7, 8, 255, 4096, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
DIGITS = [b"0", b"9", b"-1", b"1e9", b"18446744073709551616", b"null", b'"', b"[", b"}"]
TEXT = "protocol.files.safetensors_index.os.pread"
PACK = "protocol.files.pack_directory.os.pread"


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[int]]:
    """The ends of all reads."""
    ends: list[int] = []
    real = os.pread

    def pread(descriptor: int, n_bytes: int, offset: int) -> bytes:
        ends.append(offset + n_bytes)
        return real(descriptor, n_bytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(name, pread)
        yield ends


def edited(data: bytearray, places: range, generator: random.Random) -> bytearray:
    for _ in range(generator.randint(1, 3)):
        at = generator.choice(places)
        kind = generator.randrange(6)
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", generator.choice(EDGES))
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", generator.choice(EDGES) & 0xFFFFFFFF)
        elif kind == 3:
            data[at : at + 1] = generator.choice(DIGITS)
        elif kind == 4:
            del data[at : at + generator.randint(1, 40)]
        else:
            data[at:at] = data[max(0, at - 30) : at]
    return data


def refusal(read: Callable[[Path], object], path: Path) -> str | None:
    try:
        read(path)
    except ShardError as error:
        return str(error)
    return None


def n_refused(
    path: Path,
    good: bytes,
    places: range,
    read: Callable[[Path], object],
    mend: Callable[[bytearray], bytearray],
    ends: list[int],
) -> int:
    generator, refused = random.Random(7), 0
    for number in range(N_MUTATED):
        data = edited(bytearray(good), places, generator)
        if number % 2:
            data = mend(data)
        if generator.random() < 0.1:
            del data[generator.randrange(len(data)) :]
        path.write_bytes(data)
        ends.clear()
        text = refusal(read, path)
        if text is not None:
            refused += 1
            assert text.startswith(f"{path}: ")
            assert text.encode()  # no lone surrogate may reach a terminal
        assert max(ends, default=0) <= max(len(data), 8)
    return refused


def test_two_thousand_mutated_safetensors_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    tensors = fake_tensors(parse_model_config(fake_config(n_layers=1, n_experts=2), "fake"), 0)
    write_safetensors(path, {name: tensors[name] for name in list(tensors)[:12]})
    good = path.read_bytes()
    n_header = int.from_bytes(good[:8], "little")

    def with_true_length(data: bytearray) -> bytearray:
        data[:8] = (n_header + len(data) - len(good)).to_bytes(8, "little", signed=True)
        return data

    read_header(path)
    tracemalloc.start()
    with watched(monkeypatch, TEXT) as ends:
        refused = n_refused(path, good, range(8 + n_header), read_header, with_true_length, ends)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > N_MUTATED * 0.7
    assert peak < 3 << 20


def test_two_thousand_mutated_pack_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(write_fake_checkpoint(tmp_path / "a", n_layers=1, n_experts=2), tmp_path / "b")
    manifest = read_manifest(tmp_path / "b")
    row = next(file for file in manifest.files if file.kind == "experts")
    path = tmp_path / "b" / row.name
    good = path.read_bytes()

    def with_true_hash(data: bytearray) -> bytearray:
        digest = xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - 8]))
        data[HEADER_BYTES - 8 : HEADER_BYTES] = digest.to_bytes(8, "little")
        return data

    read_record_file(path, row, manifest)
    tracemalloc.start()
    with watched(monkeypatch, PACK) as ends:
        refused = n_refused(
            path, good, range(480), lambda file: read_any(file, row, manifest), with_true_hash, ends
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > N_MUTATED * 0.7
    assert peak < 3 << 20


def read_any(path: Path, row: PackFile, manifest: Manifest) -> None:
    """Read a file under a manifest that knows this very state of it: the header must defend."""
    data = path.read_bytes()
    page = data[:HEADER_BYTES]
    index_offset = int.from_bytes(page[96:104], "little")
    state = root_hash(page, data[index_offset:]) if index_offset < len(data) else row.hash
    record = read_record_file(path, replace(row, hash=state), manifest)
    header = record.header
    assert header.file_bytes == len(data) == record.shard.n_bytes
    assert record.parts.shape == (header.n_experts, header.n_parts)
