"""A small first program of a child: ties it to its parent, places its arena, becomes the command.

Run as `python -I -S tied_start.py PARENT_PID DESCRIPTOR COMMAND...`. The kernel then ends the
command with SIGTERM when the parent's starting thread ends, however that happens. Nothing runs
between fork and exec of the parent, which has threads; and only the child itself can know the pid
that LISTEN_PID must name. DESCRIPTOR is that of an arena to hand over, or -1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
LISTEN_START = 3  # the first descriptor of LISTEN_FDS


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the command."""
    parent, descriptor, command = int(arguments[0]), int(arguments[1]), list(arguments[2:])
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG was refused")
    if os.getppid() != parent:
        raise SystemExit("the parent has gone before its child began")
    if descriptor >= 0:
        if descriptor == LISTEN_START:
            os.set_inheritable(descriptor, True)
        else:
            os.dup2(descriptor, LISTEN_START, inheritable=True)
            os.close(descriptor)
        os.environ |= {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": "1",
            "LISTEN_FDNAMES": "arena",
        }
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
