"""`python -m expert_daemon`: serve the experts of one model until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from protocol.arena.handover import listen_descriptors
from protocol.errors import HeadraceError
from protocol.open_files import raise_descriptor_limit
from protocol.setting_names import unknown_variables

from .arena import ARENA_NAME
from .config import PROG, load_config
from .daemon import Daemon, WrapSource
from .log import flush, log, log_bug

EXIT_BUG = 70
SWITCH_INTERVAL_S = 1e-4  # a reader that holds the interpreter lock gives it up to the loop soon


def main(arguments: Sequence[str], wrap_source: WrapSource | None = None, prog: str = PROG) -> int:
    """Return the exit status: 0 after a signal, 1 where the daemon could not start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    threading.excepthook = _end_on_bug
    try:
        return _serve(arguments, wrap_source, prog)
    finally:
        flush()


def _serve(arguments: Sequence[str], wrap_source: WrapSource | None, prog: str) -> int:
    for line in unknown_variables(os.environ).values():
        log(line)
    try:
        config = load_config(arguments, os.environ, prog)
        passed = listen_descriptors().get(ARENA_NAME)
        daemon = Daemon(config, passed_arena=passed, wrap_source=wrap_source)
    except HeadraceError as error:
        log(f"expert daemon: {error}")
        return 1
    daemon.run(stop_on_signals=True)
    return 0


def _end_on_bug(caught: threading.ExceptHookArgs) -> None:
    """A reader that died of a bug would keep its slot for ever: end, to be started again."""
    log_bug(caught.exc_value or caught.exc_type())
    log("a thread has failed: the daemon ends")
    flush()
    os._exit(EXIT_BUG)


def _end(_kind: type[BaseException], caught: BaseException, _trace: TracebackType | None) -> None:
    """End by a bug on the main thread, whatever the other threads do."""
    log_bug(caught)
    flush()
    os._exit(EXIT_BUG)


if __name__ == "__main__":
    sys.excepthook = _end
    status = main(sys.argv[1:])
    os._exit(status)  # a read that never returns must not keep the process
