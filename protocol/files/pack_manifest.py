"""`pack.json`: what a pack directory consists of, with a hash of every file that pack wrote.

It is written last, in one rename: a directory with a manifest is whole, but for the layers that the
manifest says are missing. `places` alone may be edited by hand (a drive may be mounted elsewhere);
everything else is under the manifest's own hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ShardError

from .pack_format import ID_BYTES, LAYERS_MAX, STRIPES_MAX
from .strict_json import JsonError, parse_strict, read_bounded

MANIFEST_NAME = "pack.json"
WORK_NAME = ".pack"  # the directory of an unfinished pack's own notes, in the pack's directory
FORMAT_NAME = "headrace expert pack"
FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 16_000_000
KINDS = ("experts", "dense", "engram", "copied")
HOME = ""  # the place of a file in the pack's own directory
MIRROR = "mirror"

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file that pack wrote."""

    name: str
    place: str  # HOME, "stripe 0" and so on, or MIRROR
    kind: str  # one of KINDS
    n_bytes: int
    hash: str  # `root_hash` of an experts file, `tree_hash` of any other
    layer: int = -1  # of an experts file


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source as it was when it was packed, or one that is linked from there."""

    name: str
    n_bytes: int
    mtime_ns: int
    header: str  # xxh3_64 of a shard's header, of the whole content of any other file


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `pack.json`."""

    pack_id: bytes
    fingerprint: bytes  # of the source
    experts: str  # as in --experts
    engram: str  # "linked", "copied" or "interleaved"
    n_layers: int
    layers: tuple[int, ...]  # those whose experts are there, ascending
    source: tuple[SourceFile, ...]
    files: tuple[PackFile, ...]
    links: tuple[SourceFile, ...]
    stripes: tuple[str, ...]  # directories, absolute or relative to the pack's
    mirror: str  # directory, "" for none

    @property
    def missing_layers(self) -> tuple[int, ...]:
        """Layers without experts: not empty in a share made with --layers."""
        return tuple(sorted(set(range(self.n_layers)) - set(self.layers)))

    def directory(self, home: Path, place: str) -> Path:
        """Return where a place is; raises ShardError on one that the manifest does not name."""
        if place == HOME:
            return home
        if place == MIRROR and self.mirror:
            return home / self.mirror
        numbered = [stripe_place(number) for number in range(len(self.stripes))]
        if place in numbered:
            return home / self.stripes[numbered.index(place)]
        raise ShardError(
            f"{home / MANIFEST_NAME}: a file's place {place!r} is not among its places"
        )

    def encode(self) -> bytes:
        """Return the file's content."""
        raw: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "pack_id": self.pack_id.hex(),
            "fingerprint": self.fingerprint.hex(),
            "experts": self.experts,
            "engram": self.engram,
            "n_layers": self.n_layers,
            "layers": list(self.layers),
            "complete": not self.missing_layers,
            "source": [_source_row(file) for file in self.source],
            "links": [_source_row(file) for file in self.links],
            "files": [
                {
                    "name": file.name,
                    "place": file.place,
                    "kind": file.kind,
                    "bytes": file.n_bytes,
                    "hash": file.hash,
                    **({"layer": file.layer} if file.kind == "experts" else {}),
                }
                for file in self.files
            ],
        }
        raw["hash"] = _own_hash(raw)
        raw["places"] = {"stripes": list(self.stripes), "mirror": self.mirror}
        return (json.dumps(raw, indent=1, ensure_ascii=True) + "\n").encode()


def stripe_place(number: int) -> str:
    """Return the place name of a stripe's directory."""
    return f"stripe {number}"


def tree_hash(parts: Hashes) -> str:
    """Return a file's hash, 32 hex digits, from the xxh3_64 of each of its 1 MiB parts."""
    return xxhash.xxh3_128_hexdigest(parts.astype("<u8").tobytes())


def is_pack(directory: Path) -> bool:
    """Whether a directory is a pack, finished or not."""
    return (directory / MANIFEST_NAME).exists() or (directory / WORK_NAME).is_dir()


def read_manifest(directory: Path) -> Manifest:
    """Return a pack's manifest; raises ShardError where it is missing, damaged or changed."""
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            data = read_bounded(file, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        raise ShardError(
            f"{directory}: an expert pack that was never finished; the same `headrace pack` "
            "again goes on where it stopped"
        ) from None
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MANIFEST_BYTES_MAX:
        raise ShardError(f"{path}: is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        raw = parse_strict(data)
    except JsonError as error:
        raise ShardError(f"{path}: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise ShardError(f"{path}: its format is not {FORMAT_NAME!r}")
    if raw.get("version") != FORMAT_VERSION:
        raise ShardError(
            f"{path}: has version {ascii(raw.get('version'))[:40]}, this program reads "
            f"{FORMAT_VERSION}"
        )
    if raw.get("hash") != _own_hash(raw):
        raise ShardError(f"{path}: was changed: its hash is not that of its content")
    try:
        return _decode(raw)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ShardError(f"{path}: is damaged: {ascii(error)[:120]}") from None


def plain_name(name: object) -> str:
    """Return a file name without a directory; raises ValueError on anything else."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or "/" in name
        or name.startswith(".")
        or not 0 < len(name) < 256
    ):
        raise ValueError(f"{ascii(name)[:60]} is no file name")
    return name


def _own_hash(raw: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in raw.items() if name not in {"hash", "places"}}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _source_row(file: SourceFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.n_bytes,
        "mtime_ns": file.mtime_ns,
        "header": file.header,
    }


def _decode(raw: dict[str, Any]) -> Manifest:
    places = raw["places"]
    stripes = tuple(_text(path) for path in places["stripes"])
    n_layers = _count(raw["n_layers"], LAYERS_MAX)
    layers = tuple(_count(layer, n_layers - 1) for layer in raw["layers"])
    if list(layers) != sorted(set(layers)) or len(stripes) > STRIPES_MAX:
        raise ValueError("layers or stripes")
    return Manifest(
        pack_id=_identity(raw["pack_id"]),
        fingerprint=_identity(raw["fingerprint"]),
        experts=_text(raw["experts"]),
        engram=_text(raw["engram"]),
        n_layers=n_layers,
        layers=layers,
        source=tuple(_decode_source(row) for row in raw["source"]),
        links=tuple(_decode_source(row) for row in raw["links"]),
        files=tuple(_decode_file(row, n_layers) for row in raw["files"]),
        stripes=stripes,
        mirror=_text(places["mirror"]),
    )


def _decode_source(row: dict[str, Any]) -> SourceFile:
    return SourceFile(
        plain_name(row["name"]), _count(row["bytes"]), _count(row["mtime_ns"]), _text(row["header"])
    )


def _decode_file(row: dict[str, Any], n_layers: int) -> PackFile:
    kind = _text(row["kind"])
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    layer = _count(row["layer"], n_layers - 1) if kind == "experts" else -1
    return PackFile(
        plain_name(row["name"]), _text(row["place"]), kind, _count(row["bytes"]),
        _text(row["hash"]), layer,
    )  # fmt: skip


def _identity(value: object) -> bytes:
    data = bytes.fromhex(_text(value))
    if len(data) != ID_BYTES:
        raise ValueError(f"{ascii(value)[:60]} is no identity")
    return data


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value or len(value) > 4096:
        raise ValueError(f"{ascii(value)[:60]} is no text")
    return value


def _count(value: object, most: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{ascii(value)[:60]} is no count")
    return value
