"""The tables of docs/settings.md, from the options and dataclasses of the three processes.

    python tests/support/settings_table.py > docs/settings.md

A test holds the page to what this prints.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compute.config import COMPUTE_OPTIONS, SAMPLING_OPTIONS, ComputeConfig
from compute.frontend.config import FRONTEND_OPTIONS, FrontendConfig
from compute.options import Option
from expert_daemon.config import OPTIONS, DaemonConfig
from protocol.setting_names import ENVIRONMENT_PREFIX

HEAD = """\
# Settings

Of the three processes and of the commands that run one of them. Made from their code by
`python tests/support/settings_table.py`; a test keeps it in step.

A setting is looked for in this order, and the first that is found counts: the flag (`read_threads`
is `--read-threads`), the environment variable (`HEADRACE_READ_THREADS`), the file that `--config`
or `HEADRACE_CONFIG` names, the default. In the file a key stands at the top, for every process that
knows it, or in its process's table, `[daemon]`, `[compute]` or `[frontend]`, where it wins; a key
that no process knows is refused. A command that starts a daemon of its own gives it the `[daemon]`
table, without `metrics` and `trace`. [deploy/headrace.toml](../deploy/headrace.toml) is such a file
with comments. Sizes are written `"96GiB"`.
"""
SAMPLING = (
    f"{', '.join(f'`{name}`' for name in SAMPLING_OPTIONS)} are for the commands that generate by\n"
    "themselves; requests over HTTP bring their own, and `[frontend]` says what counts where they\n"
    "do not.\n"
)
UNSET = {
    "runtime_dir": "/run/headrace where it is ours, else $XDG_RUNTIME_DIR/headrace",
    "state_dir": "$STATE_DIRECTORY, else $XDG_STATE_HOME/headrace, else ~/.local/state/headrace",
    "arena": "the daemon's own",
    "read_threads": "the daemon's own",
    "device_cache": "what the GPU has left",
}


def page() -> str:
    """The whole page."""
    daemon = [(name, text, _daemon_default(name)) for name, text in OPTIONS.items()]
    compute = [
        (name, option.help, _default(ComputeConfig, name, option))
        for name, option in COMPUTE_OPTIONS.items()
    ]
    frontend = [
        (name, option.help, _default(FrontendConfig, name, option))
        for name, option in FRONTEND_OPTIONS.items()
    ]
    return "\n".join(
        [
            HEAD,
            "## The expert daemon: `headrace daemon`, `[daemon]`\n",
            *_table(daemon, {}),
            "## Compute: `python -m compute`, `headrace generate` and others, `[compute]`\n",
            SAMPLING,
            *_table(compute, COMPUTE_OPTIONS),
            "## The frontend: `python -m compute.frontend`, `headrace serve`, `[frontend]`\n",
            *_table(frontend, FRONTEND_OPTIONS),
        ]
    )


def _table(rows: list[tuple[str, str, str]], options: Any) -> list[str]:
    lines = ["| key | what | default |", "| --- | --- | --- |"]
    for name, text, default in rows:
        option = options.get(name)
        only = "" if option is None or option.has_flag else " (file only)"
        choices = option.choices if option is not None else ()
        more = f": {', '.join(choices)}" if choices else ""
        what = _cell(re.sub(r" \(default: .*\)", "", text) + more + only)
        lines.append(f"| `{name}` | {what} | {_cell(default)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _daemon_default(name: str) -> str:
    fields = {
        field.name.removesuffix("_bytes"): field for field in dataclasses.fields(DaemonConfig)
    }
    text = OPTIONS[name]
    if "(default: " in text:
        return text.partition("(default: ")[2].removesuffix(")")
    if name in UNSET:
        return UNSET[name]
    return _shown(fields[name].default)


def _default(config: type[Any], name: str, option: Option) -> str:
    (field,) = [field for field in dataclasses.fields(config) if field.name == name]
    if "(default: " in option.help:
        return option.help.partition("(default: ")[2].removesuffix(")")
    if name in UNSET and field.default is None:
        return UNSET[name]
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = ", ".join(f"{key} {number}" for key, number in field.default_factory().items())
    return _shown(value)


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    for bits, unit in ((30, "GiB"), (20, "MiB")):
        if isinstance(value, int) and value and value % (1 << bits) == 0:
            return f"{value >> bits}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    assert ENVIRONMENT_PREFIX in HEAD
    sys.stdout.write(page())
