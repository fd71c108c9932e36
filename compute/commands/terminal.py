"""What a person sees while a command runs: progress on a terminal, the text, the closing line.

Standard output carries the text (or the JSON object) and nothing else; progress and the closing
line go to standard error, progress only where that is a terminal.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from protocol.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from compute.session import Finished, Prefilled


class Display:
    """Shows one command's progress; a `quiet` one shows only what is asked for by `line`."""

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal and not quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that `what` is being loaded until the block ends."""
        if not self._live:
            yield
            return
        with self._console.status(f"loading {what}"):
            yield

    def prefilled(self, event: Prefilled) -> None:
        """Show how far the prompt is."""
        if not self._live:
            return
        if self._progress is None:
            self.start_bar("prompt", event.n_prompt, "tokens/s")
        self.advance_bar(event.n_done, f"{event.n_done / max(event.seconds, 1e-9):.0f} tokens/s")
        if event.n_done == event.n_prompt:
            self.end_bar()

    def start_bar(self, name: str, total: int, note: str = "") -> None:
        """Open a progress bar."""
        from rich import progress

        if not self._live:
            return
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task(name, total=total, note=note)
        self._progress.start()

    def advance_bar(self, done: int, note: str) -> None:
        """Set the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)

    def end_bar(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def text(self, text: str) -> None:
        """Write generated text at once."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def thought(self, text: str) -> None:
        """Write what the model thinks, dim, where it stands: to standard error."""
        self._console.print(text, end="", style="dim", markup=False, soft_wrap=True)

    def progress_line(self, text: str) -> None:
        """Write one line where progress is shown."""
        if self._live:
            self.line(text)

    def line(self, text: str) -> None:
        """Write one line to standard error."""
        self._console.print(text, markup=False, soft_wrap=True)


def closing_line(finished: Finished) -> str:
    """Return what a request took, for people."""
    io = finished.io
    return (
        f"{finished.n_new} tokens, {finished.tokens_per_second:.1f} tokens/s "
        f"(prompt: {finished.n_prompt}, {finished.prefill_per_second:.0f} tokens/s), "
        f"{io.hits} hits, {io.misses} misses, {format_size(io.bytes_read)} read, "
        f"{io.stall_ms:.0f} ms stalled, {finished.reason}"
    )


def as_json(finished: Finished) -> dict[str, object]:
    """Return what a request took, for programs."""
    io = finished.io
    return {
        "finish": finished.reason,
        "tokens_per_second": round(finished.tokens_per_second, 3),
        "prefill_tokens_per_second": round(finished.prefill_per_second, 3),
        "io": {
            "hits": io.hits,
            "misses": io.misses,
            "bytes_read": io.bytes_read,
            "stall_ms": round(io.stall_ms, 3),
        },
    }


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; a second one interrupts at once."""
    pressed = False

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
