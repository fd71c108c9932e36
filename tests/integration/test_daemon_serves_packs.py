"""The real daemon over expert packs: the official bytes in every form, held to the hashes."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.errors import ConfigError, ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import flip_bit, pack
from tests.support.running_daemon import daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes, table_rows

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 3, 16, 2


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    return write_fake_checkpoint(
        tmp_path_factory.mktemp("model"), n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K,
        hidden_size=1024, expert_width=512,
    )  # fmt: skip


@pytest.fixture(params=["plain", "striped", "rows"])
def packed(official, request, tmp_path):
    home = tmp_path / "pack"
    flags = {
        "plain": [],
        "striped": ["--stripe", f"{tmp_path / 'x'},{tmp_path / 'y'}", "--copy"],
        "rows": ["--interleave-engram"],
    }[request.param]
    pack(official, home, *flags)
    return home


def engine_of(daemon, checkpoint):
    return ExpertClient(daemon.runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def test_slots_and_rows_hold_the_official_bytes(official, packed, runtime_dir):
    wanted, checkpoint = open_checkpoint(official), open_checkpoint(packed)
    with (
        daemon_thread(packed, runtime_dir, read_threads=3) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        for layer in range(N_LAYERS):
            answer = engine.miss(layer, range(N_EXPERTS))
            engine.applied = answer.to_version
            assert answer.errors == ()
            for expert, slot in enumerate(answer.slots):
                assert slot_bytes(engine, slot) == expert_bytes(wanted, layer, expert)
        rows = np.array([0, 7, 3, wanted.engram_tables[0].n_rows - 1], np.uint32)
        assert np.array_equal(engine.rows(0, rows), table_rows(wanted, 0, rows))


def test_a_record_that_rotted_is_no_expert(official, runtime_dir, tmp_path):
    pack(official, tmp_path / "pack")
    checkpoint = open_checkpoint(tmp_path / "pack")
    (record,) = checkpoint.slice_map.slices(1, 3)
    flip_bit(record.shard.path, record.offset + 1000)
    with (
        daemon_thread(tmp_path / "pack", runtime_dir) as daemon,
        engine_of(daemon, checkpoint) as engine,
    ):
        answer = engine.miss(1, [2, 3, 4])
        engine.applied = answer.to_version
        ((layer, expert, code, text),) = answer.errors
        assert (layer, expert, code) == (1, 3, "CHECKSUM")
        assert "experts-00001.pack" in text
        assert [slot >= 0 for slot in answer.slots] == [True, False, True]


def test_a_share_is_refused_by_its_missing_layers(official, runtime_dir, tmp_path):
    pack(official, tmp_path / "pack", "--layers", "1")
    with (
        pytest.raises((ConfigError, ShardError), match="layers 0, 2 are missing"),
        daemon_thread(tmp_path / "pack", runtime_dir),
    ):
        pass
