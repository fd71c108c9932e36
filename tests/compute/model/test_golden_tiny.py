"""The tiny golden data: the tool agrees with it, finds ties, refuses what is wrong."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import golden, near_ties
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.golden_files import read_golden, read_ids
from tests.support.golden_sources import open_sources
from tests.support.golden_writer import GoldenWriter

ROUND, NOROUND = "golden_round_fp32", "golden_noround_fp32"


def agrees(directory: Path, name: str) -> bool:
    """What the tool says of one golden file, without a daemon."""
    with open_sources(directory, local=True) as sources:
        return golden.Comparison(directory, sources).check(name)


def test_rounded_logits_agree_without_a_jump(tiny_dir, capsys):
    assert agrees(tiny_dir, ROUND)
    said = capsys.readouterr().out
    assert "DIFFERENT" not in said
    assert "first jump" not in said


def test_vendor_precision_gives_what_the_informative_file_has(tiny, tiny_dir, tiny_ids):
    data = read_golden(tiny_dir, "own_bf16_informative", tiny.config.n_layers)
    logits = tiny.full(tiny.at("vendor"), tiny_ids)
    # Bits on the machine that the file came from; elsewhere one rounding may fall the other way: a
    # quarter of the positions is left on one kind of processor, chance would leave none.
    share = ((logits - data.logits).abs().amax(1) < 0.05).float().mean()
    assert share > 0.1


@pytest.fixture
def copy_of_tiny(tiny_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    shutil.copytree(tiny_dir, folder, copy_function=shutil.copyfile)
    return folder


def jumping(
    writer: GoldenWriter, base: torch.Tensor, noted: list[near_ties.Noted], kind: str
) -> near_ties.Noted:
    """Write golden_round with the first rounding of a kind turned whose turn moves a logit."""
    for one in noted:
        if one.event.kind == kind:
            logits, _ = writer.write_round(frozenset({one.event}))
            if float((logits - base).abs().max()) > 0.01:
                return one
    raise AssertionError(f"no turned {kind} moves a logit by 0.01")


@pytest.mark.parametrize(
    "kind",
    [
        *("input", "latent"),
        *(pytest.param(kind, marks=pytest.mark.accept) for kind in ("window", "index key")),
    ],
)
def test_a_tie_that_fell_the_other_way_is_named_and_accepted(copy_of_tiny, capsys, kind):
    writer = GoldenWriter(copy_of_tiny, read_ids(copy_of_tiny))
    base, noted = writer.write_round(frozenset())
    turned = jumping(writer, base, noted, kind)
    assert agrees(copy_of_tiny, ROUND)
    said = capsys.readouterr().out
    assert "rounding tie: position" in said
    assert f"layer {turned.event.layer}: {kind} value" in said


def test_a_rounding_off_a_midpoint_is_refused(copy_of_tiny, capsys, monkeypatch):
    writer = GoldenWriter(copy_of_tiny, read_ids(copy_of_tiny))
    with monkeypatch.context() as wider:
        wider.setattr(near_ties, "RELATIVE", 0.02)
        base, noted = writer.write_round(frozenset())
        noted = [
            n
            for n in noted
            if abs(abs(n.value) - n.midpoint) > 0.002 * n.midpoint
            and n.event.layer == 0
            and n.event.number == 1
        ]
        jumping(writer, base, noted, "input")
    assert not agrees(copy_of_tiny, ROUND)
    assert "WRONG: position" in capsys.readouterr().out


def test_one_wrong_pick_of_the_unrounded_oracle_is_refused(copy_of_tiny, capsys):
    from safetensors.torch import load_file, save_file

    path = copy_of_tiny / f"{NOROUND}.safetensors"
    tensors = load_file(path)
    tensors["router.3.ids"][17, 0] ^= 1
    save_file(tensors, path)
    assert not agrees(copy_of_tiny, NOROUND)
    assert "router picks: DIFFERENT" in capsys.readouterr().out


@pytest.mark.accept
def test_another_size_of_folder_is_compared_alike(tmp_path, capsys):
    write_fake_checkpoint(tmp_path, seed=5, n_layers=11, n_experts=16, top_k=4, hidden_size=96)
    ids = torch.randint(0, 64, (31,), generator=torch.Generator().manual_seed(1)).tolist()
    GoldenWriter(tmp_path, ids).write()
    assert golden.compare(tmp_path, local=True)
    assert "31 positions" in capsys.readouterr().out


def test_a_folder_without_oracles_is_no_success(tmp_path, capsys):
    write_fake_checkpoint(tmp_path, n_layers=2)
    assert golden.main([str(tmp_path), "--local"]) == 1
    assert "has none of" in capsys.readouterr().out
