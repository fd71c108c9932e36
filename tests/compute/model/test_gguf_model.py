"""A model from a GGUF: the same bits where the values are the same, every type as it is meant."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from protocol.errors import ConfigError, ShardError
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.files.gguf_header import GgufTensor
from protocol.files.gguf_index import load_gguf
from protocol.files.gguf_table import PLAIN_TYPES
from protocol.files.model_config import ModelConfig, parse_model_config
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import fake_config, write_fake_checkpoint
from tests.support.fake_gguf import (
    WIDE,
    FakeTensor,
    Typed,
    fake_metadata,
    write_fake_gguf,
    write_gguf,
)
from tests.support.local_model import LocalModel
from tests.support.packing import pack

IDS = [3, 17, 40, 5, 5, 62, 0, 9, 33, 12, 51, 2, 8, 27, 44, 19, 6, 60]
PRECISIONS = ["vendor", "highway", "wide", "unrounded"]
# Of the routed experts' gate, up and down, a layer each; the last one's differ all three.
EXPERTS = [
    ("Q2_K", "Q2_K", "Q3_K"),
    ("Q4_K", "Q4_K", "Q4_K"),
    ("Q8_0", "Q8_0", "Q8_0"),
    ("MXFP4", "MXFP4", "Q6_K"),
    ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
    ("Q5_K", "BF16", "F16"),
]
DENSE = ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "MXFP4"]
ROWS = {1: "Q2_K", 4: "Q8_0"}


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("official")
    return open_checkpoint(write_fake_checkpoint(directory / "model", n_layers=6))


@pytest.fixture(scope="module")
def forms(official: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[LocalModel]:
    """One model: official, packed, and in three GGUFs."""
    directory = tmp_path_factory.mktemp("forms")
    pack(official.directory, directory / "pack")
    pack(official.directory, directory / "rows", "--interleave-engram")
    whole = convert(official, directory / "whole.gguf")
    (directory / "split").mkdir()
    convert(official, directory / "split" / "m.gguf", n_parts=3, ds4=True)
    (directory / "rounded").mkdir()
    # What is wider than it need be is the same, Engram rows of 32 single values among them.
    spelled = convert(
        official,
        directory / "rounded" / "m.gguf",
        lambda name, shape: "F32" if len(shape) == 1 or "engram" in name else None,
    )
    places = [official.directory, directory / "pack", directory / "rows", whole]
    return [LocalModel(path) for path in (*places, directory / "split", spelled)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_values_in_any_form_give_the_same_bits(
    forms: list[LocalModel], precision: str
) -> None:
    assert [form.checkpoint.kind for form in forms] == ["official", "pack", "pack"] + ["gguf"] * 3
    wanted, *others = (form.full(form.at(precision), IDS).view(torch.int32) for form in forms)
    assert wanted.float().std() > 0
    for form, found in zip(forms[1:], others, strict=True):
        assert torch.equal(found, wanted), form.checkpoint.path


def wide_config() -> ModelConfig:
    raw = fake_config(n_layers=6, hidden_size=256, expert_width=256, text_config=WIDE)
    return replace(parse_model_config(raw, "wide"), n_draft_stages=0)


def mixed_types(name: str, shape: tuple[int, ...]) -> str:
    """Every type somewhere."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
    if ".experts.*." in name:
        return EXPERTS[layer][("w1", "w3", "w2").index(name.split(".")[-2])]
    if name.endswith("engram.embed.weight"):
        return ROWS[layer]
    number = zlib.crc32(name.encode())
    if len(shape) == 1 or ".hc_" in name or name.endswith(("q_weight", "k_weight")):
        return sorted(PLAIN_TYPES)[number % 3]
    return DENSE[number % len(DENSE)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path = tmp_path_factory.mktemp("mixed") / "m.gguf"
    return LocalModel(write_fake_gguf(path, wide_config(), types=mixed_types))


def as_f32(path: Path, target: Path, config: ModelConfig) -> Path:
    """The same GGUF with every tensor in F32, dequantised by the format's own library."""
    index = load_gguf(path)
    tensors = [
        FakeTensor(t.name, t.dims, 0, np.ascontiguousarray(values_of(t), "<f4").tobytes())
        for t in index.tensors.values()
    ]
    return write_gguf(target, fake_metadata(config), tensors)


def values_of(tensor: GgufTensor) -> np.ndarray:
    with tensor.shard.path.open("rb") as file:
        file.seek(tensor.offset)
        data = np.frombuffer(file.read(tensor.n_bytes), np.uint8)
    rows = data.reshape(-1, tensor.row_bytes)
    kind = gguf.GGMLQuantizationType(tensor.block.type_id)
    values = gguf.dequantize(rows, kind)
    assert values.size == prod(tensor.dims)
    return values


@pytest.mark.parametrize("precision", ["highway", "unrounded"])
def test_every_type_gives_what_its_values_give(
    mixed: LocalModel, tmp_path: Path, precision: str
) -> None:
    kinds = {entry.dtype for entry in mixed.checkpoint.tensors.values()}
    assert kinds == set(DENSE) | {"IQ2_XXS"}
    assert mixed.checkpoint.expert_format(0) == "Q2_K/Q3_K"
    assert mixed.checkpoint.expert_format(5) == "Q5_K/BF16/F16"
    plain = LocalModel(as_f32(mixed.checkpoint.path, tmp_path / "plain.gguf", mixed.config))
    assert plain.checkpoint.expert_format(0) == "F32"
    wanted = plain.full(plain.at(precision), IDS)
    assert bool(torch.isfinite(wanted).all())
    assert torch.equal(mixed.full(mixed.at(precision), IDS), wanted)


def test_layers_of_other_types_have_slots_of_other_sizes(mixed: LocalModel) -> None:
    sizes = [layout.image.expert_bytes for layout in mixed.checkpoint.slice_map.layouts]
    blocks = {name: BLOCK_TYPE_OF_NAME[name] for layer in EXPERTS for name in layer}
    assert sizes == [
        sum(256 * 256 // blocks[name].n_values * blocks[name].n_bytes for name in layer)
        for layer in EXPERTS
    ]
    assert mixed.checkpoint.slice_map.image.expert_bytes == max(sizes)


def poke(checkpoint: Checkpoint, name: str, at: int, byte: int) -> None:
    entry = checkpoint.tensors[name]
    with entry.shard.path.open("r+b") as file:
        file.seek(entry.offset + at)
        file.write(bytes([byte]))


def test_a_scale_byte_of_255_is_refused_wherever_it_stands(
    official: Checkpoint, tmp_path: Path
) -> None:
    path = convert(
        official, tmp_path / "m.gguf", lambda name, _: "MXFP4" if "wq_b" in name else None
    )
    good = path.read_bytes()
    checkpoint = open_checkpoint(path)
    poke(checkpoint, "layers.0.attn.wq_b.weight", 17 * 3, 255)
    with pytest.raises(ShardError, match=r"layers\.0\.attn\.wq_b\.weight: .*255"):
        LocalModel(path)
    path.write_bytes(good)
    stack = checkpoint.tensors["layers.2.ffn.experts.*.w1.weight"]
    for expert in range(8):
        poke(checkpoint, stack.name, expert * stack.n_bytes // 8, 255)
    with pytest.raises(ShardError, match=r"layer 2 expert \d+: .*255"):
        run(path)
    path.write_bytes(good)
    table = checkpoint.engram_tables[0]
    for row in range(table.n_rows):
        poke(checkpoint, "layers.1.engram.embed.weight", row * 33 + 32, 255)
    with pytest.raises(ShardError, match=r"layer 1 Engram table: .*255"):
        run(path)


def run(path: Path) -> None:
    model = LocalModel(path)
    model.full(model.at("wide"), IDS[:4])


def changed_map(config: ModelConfig) -> Iterator[int]:
    return (number // 2 + (number == 9) for number in range(config.vocab_size))


def test_a_token_map_that_the_tokens_do_not_give_is_refused_with_both(
    official: Checkpoint, tmp_path: Path
) -> None:
    key = "deepseek41.engram.token_map"
    wrong = Typed("array:u32", list(changed_map(official.config)))
    path = convert(official, tmp_path / "m.gguf", more={key: wrong})
    with pytest.raises(ConfigError, match=r"gives id 9 the compressed id 5, the tokens .* give 4"):
        LocalModel(path)
    # A tokenizer.json beside the file is asked first, and named.
    (tmp_path / "tokenizer.json").write_bytes((official.directory / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"the tokens of tokenizer\.json give 4"):
        LocalModel(path)
