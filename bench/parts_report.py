"""The command line of a script that measures parts of a step by themselves on a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch


def report_parts(about: str | None, measure: Callable[[int], dict[str, float]], digits: int) -> int:
    """Print each figure of `measure`, and all of them as one JSON object; the exit status.

    measure  is given how many replays the median is of
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="replays, of which the median counts"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    found = measure(args.repeats)
    for name, value in found.items():
        print(f"{name:28} {value:8.{digits}f}")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    return 0
