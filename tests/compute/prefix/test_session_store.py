"""Kept states survive a restart; whatever a crash leaves of them is either right or gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from compute.prefix.packed_rows import Form, PackedRows
from compute.prefix.session_store import SessionStore
from compute.prefix.snapshot import Front, Span
from compute.prefix.tree import Node, PrefixTree, id_bytes
from compute.prefix.weights_tag import weights_tag
from protocol.errors import ConfigError
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import write_fake_checkpoint

BUDGET = 1 << 20


def state(first: int, ids: list[int]) -> tuple[Span, Front]:
    """A state that tells its ids: rows of every form and dtype."""
    end = first + len(ids)
    codes = torch.tensor(ids, dtype=torch.uint8)[:, None].repeat(1, 16)
    rows = {2: PackedRows(Form.LATENT, (codes, codes[:, :2])), 5: PackedRows(Form.RAW, (codes,))}
    keys = {layer: PackedRows(Form.INDEX, (codes[:0], codes[:0, :1])) for layer in rows}
    windows = PackedRows(Form.RAW, (torch.full((3, 8), end, dtype=torch.bfloat16),))
    open_groups = {2: (torch.full((end % 2, 4), 0.1), torch.full((end % 2, 4), -torch.inf))}
    last = np.array([end, -1, -1], np.int64)
    return Span(first, end, rows, keys), Front(end, windows, open_groups, last, None)


def grow(tree: PrefixTree, ids: list[int]) -> None:
    node = tree.longest(ids)
    tree.pin(node)
    while node.position < len(ids):
        part = ids[node.position : (node.position // 4 + 1) * 4]
        grown = tree.add(node, id_bytes(part), *state(node.position, part))
        tree.unpin(node)
        node = grown
    tree.unpin(node)


def open_at(directory: Path, budget: int = BUDGET) -> tuple[PrefixTree, SessionStore]:
    tree, store = PrefixTree(budget), SessionStore(directory)
    store.load(tree)
    return tree, store


def check(node: Node, ids: list[int]) -> None:
    """The state of the node is the one of these ids."""
    at = 0
    for span in node.spans():
        wanted, _ = state(at, ids[at : span.end])
        for layer, rows in wanted.rows.items():
            pairs = [(rows, span.rows[layer]), (wanted.keys[layer], span.keys[layer])]
            for one, other in pairs:
                assert one.form is other.form
                for part, back in zip(one.parts, other.parts, strict=True):
                    assert part.dtype == back.dtype
                    assert part.equal(back)
        at = span.end
    assert at == node.position
    if node.front is not None:
        _, wanted_front = state(at - 1, ids[at - 1 : at])
        assert node.front.windows.parts[0].equal(wanted_front.windows.parts[0])
        for kept, back in zip(wanted_front.open_groups[2], node.front.open_groups[2], strict=True):
            assert kept.equal(back)
        assert node.front.last_ids.tolist() == wanted_front.last_ids.tolist()


TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9], [7, 7]]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    tree, store = open_at(tmp_path / "kept")
    for text in TEXTS:
        grow(tree, text)
    store.close()
    return store.directory


def test_a_restart_knows_what_was_kept(kept: Path) -> None:
    tree, store = open_at(kept)
    assert tree.n_fronts == 5
    for text in TEXTS:
        node = tree.longest([*text, 99])
        assert node.position == len(text)
        check(node, text)
    store.close()
    assert {path.suffix for path in kept.iterdir()} == {"", ".span", ".front"}


def test_what_the_tree_gives_up_is_deleted_and_use_is_remembered(kept: Path) -> None:
    tree, store = open_at(kept)
    n_bytes = tree.n_bytes
    tree.longest([7, 7, 1])  # now the last used
    store.close()
    tree, store = open_at(kept, n_bytes // 3)
    assert tree.n_bytes <= tree.budget
    assert tree.longest([7, 7, 1]).position == 2
    grow(tree, [3, 3])
    store.close()
    names = {node.name for node in tree.nodes()}
    assert {path.stem for path in kept.glob("*.span")} == names
    assert len(list(kept.glob("*.front"))) == tree.n_fronts


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "empty"])
def test_any_harmed_file_costs_only_what_needs_it(kept: Path, harm: str, tmp_path: Path) -> None:
    for number, name in enumerate(sorted(path.name for path in kept.iterdir())):
        copy = tmp_path / str(number)
        shutil.copytree(kept, copy)
        path = copy / name
        data = path.read_bytes()
        if harm == "gone":
            path.unlink()
        elif data:
            flipped = bytes([*data[:-20], data[-20] ^ 1, *data[-19:]])
            path.write_bytes({"cut": data[:-9], "flipped": flipped, "empty": b""}[harm])
        (copy / (name + ".new")).write_bytes(data[:40])
        tree, store = open_at(copy)
        for text in TEXTS:
            check(tree.longest([*text, 99]), text)
        if name != "lock":
            assert tree.n_fronts < 5
        grow(tree, [1, 2, 3, 4, 5, 6])
        store.close()
        again, store = open_at(copy)
        assert again.n_bytes == tree.n_bytes
        check(again.longest([1, 2, 3, 4, 5, 6, 9]), [1, 2, 3, 4, 5, 6])
        store.close()


def test_a_full_disk_loses_states_and_no_request(kept: Path, monkeypatch, caplog) -> None:
    tree, store = open_at(kept)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        grow(tree, [4, 4, 4, 4, 4])
        store.close()
    assert store.n_unwritten == 4
    assert "No space left" in caplog.text
    assert not list(kept.glob("*.new"))
    tree, store = open_at(kept)
    assert tree.longest([4, 4, 4, 4, 4]) is tree.root
    assert tree.n_fronts == 5
    store.close()


def test_a_directory_serves_one_process_at_a_time(kept: Path) -> None:
    _, store = open_at(kept)
    with pytest.raises(ConfigError, match="another process keeps sessions here"):
        SessionStore(kept)
    store.close()
    (kept.parent / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        SessionStore(kept.parent / "file")


def test_states_of_other_weights_are_not_taken_for_ours(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path / "a", seed=0)
    write_fake_checkpoint(tmp_path / "b", seed=1)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    a, b, c = (open_checkpoint(tmp_path / name) for name in "abc")
    assert a.fingerprint == b.fingerprint
    assert weights_tag(a) == weights_tag(c) != weights_tag(b)
