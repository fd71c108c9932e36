"""One range of a shard into memory: alignment, short reads, retries, errors that name the range.

Runs on the reader threads, and for cached Engram rows on the loop's.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

from .read_plan import Fragment, Part
from .source import Bytes, ReadKind, Source

MAX_RETRIES = 2
MAX_WINDOW_BYTES = 4 << 20  # a part at once: each further read waits for its thread to be woken
MAX_ALIGNMENT = 1 << 16
BOUNCE_BYTES = MAX_WINDOW_BYTES + 2 * MAX_ALIGNMENT  # what a thread that reads parts needs

Shown = Callable[[Bytes, int], None]  # bytes of a shard, and the place of the first


class ReadFailure(Exception):
    """A range that could not be read: `code` as in a slot change's errors, `text` names it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class RangeReader:
    """Reads ranges of a source completely or raises ReadFailure; usable by many threads."""

    def __init__(self, source: Source, *, straight: bool = True) -> None:
        """`straight`: read parts into the slots themselves where their places allow it."""
        self.source = source
        self._straight = straight
        self.n_retries = 0  # for statistics: two threads at once may count one

    def read_part(
        self,
        part: Part,
        slot: Bytes,
        slot_address: int,
        bounce: Bytes,
        shown: Shown | None = None,
    ) -> None:
        """Read a part's fragments into `slot`, u8 [slot_bytes], through `bounce` where needed.

        shown  is called with all of the part's bytes before they are copied, if they are

        A fragment alone whose place in the file and in memory are congruent to the alignment may
        be read straight into the slot, but for a head and a tail of less than an alignment. That
        pays where the slot is in huge pages: on small ones the kernel's work for each page, and
        the drive's for each of so many pieces, take longer than the copy that it saves. Through the
        page cache the kernel copies in any case, so each fragment goes straight to its place.
        """
        align = self.source.alignment(part.shard)
        if align == 1:
            self._read_cached(part, slot)
            return
        if self._straight and len(part.whole) == 1:
            (fragment,) = part.fragments
            skew = (slot_address + fragment.slot_offset - fragment.offset) % align
            if skew == 0:
                self._read_straight(fragment, slot, bounce, align)
                return
        self._read_through(part, slot, bounce, align, shown)

    def _read_cached(self, part: Part, slot: Bytes) -> None:
        for fragment in part.fragments:
            place = slot[fragment.slot_offset : fragment.slot_offset + fragment.n_bytes]
            n_bytes = fragment.n_bytes
            self.read_range(part.shard, fragment.offset, place, n_bytes=n_bytes, align=1)

    def _read_straight(self, fragment: Fragment, slot: Bytes, bounce: Bytes, align: int) -> None:
        start, stop = fragment.offset, fragment.offset + fragment.n_bytes
        first, last = -(-start // align) * align, stop // align * align
        if first >= last:
            part = Part(fragment.shard, start, stop, (fragment,))
            self._read_through(part, slot, bounce, align)
            return
        at = fragment.slot_offset + first - start
        middle = slot[at : at + last - first]
        self.read_range(fragment.shard, first, middle, n_bytes=last - first, align=align)
        for a, b in ((start, first), (last, stop)):
            if a < b:
                edge = Fragment(fragment.shard, a, b - a, fragment.slot_offset + a - start)
                self._read_through(Part(fragment.shard, a, b, (edge,)), slot, bounce, align)

    def _read_through(
        self, part: Part, slot: Bytes, bounce: Bytes, align: int, shown: Shown | None = None
    ) -> None:
        step = (len(bounce) - 2 * align) // align * align
        start = part.start // align * align
        while start < part.stop:
            stop = min(part.stop, start + step)
            window = bounce[: -(-(stop - start) // align) * align]
            self.read_range(part.shard, start, window, n_bytes=stop - start, align=align)
            if shown is not None and start <= part.start and stop == part.stop:
                shown(window, start)
            for fragment in part.whole:
                first = max(fragment.offset, part.start, start)
                last = min(fragment.offset + fragment.n_bytes, stop)
                if first < last:
                    at = fragment.slot_offset + first - fragment.offset
                    slot[at : at + last - first] = window[first - start : last - start]
            start = stop

    def read_range(
        self,
        shard: int,
        offset: int,
        memory: Bytes,
        *,
        n_bytes: int,
        align: int,
        kind: ReadKind = ReadKind.BUFFERED,
    ) -> None:
        """Fill at least `n_bytes` of `memory` from `offset`; DIRECT where `align` allows it.

        Raises ReadFailure.
        """
        done = 0
        while done < n_bytes:
            rest = len(memory) - done
            if align > 1 and (offset + done) % align == 0 and done % align == 0 == rest % align:
                count = self._read(shard, offset + done, memory[done:], ReadKind.DIRECT)
            else:
                count = self._read(shard, offset + done, memory[done:n_bytes], kind)
            if count == 0:
                raise ReadFailure(
                    "TRUNCATED",
                    f"{self.source.path(shard)} ends at {self.source.n_bytes(shard)}, "
                    f"wanted bytes {offset} to {offset + n_bytes}",
                )
            done += count

    def _read(self, shard: int, offset: int, memory: Bytes, kind: ReadKind) -> int:
        for attempt in itertools.count(1):
            try:
                return self.source.read_into(shard, offset, memory, kind)
            except OSError as error:
                if attempt <= MAX_RETRIES:
                    self.n_retries += 1
                    continue
                name = errno.errorcode.get(error.errno or 0, "error")
                raise ReadFailure(
                    "EIO",
                    f"{self.source.path(shard)}: {name} at bytes {offset} to "
                    f"{offset + len(memory)}, tried {attempt} times",
                ) from error
        raise AssertionError("unreachable")
