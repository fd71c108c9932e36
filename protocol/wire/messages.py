"""Every message that two processes exchange, as frozen dataclasses.

On the wire a message is a msgpack array `[kind, session, generation, *fields]`, the fields in the
order given here. PROTOCOL.md is the authority on kinds, deadlines and order, and moves with this
file.
New fields go at the end and have defaults; a meaning never changes.

Key lists in binary ("picks") are little-endian u16 pairs (layer, expert). A key list that is a
tuple holds (layer, expert) tuples. An error is (layer, expert, code, text), the code one of
ERROR_CODES.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROTOCOL_VERSION = (1, 0)  # (major, minor)

ROLES = ("engine", "reader")

REFUSALS = (
    "version",  # another major version of the protocol
    "fingerprint",  # another model
    "layout",  # another layout of the arena
    "role",  # the message is not for this role
    "busy",  # another engine holds the daemon, or the queue is full; try again after retry_ms
    "hello_first",  # no session of this number: say Hello or Join (again)
    "stale",  # a session or a generation that has ended
    "limit",  # more experts, rows, keys or tokens than are taken at once
    "malformed",  # the codec refused the frame
)

ERROR_CODES = (
    "EIO",  # the drive refused the read, retries included
    "CHECKSUM",  # bytes differ from the known checksum, the second read too
    "TRUNCATED",  # the shard ends before the slice does
    "QUARANTINED",  # known to be bad, not read again
    "NO_SLOT",  # nothing could be evicted
    "CANCELLED",  # the request was cancelled before the read began or ended
    "TIMEOUT",  # the deadline passed
)

ENDINGS = (
    "stop",  # a stop id, or the grammar allows no more
    "length",  # max_tokens or the context's end
    "cancelled",  # as asked, or the process ends
    "deadline",  # deadline_ms has passed
    "error",  # usage says what
)

FAULTS = (
    "request",  # the sampling, the grammar or the prompt: the client mends it
    "shard",  # a weight file
    "daemon",  # the expert daemon stayed away; try again
)

Key = tuple[int, int]
Change = tuple[int, int, int]
KeyFault = tuple[int, int, str, str]
Values = dict[str, int | float | str]
Settings = dict[str, int | float | str | tuple[int | float, ...]]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of every client."""

    version: tuple[int, int]  # the client's PROTOCOL_VERSION; stays the first field for ever
    role: str  # one of ROLES
    fingerprint: bytes  # 16 bytes; a reader may leave it empty
    arena_id: bytes  # 16 bytes of the arena that is still mapped, or empty
    top_k_batch: int  # top-k x batch of the engine; 0 from a reader
    pid: int  # must equal the peer's pid on the descriptor socket


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon's answer to Hello and to Resync: who you are and what the arena holds."""

    session: int  # goes into every later message
    generation: int  # of the daemon, raised at each start
    arena_id: bytes  # 16 random bytes
    arena_bytes: int  # size of the arena's file
    n_layers: int
    n_experts: int
    n_slots: int  # slots that may be used now
    slot_bytes: int
    max_experts: int  # most experts in one MissRequest
    lease_quota: int  # most leases of one reader
    descriptor_address: str  # path of the descriptor socket, at most 100 bytes
    version: int  # table version of `table`
    table: bytes  # i32 LE [n_layers, n_experts]: arena slot or -1
    scores: bytes  # f32 LE [n_slots]
    wire_version: tuple[int, int] = PROTOCOL_VERSION  # the daemon's
    request: int = 0  # of the Resync that it answers; 0: of Hello


@dataclass(frozen=True, slots=True)
class Refused:
    """The daemon's no: to Hello, to a message out of order, to a frame that it cannot read."""

    reason: str  # one of REFUSALS
    text: str  # what was found and what was wanted, both sides named
    retry_ms: int  # when to try again; 0: never
    pid: int  # of the engine that is in the way, else 0
    request: int = 0  # the request refused; 0: none or not known


