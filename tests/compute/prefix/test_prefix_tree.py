"""The tree alone, over states that only have a size; against a plain list of texts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, cast

import pytest

from compute.prefix.snapshot import Front, Span
from compute.prefix.tree import Node, PrefixTree, id_bytes

SPAN, FRONT = 100, 1000


@dataclass
class Sized:
    position: int
    n_bytes: int


def grow(tree: PrefixTree, ids: list[int], step: int = 8) -> Node:
    """What a request does: go on from the longest prefix, keep each `step` ids and the end."""
    node = tree.longest(ids)
    tree.pin(node)
    while node.position < len(ids):
        end = min(len(ids), (node.position // step + 1) * step)
        span, front = Sized(end, SPAN * (end - node.position)), Sized(end, FRONT)
        part = id_bytes(ids[node.position : end])
        if not tree.fits(node, len(part) + span.n_bytes + front.n_bytes):
            break
        grown = tree.add(node, part, cast(Span, span), cast(Front, front))
        tree.unpin(node)
        node = grown
    tree.unpin(node)
    return node


def counted(tree: PrefixTree) -> tuple[int, int]:
    """Bytes and fronts, by walking; no node is there for nothing."""
    n_bytes, n_fronts, left = 0, 0, [tree.root]
    while left:
        node = left.pop()
        assert node is tree.root or node.front or node.children
        assert node.n_pins == 0
        assert sorted(node.lengths.elements()) == sorted(map(len, node.children))
        n_bytes += node.own_bytes + (node.front.n_bytes if node.front else 0)
        n_fronts += node.front is not None
        left += node.children.values()
    return n_bytes, n_fronts


def test_the_longest_kept_prefix_is_found_and_one_id_is_left_over() -> None:
    tree = PrefixTree(10**9)
    text = list(range(100, 130))
    grow(tree, text)
    for n in range(1, 31):
        assert tree.longest(text[:n]).position == (n - 1) // 8 * 8
    assert tree.longest([*text, 1]).position == 30
    assert tree.longest([*text[:20], 1, 1, 1, 1, 1]).position == 16
    assert tree.longest([5, *text[1:]]) is tree.root


@pytest.mark.parametrize("seed", range(5))
def test_bytes_stay_within_the_budget_and_what_is_found_was_put_there(seed: int) -> None:
    made = random.Random(seed)
    tree = PrefixTree(60_000)
    texts: list[list[int]] = []
    for _ in range(150):
        base = made.choice(texts)[: made.randint(1, 60)] if texts and made.random() < 0.8 else []
        ids = base + [made.randint(0, 3) for _ in range(made.randint(1, 30))]
        found = tree.longest(ids)
        prefix = ids[: found.position]
        assert not prefix or any(text[: len(prefix)] == prefix for text in texts)
        assert sum(cast(Any, span).n_bytes for span in found.spans()) == SPAN * found.position
        grow(tree, ids)
        texts.append(ids)
        assert (tree.n_bytes, tree.n_fronts) == counted(tree)
        assert tree.n_bytes <= tree.budget


def test_short_texts_give_way_to_each_other_before_a_session_that_is_used() -> None:
    tree = PrefixTree(200_000)
    session = [0, *range(1000, 1200)]
    grow(tree, session)
    for n in range(400):
        grow(tree, [0, 50_000 + n])
        if n % 20 == 0:
            assert tree.longest([*session, 7]).position == len(session)
    assert tree.longest([*session, 7]).position == len(session)


def test_a_common_beginning_is_not_a_use_of_what_lies_behind_it() -> None:
    tree = PrefixTree(90_000)
    begin = list(range(8))
    old, new = begin + [11] * 60, begin + [12] * 60
    grow(tree, old)
    grow(tree, new)
    for n in range(60):
        grow(tree, [*begin, 100 + n])  # uses the 8, and pushes out the longest unused
        if tree.longest([*old, 1]).position < len(old):
            break
        tree.longest([*new, 1])
    assert tree.longest([*begin, 5]).position == 8
    assert tree.longest([*new, 1]).position == len(new)


def test_a_text_beyond_the_budget_stops_being_kept_and_leaves_others_alone() -> None:
    tree = PrefixTree(40_000)
    grow(tree, [1] * 8)
    grow(tree, list(range(1000)))
    assert (tree.n_bytes, tree.n_fronts) == counted(tree)
    assert tree.n_bytes <= tree.budget
    tiny = PrefixTree(10)
    assert grow(tiny, [1] * 8) is tiny.root
    assert tiny.n_bytes == 0
