"""Which tensors a GGUF of the model must hold, and in what types they can be read.

Types are free, tensor by tensor: a matrix may have any block format whose rows are whole blocks.
The mHC coefficients and the Engram's query and key weights stay unquantised, and so does whatever
is a vector. Source: model specification, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import ShardError

from .block_sizes import FP4_PER_BYTE, READABLE_TYPES
from .gguf_header import GgufTensor
from .gguf_index import GgufIndex
from .gguf_names import by_official_name, gguf_names
from .gguf_values import Value
from .model_config import ModelConfig
from .tensor_table import (
    dense_tensors,
    engram_tensors,
    expert_piece_names,
    expert_pieces,
    is_expert,
)

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
ROW_ENCODING_KEY = "deepseek41.engram.encoding"
ROW_ENCODING = "e4m3_e8m0_32_row264"
# Stages and towers that a text engine leaves alone, in the spellings of either writer.
SKIPPED_PREFIXES = ("mtp.", "v.", "mm.", "vision.", "aligner.", "image_")
SKIPPED_SUFFIXES = (".bias_vl",)


def gguf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape, outermost first, of every tensor by its official name, `*` for experts."""
    shapes = {
        name: tensor.shape
        for name, tensor in dense_tensors(config).items()
        if not name.endswith(".scale")
    }
    for layer in range(config.n_layers):
        pieces = zip(expert_piece_names(layer, 0), expert_pieces(config), strict=True)
        for name, piece in pieces:
            if name.endswith(".weight"):
                n_out, packed = piece.shape
                shapes[name.replace(".experts.0.", ".experts.*.")] = (
                    config.n_experts,
                    n_out,
                    packed * FP4_PER_BYTE,
                )
    tables = engram_tensors(config)
    shapes |= {name: tables[name].shape for name in tables if name.endswith(".weight")}
    return shapes


def checked_tensors(
    config: ModelConfig, index: GgufIndex, *, experts: bool = True
) -> dict[str, GgufTensor]:
    """Return the model's tensors by official name, `*` for experts; raises ShardError.

    Without `experts` the files hold none of the routed ones.

    Refused are a missing tensor, other dims, a type that cannot be read or is not kept here, and a
    tensor that is no part of the model.
    """
    found = by_official_name(index.tensors)
    shapes = gguf_shapes(config)
    if not experts:
        shapes = {name: shape for name, shape in shapes.items() if not is_expert(name)}
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            spellings = " or ".join(map(repr, gguf_names(name)))
            raise ShardError(
                f"{index.shards[0].path}: tensor {spellings} is in no file, wanted {list(shape)}"
            )
        _check_type(name, tensor)
        if not _has_shape(name, tensor, shape, config, index.metadata):
            raise ShardError(
                f"{_where(tensor)} has the dims {list(tensor.dims)} ({tensor.block.name}), wanted "
                f"{list(shape[::-1])}"
            )
    for name, tensor in found.items():
        if name not in shapes and not is_skipped(name):
            raise ShardError(f"{_where(tensor)} is no part of the model that its metadata describe")
    return {name: found[name] for name in shapes}


def is_skipped(name: str) -> bool:
    """Whether a text-only engine knows the tensor and leaves it alone."""
    return name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIXES)


def is_row_table(tensor: GgufTensor) -> bool:
    """Whether an Engram table has the official bytes: E4M3 values, then E8M0 scales, each row."""
    return tensor.block.name == "I8"


def _has_shape(
    name: str,
    tensor: GgufTensor,
    shape: tuple[int, ...],
    config: ModelConfig,
    metadata: Mapping[str, Value],
) -> bool:
    if name.endswith(".engram.embed.weight") and is_row_table(tensor):
        found = metadata.get(ROW_ENCODING_KEY)
        if found != ROW_ENCODING:
            raise ShardError(
                f"{_where(tensor)} is I8, but {ROW_ENCODING_KEY} is {ascii(found)[:80]}, wanted "
                f"{ROW_ENCODING!r}"
            )
        return tensor.shape == (shape[0], config.engram_row_bytes)
    if name.endswith(".attn.wo_a.weight") and len(tensor.dims) == 3:
        return tensor.shape == (config.o_groups, config.o_lora_rank, shape[1])
    return tensor.shape == shape


def _check_type(name: str, tensor: GgufTensor) -> None:
    kind = tensor.block.name
    if name.endswith(".engram.embed.weight") and kind == "I8":
        return
    if kind not in READABLE_TYPES:
        wanted = ", ".join(sorted(READABLE_TYPES))
        raise ShardError(f"{_where(tensor)} has the type {kind}, wanted one of {wanted}")
    plain = len(tensor.dims) == 1 or ".hc_" in name or name.endswith(("q_weight", "k_weight"))
    if plain and kind not in PLAIN_TYPES:
        raise ShardError(f"{_where(tensor)} has the type {kind}, wanted F32, F16 or BF16")


def _where(tensor: GgufTensor) -> str:
    return f"{tensor.shard.path}: tensor {tensor.name!r}"