@dataclass(frozen=True, slots=True)
class MissRequest:
    """One layer's picks of which at least one is neither on the device nor in the arena.

    Opens a write window, which the answer closes. The same number again gets the same answer.
    """

    request: int  # unique in the session, returned in the answer; from 1
    step: int  # step of the session, from 0
    layer: int  # 0 .. n_layers - 1
    experts: tuple[int, ...]  # all picks not on the device, arena hits included; ascending
    busy: tuple[int, ...]  # arena slots that an unfinished copy or kernel still reads; ascending
    applied: int  # table version that the device's table reflects
    epoch_done: int  # all work up to this epoch has completed on every stream that reads the arena
    hints: tuple[Key, ...] = ()  # keys that this step may want next, best first


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """The answer to MissRequest (one, final) and to Stream (several, the last final).

    `changes` apply even where `errors` is not empty. A final answer closes the window.
    """

    request: int
    from_version: int  # changes are the final state of every key changed after it
    to_version: int  # >= from_version
    slots: tuple[int, ...]  # parallel to the request's experts; -1: failed, or not in this part
    changes: tuple[Change, ...]  # (layer, expert, slot or -1), ascending by key, no key twice
    errors: tuple[KeyFault, ...]  # ascending by key, no key twice
    n_bytes: int  # read from disk for this answer
    read_ms: float  # from the first submission to the last completion
    final: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """All of a chunk's experts of one layer, to be loaded in ascending order through a window."""

    request: int
    step: int
    layer: int
    experts: tuple[int, ...]  # ascending
    window: int  # most experts that are read and not yet consumed, at least 1
    applied: int
    epoch_done: int
    busy: tuple[int, ...] = ()  # as in MissRequest
    ahead: tuple[Key, ...] = ()  # keys of the next layer, to be read when all of these are placed


@dataclass(frozen=True, slots=True)
class Consumed:
    """The experts of a Stream up to this one are no longer needed. No answer."""

    request: int
    up_to: int  # expert


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this request now; its own final answer comes, with every change made."""

    request: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What the daemon changed outside of a window: retirements, prefetched loads."""

    from_version: int
    to_version: int  # > from_version
    changes: tuple[Change, ...]  # (layer, expert, slot or -1), ascending by key, no key twice


@dataclass(frozen=True, slots=True)
class Ack:
    """The device's table reflects `applied`; nothing up to `epoch_done` still reads the arena."""

    applied: int
    epoch_done: int
    n_slots: int = 0  # slots that the engine can read, as of the last Added; 0: not told


@dataclass(frozen=True, slots=True)
class Resync:
    """Ask for the whole table; the answer is a Welcome of the same session."""

    applied: int
    request: int = 0  # returned in the Welcome


@dataclass(frozen=True, slots=True)
class Touch:
    """All committed picks of one step. One way; its loss costs nothing."""

    step: int
    picks: bytes  # u16 LE pairs (layer, expert), ascending, no key twice


@dataclass(frozen=True, slots=True)
class Hint:
    """Experts that a layer may want soon. One way."""

    step: int
    layer: int
    experts: tuple[int, ...]  # best first, no duplicates


@dataclass(frozen=True, slots=True)
class Warm:
    """Keys to load when idle. One way."""

    keys: bytes  # as Touch.picks, but best first; no key twice


@dataclass(frozen=True, slots=True)
class Fetch:
    """A reader wants these experts to stay in the arena until it releases them."""

    request: int
    keys: tuple[Key, ...]  # no key twice; at most the lease quota
    wait_ms: int  # the caller's deadline


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to Fetch: a lease or an error for each key, in the order of the request."""

    request: int
    leases: tuple[tuple[int, int, int, int], ...]  # (layer, expert, slot, generation of the slot)
    errors: tuple[KeyFault, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    """The answer to Fetch where quota or slots do not suffice now. Nothing was leased."""

    request: int
    retry_ms: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give leases back. One way; unknown ones are ignored."""

    leases: tuple[tuple[int, int], ...]  # (slot, generation of the slot)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Engram rows wanted in the ring, in this order; duplicates are allowed.

    Rows of several tables may be asked for at once: they follow one another in the ring.
    """

    request: int
    table: int  # index of the Engram table, from 0
    rows: bytes  # u32 LE row numbers, at least one
    others: tuple[tuple[int, bytes], ...] = ()  # (table, rows) of further tables, none twice


@dataclass(frozen=True, slots=True)
class RowsReady:
    """The rows stand in the ring at position .. position + n_rows - 1, which never wraps."""

    request: int
    position: int  # first ring row
    n_rows: int  # as requested; 0 where nothing was read
    errors: tuple[tuple[int, str, str], ...]  # (row number, code, text); their ring rows are zero


@dataclass(frozen=True, slots=True)
class RowsDone:
    """The rows of this request have been copied; their ring rows are free. One way."""

    request: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Ask for what the arena holds."""

    request: int


@dataclass(frozen=True, slots=True)
class KeyList:
    """Every key that is READY."""

    request: int
    version: int  # table version
    keys: bytes  # records (layer u16, expert u16, slot i32) LE, ascending by key, no key twice


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for the daemon's counters."""

    request: int


@dataclass(frozen=True, slots=True)
class StatList:
    """The daemon's counters and settings by name."""

    request: int
    values: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resize:
    """Make the arena this large, as populated."""

    request: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Resized:
    """The answer to Resize: the size that now holds, and why it is not the one asked for."""

    request: int
    n_bytes: int
    text: str  # empty when it is as asked


