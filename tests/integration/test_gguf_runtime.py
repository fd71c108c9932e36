"""Tokens by launches over a GGUF of blocks, through the real daemon: every way gives the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import headrace
from compute.assembly import make_experts
from compute.connecting import connect_engine
from compute.experts.device_experts import DeviceExperts
from compute.experts.request_io import Waiting
from compute.graph.exactness import run_matrix, sizes_of
from compute.graph.runner import Runner
from compute.model import tensor_reader
from compute.model.matrix import StackedMatrix, StoredMatrix
from compute.model.model import Model
from compute.model.sequence import Sequence
from compute.model.weights import load_weights
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.decode_rig import fresh_model
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.fake_gguf import WIDE
from tests.support.local_sources import LocalSources
from tests.support.running_daemon import daemon_thread, smallest_arena

pytestmark = pytest.mark.timeout(120)

# Of the routed experts' gate, up and down, a layer each: slots of three sizes.
EXPERTS = [("Q2_K", "Q2_K", "Q3_K"), ("Q4_K",) * 3, ("Q8_0",) * 3] * 2
DENSE = ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0"]
ROWS = {1: "Q2_K", 4: "Q8_0"}  # of 84 and of 272 bytes
PROMPT = [3, 17, 40, 5]
MODELS = [
    pytest.param("cpu", False, 2, id="cpu"),
    pytest.param("cpu", True, 2, id="cpu-stored", marks=pytest.mark.accept),
    pytest.param("cuda", True, 40, id="cuda", marks=pytest.mark.gpu),
]
Open = Callable[[int], contextlib.AbstractContextManager[DeviceExperts]]


def types(name: str, shape: tuple[int, ...]) -> str | None:
    """Each dense matrix has a type of its own in each layer, so those of one input often differ."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
    if ".experts.*." in name:
        return EXPERTS[layer][("w1", "w3", "w2").index(name.split(".")[-2])]
    if name.endswith("engram.embed.weight"):
        return ROWS[layer]
    is_dense = len(shape) == 2 and not any(part in name for part in (".hc_", "embed", ".gate."))
    if not is_dense or name.endswith(("q_weight", "k_weight")):
        return None
    return DENSE[(sum(name.encode()) + layer) % len(DENSE)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("mixed")
    official = write_fake_checkpoint(
        directory / "model", n_layers=6, n_experts=16, hidden_size=256, expert_width=256,
        text_config=WIDE,
    )  # fmt: skip
    return open_checkpoint(convert(open_checkpoint(official), directory / "m.gguf", types))


def load(
    checkpoint: Checkpoint, device: str, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> Model:
    monkeypatch.setattr(tensor_reader, "_keeps_stored", lambda _device: stored)
    return fresh_model(checkpoint, device)


@contextlib.contextmanager
def opened(checkpoint: Checkpoint, runtime_dir: Path, device: str) -> Iterator[Open]:
    """What opens experts over a daemon with the smallest arena."""

    @contextlib.contextmanager
    def experts_of(n_device: int) -> Iterator[DeviceExperts]:
        with connect_engine(runtime_dir, checkpoint, 20) as client:
            at = torch.device(device)
            experts = make_experts(checkpoint, client, Waiting(), n_device, at)
            yield experts
            experts.close()

    size = smallest_arena(checkpoint, checkpoint.config.top_k)
    with daemon_thread(checkpoint.path, runtime_dir, arena_bytes=size, read_threads=2) as daemon:
        yield experts_of
        daemon.daemon.cache.check()


def matrices_in(weights: object) -> Iterator[StoredMatrix | StackedMatrix]:
    """All dense matrices that are kept as they are stored."""
    if isinstance(weights, StoredMatrix | StackedMatrix):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from matrices_in(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from matrices_in(getattr(weights, field.name))


def test_the_gguf_has_every_format_that_there_are_kernels_for(
    mixed: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "_keeps_stored", lambda _device: True)
    found = list(matrices_in(load_weights(mixed, torch.device("cpu"))))
    stacks = [matrix.parts for matrix in found if isinstance(matrix, StackedMatrix)]
    assert {len(parts) for parts in stacks} == {2}
    alone = [matrix for matrix in found if isinstance(matrix, StoredMatrix)]
    assert {matrix.format for matrix in alone} == set(DENSE)
    assert len({layout.image.slot_bytes for layout in mixed.slice_map.layouts}) == 3
    assert [table.row_bytes for table in mixed.engram_tables] == [84, 272]


@pytest.mark.parametrize(("device", "stored", "n_tokens"), MODELS)
def test_every_way_to_decode_a_gguf_of_blocks_gives_the_same_bits(
    mixed: Checkpoint,
    device: str,
    stored: bool,
    n_tokens: int,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, own = load(mixed, device, stored, monkeypatch), mixed.config
    sizes = [0, 20] if device == "cpu" else sizes_of(own.n_keys, own.top_k, own.n_keys)
    with opened(mixed, runtime_dir, device) as experts_of:
        outcomes = run_matrix(
            model,
            experts_of,
            sizes=sizes,
            n_tokens=n_tokens,
            prompt=PROMPT,
        )
    assert len(outcomes) == 4 * len(sizes)
    assert not [outcome for outcome in outcomes if outcome.difference]
    assert all(outcome.n_misses for outcome in outcomes if outcome.case.n_device == 0)


@pytest.mark.parametrize(("device", "stored", "n_tokens"), MODELS)
def test_tokens_by_launches_give_the_logits_of_the_values(
    mixed: Checkpoint,
    device: str,
    stored: bool,
    n_tokens: int,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, source = load(mixed, "cpu", False, monkeypatch), LocalSources(mixed)
    model = load(mixed, device, stored, monkeypatch)
    drawn = torch.randint(3, 60, (4 * n_tokens,), generator=torch.Generator().manual_seed(4))
    ids = drawn.tolist()
    wanted = plain.forward(plain.new_sequence(len(ids)), ids, source, source, logits="all")
    found = []
    with opened(mixed, runtime_dir, device) as experts_of, experts_of(20) as experts:
        sequence = Sequence(model.config, len(ids), model.device, model.precision)
        runner = Runner(model, sequence, experts, mode="segment")
        for token in ids:
            runner.step(token)
            found.append(torch.from_numpy(runner.logits().copy()))
        runner.finish()
    logits = torch.stack(found)
    # Rounding to eight bits moves values over the edges of coarser roundings, and some picks.
    pair = torch.stack([logits.flatten(), wanted.flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.9


def test_the_command_asks_for_an_arena_that_the_daemon_accepts(
    mixed: Checkpoint,
    runtime_dir: Path,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = mixed.config
    half = sum(layout.image.slot_bytes for layout in mixed.slice_map.layouts) * own.n_experts // 2
    assert half < smallest_arena(mixed, own.top_k)
    monkeypatch.setattr("compute.graph.exactness.sizes_of", lambda *_: [0])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state_dir))
    command = ["verify", "--runtime", str(mixed.path), "--tokens", "1", "--device", "cpu"]
    assert headrace.main(command) == 0
    assert "4 ways, none different" in capsys.readouterr().out
