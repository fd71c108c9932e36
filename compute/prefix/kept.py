"""The states that a process keeps of earlier requests, from its settings: none, in memory, on disk.

The directory on disk is of one model, precision and way of computing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from compute.config import ComputeConfig
from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint

from .cache import PrefixCache
from .session_store import SessionStore
from .weights_tag import weights_tag

_LOG = logging.getLogger("headrace.compute")


@contextlib.contextmanager
def kept_prefixes(config: ComputeConfig, checkpoint: Checkpoint) -> Iterator[PrefixCache | None]:
    """Give the cache that the settings ask for. Raises ConfigError."""
    if not config.prefix_cache:
        if config.session_dir is not None:
            raise ConfigError("--session-dir keeps nothing with --prefix-cache 0")
        yield None
        return
    cache = PrefixCache(config.prefix_cache)
    if config.session_dir is None:
        yield cache
        return
    defect = "-defect" if config.vendor_decode_defect else ""
    name = f"{weights_tag(checkpoint)}-{config.precision}{defect}"
    store = SessionStore(config.session_dir / name)
    try:
        store.load(cache.tree)
        _LOG.info("%d states of earlier requests in %s", cache.tree.n_fronts, store.directory)
        yield cache
    finally:
        store.close()
