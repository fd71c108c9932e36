"""The real daemon over a pack and its mirror: both are read, what is bad in one does no harm."""

from __future__ import annotations

import pytest

from expert_daemon.log import flush
from protocol.files.checkpoint import open_checkpoint, resolve_model
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults
from tests.support.generation import generate
from tests.support.packing import flip_bit, pack
from tests.support.running_daemon import daemon_process, daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(120)

N_LAYERS, N_EXPERTS, TOP_K = 3, 16, 2


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture
def packed(official, tmp_path):
    pack(official, tmp_path / "pack", "--mirror", tmp_path / "mirror")
    return tmp_path / "pack"


def engine_of(daemon, checkpoint):
    return ExpertClient(daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def load_all(engine, wanted):
    """Load every expert and hold its bytes to the official ones."""
    for layer in range(N_LAYERS):
        answer = engine.miss(layer, range(N_EXPERTS))
        engine.applied = answer.to_version
        assert answer.errors == ()
        for expert, slot in enumerate(answer.slots):
            assert slot_bytes(engine, slot) == expert_bytes(wanted, layer, expert)


def rot(checkpoint, layer, expert, *, mirror=False):
    """Change one bit of a record; return its file and offset."""
    slice_map = checkpoint.slice_map
    slices = slice_map.mirror_slices if mirror else slice_map.slices
    (record,) = slices(layer, expert)
    flip_bit(record.shard.path, record.offset + 1000)
    return record.shard.path, record.offset


def test_experts_come_from_both_copies(official, packed, runtime_dir):
    checkpoint = open_checkpoint(packed)
    with (
        daemon_thread(packed, runtime_dir) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        load_all(engine, open_checkpoint(official))
        stats = engine.stats()
    assert stats["reads_home"] + stats["reads_mirror"] == stats["reads"] == N_LAYERS * N_EXPERTS
    assert min(stats["reads_home"], stats["reads_mirror"]) >= 4
    assert min(stats["rate_home"], stats["rate_mirror"]) > 0
    assert (stats["mirror_fallbacks"], stats["quarantined_copies"]) == (0, 0)


@pytest.mark.timing
def test_a_slow_copy_is_read_less(official, packed, runtime_dir):
    checkpoint = open_checkpoint(packed)
    mirrors = {checkpoint.slice_map.mirror_slices(layer, 0)[0].shard for layer in range(N_LAYERS)}
    slow = {checkpoint.shards.index(shard) for shard in mirrors}
    faults = Faults(late=lambda shard, *_: 0.15 * (shard in slow))
    with (
        daemon_thread(packed, runtime_dir, faults, read_threads=2) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        load_all(engine, open_checkpoint(official))
        stats = engine.stats()
    assert 4 <= stats["reads_mirror"] < stats["reads_home"]
    assert stats["rate_mirror"] < stats["rate_home"]


def test_a_bad_copy_is_named_and_never_read_again_the_other_one_serving(
    official, packed, runtime_dir
):
    wanted, checkpoint = open_checkpoint(official), open_checkpoint(packed)
    places = {(1, expert): rot(checkpoint, 1, expert) for expert in range(N_EXPERTS)}
    for _ in range(2):  # over a restart
        with (
            daemon_thread(packed, runtime_dir) as daemon,
            engine_of(daemon, checkpoint) as engine,
        ):
            before = engine.stats()
            load_all(engine, wanted)
            stats = engine.stats()
        known, found = before["quarantined_copies"], stats["quarantined_copies"]
        assert stats["quarantined"] == 0
        assert stats["mirror_fallbacks"] == found - known
        for (layer, expert), (path, offset) in places.items():
            text = stats.get(f"quarantine layer {layer} expert {expert}")
            if text is not None:
                assert f"{path}: bytes from {offset} on" in text
    assert known > 0  # the second daemon knew what the first one found


def test_an_expert_bad_in_both_copies_is_quarantined_until_it_is_lifted(packed, runtime_dir):
    checkpoint = open_checkpoint(packed)
    home, mirror = rot(checkpoint, 1, 3), rot(checkpoint, 1, 3, mirror=True)
    with (
        daemon_thread(packed, runtime_dir) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        for code in ("CHECKSUM", "QUARANTINED"):
            answer = engine.miss(1, [2, 3, 4])
            engine.applied = answer.to_version
            ((layer, expert, found, text),) = answer.errors
            assert (layer, expert, found) == (1, 3, code)
            assert str(home[0]) in text
            assert str(mirror[0]) in text
            assert [slot >= 0 for slot in answer.slots] == [True, False, True]
        stats = engine.stats()
        assert (stats["quarantined"], stats["quarantined_copies"]) == (1, 2)
        flip_bit(mirror[0], mirror[1] + 1000)
        assert engine.unquarantine([(1, 3)]) == "lifted from 1 of 1 experts"
        assert engine.miss(1, [3]).errors == ()


def test_a_drive_of_a_striped_pack_that_fails_is_made_up_for_by_the_mirror(runtime_dir, tmp_path):
    official = write_fake_checkpoint(
        tmp_path / "model", n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K,
        hidden_size=1024, expert_width=512,
    )  # fmt: skip
    stripes = f"{tmp_path / 'x'},{tmp_path / 'y'}"
    pack(official, tmp_path / "pack", "--stripe", stripes, "--mirror", tmp_path / "mirror")
    checkpoint = open_checkpoint(tmp_path / "pack")
    lost = [n for n, shard in enumerate(checkpoint.shards) if shard.path.parent == tmp_path / "y"]
    assert len(lost) == N_LAYERS
    faults = Faults(eio=lambda shard, *_: shard in lost)
    with (
        daemon_thread(tmp_path / "pack", runtime_dir, faults) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        load_all(engine, open_checkpoint(official))
        stats = engine.stats()
    assert (stats["reads_home"], stats["read_errors"]) == (0, 0)
    assert stats["mirror_fallbacks"] > 0


def test_a_mirror_that_is_gone_is_told_once_and_does_without(official, packed, runtime_dir, capfd):
    checkpoint = open_checkpoint(packed)
    path = checkpoint.slice_map.mirror_slices(1, 0)[0].shard.path
    path.unlink()
    checkpoint = open_checkpoint(packed)
    with (
        daemon_thread(packed, runtime_dir) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        load_all(engine, open_checkpoint(official))
    flush()
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "mirror not used for layer 1" in line]) == 1


def test_text_is_the_same_from_a_pack_whose_home_has_rotted(runtime_dir, tmp_path):
    demo = resolve_model("demo")
    pack(demo, tmp_path / "pack", "--mirror", tmp_path / "mirror")
    checkpoint = open_checkpoint(tmp_path / "pack")
    for expert in range(checkpoint.config.n_experts):
        rot(checkpoint, 0, expert)
    first, second = runtime_dir / "a", runtime_dir / "b"
    first.mkdir()
    second.mkdir()
    with daemon_process("demo", first):
        wanted = generate(first, 12)["ids"]
    with daemon_process(tmp_path / "pack", second):
        found = generate(second, 12, model=str(tmp_path / "pack"))["ids"]
        with ExpertClient(second) as reader:
            stats = reader.stats()
    assert found == wanted
    assert stats["mirror_fallbacks"] > 0
    assert stats["quarantined_copies"] == stats["mirror_fallbacks"]
    assert (stats["quarantined"], stats["read_errors"]) == (0, 0)
