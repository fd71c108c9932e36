"""Dense weights: only their own bytes are read, and nothing stays open."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.model import tensor_reader
from compute.model.matrix import Matrix, StackedMatrix
from compute.model.weights import load_weights
from protocol.errors import ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.files.model_config import parse_model_config
from protocol.files.tensor_table import expected_tensors
from tests.support.fake_checkpoint import fake_config, write_fake_checkpoint
from tests.support.fake_gguf import write_fake_gguf

CPU = torch.device("cpu")


def test_only_dense_ranges_are_read(tmp_path, monkeypatch):
    write_fake_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    read: dict[Path, bytearray] = {s.path: bytearray(s.n_bytes) for s in checkpoint.shards}
    real = os.preadv

    def watched(descriptor, buffers, offset):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        n = real(descriptor, buffers, offset)
        read[path][offset : offset + n] = b"\1" * n
        return n

    monkeypatch.setattr(os, "preadv", watched)
    load_weights(checkpoint, CPU)
    table = expected_tensors(checkpoint.config)
    for name, entry in checkpoint.tensors.items():
        is_dense = name in table and table[name].kind == "dense"
        own = read[entry.shard.path][entry.offset : entry.offset + entry.n_bytes]
        assert set(own) == {int(is_dense)}, name


def test_no_descriptor_is_left(tmp_path):
    write_fake_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    load_weights(checkpoint, CPU)
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if link.readlink().is_relative_to(tmp_path)]


def test_short_reads_are_read_on(tmp_path, monkeypatch):
    write_fake_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    wanted = load_weights(checkpoint, CPU)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, b, o: real(d, [b[0][:7]], o))
    with tensor_reader.TensorReader(checkpoint.tensors, CPU) as reader:
        assert torch.equal(reader.stored("embed.weight"), wanted.embed)


def test_a_file_cut_off_after_it_was_checked_is_named(tmp_path):
    write_fake_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    entry = checkpoint.tensors["norm.weight"]
    os.truncate(entry.shard.path, entry.offset + 3)
    with (
        tensor_reader.TensorReader(checkpoint.tensors, CPU) as reader,
        pytest.raises(ShardError, match=r"norm\.weight ends at"),
    ):
        reader.stored("norm.weight")


def test_a_dense_scale_of_255_is_refused_with_its_name(tmp_path):
    write_fake_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    entry = checkpoint.tensors["layers.0.attn.wq_a.scale"]
    with entry.shard.path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff")
    with pytest.raises(ShardError, match=r"layers\.0\.attn\.wq_a.*255"):
        load_weights(checkpoint, CPU)


# Pairs that one product would take; no kernel reads F32 or F16.
STACKED = {
    "attn.wq_a.weight": "Q4_K",
    "attn.wkv.weight": "Q6_K",
    "shared_experts.w1.weight": "F16",
    "shared_experts.w3.weight": "F32",
    "compressor.wkv.weight": "Q8_0",
    "compressor.wgate.weight": "F16",
}


def stored_as(matrix: Matrix | None) -> tuple[list[str], torch.Tensor]:
    """The formats of a matrix's parts and all values, f32."""
    assert matrix is not None
    parts = matrix.parts if isinstance(matrix, StackedMatrix) else (matrix,)
    formats, values = [], []
    for part in parts:
        if isinstance(part, torch.Tensor):
            formats.append("f32")
            values.append(part)
        else:
            formats.append(part.format)
            values.append(part.dequantised(torch.float32))
    return formats, torch.cat(values)


def test_stacked_matrices_of_two_types_stay_as_they_are_stored(tmp_path, monkeypatch):
    ratios = {"compress_ratios": [0, 0, 2, 2], "num_nextn_predict_layers": 0}
    wide = ratios | {"q_lora_rank": 256, "head_dim": 256}
    raw = fake_config(n_layers=4, hidden_size=256, expert_width=256, text_config=wide)

    def types(name, shape):
        if len(shape) == 1 or name.endswith("engram.embed.weight") or "engram.w" in name:
            return "F32"
        return next((kind for end, kind in STACKED.items() if name.endswith(end)), "BF16")

    config = replace(parse_model_config(raw, "wide"), n_draft_stages=0)
    checkpoint = open_checkpoint(write_fake_gguf(tmp_path / "m.gguf", config, types=types))
    plain = load_weights(checkpoint, CPU).layers[2]
    monkeypatch.setattr(tensor_reader, "_keeps_stored", lambda _device: True)
    own = load_weights(checkpoint, CPU).layers[2]
    assert plain.attention.compressor
    assert own.attention.compressor
    for found, wanted, formats in (
        (own.attention.qa_kv, plain.attention.qa_kv, ["Q4_K", "Q6_K"]),
        (own.attention.compressor.kv_gate, plain.attention.compressor.kv_gate, ["Q8_0", "f32"]),
        (own.moe.shared_gate_up, plain.moe.shared_gate_up, ["f32"]),
        (own.attention.q_b, plain.attention.q_b, ["BF16"]),
    ):
        assert stored_as(wanted)[0] == ["f32"]
        assert stored_as(found)[0] == formats
        assert torch.equal(stored_as(found)[1], stored_as(wanted)[1])
