"""Reads on advice: for a chunk's next layer, to have keys ready when idle, and on hints.

Begun outside of windows and into FREE slots only. Hints take from the free pool, down to the half
that is the readers'; what is to be warm takes what is free beyond the pool, and has residents
retired that are worth less. Keys of a step and layer that have passed are forgotten, and reads of
them that nobody waits for are given up.

One call looks at so many keys to be warm, whatever their number: `is_cut_short` says that another
call would find more to do.

Following hints stops by itself when fewer than half of those decided lately were of use.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from .cache_parts import CacheParts
from .outcome import Load, Purpose
from .residents import Origin

Begin = Callable[[int, int, Purpose], Load]
Moment = tuple[int, int]  # step, layer

MOST_HINTS = 512  # keys remembered
MOST_HINT_READS = 2
MOST_WARM_READS = 8
MOST_WARM_LOOKS = 64  # keys to be warm that one call looks at
TRIAL = 128  # hints decided between two looks at their use


@dataclass(frozen=True, slots=True)
class _UnderWay:
    load: Load
    moment: Moment


@dataclass(frozen=True, slots=True)
class _Floor:
    """The residents of a room that would go next, what each is worth, and the lowest of that."""

    victims: list[int]
    worths: list[float]
    lowest: float


class Foresight:
    """What is to be read when nobody waits for anything."""

    def __init__(self, parts: CacheParts, begin: Begin) -> None:
        self._parts = parts
        self._begin = begin
        self._ahead: deque[int] = deque()
        self._ahead_moment: Moment = (0, 0)
        self._ahead_limit = 0
        self._hints: OrderedDict[int, Moment] = OrderedDict()
        self._warm: deque[int] = deque()
        self._under_way: dict[int, _UnderWay] = {}
        self._moments: dict[int, Moment] = {}  # of keys read or being read, until it has passed
        self._decided = (0, 0)  # useful, all: at the last look
        self.hints_ended = False  # they were of too little use
        self.is_cut_short = False  # the last `place` left keys to be warm that it may go on with

    @property
    def n_warm_left(self) -> int:
        """Keys of the last `warm` that are neither begun nor passed over."""
        return len(self._warm)

    def new_session(self) -> None:
        """Another engine: what the last one foresaw is void."""
        self._ahead.clear()
        self._hints.clear()
        for key in self._moments:
            self._parts.residents.fade(key)
        self._moments.clear()
        self._under_way = {
            key: one for key, one in self._under_way.items() if one.load.purpose is Purpose.WARM
        }
        self.hints_ended = False
        self._decided = self._count_decided()

    def hint(self, step: int, keys: Iterable[tuple[int, int]]) -> None:
        """(layer, expert) keys that may be wanted in this step, best first."""
        if not self._parts.limits.follow_hints or self.hints_ended:
            return
        for layer, expert in keys:
            self._hints[layer * self._parts.book.n_experts + expert] = (step, layer)
        while len(self._hints) > MOST_HINTS:
            self._hints.popitem(last=False)

    def look_ahead(self, step: int, layer: int, keys: Iterable[int], limit: int) -> None:
        """Keys of the layer after a stream's, in the order in which it will want them."""
        self._ahead = deque(keys)
        self._ahead_moment = (step, layer)
        self._ahead_limit = limit

    def warm(self, keys: Iterable[int]) -> None:
        """Keys to load when idle, in this order; in place of those of the last call."""
        self._warm = deque(keys)

    def begun_ahead(self, load: Load, step: int) -> None:
        """A stream has begun a read for its next layer."""
        key = load.layer * self._parts.book.n_experts + load.expert
        self._under_way[key] = _UnderWay(load, (step, load.layer))
        self._moments[key] = (step, load.layer)

    def passed(self, step: int, layer: int, wanted: AbstractSet[int]) -> list[Load]:
        """Forget what was foreseen up to this moment; return reads that nobody waits for now.

        wanted  keys that a window waits for
        """
        now = (step, layer)
        if self._ahead and self._ahead_moment <= now:
            self._ahead.clear()
        for key in [key for key, moment in self._hints.items() if moment <= now]:
            del self._hints[key]
        for key in [key for key, moment in self._moments.items() if moment <= now]:
            del self._moments[key]
            self._parts.residents.fade(key)
        given_up: list[Load] = []
        for key, one in list(self._under_way.items()):
            if self._parts.flights.load_of(key) != one.load:
                del self._under_way[key]
            elif one.load.purpose is not Purpose.WARM and one.moment <= now and key not in wanted:
                del self._under_way[key]
                if not self._parts.fetches.wants(key) and self._give_up(one.load):
                    given_up.append(one.load)
        return given_up

    def _give_up(self, load: Load) -> bool:
        is_hint = load.purpose is Purpose.HINT
        if self._parts.flights.disown(load) is None:
            return False
        self._parts.counters.n_hints_stale += is_hint
        return True

    def place(self) -> None:
        """Begin what may be begun now; no window is open."""
        self.is_cut_short = False
        if self._ahead:
            self._place_ahead()
        if self._hints:
            self._place_hints()
        if self._warm:
            self._place_warm()

    def _place_ahead(self) -> None:
        while self._ahead and self._n_reads(Purpose.AHEAD) < self._ahead_limit:
            key = self._ahead[0]
            if not self._is_absent(key):
                self._ahead.popleft()
                continue
            if not self._begin_free(key, Purpose.AHEAD, Origin.STREAM, self._ahead_moment):
                return
            self._ahead.popleft()

    def _place_hints(self) -> None:
        self._look_at_use()
        while self._hints and self._n_reads(Purpose.HINT) < MOST_HINT_READS:
            key, moment = next(iter(self._hints.items()))
            if self._is_absent(key) and not self._begin_free(
                key, Purpose.HINT, Origin.HINT, moment
            ):
                return
            del self._hints[key]

    def _begin_free(self, key: int, purpose: Purpose, origin: Origin, moment: Moment) -> bool:
        """Begin a read into a FREE slot, unless only those kept for readers are left."""
        placement, book = self._parts.placement, self._parts.book
        if book.n_free(book.room_of(key)) <= placement.free_pool // 2:
            return False
        slot = placement.take_free(key)
        if slot is None:
            return False
        self._parts.residents.expect(key, origin, foreseen=True)
        self._under_way[key] = _UnderWay(self._begin(key, slot, purpose), moment)
        self._moments[key] = moment
        return True

    def _place_warm(self) -> None:
        """Look at the next keys; they come in the order of the files, so each may be worth more."""
        placement, book = self._parts.placement, self._parts.book
        n_reads, n_looks = self._n_reads(Purpose.WARM), 0
        floors: dict[int, _Floor] = {}
        while self._warm and n_reads < MOST_WARM_READS:
            if n_looks == MOST_WARM_LOOKS:
                self.is_cut_short = True
                return
            n_looks += 1
            key = self._warm[0]
            room = book.room_of(key)
            if not self._is_absent(key):
                self._pass_over()
            elif book.n_free(room) > placement.free_pool:
                self._warm.popleft()
                slot = placement.take_free(key)
                assert slot is not None
                self._under_way[key] = _UnderWay(self._begin(key, slot, Purpose.WARM), (0, 0))
                n_reads += 1
            elif placement.n_beyond(room) or not self._make_room(room, floors):
                return

    def _pass_over(self) -> None:
        self._warm.popleft()
        self._parts.counters.n_warm_passed += 1

    def _make_room(self, room: int, floors: dict[int, _Floor]) -> bool:
        """Retire residents worth less than the next keys; whether there is anything to go on with.

        Slots are awaited together: each acknowledgement may take a step of the engine.

        room    of the next key; those that follow it count as far as they are of the same
        floors  those found before, by room; none once residents left
        """
        if room not in floors:
            floors[room] = self._find_floor(room)
        less = self._worth_less(floors[room], room)
        if not less:
            self._pass_over()
            return True
        floors.clear()
        self._parts.placement.retire(less)
        self._parts.free_retired()
        return self._parts.book.n_free(room) > self._parts.placement.free_pool

    def _find_floor(self, room: int) -> _Floor:
        victims = self._parts.placement.lowest(MOST_WARM_READS, room)
        residents = self._parts.residents
        guests = residents.guests
        worths = [-math.inf if key in guests else residents.figures(key)[0] for key in victims]
        return _Floor(victims, worths, min(worths, default=math.inf))

    def _worth_less(self, floor: _Floor, room: int) -> list[int]:
        """Residents worth less than the next keys; none where the first key is worth no more."""
        if self._worth(self._warm[0]) <= floor.lowest:
            return []
        book = self._parts.book
        wanted = takewhile(lambda key: book.room_of(key) == room, self._warm)
        pairs = zip(floor.victims, floor.worths, wanted, strict=False)
        return [victim for victim, worth, key in pairs if worth < self._worth(key)]

    def _worth(self, key: int) -> float:
        return self._parts.policy.figures(key)[0]

    def _is_absent(self, key: int) -> bool:
        parts = self._parts
        is_there = key in parts.book.slot_of or parts.flights.load_of(key) is not None
        return not is_there and key not in parts.barred

    def _n_reads(self, purpose: Purpose) -> int:
        reads = self._under_way
        for key in [k for k, one in reads.items() if self._parts.flights.load_of(k) != one.load]:
            del reads[key]
        return sum(one.load.purpose is purpose for one in reads.values())

    def _count_decided(self) -> tuple[int, int]:
        counters = self._parts.counters
        lost = counters.n_hints_wasted + counters.n_hints_stale
        return counters.n_hints_useful, counters.n_hints_useful + lost

    def _look_at_use(self) -> None:
        useful, decided = self._count_decided()
        if decided - self._decided[1] < TRIAL:
            return
        if 2 * (useful - self._decided[0]) < decided - self._decided[1]:
            self.hints_ended = True
            self._hints.clear()
        self._decided = (useful, decided)
