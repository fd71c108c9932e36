"""The names that settings have in the environment, and what looks like one of them and is none.

One environment and one file serve all three processes, so each has to know the others' names to
tell a word misspelled. A test holds the list to the settings of all three.
"""

from __future__ import annotations

from collections.abc import Iterable

from .wording import nearest

ENVIRONMENT_PREFIX = "HEADRACE_"
SETTING_NAMES = frozenset(
    [
        "ALLOWED_UIDS",
        "ARENA",
        "ARENA_MAX",
        "BATCH",
        "CHAT_TEMPLATE",
        "CHECK_ROUTES",
        "CHUNK",
        "CONFIG",
        "CONTEXT",
        "DAEMON_WAIT_S",
        "DEFAULT_EFFORT",
        "DEVICE",
        "DEVICE_CACHE",
        "DRAIN_S",
        "GRAPH",
        "GRAPH_LOG",
        "HOST",
        "LOOKAHEAD",
        "MAX_BODY",
        "MAX_CONNECTIONS",
        "MAX_DEPTH",
        "MAX_TOKENS",
        "MAX_WAITING",
        "METRICS",
        "MIN_P",
        "MODEL",
        "NO_SAVE",
        "POLICY",
        "PORT",
        "PRECISION",
        "PREDICT_TRACE",
        "PREFETCH",
        "PREFIX_CACHE",
        "READ_MODE",
        "READ_THREADS",
        "REQUEST_TIMEOUT_S",
        "RUNTIME_DIR",
        "SEED",
        "SEGMENTS",
        "SERVED_NAME",
        "SESSION_DIR",
        "SIDE_STREAMS",
        "STATE_DIR",
        "TEMPERATURE",
        "THREADS",
        "TIMINGS",
        "TOKEN_FILE",
        "TOP_K",
        "TOP_P",
        "TRACE",
        "TRACE_HASH",
        "TRACE_SIZE",
        "VENDOR_DECODE_DEFECT",
        "WRITE_TIMEOUT_S",
    ]
)


def unknown_variables(names: Iterable[str]) -> dict[str, str]:
    """Return a line for each variable that starts as ours do and that no process reads."""
    found = sorted(name for name in names if name.startswith(ENVIRONMENT_PREFIX))
    words = [name.removeprefix(ENVIRONMENT_PREFIX) for name in found]
    return {ENVIRONMENT_PREFIX + w: _line(w) for w in words if w not in SETTING_NAMES}


def _line(word: str) -> str:
    near = nearest(word, sorted(SETTING_NAMES))
    meant = f"; is {ENVIRONMENT_PREFIX}{near} meant?" if near else "; docs/settings.md has them all"
    return f"{ENVIRONMENT_PREFIX}{word}: no setting has this name, it is ignored{meant}"
