"""`headrace serve`: the APIs of a model over HTTP.

Starts what does not run yet in the runtime directory as children: the expert daemon, the compute
service, the HTTP frontend. Each is the process that systemd would start; here they are kept
running until SIGTERM or Ctrl-C, then ended in the order in which nothing is lost: the frontend
drains first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from compute.config import (
    COMPUTE_KEYS,
    DAEMON_OPTIONS,
    MODEL_OPTIONS,
    SERVICE_OPTIONS,
    ComputeConfig,
    add_config_arguments,
    load_config,
    private_environment,
)
from compute.frontend.config import (
    FRONTEND_OPTIONS,
    FrontendConfig,
    add_frontend_arguments,
    load_frontend_config,
    read_tokens,
)
from compute.frontend.listener import listen
from compute.options import switch
from protocol.errors import ConfigError
from protocol.files.checkpoint import open_checkpoint, resolve_model
from protocol.runtime_dir import default_runtime_dir
from protocol.runtime_lock import prepare_directory
from protocol.sd_notify import notify
from protocol.wire.sockets import RuntimePaths

from .children import Place, daemon_arguments, daemon_runs, find_place
from .daemon_table import daemon_flags
from .supervision import Child, ChildFailed, Program, Supervisor

_LOOK_S = 60.0
_UNREACHABLE = 2  # exit status of compute.device
_JOINED = "X_HEADRACE_JOINED"  # the frontend's word for compute being there
_SPARE_S = 5.0  # beyond the frontend's own drain
_FRONTEND_FLAGS = tuple(
    name
    for name, option in FRONTEND_OPTIONS.items()
    if option.has_flag and name not in ("model", "runtime_dir")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model, daemon, queue and HTTP."""
    ours = ("max_waiting", "prefix_cache", "session_dir")
    add_config_arguments(parser, MODEL_OPTIONS + DAEMON_OPTIONS + ours)
    add_frontend_arguments(parser, _FRONTEND_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status."""
    config = load_config(args, os.environ)
    frontend = load_frontend_config(args, os.environ, COMPUTE_KEYS)
    if frontend.token_file is not None:
        read_tokens(frontend.token_file)
    model = open_checkpoint(resolve_model(config.model)).path.absolute()
    listen(frontend).close()  # refused before a daemon fills its arena
    with _runtime_dir(config) as runtime_dir:
        config = replace(config, model=str(model), runtime_dir=runtime_dir)
        frontend = replace(frontend, model=str(model), runtime_dir=runtime_dir)
        starts_compute = not _compute_runs(runtime_dir)
        if starts_compute:
            _check_device(config.device)
        supervisor = Supervisor(runtime_dir, _environment())
        stopped = _heed_signals(supervisor)
        try:
            web = _start(supervisor, config, frontend, starts_compute=starts_compute)
            status = _look_after(supervisor, web, stopped)
            supervisor.stop()
        finally:
            supervisor.close()
    return status


def _check_device(name: str) -> None:
    """Raise ConfigError where torch does not reach a GPU that was asked for by name.

    In a process of its own: torch and what it takes of a GPU have no place in this one. What else
    may fail there is left to compute to say.
    """
    if not name.startswith("cuda"):
        return
    command = [sys.executable, "-m", "compute.device", name]
    done = subprocess.run(
        command, env=_environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == _UNREACHABLE:
        raise ConfigError(done.stderr.strip().splitlines()[-1])


def _start(
    supervisor: Supervisor,
    config: ComputeConfig,
    frontend: FrontendConfig,
    *,
    starts_compute: bool,
) -> Child:
    """Start what does not run; return the frontend."""
    assert config.runtime_dir is not None
    file = [] if config.settings_file is None else ["--config", str(config.settings_file)]
    if not daemon_runs(config.runtime_dir):
        table = daemon_flags(config.settings_file)
        flags = table + daemon_arguments(config, Path(config.model))  # of two the last one counts
        flags += ["--runtime-dir", str(config.runtime_dir)]
        supervisor.add(Program("the expert daemon", ["-m", "expert_daemon", *flags]))
    if starts_compute:
        names = dict.fromkeys((*MODEL_OPTIONS, *SERVICE_OPTIONS))
        flags = _flags({name: getattr(config, name) for name in names})
        supervisor.add(Program("the compute service", ["-m", "compute", *file, *flags]))
    names = dict.fromkeys(("model", "runtime_dir", *_FRONTEND_FLAGS))
    flags = _flags({name: getattr(frontend, name) for name in names})
    return supervisor.add(
        Program(
            "the frontend",
            ["-m", "compute.frontend", *file, *flags],
            stop_s=frontend.drain_s + _SPARE_S,
        )
    )


def _look_after(supervisor: Supervisor, web: Child, stopped: Mapping[str, bool]) -> int:
    """Keep the children running until a signal; return the exit status."""
    told = False
    while not stopped["now"]:
        try:
            supervisor.wait(_LOOK_S)
        except ChildFailed as error:
            sys.stderr.write(f"headrace: {error}\n")
            return error.status
        if not told and supervisor.all_ready and web.told.get(_JOINED):
            told = True
            sys.stdout.write(f"ready: {web.told.get('STATUS', '')}\n")
            sys.stdout.flush()
            notify("READY=1")
    notify("STOPPING=1")
    return 0


def _heed_signals(supervisor: Supervisor) -> Mapping[str, bool]:
    """Return what says whether to stop; a second signal kills the children."""
    stopped = {"now": False}

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if stopped["now"]:
            raise KeyboardInterrupt
        stopped["now"] = True
        supervisor.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopped


@contextlib.contextmanager
def _runtime_dir(config: ComputeConfig) -> Iterator[Path]:
    """Find the runtime directory: the one given, the default one, else a private one."""
    place = _place(config)
    try:
        prepare_directory(place.runtime_dir)
        RuntimePaths.of_compute(place.runtime_dir)
        if place.private:  # nothing else would find it
            sys.stderr.write(
                f"runtime directory of this server: {place.runtime_dir}; other commands, such as "
                f"headrace cache, want it as --runtime-dir\n"
            )
        yield place.runtime_dir
    finally:
        if place.private:
            shutil.rmtree(place.runtime_dir, ignore_errors=True)


def _place(config: ComputeConfig) -> Place:
    if config.runtime_dir is None:
        with contextlib.suppress(ConfigError):
            return Place(default_runtime_dir(os.environ), private=False)
    return find_place(config, os.environ)


def _compute_runs(runtime_dir: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(RuntimePaths.of_compute(runtime_dir).descriptor_socket))
        except OSError:
            return False
    return True


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """The settings as flags; what is as by default may be left out but need not."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        option = FRONTEND_OPTIONS.get(name)
        if isinstance(value, bool) or (option is not None and option.convert is switch):
            flags += [flag] if value else []
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def _environment() -> dict[str, str]:
    """Ours, with the folder of our packages first: the children must be of the same headrace."""
    environment = private_environment(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    return environment | {"PYTHONPATH": root + (os.pathsep + inherited if inherited else "")}
