"""A model whose layers have experts of several sizes: each takes a slot of its own size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compute.connecting import connect_engine
from compute.experts.miss_client import MissClient
from compute.load import expert_shapes
from expert_daemon.arena_plan import plan
from protocol.arena.layout import SlotState
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.wire.client import ExpertClient
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.local_model import LocalModel
from tests.support.running_daemon import DaemonProcess, daemon_thread
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(120)

TOP_K = 4
FORMATS = ["BF16", "MXFP4", "MXFP4", "Q8_0", "MXFP4", "MXFP4"]  # of a layer's experts
N_SLOTS = 260  # of 384 experts
IDS = [int(token) for token in np.random.default_rng(3).integers(0, 64, 48)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixed")
    official = write_fake_checkpoint(
        directory / "official", n_layers=6, n_experts=64, top_k=TOP_K, hidden_size=64,
        expert_width=64,
    )  # fmt: skip

    def types(name: str, _shape: tuple[int, ...]) -> str | None:
        return FORMATS[int(name.split(".")[1])] if ".experts.*." in name else None

    return convert(open_checkpoint(official), directory / "m.gguf", types)


def arena_bytes(checkpoint: Checkpoint) -> int:
    """An arena of N_SLOTS slots."""
    planned = plan(checkpoint, size_bytes=1 << 30, max_bytes=0, top_k_batch=TOP_K)
    # The ring grows with the size; what is wanted here is the slots.
    smaller = plan(
        checkpoint, size_bytes=planned.layout.rooms.end(N_SLOTS) + (1 << 20), max_bytes=0,
        top_k_batch=TOP_K,
    )  # fmt: skip
    return smaller.n_bytes


def test_an_arena_holds_more_experts_where_they_are_smaller(mixed: Path) -> None:
    checkpoint = open_checkpoint(mixed)
    sizes = [layout.image.slot_bytes for layout in checkpoint.slice_map.layouts]
    assert sizes == [24_576, 8192, 8192, 16_384, 8192, 8192]
    planned = plan(checkpoint, size_bytes=1 << 30, max_bytes=0, top_k_batch=TOP_K)
    rooms = planned.layout.rooms
    assert rooms.sizes == (24_576, 16_384, 8192)
    assert rooms.n_layers == (1, 1, 4)
    assert planned.layer_rooms == (0, 2, 2, 1, 2, 2)
    assert 154 <= rooms.n_common <= 170
    # Behind the common slots each expert costs what it is: no byte is lost but for whole blocks.
    n_blocks = (planned.n_slots - rooms.n_common) // len(rooms.block)
    spent = rooms.end(rooms.n_common + n_blocks * len(rooms.block)) - rooms.end(rooms.n_common)
    assert spent == n_blocks * len(rooms.block) * sum(sizes) // 6
    # All experts are there at once, each layer's in slots of its size or in common ones.
    assert planned.n_slots - planned.budget.free_pool - planned.budget.hedge >= 384
    budget = planned.budget
    taken = budget.free_pool + budget.hedge + budget.lease_quota
    assert budget.max_experts == rooms.n_for_any(planned.n_slots) - taken >= 64


def test_logits_do_not_depend_on_which_slot_an_expert_takes(mixed: Path, runtime_dir: Path) -> None:
    local = LocalModel(mixed)
    checkpoint, model = local.checkpoint, local.at("highway")
    with (
        daemon_thread(mixed, runtime_dir, arena_bytes=arena_bytes(checkpoint)) as daemon,
        connect_engine(runtime_dir, checkpoint, 20) as client,
    ):
        source = MissClient(client, expert_shapes(checkpoint))
        sequence = model.new_sequence(len(IDS))
        parts = []
        for first in range(0, len(IDS), 4):
            source.begin_step()
            ids = IDS[first : first + 4]
            parts.append(model.forward(sequence, ids, source, source, logits="all"))
            source.end_step()
            daemon.daemon.cache.check()
        assert torch.equal(torch.cat(parts), local.full(model, IDS))
        assert source.io.misses > N_SLOTS  # so that slots were taken again
        rooms, headers = client.arena.layout.rooms, client.arena.headers
        ready = np.flatnonzero(headers["state"] == SlotState.READY).tolist()
        found = {(int(headers["layer"][slot]), rooms.room(slot)) for slot in ready}
        assert {(1, 2), (3, 1), (0, 0), (5, 2)} <= found
        own = (0, 2, 2, 1, 2, 2)
        assert all(room in (0, own[layer]) for layer, room in found)


def test_readers_see_the_pieces_of_the_layer_and_a_restart_keeps_them(
    mixed: Path, runtime_dir: Path
) -> None:
    checkpoint = open_checkpoint(mixed)
    daemon = DaemonProcess(mixed, runtime_dir, "--arena", str(arena_bytes(checkpoint)))
    keys = [(layer, expert) for layer in range(6) for expert in range(8)]
    try:
        daemon.start()
        with ExpertClient(runtime_dir, "reader") as client:
            before = {}
            for key in keys:
                with client.leased([key]) as (lease,):
                    assert slot_bytes(client, lease.slot) == expert_bytes(checkpoint, *key)
                    before[key] = lease.slot
            rooms = client.arena.layout.rooms
        assert {rooms.room(slot) for slot in before.values()} == {0, 1, 2}
        daemon.kill()
        daemon.start()
        with ExpertClient(runtime_dir, "reader") as client:
            for key in keys:
                with client.leased([key]) as (lease,):
                    assert lease.slot == before[key]
                    assert slot_bytes(client, lease.slot) == expert_bytes(checkpoint, *key)
    finally:
        daemon.close()
