"""Shards of 100 GB, sparse: dense weights, experts and rows behind them are the right bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.files.checkpoint import open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.far_away import HOLE, far_gguf, far_official
from tests.support.local_model import LocalModel
from tests.support.running_daemon import daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes, table_rows

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_checkpoint(tmp_path_factory.mktemp("near") / "m", n_layers=6)


@pytest.mark.parametrize("kind", ["official", "gguf"])
def test_what_lies_behind_100_gb_is_read_from_there(
    near: Path, tmp_path: Path, runtime_dir: Path, kind: str
) -> None:
    try:
        path = (
            far_official(tmp_path / "far")
            if kind == "official"
            else far_gguf(near, tmp_path / "far.gguf")
        )
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    checkpoint = open_checkpoint(path)
    assert checkpoint.shards[0].n_bytes > HOLE > 2**32
    assert any("vision" in note or "1 of v" in note for note in checkpoint.notes())
    far, wanted = LocalModel(path), LocalModel(near)
    ids = [3, 9, 27, 4]
    found = far.full(far.at("highway"), ids)
    assert torch.equal(found, wanted.full(wanted.at("highway"), ids))
    with (
        daemon_thread(path, runtime_dir) as daemon,
        ExpertClient(daemon.runtime_dir, "reader") as client,
    ):
        for key in ((0, 0), (2, 5), (5, 7)):
            with client.leased([key]) as (lease,):
                assert slot_bytes(client, lease.slot) == expert_bytes(checkpoint, *key)
        rows = np.array([0, 203, 100], np.uint32)
        for table in (0, 1):
            assert np.array_equal(client.rows(table, rows), table_rows(checkpoint, table, rows))
