"""A GGUF model of one or several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError, ShardError
from protocol.files.gguf_index import gguf_files, load_gguf
from tests.support.fake_gguf import FakeTensor, Typed, write_gguf, write_split

METADATA = {"general.architecture": Typed("string", "deepseek41")}


def tensor(name: str) -> FakeTensor:
    return FakeTensor(name, (8,), 0, bytes(32))


PARTS = [[tensor("a"), tensor("b")], [tensor("c")], [tensor("d")]]


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    return write_split(tmp_path, "model-Q2_K", METADATA, PARTS)


def test_a_set_is_found_by_any_part_and_by_its_directory(tmp_path, split):
    assert gguf_files(tmp_path) == gguf_files(split[2]) == tuple(split)
    index = load_gguf(split[1])
    assert list(index.tensors) == ["a", "b", "c", "d"]
    assert [shard.path for shard in index.shards] == split
    assert index.tensors["d"].shard is index.shards[2]
    assert index.metadata["general.architecture"] == "deepseek41"


def test_one_file_is_a_model(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", METADATA, PARTS[0])
    assert list(load_gguf(tmp_path).tensors) == ["a", "b"]
    assert load_gguf(path).shards[0].path == path
    for count in (0, 1):
        write_gguf(path, METADATA | {"split.count": Typed("u16", count)}, PARTS[0])
        assert len(load_gguf(path).shards) == 1


def test_a_missing_part_is_named(tmp_path, split):
    split[1].unlink()
    with pytest.raises(ShardError, match=r"model-Q2_K-00002-of-00003\.gguf: the shard is missing"):
        load_gguf(split[0])


def test_a_part_under_another_parts_name_is_refused(tmp_path, split):
    split[1].write_bytes(split[2].read_bytes())
    with pytest.raises(ShardError, match=r"split\.no 2 of split\.count 3, by its name it is 1 of"):
        load_gguf(tmp_path)


def test_a_part_that_is_named_like_a_whole_file_is_refused(tmp_path, split):
    path = split[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ShardError, match=r"split\.no 0 of split\.count 3, by its name it is 0 of"):
        load_gguf(path)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    write_split(tmp_path, "m", METADATA, [[tensor("a")], [tensor("a")]])
    with pytest.raises(ShardError, match=r"'a' stands twice: in .*00001.* and in .*00002"):
        load_gguf(tmp_path)


def test_a_set_with_other_tensors_than_it_says_is_refused(tmp_path):
    write_split(tmp_path, "m", METADATA | {"x": Typed("u8", 1)}, [[tensor("a")], [tensor("b")]])
    pairs = METADATA | {
        "split.no": Typed("u16", 1),
        "split.count": Typed("u16", 2),
        "split.tensors.count": Typed("i32", 2),
    }
    write_gguf(tmp_path / "m-00002-of-00002.gguf", pairs, [])
    with pytest.raises(ShardError, match="says that the set has 2 tensors, it has 1"):
        load_gguf(tmp_path)


def test_a_directory_of_several_models_asks_for_one(tmp_path, split):
    write_gguf(tmp_path / "other.gguf", METADATA, PARTS[0])
    with pytest.raises(ConfigError, match=r"holds the models model-Q2_K \(of 3\), other\.gguf"):
        load_gguf(tmp_path)
    assert len(load_gguf(split[0]).shards) == 3


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        load_gguf(tmp_path)
    with pytest.raises(ConfigError, match="neither a directory nor"):
        load_gguf(tmp_path / "model.safetensors")
    with pytest.raises(ShardError, match="is missing"):
        load_gguf(tmp_path / "none.gguf")
    for number, count in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(ConfigError, match="is no part of a set"):
            load_gguf(tmp_path / f"m-{number:05d}-of-{count:05d}.gguf")
