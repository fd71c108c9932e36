"""Work beside the current CUDA stream, between two events."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A CUDA stream for work beside the current one; while a graph is recorded, another.

    is_on  False: what is forked runs on the current stream, in its place
    """

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda" and is_on:
            self._streams = [
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]

    def fork(self) -> AbstractContextManager[object]:
        """Launch what follows beside the current stream, after what it has launched so far."""
        if not self._streams:
            return nullcontext()
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Let the current stream wait for what was forked."""
        if self._streams:
            torch.cuda.current_stream().wait_stream(self._stream())

    def _stream(self) -> torch.cuda.Stream:
        return self._streams[torch.cuda.is_current_stream_capturing()]
