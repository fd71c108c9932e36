"""Which kind number a message has, and what each of its fields must be.

PROTOCOL.md holds the same table; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import fields as f
from . import lists as ls
from . import messages as m
from . import records as r
from .fields import Bounds, Check, Unfit

KINDS: dict[type, int] = {
    m.Hello: 1,
    m.Welcome: 2,
    m.Refused: 3,
    m.Bye: 4,
    m.Ping: 5,
    m.Pong: 6,
    m.MissRequest: 10,
    m.SlotChanges: 11,
    m.Stream: 12,
    m.Consumed: 13,
    m.Cancel: 14,
    m.Changes: 15,
    m.Ack: 16,
    m.Resync: 17,
    m.Touch: 20,
    m.Hint: 21,
    m.Warm: 22,
    m.Fetch: 30,
    m.Leased: 31,
    m.Busy: 32,
    m.Release: 33,
    m.RowRequest: 40,
    m.RowsReady: 41,
    m.RowsDone: 42,
    m.Keys: 50,
    m.KeyList: 51,
    m.Stats: 52,
    m.StatList: 53,
    m.Answered: 54,
    m.Unquarantine: 55,
    m.Trace: 56,
    m.Resize: 60,
    m.Resized: 61,
    m.Drop: 62,
    m.Dropped: 63,
    m.Added: 64,
    m.Join: 98,
    m.Joined: 99,
    m.Generate: 100,
    m.Tokens: 101,
    m.CancelGenerate: 102,
    m.Done: 103,
    m.Status: 104,
    m.StatusReport: 105,
    m.PromptPart: 106,
    m.Queued: 107,
    m.Progress: 108,
}

_request = f.integer(1)
_milliseconds = f.integer(0, f.U31)

# In the order of the dataclass's fields.
FIELDS: dict[type, tuple[Check, ...]] = {
    m.Hello: (
        f.version,
        f.word(m.ROLES),
        f.binary(0, 16),
        f.binary(0, 16),
        f.integer(0, f.U31),
        f.integer(1, f.U31),
    ),
    m.Welcome: (
        f.integer(1),
        f.count,
        f.binary(16),
        f.count,
        f.integer(1, f.U16 + 1),
        f.integer(1, f.U16 + 1),
        f.integer(1, f.U31),
        f.count,
        f.count,
        f.count,
        f.text,
        f.count,
        r.table,
        r.scores,
        f.version,
        f.count,
    ),
    m.Refused: (f.word(m.REFUSALS), f.text, _milliseconds, f.integer(0, f.U31), f.count),
    m.Bye: (),
    m.Ping: (_request,),
    m.Pong: (_request,),
    m.MissRequest: (
        _request,
        f.count,
        f.layer,
        ls.experts,
        ls.slots,
        f.count,
        f.count,
        ls.hints,
    ),
    m.SlotChanges: (
        _request,
        f.count,
        f.count,
        ls.answered_slots,
        ls.changes,
        ls.errors,
        f.count,
        f.number,
        f.flag,
    ),
    m.Stream: (
        _request,
        f.count,
        f.layer,
        ls.experts,
        f.integer(1, f.U31),
        f.count,
        f.count,
        ls.slots,
        ls.hints,
    ),
    m.Consumed: (_request, f.expert),
    m.Cancel: (_request,),
    m.Changes: (f.count, f.count, ls.changes),
    m.Ack: (f.count, f.count, f.integer(0, f.U31)),
    m.Resync: (f.count, f.count),
    m.Touch: (f.count, r.picks),
    m.Hint: (f.count, f.layer, ls.ranked_experts),
    m.Warm: (r.ranked_picks,),
    m.Fetch: (_request, ls.keys, _milliseconds),
    m.Leased: (_request, ls.leases, ls.errors),
    m.Busy: (_request, _milliseconds),
    m.Release: (ls.released,),
    m.RowRequest: (_request, f.table_index, r.row_numbers, r.other_rows),
    m.RowsReady: (_request, f.count, f.count, ls.row_errors),
    m.RowsDone: (_request,),
    m.Keys: (_request,),
    m.KeyList: (_request, f.count, r.key_records),
    m.Stats: (_request,),
    m.StatList: (_request, ls.values),
    m.Answered: (_request, f.flag, f.text),
    m.Unquarantine: (_request, ls.keys),
    m.Trace: (_request, f.text, f.flag),
    m.Resize: (_request, f.count),
    m.Resized: (_request, f.count, f.text),
    m.Drop: (ls.chunks, f.integer(0, f.U31), f.count),
    m.Dropped: (ls.chunks,),
    m.Added: (ls.chunks, f.integer(0, f.U31), f.count),
    m.Join: (f.version, f.binary(16), f.integer(1, f.U31)),
    m.Joined: (
        f.integer(1),
        f.count,
        f.text,
        f.integer(1, f.U31),
        f.integer(0, f.U31),
        f.version,
    ),
    m.PromptPart: (_request, ls.tokens),
    m.Generate: (_request, ls.tokens, ls.settings, _milliseconds, f.blob),
    m.Queued: (_request, f.integer(0, f.U31)),
    m.Progress: (_request, f.integer(0, f.U31), f.integer(0, f.U31)),
    m.Tokens: (_request, ls.tokens, ls.logprobs, ls.values, ls.tokens, ls.logprobs),
    m.CancelGenerate: (_request,),
    m.Done: (_request, f.word(m.ENDINGS), ls.values),
    m.Status: (_request, f.flag),
    m.StatusReport: (_request, ls.values, f.blob),
}


def _welcome(message: m.Welcome, _bounds: Bounds) -> None:
    own = Bounds(message.n_layers, message.n_experts, message.n_slots)
    r.table(message.table, own)
    n_keys = message.n_layers * message.n_experts
    for name, found, wanted in (
        ("table", len(message.table), n_keys * r.TABLE_ENTRY.itemsize),
        ("scores", len(message.scores), message.n_slots * r.SCORE.itemsize),
    ):
        if found != wanted:
            raise Unfit("size", f"{name} has {found} bytes, wanted {wanted}")


def _versions(message: m.SlotChanges | m.Changes, _bounds: Bounds) -> None:
    if message.to_version < message.from_version:
        raise Unfit(
            "order", f"versions {message.from_version} to {message.to_version} go backwards"
        )


def _leased(message: m.Leased, _bounds: Bounds) -> None:
    leased = {lease[:2] for lease in message.leases}
    for error in message.errors:
        if error[:2] in leased:
            raise Unfit("order", f"layer {error[0]} expert {error[1]} has a lease and an error")


def _row_request(message: m.RowRequest, bounds: Bounds) -> None:
    tables = [message.table, *(table for table, _ in message.others)]
    if len(set(tables)) != len(tables):
        raise Unfit("order", "found a table twice, wanted each once")
    n_rows = (len(message.rows) + sum(len(rows) for _, rows in message.others)) // 4
    if n_rows > bounds.ring_rows:
        raise Unfit("size", f"found {n_rows} rows, wanted at most {bounds.ring_rows}")


def _rows_ready(message: m.RowsReady, bounds: Bounds) -> None:
    if message.position + message.n_rows > bounds.ring_rows:
        raise Unfit(
            "range",
            f"ring rows {message.position} to {message.position + message.n_rows - 1}, "
            f"the ring has {bounds.ring_rows}",
        )


def _tokens(message: m.Tokens, _bounds: Bounds) -> None:
    if message.logprobs and len(message.logprobs) != len(message.ids):
        raise Unfit("size", f"{len(message.logprobs)} logprobs for {len(message.ids)} ids")
    n_top = len(message.top_ids)
    if len(message.top_logprobs) != n_top:
        raise Unfit("size", f"{len(message.top_logprobs)} top_logprobs for {n_top} top_ids")
    if n_top and (not message.ids or n_top % len(message.ids)):
        raise Unfit("size", f"{n_top} top_ids for {len(message.ids)} ids, wanted as many for each")


# Checks across fields, after each field's own.
WHOLE: dict[type, Callable[[Any, Bounds], None]] = {
    m.Welcome: _welcome,
    m.SlotChanges: _versions,
    m.Changes: _versions,
    m.Leased: _leased,
    m.RowRequest: _row_request,
    m.RowsReady: _rows_ready,
    m.Tokens: _tokens,
}
