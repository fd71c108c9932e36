"""GGUF models and quantised packs through the real daemon: ids, bits, slots of several sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from compute.connecting import connect_engine
from compute.experts.miss_client import MissClient
from compute.load import expert_shapes
from protocol.files.checkpoint import open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.fake_gguf import Typed
from tests.support.gguf_tokens import token_metadata
from tests.support.local_model import LocalModel
from tests.support.packing import pack
from tests.support.running_daemon import daemon_thread, smallest_arena

pytestmark = pytest.mark.timeout(120)

PLAY = "0,209,711,63,1288,278"
IDS = [3, 17, 40, 5, 5, 62, 0, 9, 33, 12, 51, 2, 8, 27, 44, 19, 6, 60]
EXPERTS = ["Q2_K", "Q4_K", "Q8_0", "MXFP4", "Q3_K", "BF16"]  # a layer each


@pytest.fixture(scope="module")
def demo_gguf(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as a split GGUF with all of its metadata and nothing beside it."""
    token_map = json.loads((demo_dir / "engram_token_map.json").read_text())
    more = token_metadata(demo_dir / "tokenizer.json") | {
        "deepseek41.engram.token_map": Typed("array:u32", token_map),
        "deepseek41.engram.pad_id": Typed("u32", token_map[2]),
    }
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    return convert(open_checkpoint(demo_dir), path, n_parts=3, more=more)


@pytest.fixture(autouse=True)
def _own_directories(runtime_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state_dir))


def last_object(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert headrace.main(list(arguments)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("named", ["file", "directory"])
def test_generate_writes_the_demos_ids(
    demo_gguf: Path, demo_dir: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    sample = json.loads((demo_dir / "expected.json").read_text())["samples"][0]["unrounded"]
    model = demo_gguf if named == "file" else demo_gguf.parent
    found = last_object(
        capsys, "generate", "--json", "--model", str(model), "--prompt-ids", PLAY, "--arena", "2MB",
        "--temperature", "0", "--max-tokens", "12", "--precision", "unrounded",
    )  # fmt: skip
    assert found["ids"] == sample["continuation_ids"][:12]
    assert found["text"].startswith("I will not be so bold")


def test_eval_gives_the_demos_perplexity(
    demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("What is the matter, that you keep so long?\n" * 3)
    common = ["eval", "--text", str(text), "--json", "--precision", "vendor"]
    official = last_object(capsys, *common, "--model", "demo")
    found = last_object(capsys, *common, "--model", str(demo_gguf))
    assert found["perplexity"] == official["perplexity"]


def through_the_daemon(path: Path, runtime_dir: Path) -> tuple[torch.Tensor, LocalModel]:
    """Logits of IDS over the smallest arena, and the model with sources of its own."""
    local = LocalModel(path)
    checkpoint = local.checkpoint
    size = smallest_arena(checkpoint, checkpoint.config.top_k)
    model = local.at("highway")
    with (
        daemon_thread(path, runtime_dir, arena_bytes=size, read_threads=2),
        connect_engine(runtime_dir, checkpoint, 20) as client,
    ):
        source = MissClient(client, expert_shapes(checkpoint))
        sequence = model.new_sequence(len(IDS))
        parts = []
        for first in range(0, len(IDS), 6):
            source.begin_step()
            part = IDS[first : first + 6]
            parts.append(model.forward(sequence, part, source, source, logits="all"))
            source.end_step()
        return torch.cat(parts), local


WIDE = {"engram_head_dim": 256, "num_nextn_predict_layers": 0}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An official checkpoint whose experts and Engram rows have 256 values a row."""
    directory = tmp_path_factory.mktemp("wide")
    return write_fake_checkpoint(
        directory / "model", n_layers=6, n_experts=16, hidden_size=256, expert_width=256,
        text_config=WIDE | {"compress_ratios": [0, 0, 2, 2, 2, 1]},
    )  # fmt: skip


def test_layers_of_other_types_share_one_arena(
    wide: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    def types(name: str, _shape: tuple[int, ...]) -> str | None:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        if ".experts.*." in name:
            return EXPERTS[layer]
        if name.endswith("engram.embed.weight"):
            return "Q2_K" if layer == 1 else "Q8_0"  # rows of 84 and of 272 bytes
        return None

    path = convert(open_checkpoint(wide), tmp_path / "m.gguf", types)
    found, local = through_the_daemon(path, runtime_dir)
    assert [table.row_bytes for table in local.checkpoint.engram_tables] == [84, 272]
    assert len({layout.image.slot_bytes for layout in local.checkpoint.slice_map.layouts}) > 4
    assert torch.equal(found, local.full(local.at("highway"), IDS))


def test_a_quantised_pack_gives_what_its_values_give(
    wide: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    pack(wide, tmp_path / "pack", "--experts", "q2k-q3k")
    found, local = through_the_daemon(tmp_path / "pack", runtime_dir)
    assert local.checkpoint.expert_format(3) == "Q2_K/Q3_K"
    assert torch.equal(found, local.full(local.at("highway"), IDS))
