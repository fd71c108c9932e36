"""Pack files and manifests: what is written is read, and nothing damaged is believed."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError, ShardError
from protocol.files.checkpoint import open_checkpoint
from protocol.files.pack_directory import layer_ranges, read_record_file
from protocol.files.pack_format import (
    HEADER_BYTES,
    PART_BYTES,
    PackHeader,
    Stripe,
    check_index,
    decode_header,
    decode_index,
    encode_index,
    part_hashes,
    share_hashes,
)
from protocol.files.pack_manifest import (
    KINDS,
    Manifest,
    PackFile,
    SourceFile,
    plain_name,
    read_manifest,
)
from protocol.files.slice_map import ExpertLayout
from protocol.files.tensor_table import ExpectedTensor

PATH = Path("experts-00003.pack")
NO_SCALE = ExpectedTensor("F8_E8M0", (0,), "expert")


def fp4_layout(rows: int = 64, columns: int = 128) -> ExpertLayout:
    matrix = ExpectedTensor("I8", (rows, columns // 2), "expert")
    scale = ExpectedTensor("F8_E8M0", (rows, columns // 32), "expert")
    return ExpertLayout.of_pieces([matrix, scale] * 3)


def k_layout() -> ExpertLayout:
    gate = ExpectedTensor("Q2_K", (4, 256), "expert")
    down = ExpectedTensor("Q3_K", (256, 512), "expert")
    return ExpertLayout.of_pieces([gate, NO_SCALE, gate, NO_SCALE, down, NO_SCALE])


def header(layout: ExpertLayout | None = None, stripe: Stripe | None = None) -> PackHeader:
    return PackHeader(
        b"p" * 16, b"f" * 16, 3, 5, stripe or Stripe(), layout or fp4_layout()
    )  # fmt: skip


def index_of(made: PackHeader) -> bytes:
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 1 << 63, (made.n_experts, 1 + made.n_parts)).astype(np.uint64)
    return encode_index(numbers[:, 0], numbers[:, 1:])


@pytest.mark.parametrize("layout", [fp4_layout(), k_layout(), fp4_layout(2304, 5120)])
@pytest.mark.parametrize("stripe", [Stripe(), Stripe(1, 2), Stripe(2, 3, 4096)])
def test_a_header_reads_as_it_was_written(layout: ExpertLayout, stripe: Stripe) -> None:
    made = header(layout, stripe)
    index = index_of(made)
    page = made.encode(index)
    assert len(page) == HEADER_BYTES
    assert decode_header(PATH, page, made.file_bytes) == made
    check_index(PATH, page, index)
    checksums, parts = decode_index(made, index)
    assert encode_index(checksums, parts) == index
    assert parts.shape == (5, -(-made.share_bytes // PART_BYTES))


def test_formats_have_names() -> None:
    assert (fp4_layout().format, k_layout().format) == ("FP4", "Q2_K/Q3_K")
    mixed = list(k_layout().pieces)
    mixed[2] = ExpectedTensor("Q8_0", (4, 256), "expert")
    assert ExpertLayout.of_pieces(mixed).format == "Q2_K/Q8_0/Q3_K"


def test_the_released_expert_is_a_record_without_padding() -> None:
    pieces = [
        ExpectedTensor(dtype, shape, "expert")
        for rows, columns in ((2304, 5120), (2304, 5120), (5120, 2304))
        for dtype, shape in (("I8", (rows, columns // 2)), ("F8_E8M0", (rows, columns // 32)))
    ]
    made = header(ExpertLayout.of_pieces(pieces))
    assert made.share_bytes == 18_800_640
    assert made.n_parts == 18
    halves = [header(made.layout, Stripe(number, 2)).share_bytes for number in (0, 1)]
    assert sum(halves) == 18_800_640
    assert abs(halves[0] - halves[1]) <= 256 << 10


@given(
    n_stripes=st.integers(1, 9), unit=st.sampled_from([4096, 8192, 262144]),
    pages=st.integers(1, 700),
)  # fmt: skip
def test_stripes_cover_a_record_exactly_once(n_stripes: int, unit: int, pages: int) -> None:
    record_bytes = pages * 4096
    covered = np.zeros(record_bytes // 4096, np.int64)
    for number in range(n_stripes):
        stripe = Stripe(number, n_stripes, unit)
        end = 0
        for start, at, n_bytes in stripe.spans(record_bytes):
            assert at == end
            assert start % 4096 == 0 == n_bytes % 4096
            covered[start // 4096 : (start + n_bytes) // 4096] += 1
            end = at + n_bytes
        assert stripe.share_bytes(record_bytes) == end
    assert (covered == 1).all()


@given(n_stripes=st.integers(1, 4), unit=st.sampled_from([4096, 12288, 1 << 20]))
def test_a_stripe_is_hashed_as_it_lies_in_its_file(n_stripes: int, unit: int) -> None:
    record = np.random.default_rng(n_stripes).integers(0, 256, 5 << 19, dtype=np.uint8)
    for number in range(n_stripes):
        stripe = Stripe(number, n_stripes, unit)
        parts = [record[start : start + n] for start, _, n in stripe.spans(len(record))]
        share = np.concatenate(parts) if parts else record[:0]
        assert share_hashes(record, stripe).tolist() == part_hashes(share).tolist()


@given(data=st.binary(max_size=HEADER_BYTES), size=st.integers(0, 1 << 40))
def test_any_bytes_are_refused_as_a_header(data: bytes, size: int) -> None:
    with pytest.raises(ShardError, match="experts-00003"):
        decode_header(PATH, data, size)


def rehashed(page: bytearray) -> bytes:
    import xxhash

    page[-8:] = xxhash.xxh3_64_intdigest(bytes(page[:-8])).to_bytes(8, "little")
    return bytes(page)


@given(at=st.integers(8, HEADER_BYTES - 9), value=st.integers(0, 255), width=st.integers(1, 8))
def test_a_lying_header_with_the_right_hash_is_refused_or_harmless(at, value, width) -> None:
    made = header()
    page = bytearray(made.encode(index_of(made)))
    page[at : at + width] = bytes([value]) * len(page[at : at + width])
    try:
        read = decode_header(PATH, rehashed(page[:HEADER_BYTES]), made.file_bytes)
    except ShardError:
        return
    assert read.file_bytes == made.file_bytes
    assert read.layout.image.slot_bytes * read.n_experts < made.file_bytes


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.fake_checkpoint import write_fake_checkpoint
    from tests.support.packing import pack

    home = tmp_path_factory.mktemp("fuzz")
    pack(write_fake_checkpoint(home / "a", n_layers=1, n_experts=2), home / "b", "--copy")
    return home / "b"


def n_refused(packed: Path, name: str, n_files: int) -> int:
    """How many of `n_files` mutated files make the pack refused; the others are harmless."""
    rng = random.Random(9)
    path = packed / name
    original = path.read_bytes()
    record = name.endswith(".pack")
    refused = 0
    whole = read_manifest(packed)
    row = next(file for file in whole.files if file.kind == "experts")
    for turn in range(n_files):
        path.write_bytes(mutated(original, rng, is_record_file=record))
        try:
            if turn % 10 == 0:
                open_checkpoint(packed)
            elif record:
                read_record_file(path, row, whole)
            else:
                read_manifest(packed)
        except (ShardError, ConfigError):
            refused += 1
    path.write_bytes(original)
    return refused


@pytest.mark.parametrize("name", ["experts-00000.pack", "pack.json"])
def test_a_thousand_mutated_files_are_refused_or_harmless(packed: Path, name: str) -> None:
    assert n_refused(packed, name, 1000) > 900


def test_mutated_files_take_no_more_memory_than_their_headers(packed: Path) -> None:
    n_refused(packed, "pack.json", 20)
    tracemalloc.start()
    for name in ("experts-00000.pack", "pack.json"):
        n_refused(packed, name, 60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def mutated(data: bytes, rng: random.Random, *, is_record_file: bool) -> bytes:
    changed = bytearray(data)
    kind = rng.randrange(4)
    # Of a record file the header and the index count; records are what verify reads.
    places = (
        [*range(400), *range(len(data) - 40, len(data))] if is_record_file else range(len(data))
    )
    if kind == 0:
        changed[rng.choice(places)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del changed[rng.randrange(len(data)) :]
    elif kind == 2:
        changed += rng.randbytes(rng.randrange(1, 5000))
    else:
        at = rng.choice(places)
        changed[at : at + 8] = rng.randbytes(8)
    return bytes(changed)


def manifest() -> Manifest:
    return Manifest(
        pack_id=b"p" * 16,
        fingerprint=b"f" * 16,
        experts="fp4",
        engram="linked",
        n_layers=4,
        layers=(0, 2),
        source=(SourceFile("a.safetensors", 5, 7, "ab"),),
        files=(
            PackFile("experts-00000.pack", "stripe 1", "experts", 9, "cd", 0),
            PackFile("config.json", "", "copied", 9, "cd"),
        ),
        links=(SourceFile("a.safetensors", 5, 7, "ab"),),
        stripes=("x", "/mnt/y"),
        mirror="",
    )


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    made = manifest()
    (tmp_path / "pack.json").write_bytes(made.encode())
    assert read_manifest(tmp_path) == made
    assert made.missing_layers == (1, 3)
    assert made.directory(tmp_path, "stripe 1") == Path("/mnt/y")
    assert made.directory(tmp_path, "stripe 0") == tmp_path / "x"
    for place in ("stripe 2", "mirror", "elsewhere"):
        with pytest.raises(ShardError, match="not among its places"):
            made.directory(tmp_path, place)


def test_a_manifest_may_be_edited_in_its_places_alone(tmp_path: Path) -> None:
    raw = json.loads(manifest().encode())
    raw["places"]["stripes"][0] = "/mnt/z"
    (tmp_path / "pack.json").write_text(json.dumps(raw))
    assert read_manifest(tmp_path).stripes == ("/mnt/z", "/mnt/y")
    raw["layers"] = [0, 1, 2, 3]
    (tmp_path / "pack.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match="was changed"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [2, 0]}, {"layers": [0, 4]}, {"layers": [True]}, {"layers": 3},
        {"n_layers": 1 << 20}, {"pack_id": "zz"}, {"pack_id": "00"}, {"files": [{}]},
        {"files": [{"name": "../x", "place": "", "kind": "copied", "bytes": 1, "hash": "a"}]},
        {"files": [{"name": "x", "place": "", "kind": "odd", "bytes": 1, "hash": "a"}]},
        {"files": [{"name": "x", "place": "", "kind": "copied", "bytes": -1, "hash": "a"}]},
        {"links": None}, {"places": {}}, {"places": {"stripes": [1], "mirror": ""}},
        {"version": 2}, {"format": "other"},
    ],
)  # fmt: skip
def test_a_lying_manifest_with_the_right_hash_is_refused(tmp_path: Path, change) -> None:
    from protocol.files import pack_manifest

    raw = json.loads(manifest().encode()) | change
    raw["hash"] = pack_manifest._own_hash(raw)
    (tmp_path / "pack.json").write_text(json.dumps(raw))
    with pytest.raises(ShardError, match=r"pack\.json"):
        read_manifest(tmp_path)


def test_names_that_leave_the_directory_are_refused() -> None:
    for name in ("", "..", ".hidden", "a/b", "a\nb", "x" * 300, 7, None):
        with pytest.raises(ValueError, match="no file name"):
            plain_name(name)
    assert plain_name("experts-00000.pack") == "experts-00000.pack"
    assert KINDS[0] == "experts"


def test_layers_are_named_as_ranges() -> None:
    assert layer_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert layer_ranges([]) == ""


def test_a_file_is_what_the_document_says(packed: Path) -> None:
    import struct

    import xxhash

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    def hash_of(part: bytes) -> int:
        return xxhash.xxh3_64_intdigest(part)

    data = (packed / "experts-00000.pack").read_bytes()
    raw = json.loads((packed / "pack.json").read_text())
    assert data[:8] == b"HRDPACK\n"
    assert data[16:48].hex() == raw["pack_id"] + raw["fingerprint"]
    assert [number(at, 4) for at in (8, 12, 48, 52, 56, 60)] == [1, 4096, 0, 2, 0, 1]
    share, index_at, index_bytes = number(80, 8), number(96, 8), number(104, 8)
    assert (number(64, 8), number(72, 8), number(88, 8)) == (262144, share, 4096)
    assert (index_at, index_bytes, number(112, 8)) == (4096 + 2 * share, 2 * 2 * 8, 1 << 20)
    assert index_at + index_bytes == len(data)
    assert number(120, 8) == hash_of(data[index_at:])
    assert number(4088, 8) == hash_of(data[:4088])
    assert not any(data[128:256]) and not any(data[496:4088])
    pieces = [struct.unpack_from("<16sQQII", data, 256 + 40 * piece) for piece in range(6)]
    assert [name.rstrip(b"\0") for name, *_ in pieces] == [b"I8", b"F8_E8M0"] * 3
    for expert in range(2):
        record = data[4096 + expert * share : 4096 + (expert + 1) * share]
        inside = b"".join(record[at : at + size] for _, at, size, *_ in pieces)
        assert number(index_at + expert * 16, 8) == hash_of(inside)
        assert number(index_at + expert * 16 + 8, 8) == hash_of(record)
    file = next(file for file in raw["files"] if file["kind"] == "experts")
    assert file["hash"] == xxhash.xxh3_128_hexdigest(data[:4096] + data[index_at:])
    copied = next(file for file in raw["files"] if file["name"] == "config.json")
    content = (packed / "config.json").read_bytes()
    parts = hash_of(content).to_bytes(8, "little")
    assert copied["hash"] == xxhash.xxh3_128_hexdigest(parts)
