"""What the engine asks: go on from the longest known prefix, and keep the states on the way.

Invariants: a request that goes on from a state kept at a multiple of the chunk, on whose way all
forwards were cut at such multiples, gives the bits of a request that began at 0. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from compute.model.sequence import Sequence as ModelSequence

from .snapshot import restore, take_front, take_span
from .tree import Node, PrefixTree, id_bytes


class PrefixCache:
    """States of earlier requests of one model at one precision.

    budget   bytes at most
    """

    def __init__(self, budget: int) -> None:
        self.tree = PrefixTree(budget)

    def resume(self, sequence: ModelSequence, prompt_ids: Sequence[int]) -> Trail:
        """Bring an empty sequence to the longest known prefix of the prompt, if there is one.

        At least the last id is left to compute. The trail is to be closed.
        """
        node = self.tree.longest(prompt_ids)
        if node.front is not None:
            restore(sequence, node.spans(), node.front)
        return Trail(self.tree, sequence, node)


class Trail:
    """One request's way through the tree: where its last kept state is, and the ids since.

    Holds a pin on that node until it is closed, so that what follows has its spans.
    """

    def __init__(self, tree: PrefixTree, sequence: ModelSequence, node: Node) -> None:
        self._tree = tree
        self._sequence = sequence
        self._node = node
        self._ids: list[int] = []  # taken in since the node
        self.n_cached = node.position  # prompt ids that need no computing
        tree.pin(node)

    def took(self, ids: Sequence[int]) -> None:
        """The sequence has taken these in."""
        self._ids.extend(ids)

    def keep(self) -> None:
        """Keep the sequence's state, where something has come in since and it has room."""
        tree, node = self._tree, self._node
        if not self._ids:
            return
        assert node.position + len(self._ids) == self._sequence.position
        span, front = take_span(self._sequence, node.position), take_front(self._sequence)
        ids = id_bytes(self._ids)
        if not tree.fits(node, len(ids) + span.n_bytes + front.n_bytes):
            return
        self._node = tree.add(node, ids, span, front)
        self._ids.clear()
        tree.unpin(node)

    def close(self) -> None:
        """The request has ended."""
        self._tree.unpin(self._node)
