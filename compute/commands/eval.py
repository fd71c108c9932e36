"""`headrace eval`: the perplexity of a text.

The text is tokenised whole, without special tokens, and cut into rows of --row-tokens tokens; each
row is put after the begin token and every one of its tokens is scored. A last, shorter row is left
out unless it is the only one. By default so many rows as the demo's README uses: 32 of 511 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compute.config import DAEMON_OPTIONS, MODEL_OPTIONS, add_config_arguments, load_config
from protocol.errors import ConfigError, why_unread

from .terminal import Display, interruptible

if TYPE_CHECKING:
    from compute.session import Engine

    from .opening import Opened

EXIT_INTERRUPTED = 128 + signal.SIGINT
ROW_TOKENS = 511
N_ROWS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the text, the rows and the flags of model and daemon."""
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to score")
    parser.add_argument(
        "--rows",
        type=int,
        default=N_ROWS,
        metavar="N",
        help="rows to score, 0: all (default: %(default)s)",
    )
    parser.add_argument(
        "--row-tokens",
        type=int,
        default=ROW_TOKENS,
        metavar="N",
        help="scored tokens of a row (default: %(default)s)",
    )
    add_config_arguments(parser, MODEL_OPTIONS + DAEMON_OPTIONS)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


@dataclass(slots=True)
class Score:
    """Sums over the rows scored so far."""

    row_nlls: list[float]
    n_tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return math.fsum(self.row_nlls) / self.n_tokens if self.n_tokens else math.nan


def run(args: argparse.Namespace) -> int:
    """Score the text and return the exit status."""
    from .opening import opened

    config = load_config(args, os.environ)
    if args.rows < 0 or args.row_tokens < 1:
        raise ConfigError("--rows must be at least 0 and --row-tokens at least 1")
    text = _read(Path(args.text))
    display = Display(quiet=args.json)
    with opened(config, display) as ready, interruptible() as cancelled:
        rows = cut_rows(ready.tokenizer.encode(text), args.row_tokens, args.rows)
        io_before = ready.engine.source.io.copy()
        score = _scored(ready, rows, display, cancelled)
        io = ready.engine.source.io.since(io_before)
    done = len(score.row_nlls)
    if not done:
        display.line("interrupted before the first row was done")
        return EXIT_INTERRUPTED
    perplexity = math.exp(score.mean_nll)
    if args.json:
        found = {
            "perplexity": perplexity,
            "mean_nll": score.mean_nll,
            "tokens": score.n_tokens,
            "rows": done,
            "row_nll": [total / len(row) for total, row in zip(score.row_nlls, rows, strict=False)],
            "precision": config.precision,
            "tokens_per_second": round(score.n_tokens / max(score.seconds, 1e-9), 3),
            "io": {"hits": io.hits, "misses": io.misses, "bytes_read": io.bytes_read},
        }
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        display.text(
            f"perplexity {perplexity:.4f} (mean nll {score.mean_nll:.5f}) over "
            f"{score.n_tokens} tokens in {done} rows, precision {config.precision}\n"
        )
    return 0 if done == len(rows) else EXIT_INTERRUPTED


def cut_rows(ids: list[int], row_tokens: int, n_rows: int) -> list[list[int]]:
    """Return the first `n_rows` (0: all) of `row_tokens` ids; raises ConfigError for no ids."""
    rows = [ids[start : start + row_tokens] for start in range(0, len(ids), row_tokens)]
    rows = rows[: n_rows or None]
    if not rows:
        raise ConfigError("--text: the file holds no tokens")
    if len(rows) > 1 and len(rows[-1]) < row_tokens:
        rows.pop()
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path}: cannot be read: {why_unread(error)}") from error


def _scored(
    ready: Opened, rows: list[list[int]], display: Display, cancelled: Callable[[], bool]
) -> Score:
    from compute.experts.miss_client import RequestCancelled

    score = Score([])
    started = time.perf_counter()
    ready.engine.source.waiting.cancelled = cancelled
    display.start_bar("rows", len(rows))
    try:
        for row in rows:
            score.row_nlls.append(math.fsum(row_nll(ready.engine, ready.bos_id, row)))
            score.n_tokens += len(row)
            score.seconds = time.perf_counter() - started
            rate = score.n_tokens / score.seconds
            note = f"{rate:.0f} tokens/s, perplexity {math.exp(score.mean_nll):.3f}"
            display.advance_bar(len(score.row_nlls), note)
    except RequestCancelled:
        pass
    finally:
        display.end_bar()
    return score


def row_nll(engine: Engine, bos_id: int, row: list[int]) -> Iterator[float]:
    """Yield the negative log-likelihood of each token of `row` after the begin token."""
    import torch

    inputs = [bos_id, *row[:-1]]
    engine.check(inputs, "a row")
    sequence = engine.new_sequence()
    for start in range(0, len(inputs), engine.chunk):
        part = inputs[start : start + engine.chunk]
        logits = torch.from_numpy(engine.logits(sequence, part, every=True)).double()
        wanted = torch.tensor(row[start : start + len(part)])
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        yield from losses.tolist()
