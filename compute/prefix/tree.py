"""Kept states by the ids that lead to them, within a budget of bytes.

A node stands at a position: its path from the root spells the ids before it, each node on it holds
the span of its own ids, and it may hold the front at its position. Only a node with a front can be
gone on from. Fronts leave by last use; a node without front, child or pin goes with its span.

Invariants: the bytes are those of all spans, ids and fronts; they never exceed the budget but for
pinned spans; what is used is the one node that is gone on from, not those before or behind it.
One thread uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np

from .snapshot import Front, Span

_NODE_BYTES = 2000  # of the objects themselves, about
_IDS = np.dtype("<i4")


def id_bytes(ids: Sequence[int]) -> bytes:
    """Return ids as the tree compares them."""
    return np.asarray(ids, _IDS).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A position in some text."""

    parent: Node | None
    ids: bytes  # from the parent's position to this one's
    span: Span | None  # None at the root alone
    position: int
    path_bytes: int  # of all spans from the root to here
    name: str = ""  # a hash of all ids from position 0 on
    front: Front | None = None
    n_pins: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)  # of the children's ids, in bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of the node without its front."""
        return 0 if self.span is None else self.span.n_bytes + len(self.ids) + _NODE_BYTES

    def spans(self) -> list[Span]:
        """Return the spans from position 0 to here."""
        found: list[Span] = []
        node: Node | None = self
        while node is not None and node.span is not None:
            found.append(node.span)
            node = node.parent
        return found[::-1]


class Store(Protocol):
    """What follows the tree, change by change."""

    def node_added(self, node: Node) -> None:
        """A node is there, its front not yet."""

    def front_added(self, node: Node) -> None:
        """The node has a front."""

    def front_dropped(self, node: Node) -> None:
        """It has none any more."""

    def node_removed(self, node: Node) -> None:
        """The node is gone."""

    def used(self, node: Node) -> None:
        """The node was gone on from."""


class PrefixTree:
    """The nodes of all texts.

    budget   bytes at most
    store    told of every change
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.store: Store | None = None
        self.n_bytes = 0
        self.root = Node(None, b"", None, 0, 0)
        self._fronts: OrderedDict[Node, None] = OrderedDict()  # the longest unused comes first

    @property
    def n_fronts(self) -> int:
        """Positions that can be gone on from."""
        return len(self._fronts)

    def longest(self, ids: Sequence[int]) -> Node:
        """Return the last node with a front on the way of `ids`, else the root; it counts as used.

        At least one id is left over, so that there is something to compute.
        """
        wanted = id_bytes(ids)
        best, reached = self.root, [self.root]
        while reached:
            node = reached.pop()
            if node.front is not None and node.position > best.position:
                best = node
            at = node.position * _IDS.itemsize
            for length in node.lengths:
                if at + length < len(wanted):
                    child = node.children.get(wanted[at : at + length])
                    reached += [] if child is None else [child]
        if best.front is not None:
            self._fronts.move_to_end(best)
            if self.store is not None:
                self.store.used(best)
        return best

    def fits(self, parent: Node, n_bytes: int) -> bool:
        """Whether a node below `parent` could stay, everything else given up."""
        return parent.path_bytes + n_bytes + _NODE_BYTES <= self.budget

    def add(self, parent: Node, ids: bytes, span: Span, front: Front) -> Node:
        """Keep a state below `parent`, which is pinned, and return its node, pinned as well.

        What is there already stays. The caller has asked `fits`.
        """
        node = parent.children.get(ids) or self.graft(parent, ids, span)
        self.set_front(node, front)
        self.pin(node)
        self.shrink()
        return node

    def graft(self, parent: Node, ids: bytes, span: Span) -> Node:
        """Put a node without a front below `parent`."""
        node = Node(parent, ids, span, parent.position + len(ids) // _IDS.itemsize, 0)
        node.path_bytes = parent.path_bytes + node.own_bytes
        node.name = blake2b(parent.name.encode() + ids, digest_size=16).hexdigest()
        parent.children[ids] = node
        parent.lengths[len(ids)] += 1
        self.n_bytes += node.own_bytes
        if self.store is not None:
            self.store.node_added(node)
        return node

    def set_front(self, node: Node, front: Front) -> None:
        """Give the node a front, where it has none; it counts as used."""
        if node.front is None:
            node.front = front
            self.n_bytes += front.n_bytes
            if self.store is not None:
                self.store.front_added(node)
        self._fronts[node] = None
        self._fronts.move_to_end(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        left = list(self.root.children.values())
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def pin(self, node: Node) -> None:
        """Keep the node, if not its front, until it is unpinned as often."""
        node.n_pins += 1

    def unpin(self, node: Node) -> None:
        """Take a pin away."""
        node.n_pins -= 1
        self.prune(node)

    def shrink(self) -> None:
        """Give up the longest unused until the budget holds."""
        while self.n_bytes > self.budget and self._fronts:
            node, _ = self._fronts.popitem(last=False)
            assert node.front is not None
            self.n_bytes -= node.front.n_bytes
            node.front = None
            if self.store is not None:
                self.store.front_dropped(node)
            self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove the node and those before it that nothing needs."""
        parent = node.parent
        while parent and not (node.front or node.children or node.n_pins):
            del parent.children[node.ids]
            parent.lengths[len(node.ids)] -= 1
            parent.lengths += Counter()  # drops what is zero
            self.n_bytes -= node.own_bytes
            if self.store is not None:
                self.store.node_removed(node)
            node.parent = None
            node, parent = parent, parent.parent
