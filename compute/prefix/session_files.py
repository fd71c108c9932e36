"""Spans and fronts as bytes of a file.

A file is 8 bytes of magic, the length of a JSON header (u32, little endian), the header, the bytes
of its arrays one after the other, and the xxh3_64 of all that (u64). A damaged file counts as none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protocol.files.pack_format import hash_bytes

from .packed_rows import Form, PackedRows
from .snapshot import Front, Span

MAGIC = b"HRDSESS1"
_DTYPES = {"u8": torch.uint8, "bf16": torch.bfloat16, "f32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def span_file(span: Span, ids: bytes, parent: str) -> bytes:
    """Return the file of a node's span and ids; `parent` names the node before it."""
    layers, arrays = [], []
    for layer, rows in span.rows.items():
        keys = span.keys[layer]
        layers.append([layer, rows.form.value, keys.form.value])
        arrays += [*rows.parts, *keys.parts]
    header = {"parent": parent, "first": span.first, "end": span.end, "layers": layers}
    return _file(header, [torch.frombuffer(bytearray(ids), dtype=torch.uint8), *arrays])


def read_span(data: bytes) -> tuple[Span, bytes, str] | None:
    """Return span, ids and parent; None for a damaged file."""
    found = _contents(data)
    if found is None:
        return None
    header, arrays = found
    ids = next(arrays).numpy().tobytes()
    rows, keys = {}, {}
    for layer, row_form, key_form in header["layers"]:
        rows[layer] = _packed(row_form, arrays)
        keys[layer] = _packed(key_form, arrays)
    return Span(header["first"], header["end"], rows, keys), ids, header["parent"]


def front_file(front: Front) -> bytes:
    """Return the file of a node's front."""
    arrays = list(front.windows.parts)
    for pair in front.open_groups.values():
        arrays += pair
    header = {
        "position": front.position,
        "windows": front.windows.form.value,
        "open_groups": list(front.open_groups),
        "last_ids": front.last_ids.tolist(),
        "published_keys": front.published_keys,
    }
    return _file(header, arrays)


def read_front(data: bytes) -> Front | None:
    """Return the front; None for a damaged file."""
    found = _contents(data)
    if found is None:
        return None
    header, arrays = found
    return Front(
        position=header["position"],
        windows=_packed(header["windows"], arrays),
        open_groups={layer: (next(arrays), next(arrays)) for layer in header["open_groups"]},
        last_ids=np.array(header["last_ids"], np.int64),
        published_keys=header["published_keys"],
    )


def _packed(form: str, arrays: Iterator[Tensor]) -> PackedRows:
    n_parts = 1 if form == Form.RAW.value else 2
    return PackedRows(Form(form), tuple(next(arrays) for _ in range(n_parts)))


def _file(header: dict[str, Any], arrays: Sequence[Tensor]) -> bytes:
    header["arrays"] = [[_NAMES[array.dtype], *array.shape] for array in arrays]
    text = json.dumps(header).encode()
    parts = [MAGIC, len(text).to_bytes(4, "little"), text]
    parts += [array.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for array in arrays]
    body = b"".join(parts)
    return body + hash_bytes(body).to_bytes(8, "little")


def _contents(data: bytes) -> tuple[dict[str, Any], Iterator[Tensor]] | None:
    body = data[:-8]
    if not body.startswith(MAGIC) or hash_bytes(body) != int.from_bytes(data[-8:], "little"):
        return None
    start = len(MAGIC) + 4
    at = start + int.from_bytes(body[len(MAGIC) : start], "little")
    header: dict[str, Any] = json.loads(body[start:at])
    arrays = []
    for name, *shape in header["arrays"]:
        dtype = _DTYPES[name]
        n_bytes = math.prod(shape) * dtype.itemsize
        array = torch.frombuffer(bytearray(body[at : at + n_bytes] or b"\0"), dtype=torch.uint8)
        arrays.append(array[:n_bytes].view(dtype).view(shape))
        at += n_bytes
    return header, iter(arrays)