@dataclass(frozen=True, slots=True)
class Drop:
    """The engine is to unregister these chunks of the arena at its next step boundary."""

    chunks: tuple[int, ...]  # ascending
    n_slots: int = 0  # slots that remain; of a chunk that holds one of them the rest stays usable
    max_experts: int = 0  # most experts in one MissRequest from now on


@dataclass(frozen=True, slots=True)
class Dropped:
    """These chunks are no longer registered."""

    chunks: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True)
class Added:
    """These chunks are populated; the engine registers them, a part of one anew, then acks."""

    chunks: tuple[int, ...]  # ascending
    n_slots: int = 0  # slots that may be used once that is acknowledged
    max_experts: int = 0  # most experts in one MissRequest from now on


@dataclass(frozen=True, slots=True)
class Unquarantine:
    """Try these keys again. Answered by Answered."""

    request: int
    keys: tuple[Key, ...]  # no key twice


@dataclass(frozen=True, slots=True)
class Trace:
    """Start or end a routing trace. Answered by Answered."""

    request: int
    path: str  # file to write; empty when ending
    on: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to requests that only succeed or fail."""

    request: int
    ok: bool
    text: str  # why not; empty when ok


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a sign of life. Either side may ask."""

    request: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Yes."""

    request: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The client leaves. The daemon answers by closing the descriptor connection."""


@dataclass(frozen=True, slots=True)
class Join:
    """Frontend to compute, the first message: answered by Joined or Refused."""

    version: tuple[int, int]  # the frontend's PROTOCOL_VERSION; stays the first field for ever
    fingerprint: bytes  # of the model whose tokenizer the frontend has, 16 bytes
    pid: int  # must equal the peer's pid on the life socket


@dataclass(frozen=True, slots=True)
class Joined:
    """Compute to frontend: a session begins. It lives as long as the connection to life_address."""

    session: int
    generation: int  # of this compute process
    life_address: str  # path of the life socket
    context: int  # most tokens of a sequence, prompt included
    max_waiting: int  # requests that wait at most, beside the one that runs
    wire_version: tuple[int, int] = PROTOCOL_VERSION  # compute's


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Frontend to compute: the next ids of a long prompt. Generate with the same id ends it."""

    id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """Frontend to compute: go on from these tokens. Answered by Queued or Refused, then Done."""

    id: int  # unique in the frontend's session
    token_ids: tuple[int, ...]  # after those of its PromptParts
    sampling: Settings  # names of the sampler's settings
    deadline_ms: int  # from receipt; 0: none
    grammar: bytes = b""  # what the output must match, in the grammar library's text form


@dataclass(frozen=True, slots=True)
class Queued:
    """Compute to frontend: a Generate is taken; sent again whenever its place changes."""

    id: int
    position: int  # requests before it; 0: it runs


@dataclass(frozen=True, slots=True)
class Progress:
    """Compute to frontend: a chunk of the prompt has been computed."""

    id: int
    n_done: int  # prompt tokens, those taken over from an earlier request included
    n_prompt: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Compute to frontend: the next tokens of a running Generate."""

    id: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # parallel to ids, or empty
    io: Values  # hits, misses, bytes_read, stall_ms since the last Tokens
    top_ids: tuple[int, ...] = ()  # the likeliest of each place, as many for each id
    top_logprobs: tuple[float, ...] = ()  # parallel to top_ids


@dataclass(frozen=True, slots=True)
class CancelGenerate:
    """Frontend to compute: stop this one. Checked before each window and each prefill layer."""

    id: int


@dataclass(frozen=True, slots=True)
class Done:
    """Compute to frontend: a Generate has ended."""

    id: int
    reason: str  # one of ENDINGS
    usage: Values  # counters; of an error also its text and fault, one of FAULTS


@dataclass(frozen=True, slots=True)
class Status:
    """Frontend to compute: say what you are doing."""

    request: int
    tiers: bool = False  # and where every expert is


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The answer to Status."""

    request: int
    values: Values
    tiers: bytes = b""  # where asked for, a byte a key, layer by layer: 0 disk, 1 arena, 2 device


Message = (
    Hello
    | Welcome
    | Refused
    | MissRequest
    | SlotChanges
    | Stream
    | Consumed
    | Cancel
    | Changes
    | Ack
    | Resync
    | Touch
    | Hint
    | Warm
    | Fetch
    | Leased
    | Busy
    | Release
    | RowRequest
    | RowsReady
    | RowsDone
    | Keys
    | KeyList
    | Stats
    | StatList
    | Resize
    | Resized
    | Drop
    | Dropped
    | Added
    | Unquarantine
    | Trace
    | Answered
    | Ping
    | Pong
    | Bye
    | Join
    | Joined
    | PromptPart
    | Generate
    | Queued
    | Progress
    | Tokens
    | CancelGenerate
    | Done
    | Status
    | StatusReport
)
