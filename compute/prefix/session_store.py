"""The tree's states on disk, so that a restart goes on from them: `--session-dir`.

`DIR/<weights>-<precision>/` has, for each node, `<name>.span`, and `<name>.front` where it has
a front; the name is a hash of all ids up to the node. The files follow the tree: what it gives up
is deleted. A thread of its own writes them, in the tree's order; a crash at any instant leaves
whole files, of which those without their parents are deleted at the next start.

Invariants: a file is written beside its place, synced and moved there; no request waits for a
disk, and none fails by one: what cannot be written is logged, counted, and missing after a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from protocol.errors import ConfigError

from .session_files import front_file, read_front, read_span, span_file
from .snapshot import Span
from .tree import Node, PrefixTree

_LOG = logging.getLogger("headrace.compute")
_MOST_WAITING = 256  # writes; beyond them the disk is too slow, and states are not written
_CLOSE_S = 30.0

Job = Callable[[], None]


class SessionStore:
    """One directory of one model at one precision; it has the directory to itself."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where the directory cannot be had."""
        self.directory = directory
        self.n_unwritten = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"{directory}: another process keeps sessions here") from error
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be used: {error.strerror}") from error
        self._jobs: queue.Queue[Job | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="sessions", daemon=True)

    def load(self, tree: PrefixTree) -> None:
        """Fill an empty tree, within its budget, and follow it from then on.

        Raises ConfigError where the directory cannot be read.
        """
        try:
            self._load(tree)
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be used: {error.strerror}") from error
        tree.store = self
        self._thread.start()

    def _load(self, tree: PrefixTree) -> None:
        nodes = self._load_spans(tree)
        for path in sorted(self.directory.glob("*.front"), key=_last_use):
            node, front = nodes.get(path.stem), read_front(path.read_bytes())
            if node is not None and front is not None and front.position == node.position:
                tree.set_front(node, front)
        tree.shrink()
        for node in nodes.values():
            tree.prune(node)
        self._delete_strangers(tree)

    def _load_spans(self, tree: PrefixTree) -> dict[str, Node]:
        """Graft every span whose parents are there too."""
        by_parent: dict[str, list[tuple[Span, bytes]]] = {}
        for path in self.directory.glob("*.span"):
            found = read_span(path.read_bytes())
            if found is not None:
                by_parent.setdefault(found[2], []).append(found[:2])
        nodes: dict[str, Node] = {}
        reached = [tree.root]
        while reached:
            parent = reached.pop()
            for span, ids in by_parent.get(parent.name, ()):
                if ids not in parent.children:
                    node = tree.graft(parent, ids, span)
                    nodes[node.name] = node
                    reached.append(node)
        return nodes

    def _delete_strangers(self, tree: PrefixTree) -> None:
        """Delete all files that belong to no node: damaged, half written, without parents."""
        known = {"lock"}
        for node in tree.nodes():
            known |= {f"{node.name}.span"} | ({f"{node.name}.front"} if node.front else set())
        for path in self.directory.iterdir():
            if path.name not in known:
                path.unlink()

    def node_added(self, node: Node) -> None:
        """Write the span."""
        span, parent = node.span, node.parent
        assert span is not None
        assert parent is not None
        self._write(f"{node.name}.span", partial(span_file, span, node.ids, parent.name))

    def front_added(self, node: Node) -> None:
        """Write the front."""
        assert node.front is not None
        self._write(f"{node.name}.front", partial(front_file, node.front))

    def front_dropped(self, node: Node) -> None:
        """Delete the front."""
        self._put(partial(self._delete, f"{node.name}.front"))

    def node_removed(self, node: Node) -> None:
        """Delete the span."""
        self._put(partial(self._delete, f"{node.name}.span"))

    def used(self, node: Node) -> None:
        """Give the front's file the time of now."""
        path = self.directory / f"{node.name}.front"

        def touch() -> None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)

        self._put(touch)

    def close(self) -> None:
        """Write what waits, for at most half a minute, and give the directory back."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._jobs.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        os.close(self._lock)

    def _put(self, job: Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._missed("the disk is too slow")

    def _write(self, name: str, contents: Callable[[], bytes]) -> None:
        def write() -> None:
            path = self.directory / name
            new = path.with_name(name + ".new")
            try:
                with new.open("wb") as file:
                    file.write(contents())
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(path)
                self._sync()
            except OSError:
                new.unlink(missing_ok=True)
                raise

        self._put(write)

    def _delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)

    def _sync(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                self._missed(error.strerror or str(error))

    def _missed(self, why: str) -> None:
        self.n_unwritten += 1
        _LOG.warning("%s: a state could not be kept: %s", self.directory, why)


def _last_use(path: Path) -> int:
    return path.stat().st_mtime_ns
