"""The expert daemon that a command uses: one that runs already, or a child that ends with us.

A child is tied to this process by the parent-death signal (see tied_start.py), restarted when it
dies, and handed the arena that its predecessor left: this process holds a descriptor of it.
Invariants: a daemon that we did not start is never stopped; a child never outlives us; nobody else
finds the child of a command that was given no runtime directory, because that directory is private.
Children are started by the thread that calls `tend`, which must live as long as they: the main one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compute.config import ComputeConfig, private_environment
from protocol.errors import ConfigError, DaemonLost, HeadraceError
from protocol.runtime_dir import DESCRIPTOR_NAME, default_runtime_dir

from .daemon_table import daemon_flags
from .supervision import kill

if TYPE_CHECKING:
    from protocol.wire.client import ExpertClient

LOG_NAME = "expertd.log"
_PRIVATE_PREFIX = "headrace-"
_MAX_FAILURES = 5  # starts in a row that never became ready
_FIRST_PAUSE_S = 0.1  # doubled with each failure
_STOP_S = 5.0
_LOG_TAIL_BYTES = 4096


def daemon_runs(runtime_dir: Path) -> bool:
    """Whether a daemon answers in `runtime_dir`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(runtime_dir / DESCRIPTOR_NAME))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon is to be found."""

    runtime_dir: Path
    private: bool  # made for this process, removed with it
    looked_in: Path | None = None  # the default one, where no daemon runs


def find_place(config: ComputeConfig, environment: Mapping[str, str]) -> Place:
    """Return the runtime directory given; else the default one where a daemon runs; else a new one.

    The new one is private, so that commands that run at once do not meet: mode 0700 with a name
    that nobody can foresee, in $XDG_RUNTIME_DIR or the temporary directory.
    """
    if config.runtime_dir is not None:
        return Place(config.find_runtime_dir(environment), private=False)
    default = None
    with contextlib.suppress(ConfigError):
        default = default_runtime_dir(environment)
        if daemon_runs(default):
            return Place(default, private=False)
    base = environment.get("XDG_RUNTIME_DIR")
    base = base if base and os.access(base, os.W_OK) else tempfile.gettempdir()
    _remove_left_over(Path(base))
    made = tempfile.mkdtemp(prefix=f"{_PRIVATE_PREFIX}{os.getpid()}-", dir=base)
    return Place(Path(made), private=True, looked_in=default)


def _remove_left_over(base: Path) -> None:
    """Remove private directories of ours whose process has been killed."""
    for path in base.glob(f"{_PRIVATE_PREFIX}*-*"):
        pid = path.name.removeprefix(_PRIVATE_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            ours = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
            if ours and pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(path, ignore_errors=True)


class DaemonChild:
    """An expert daemon started by this process."""

    def __init__(
        self,
        arguments: list[str],
        runtime_dir: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._arguments = arguments
        self._runtime_dir = runtime_dir
        self._log = runtime_dir / LOG_NAME
        self._environment = private_environment(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._arena = -1
        self._ready = False  # the running child has answered
        self._ever_ready = False
        self._n_failures = 0
        self._start_at = 0.0

    def start(self) -> None:
        """Start the child; it is ready when it answers."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if self._arena < 0 else (self._arena,),
                env=self._environment | {"PYTHONPATH": self._python_path()},
                process_group=0,  # Ctrl-C in the terminal is ours to handle
            )
        self._ready = False

    @property
    def runs(self) -> bool:
        """Whether the child is alive."""
        return self._process is not None and self._process.poll() is None

    def ready(self, arena: int) -> None:
        """Note that the child has answered, and take over `arena`, a descriptor of its memory."""
        self._ready = self._ever_ready = True
        self._n_failures = 0
        self._close_arena()
        self._arena = arena

    def tend(self) -> None:
        """Start the child again where it has died; call while waiting for its answer.

        Raises what its last words say when it cannot start, DaemonLost after several failures.
        """
        if self._process is None:  # another daemon took its place
            if not daemon_runs(self._runtime_dir):
                self.start()
            return
        if self._process.poll() is None:
            return
        if self._start_at == 0.0:
            self._note_death()
        if time.monotonic() >= self._start_at:
            self._start_at = 0.0
            self.start()

    def _note_death(self) -> None:
        assert self._process is not None
        if not self._ready:
            self._n_failures += 1
        if not self._ever_ready and self._process.returncode > 0:
            raise ConfigError(f"the expert daemon did not start: {self.last_words()}")
        if self._n_failures >= _MAX_FAILURES:
            raise DaemonLost(
                f"the expert daemon died {self._n_failures} times before it was ready, "
                f"last with status {self._process.returncode}: {self.last_words()}"
            )
        pause = _FIRST_PAUSE_S * 2 ** (self._n_failures - 1) if self._n_failures else 0.0
        self._start_at = time.monotonic() + pause

    def stand_down(self) -> None:
        """Leave the directory to another daemon that runs there."""
        self._process = None
        self._n_failures = 0
        self._start_at = 0.0

    def last_words(self) -> str:
        """The end of what the child wrote, for an error's text."""
        try:
            text = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError as error:
            return f"{self._log}: {error.strerror}"
        return text or "it wrote nothing"

    def stop(self) -> None:
        """End the child and give its arena back."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                kill(process, "the expert daemon")
        self._close_arena()

    def _command(self) -> list[str]:
        starter = Path(__file__).with_name("tied_start.py")
        return [
            *(sys.executable, "-I", "-S", str(starter)),
            *(str(os.getpid()), str(self._arena)),
            *(sys.executable, "-m", "expert_daemon", *self._arguments),
            *("--runtime-dir", str(self._runtime_dir)),
        ]

    def _python_path(self) -> str:
        """The folder of our packages first: the child must be of the same headrace."""
        root = str(Path(__file__).resolve().parents[2])
        inherited = self._environment.get("PYTHONPATH")
        return root if not inherited else root + os.pathsep + inherited

    def _close_arena(self) -> None:
        if self._arena >= 0:
            os.close(self._arena)
            self._arena = -1


def daemon_arguments(config: ComputeConfig, model: Path) -> list[str]:
    """Return the flags of a daemon for `model` at what the settings say."""
    arguments = ["--model", str(model.absolute())]
    if config.arena is not None:
        arguments += ["--arena", str(config.arena)]
    if config.read_threads is not None:
        arguments += ["--read-threads", str(config.read_threads)]
    if config.state_dir is not None:
        arguments += ["--state-dir", str(config.state_dir)]
    return arguments


@dataclass(frozen=True, slots=True)
class DaemonInUse:
    """A daemon, ours or not."""

    runtime_dir: Path
    child: DaemonChild | None  # None: it ran before us and is left alone
    looked_in: Path | None = None  # where a daemon was looked for; None: there was no such place

    def tend(self) -> None:
        """Keep our own child running; where another daemon took its place, use that one."""
        if self.child is None:
            return
        try:
            self.child.tend()
        except HeadraceError:
            if not daemon_runs(self.runtime_dir):
                raise
            self.child.stand_down()

    def attached(self, client: ExpertClient) -> None:
        """Note that `client` reached the daemon; keep our own child's arena for its successor."""
        if self.child is not None and self.child.runs:
            self.child.ready(os.dup(client.arena_descriptor))


@contextlib.contextmanager
def daemon_in_use(
    config: ComputeConfig, model: Path, environment: Mapping[str, str]
) -> Iterator[DaemonInUse]:
    """Find a running daemon or start a child, and stop the child at the end."""
    place = find_place(config, environment)
    child = None
    try:
        if place.private or not daemon_runs(place.runtime_dir):
            _make_runtime_dir(place.runtime_dir)
            table = daemon_flags(config.settings_file, private=True)
            arguments = table + daemon_arguments(config, model)  # of two the last one counts
            child = DaemonChild(arguments, place.runtime_dir, environment)
            child.start()
        looked_in = place.looked_in if place.private else place.runtime_dir
        yield DaemonInUse(place.runtime_dir, child, looked_in)
    finally:
        if child is not None:
            child.stop()
        if place.private:
            shutil.rmtree(place.runtime_dir, ignore_errors=True)


def _make_runtime_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"runtime directory {path}: {error.strerror}; wanted a directory of our own, "
            "choose another --runtime-dir"
        ) from None
