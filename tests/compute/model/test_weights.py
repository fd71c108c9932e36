"""Dense weights: only their own bytes are read, and nothing stays open."""

import os
from pathlib import Path

import pytest
import torch

from compute.model import tensor_reader
from compute.model.weights import load_weights
from protocol.errors import ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.files.tensor_table import expected_tensors
from tests.support.fake_checkpoint import write_fake_checkpoint

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
