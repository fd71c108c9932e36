"""The daemon's lock on its runtime directory, the same as every service's."""

from __future__ import annotations

from protocol.runtime_lock import RuntimeLock, prepare_directory

__all__ = ["RuntimeLock", "prepare_directory"]
