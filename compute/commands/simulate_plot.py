"""The plot of `headrace simulate`: hit rate over arena size, a curve for each policy.

matplotlib is imported here alone, and only for `--plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError
from protocol.wording import to_install

if TYPE_CHECKING:
    from expert_daemon.simulate import Figures

SUFFIXES = (".png", ".svg", ".pdf")
INSTALL = f"--plot needs matplotlib, which is not installed: {to_install('plot')}"


def check_plot(path: Path) -> None:
    """Raise ConfigError where `write_plot` could not draw into `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: wanted a name that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: {path.parent} is not a directory")
    _figure_class()


def write_plot(path: Path, figures: list[Figures], title: str) -> None:
    """Draw the figures of `simulate` into `path`."""
    figure = _figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(one.policy for one in figures):
        own = sorted(
            (one.setting.arena_bytes / (1 << 30), 100 * one.hit_rate)
            for one in figures
            if one.policy == policy
        )
        dashes = "--" if policy == figures[-1].policy else "-"
        axes.plot(*zip(*own, strict=True), dashes, marker="o", label=policy)
    axes.set(title=title, xlabel="arena, GiB", ylabel="picks without a read, %")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return Figure
