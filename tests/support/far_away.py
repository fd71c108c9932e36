"""Models whose every byte lies far behind the start of its file: sparse files, little data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from protocol.files.checkpoint import open_checkpoint
from protocol.files.safetensors_header import LENGTH_BYTES
from protocol.files.safetensors_index import SINGLE_NAME
from tests.support.converted_gguf import converted_tensors, metadata_of
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.fake_gguf import FakeTensor, gguf_bytes

HOLE = 100 << 30  # bytes of a tensor that an engine leaves alone


def far_official(directory: Path) -> Path:
    """A fake checkpoint behind a hole; raises OSError where such files cannot be."""
    write_fake_checkpoint(directory, single_file=True, n_layers=6)
    path = directory / SINGLE_NAME
    content = path.read_bytes()
    n_header = int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + n_header])
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + HOLE for offset in entry["data_offsets"]]
    header["vision.hole"] = {"dtype": "U8", "shape": [HOLE], "data_offsets": [0, HOLE]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    _write(
        path, len(text).to_bytes(LENGTH_BYTES, "little") + text, content[LENGTH_BYTES + n_header :]
    )
    return directory


def far_gguf(official: Path, path: Path) -> Path:
    """The same model as a GGUF behind a hole."""
    checkpoint = open_checkpoint(official)
    hole = FakeTensor("v.hole", (HOLE,), 24, b"", 0)
    tensors = [hole, *_placed(converted_tensors(checkpoint))]
    data = b"".join(tensor.data + bytes(-len(tensor.data) % 32) for tensor in tensors)
    headers = [tensor._replace(data=b"") for tensor in tensors]
    _write(path, gguf_bytes(metadata_of(checkpoint).items(), headers), data)
    return path


def _placed(tensors: list[FakeTensor]) -> Iterator[FakeTensor]:
    at = HOLE
    for tensor in tensors:
        yield tensor._replace(offset=at)
        at += -(-len(tensor.data) // 32) * 32


def _write(path: Path, header: bytes, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(header)
        file.seek(len(header) + HOLE)
        file.write(data)
