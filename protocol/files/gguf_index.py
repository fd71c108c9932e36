"""A GGUF model of one file or of a split set, by its headers.

A split set is `NAME-00001-of-0000N.gguf` and so on; every part says its number and their count, the
first has the model's metadata, and no tensor stands in two parts. No file stays open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError, ShardError

from .gguf_header import GgufHeader, GgufTensor, read_gguf_header
from .gguf_values import Value
from .safetensors_header import Shard

SUFFIX = ".gguf"
SPLITS_MAX = 9999
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """All files of one model, in the order of their numbers, and all their tensors by name."""

    shards: tuple[Shard, ...]
    metadata: dict[str, Value]  # of the first file
    tensors: dict[str, GgufTensor]
    data_offsets: tuple[int, ...]  # where each file's header ends


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that `path` names: a file, one part of a set, or a directory.

    Raises ConfigError where there is no such file, or where a directory holds several models.
    """
    if path.is_dir():
        return _files_of_directory(path)
    if path.suffix != SUFFIX:
        raise ConfigError(f"{path}: is neither a directory nor a {SUFFIX} file")
    return _whole_set(path)


def load_gguf(path: Path) -> GgufIndex:
    """Return what the model that `path` names holds; raises ConfigError or ShardError.

    Every file is read as `read_gguf_header` reads it. Refused are a missing part, a part that says
    another number or count than its name, a tensor that stands in two parts, and a set with more
    or fewer tensors than it says.
    """
    headers = [read_gguf_header(file) for file in gguf_files(path)]
    for number, header in enumerate(headers):
        _check_part(header, number, len(headers))
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ShardError(
                    f"tensor {tensor.name!r} stands twice: in {other.shard.path} and in "
                    f"{header.shard.path}"
                )
    metadata = headers[0].metadata
    said = metadata.get("split.tensors.count")
    if len(headers) > 1 and said is not None and said != len(tensors):
        raise ShardError(
            f"{headers[0].shard.path}: says that the set has {said} tensors, it has {len(tensors)}"
        )
    return GgufIndex(
        shards=tuple(header.shard for header in headers),
        metadata=metadata,
        tensors=tensors,
        data_offsets=tuple(header.data_offset for header in headers),
    )


def has_gguf(directory: Path) -> bool:
    """Whether a directory holds any GGUF file."""
    try:
        return any(file.suffix == SUFFIX for file in directory.iterdir())
    except OSError:
        return False


def _files_of_directory(directory: Path) -> tuple[Path, ...]:
    files = sorted(file for file in directory.iterdir() if file.suffix == SUFFIX)
    names = {_stem(file) for file in files}
    if not names:
        raise ConfigError(f"{directory}: holds no {SUFFIX} file")
    if len(names) > 1:
        raise ConfigError(
            f"{directory}: holds the models {_listed(names)}: name the file of one of them"
        )
    return _whole_set(files[0])


def _stem(file: Path) -> str:
    match = _SPLIT_NAME.fullmatch(file.name)
    return f"{match['stem']} (of {int(match['count'])})" if match else file.name


def _whole_set(file: Path) -> tuple[Path, ...]:
    match = _SPLIT_NAME.fullmatch(file.name)
    if match is None:
        return (file,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= SPLITS_MAX:
        raise ConfigError(f"{file}: part {int(match['number'])} of {count} is no part of a set")
    return tuple(
        file.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    )


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    """Compare what a part says of itself with its name; without a word it may be a whole file."""
    says_number = header.metadata.get("split.no", 0)
    says_count = header.metadata.get("split.count", 1)
    if count == 1 and says_count == 0:  # some writers say 0 for a whole file
        says_count = 1
    if (says_number, says_count) != (number, count):
        raise ShardError(
            f"{header.shard.path}: says that it is split.no {says_number} of split.count "
            f"{says_count}, by its name it is {number} of {count}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
