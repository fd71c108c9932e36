"""The exceptions that headrace raises, sorted by what the reader should do about them.

A message says where, what was found and what was wanted:
`layer 7 expert 212: slice ends at 912384, shard experts-00003 has 908288 bytes`.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that a user of headrace may see."""


class ConfigError(HeadraceError):
    """A setting, a flag or a config file is wrong: mend it and start again."""


class ShardError(HeadraceError):
    """A weight file is missing, damaged or not what its header says: mend the weights."""


class ProtocolError(HeadraceError):
    """The two sides do not speak the same version, model or layout."""


class DaemonLost(HeadraceError):
    """The expert daemon did not answer in time or is gone: wait for it or restart it."""


class DaemonBusy(HeadraceError):
    """The daemon has no room for this now: try again later, or release leases.

    pid   of the process that is in the way; 0 where it is not one process
    """

    def __init__(self, text: str, pid: int = 0) -> None:
        super().__init__(text)
        self.pid = pid


class LeaseLost(HeadraceError):
    """A leased slot was taken back, so its bytes may no longer be those of the key."""


class CaptureError(HeadraceError):
    """A graph could not be captured: go on eagerly."""


def why_unread(error: Exception) -> str:
    """Return why a file could not be had, without its path, which the message names itself."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
