from __future__ import annotations

import re
import struct
from dataclasses import MISSING, fields
from pathlib import Path

from protocol.arena.attach import ATTACH_REQUEST_BYTES, AttachRequest
from protocol.arena.layout import (
    HEADER,
    LAYOUT_VERSION,
    SECTIONS,
    Identity,
    SlotState,
    write_identity,
)
from protocol.wire import limits
from protocol.wire import messages as m
from protocol.wire.schema import KINDS
from tests.support.fake_daemon import LAYOUT

PAGE = (Path(__file__).parents[2] / "protocol" / "PROTOCOL.md").read_text()
ROW = re.compile(r"^\| (\d+) \| (\w+) \| ([cerdfx, ]+) \| (.*?) \|", re.MULTILINE)


def test_page_and_code_have_the_same_messages_kinds_and_fields() -> None:
    stated = {}
    for kind, name, _, row in ROW.findall(PAGE.partition("## 4.")[2].partition("## 5.")[0]):
        stated[name] = (int(kind), re.findall(r"`(\w+): [\w?]+`", row))
    built = {
        cls.__name__: (kind, [field.name for field in fields(cls)]) for cls, kind in KINDS.items()
    }
    assert stated == built


def test_page_explains_every_type_that_it_uses() -> None:
    used = set(re.findall(r"`\w+: ([\w?]+)`", PAGE))
    explained = set(re.findall(r"`([\w?]+)`", PAGE.partition("## 3.")[2].partition("## 4.")[0]))
    assert used <= explained


def test_page_states_every_default() -> None:
    stated = PAGE.partition("Defaults of trailing fields:")[2].partition("\n\n")[0]
    for cls in KINDS:
        for field in fields(cls):
            if field.default is not MISSING or field.default_factory is not MISSING:
                assert re.search(rf"{cls.__name__} `{field.name}`", stated)


def test_page_lists_every_word() -> None:
    words = PAGE.partition("## 5.")[2].partition("## 6.")[0]
    for word in (*m.ROLES, *m.REFUSALS, *m.ERROR_CODES, *m.ENDINGS, *m.FAULTS):
        assert f"`{word}`" in words


def test_page_states_versions_and_limits() -> None:
    assert f"| wire | {m.PROTOCOL_VERSION[0]}.{m.PROTOCOL_VERSION[1]} |" in PAGE
    assert f"| arena layout | {LAYOUT_VERSION[0]}.{LAYOUT_VERSION[1]} |" in PAGE
    assert limits.MAX_FRAME_BYTES == 1 << 20 and limits.MAX_MESSAGE_BYTES == 16 << 20
    assert f"{limits.MAX_LIST:,} entries" in PAGE
    assert f"{limits.MAX_TEXT:,} characters" in PAGE
    assert f"{limits.MAX_VALUES:,} names of at most {limits.MAX_NAME}" in PAGE
    assert (limits.SEND_HIGH_WATER, limits.RECEIVE_HIGH_WATER) == (64, 1024)
    assert (limits.MOST_WAITING_BYTES, limits.DEAF_MS) == (1 << 20, 2000)
    assert "than 1 MiB waits, or that takes none of it for 2 s" in PAGE
    assert limits.MAX_PATH_BYTES == 100
    assert f"at most {limits.MOST_ROW_REQUESTS} requests" in PAGE
    assert f"one of more than {limits.MOST_KEYS_NAMED:,} besides is refused" in PAGE
    assert limits.HANDSHAKE_MS == 2000 and "| HANDSHAKE_IVL | | 2 s |" in PAGE
    assert (limits.HELLO_MS, limits.MISS_MS, limits.ROWS_MS) == (5000, 30_000, 5000)
    assert (limits.CANCEL_MS, limits.STATS_MS, limits.ATTACH_MS) == (5000, 1000, 2000)


def test_page_lists_the_arenas_sections_in_order() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| 4096|^\| `(\w+)` \| [^|]+ \| 64", PAGE, re.MULTILINE
    )
    assert tuple(first or second for first, second in rows) == SECTIONS


def test_slot_header_stands_as_the_page_says() -> None:
    sentence = PAGE.partition("**Slot header**")[2].partition("**Identity page.**")[0]
    assert HEADER.fields is not None
    for name in HEADER.names or ():
        word = name.replace("_", " ")
        assert re.search(rf"\b{HEADER.fields[name][1]} {word} [uf]\d", sentence), name
    for state in SlotState:
        assert f"{state.value} {state.name}" in sentence


def test_identity_page_stands_byte_by_byte_as_the_page_says() -> None:
    page = bytearray(LAYOUT.n_bytes)
    identity = Identity(LAYOUT, b"A" * 16, b"F" * 16, 7, 5, 77, 99, clean=True)
    write_identity(page, identity)
    assert page[0:8] == b"HRARENA\n"
    assert struct.unpack_from("<2I", page, 8) == LAYOUT_VERSION
    assert struct.unpack_from("<Q", page, 16) == (LAYOUT.n_bytes,)
    assert page[32:64] == b"A" * 16 + b"F" * 16
    assert struct.unpack_from("<6Q", page, 64) == (3, 8, 10, 4096, 36, 32)
    assert struct.unpack_from("<6Q", page, 112) == LAYOUT.piece_offsets
    assert struct.unpack_from("<6Q", page, 160) == LAYOUT.piece_bytes
    assert struct.unpack_from("<12Q", page, 208) == LAYOUT.offsets
    assert struct.unpack_from("<12Q", page, 304) == LAYOUT.sizes
    assert struct.unpack_from("<Q8Q8Q", page, 400) == (0, 4096, *[0] * 7, 1, *[0] * 7)
    assert not any(page[536:1024])
    assert struct.unpack_from("<QQIIQ", page, 1024) == (7, 5, 77, 1, 99)
    for byte in (
        0,
        8,
        16,
        24,
        32,
        48,
        64,
        112,
        160,
        208,
        304,
        400,
        408,
        472,
        1024,
        1032,
        1040,
        1044,
        1048,
    ):
        assert f"\n| {byte} | " in PAGE


def test_attach_request_is_twenty_bytes() -> None:
    packet = AttachRequest(5, 6).pack()
    assert len(packet) == ATTACH_REQUEST_BYTES == 20
    assert packet == b"HRA1" + (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    assert AttachRequest.unpack(packet) == AttachRequest(5, 6)
