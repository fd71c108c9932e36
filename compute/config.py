"""The compute process's settings: one frozen dataclass, read once and handed down.

How they are written and which one wins stands in options.py. `add_config_arguments` and
`load_config` serve every subcommand, so a flag means the same everywhere. The frontend's settings
may stand in the same file. Imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from protocol.runtime_dir import check_runtime_dir, default_runtime_dir
from protocol.setting_names import ENVIRONMENT_PREFIX
from protocol.sizes import parse_size

from .device_name import AUTO_DEVICE, device_name
from .frontend.config import FRONTEND_OPTIONS
from .options import (
    Option,
    add_flags,
    count,
    number,
    path,
    read_options,
    settings_file,
    switch,
    text,
    word,
)

DEFAULT_CONTEXT = 4096
GRAPH_MODES = ("auto", "plain", "eager", "layer", "segment", "oracle")
SEGMENT_KINDS = ("auto", "whole", "source-layers")
SIDE_STREAMS = ("on", "off")
PRECISIONS = ("highway", "vendor", "wide", "unrounded")


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """What compute was told; None where the choice is left to whoever knows more."""

    model: str = "demo"  # model directory, .gguf file, or `demo` for the packaged one
    precision: str = "highway"  # one of PRECISIONS
    device: str = AUTO_DEVICE  # that, "cpu", "cuda" or "cuda:N"
    context: int | None = (
        None  # tokens, prompt included; None: DEFAULT_CONTEXT or the model's limit
    )
    chunk: int = 512  # prompt tokens a forward
    threads: int = 0  # CPU threads of one operator; 0: one for a small model, else all cores
    arena: int | None = None  # bytes for a daemon that we start; None: the daemon's own default
    read_threads: int | None = None  # for a daemon that we start
    runtime_dir: Path | None = None  # None: the default one where a daemon runs, else a private one
    state_dir: Path | None = None  # for a daemon that we start; None: its own default
    daemon_wait_s: float = 60.0  # how long a request waits for a lost daemon
    max_waiting: int = 32  # requests that wait in the service's queue
    prefix_cache: int = 1 << 30  # bytes of kept states of earlier requests; 0: none
    session_dir: Path | None = None  # where they are kept on disk as well; None: nowhere
    graph: str = "auto"  # how tokens are launched, one of GRAPH_MODES
    segments: str = "auto"  # where graphs of several layers end, one of SEGMENT_KINDS
    side_streams: str = "on"  # what may run beside the routed experts does, one of SIDE_STREAMS
    device_cache: int | None = None  # bytes of experts on the device; None: what a GPU has left
    graph_log: bool = False  # print running counts and a line a miss
    trace_hash: bool = False  # print the hashes of every segment's streams
    timings: bool = False  # print where each token's time went
    check_routes: bool = False  # compare every layer's routing with the host's
    lookahead: int = 0  # layers whose picks are guessed ahead and told to the daemon as hints
    predict_trace: Path | None = None  # takes each token's picks and guesses of them
    vendor_decode_defect: bool = False  # reproduce the vendor's shared-key defect in decode
    max_tokens: int = 256  # new tokens of a request
    temperature: float = 1.0  # 0: greedy
    top_p: float = 0.95
    top_k: int = 0  # ids kept; 0: all
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one each run
    settings_file: Path | None = None  # no setting itself: the file that the others came from

    def find_runtime_dir(self, environment: Mapping[str, str]) -> Path:
        """Return the runtime directory given, else the default one.

        Raises ConfigError when there is none or a socket's path in it would be too long.
        """
        return check_runtime_dir(self.runtime_dir or default_runtime_dir(environment))


COMPUTE_OPTIONS = {
    "model": Option(text, "MODEL", "model directory, .gguf file, or demo for the packaged model"),
    "precision": Option(word(PRECISIONS), None, "how activations are kept and rounded", PRECISIONS),
    "device": Option(
        device_name, "NAME", "auto, cpu, cuda or cuda:N (auto: a GPU where one has room)"
    ),
    "context": Option(
        count(1, 2**24), "N", "most tokens, prompt included (default: 4096 or the model's limit)"
    ),
    "chunk": Option(count(1, 2**15), "N", "prompt tokens computed at once"),
    "threads": Option(count(0, 1024), "N", "CPU threads of one operator; 0 suits the model"),
    "arena": Option(parse_size, "SIZE", 'cap on the experts\' shared memory, such as "96GiB"'),
    "read_threads": Option(count(1, 64), "N", "reader threads of a daemon that is started here"),
    "runtime_dir": Option(path, "DIR", "where the daemon's sockets are"),
    "state_dir": Option(path, "DIR", "what a daemon started here keeps for next time"),
    "daemon_wait_s": Option(number(0, 86400), "SECONDS", "how long to wait for a lost daemon"),
    "max_waiting": Option(count(0, 4096), "N", "requests that wait at most; more are refused"),
    "prefix_cache": Option(parse_size, "SIZE", "memory for states to go on from; 0 keeps none"),
    "session_dir": Option(path, "DIR", "keep those states on disk too, for the next start"),
    "graph": Option(
        word(GRAPH_MODES), None, "how tokens are launched; auto: by segments on a GPU", GRAPH_MODES
    ),
    "segments": Option(
        word(SEGMENT_KINDS), None, "where graphs of several layers end", SEGMENT_KINDS
    ),
    "side_streams": Option(
        word(SIDE_STREAMS), None, "run the shared expert beside the routed ones", SIDE_STREAMS
    ),
    "device_cache": Option(
        parse_size, "SIZE", "experts kept in a GPU's own memory; 0: new tokens read all in place"
    ),
    "graph_log": Option(switch, None, "print counts of graphs, and a line a miss"),
    "trace_hash": Option(switch, None, "print hashes of the streams after every segment"),
    "timings": Option(switch, None, "print where each token's time went, part by part"),
    "check_routes": Option(switch, None, "hold every layer's routing to the host's; slow"),
    "lookahead": Option(count(0, 8), "K", "hint the daemon at the next K layers' likely experts"),
    "predict_trace": Option(path, "FILE", "record how well earlier layers foretell picks"),
    "vendor_decode_defect": Option(switch, None, "reproduce the vendor's defect in decode"),
    "max_tokens": Option(count(0, 2**24), "N", "new tokens at most"),
    "temperature": Option(number(0, 100), "T", "0 takes the likeliest token each time"),
    "top_p": Option(number(1e-9, 1), "P", "keep the likeliest tokens up to this sum"),
    "top_k": Option(count(0, 2**31), "K", "keep the K likeliest tokens; 0 keeps all"),
    "min_p": Option(number(0, 1), "P", "drop tokens below this share of the likeliest"),
    "seed": Option(count(0, 2**64 - 1), "N", "same seed, same text"),
}
assert [*COMPUTE_OPTIONS, "settings_file"] == [field.name for field in fields(ComputeConfig)]
COMPUTE_KEYS = tuple(COMPUTE_OPTIONS)  # of a settings file

MODEL_OPTIONS = (
    "model",
    "precision",
    "device",
    "context",
    "chunk",
    "threads",
    "graph",
    "segments",
    "side_streams",
    "device_cache",
    "graph_log",
    "trace_hash",
    "timings",
    "check_routes",
    "lookahead",
    "predict_trace",
    "vendor_decode_defect",
)
DAEMON_OPTIONS = ("arena", "read_threads", "runtime_dir", "state_dir", "daemon_wait_s")
SERVICE_OPTIONS = ("runtime_dir", "daemon_wait_s", "max_waiting", "prefix_cache", "session_dir")
SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


def add_config_arguments(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the flag of each named setting, and `--config`."""
    parser.add_argument("--config", metavar="FILE.toml", help="settings; flags win over it")
    defaults = {field.name: field.default for field in fields(ComputeConfig)}
    add_flags(parser, {name: COMPUTE_OPTIONS[name] for name in names}, defaults)


def load_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ComputeConfig:
    """Return the settings from parsed flags, the environment and the file. Raises ConfigError."""
    given = read_options(
        COMPUTE_OPTIONS, args, environment, process="compute", also_known=FRONTEND_OPTIONS
    )
    return ComputeConfig(**given, settings_file=settings_file(args, environment))


def private_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a daemon that we start.

    Without our own `--config`, which is not its own, and without what a service manager told us.
    """
    ours = {ENVIRONMENT_PREFIX + "CONFIG", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}
    ours |= {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}
    return {name: value for name, value in environment.items() if name not in ours}
