"""Traces on disk: rotation, going on after a crash, and what is never overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expert_daemon.routing_trace import TraceShape
from expert_daemon.synthetic_trace import synthetic_trace
from expert_daemon.trace_file import TraceFile, read_trace, write_trace
from expert_daemon.trace_format import HEADER_BYTES, Step, encode_blocks
from expert_daemon.trace_parts import trace_parts
from protocol.errors import ConfigError

SHAPE = TraceShape(2, 10, 2, expert_bytes=100, slot_bytes=4096, fingerprint=b"0123456789abcdef")


def step(number):
    first, second = divmod(number, 9)
    keys = [first % 9, 9, 10 + second, 19]
    return Step(number, np.array(keys, np.int64), True)


def firsts(path):
    trace, _ = read_trace(path)
    return [int(keys[0]) * 9 + int(keys[2]) - 10 for keys in trace.steps()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "picks.trace"


def test_a_trace_is_private_and_read_as_it_was_written(path):
    file = TraceFile(path, SHAPE)
    file.write([step(n) for n in range(5)])
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == file.n_bytes
    assert firsts(path) == list(range(5))


def test_a_full_file_becomes_an_older_part_and_the_oldest_goes(path):
    one = len_of_block()
    file = TraceFile(path, SHAPE, max_bytes=HEADER_BYTES + 2 * one, n_old_parts=2)
    for n in range(9):
        file.write([step(n)])
    file.close()
    assert [part.name for part in trace_parts(path)] == [
        "picks.trace.2",
        "picks.trace.1",
        "picks.trace",
    ]
    assert all(part.stat().st_size <= HEADER_BYTES + 2 * one for part in trace_parts(path))
    assert firsts(path) == [4, 5, 6, 7, 8]
    assert firsts(path.with_name("picks.trace.1")) == [6, 7]


def len_of_block():
    (block,) = encode_blocks([step(0)], SHAPE, 0)
    return len(block)


def test_without_older_parts_a_full_file_begins_anew(path):
    file = TraceFile(path, SHAPE, max_bytes=HEADER_BYTES + len_of_block(), n_old_parts=0)
    for n in range(3):
        file.write([step(n)])
    file.close()
    assert firsts(path) == [2]
    assert trace_parts(path) == [path]


def test_a_block_larger_than_the_limit_still_gets_a_file(path):
    file = TraceFile(path, SHAPE, max_bytes=10)
    file.write([step(0)])
    file.write([step(1)])
    file.close()
    assert firsts(path) == [0, 1]
    assert len(trace_parts(path)) == 2


def test_a_successor_goes_on_after_a_cut_at_any_byte(path):
    file = TraceFile(path, SHAPE)
    for n in range(3):
        file.write([step(n)])
    file.close()
    whole, one = path.read_bytes(), len_of_block()
    for cut in range(len(whole) + 1):
        if 0 < cut < HEADER_BYTES:
            continue
        path.write_bytes(whole[:cut])
        file = TraceFile(path, SHAPE)
        file.write([step(7)])
        file.close()
        n_whole = max(0, cut - HEADER_BYTES) // one
        assert firsts(path) == [*range(n_whole), 7]
        assert read_trace(path)[1] == []
    assert trace_parts(path) == [path]


def test_a_header_that_was_torn_as_it_was_written_is_written_anew(path):
    file = TraceFile(path, SHAPE)
    file.close()
    header = path.read_bytes()
    for cut in range(HEADER_BYTES):
        path.write_bytes(header[:cut])
        TraceFile(path, SHAPE).close()
        assert firsts(path) == []


def test_a_trace_of_another_model_becomes_an_older_part_and_is_not_mixed_in(path):
    file = TraceFile(path, SHAPE)
    file.write([step(1)])
    file.close()
    other = TraceShape(2, 10, 2, expert_bytes=100, slot_bytes=4096)
    file = TraceFile(path, other)
    file.write([step(2)])
    file.close()
    trace, notes = read_trace(path)
    assert trace.shape == other
    assert firsts(path) == [2]
    assert notes == [f"{path}.1: of another model: left out, and what is older"]
    assert firsts(path.with_name(path.name + ".1")) == [1]


def test_a_file_that_is_no_trace_is_left_alone(path):
    path.write_text("somebody's letter")
    with pytest.raises(ConfigError, match="not a routing trace, it begins with b'somebody'"):
        TraceFile(path, SHAPE)
    assert path.read_text() == "somebody's letter"
    os.mkfifo(path.with_name("pipe"))
    with pytest.raises(ConfigError, match="not a plain file"):
        TraceFile(path.with_name("pipe"), SHAPE)
    with pytest.raises(ConfigError, match="Is a directory"):
        TraceFile(path.parent, SHAPE)
    with pytest.raises(ConfigError, match="No such file"):
        TraceFile(path.with_name("missing") / "it", SHAPE)


def test_a_file_has_one_writer(path):
    file = TraceFile(path, SHAPE)
    code = (
        "import sys; from pathlib import Path; from expert_daemon.trace_file import TraceFile\n"
        "from expert_daemon.routing_trace import TraceShape\n"
        "from protocol.errors import ConfigError\n"
        "try: TraceFile(Path(sys.argv[1]), TraceShape(2, 10, 2, 100, 4096))\n"
        "except ConfigError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "another process writes it" in told
    file.close()


def test_a_write_that_fails_leaves_whole_blocks_alone(path, monkeypatch):
    file = TraceFile(path, SHAPE)
    file.write([step(0)])
    real = os.write

    def half(descriptor, data):
        if len(data) > 10:
            return real(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        file.write([step(1)])
    monkeypatch.undo()
    file.write([step(2)])
    file.close()
    assert firsts(path) == [0, 2]
    assert read_trace(path)[1] == []


def test_damage_is_told_with_its_file_and_size(path):
    file = TraceFile(path, SHAPE)
    for n in range(3):
        file.write([step(n)])
    file.close()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + len_of_block() + 5] ^= 1
    path.write_bytes(data[:-1])
    one = len_of_block()
    assert firsts(path) == [0]
    assert read_trace(path)[1] == [f"{path}: {2 * one - 1} bytes at the end are no whole block"]
    path.write_bytes(data)
    assert firsts(path) == [0, 2]
    assert read_trace(path)[1] == [f"{path}: {one} damaged bytes left out"]


def parts_of_one_step(path, n_parts):
    """A trace file whose every step is a part, `n_parts` of them; n_parts - 1 are older ones."""
    file = TraceFile(path, SHAPE, max_bytes=HEADER_BYTES + len_of_block())
    for n in range(n_parts):
        file.write([step(n)])
    return file


def test_a_part_that_is_no_trace_or_gone_is_told_and_the_older_ones_are_read(path):
    parts_of_one_step(path, 6).close()
    path.with_name("picks.trace.1").write_text("something else")
    path.with_name("picks.trace.3").unlink()
    path.with_name("picks.trace.4").unlink()
    trace, notes = read_trace(path)
    assert len(trace) == 3
    assert firsts(path) == [0, 3, 5]
    assert notes == [
        f"{path}.1: not a routing trace, it begins with b'somethin': left out",
        f"{path}: parts missing between picks.trace.5 and picks.trace.2: 2",
        f"{path}: parts missing between picks.trace.2 and picks.trace: 1",
    ]


def test_parts_are_in_the_order_of_their_numbers_and_none_counts_twice(path):
    parts_of_one_step(path, 4).close()
    path.with_name("picks.trace.2").rename(path.with_name("picks.trace.40"))
    path.with_name("picks.trace.9").write_bytes(path.with_name("picks.trace.1").read_bytes())
    path.with_name("picks.trace.01").write_text("not one of its names")
    assert firsts(path) == [0, 1, 2, 3]
    assert read_trace(path)[1] == [f"{path}.9: the same part as {path}.1: left out"]


@pytest.mark.parametrize("n_renames", range(8))
def test_a_death_within_a_rotation_loses_no_part_and_the_next_fills_the_gap(
    path, monkeypatch, n_renames
):
    file = parts_of_one_step(path, 7)
    left = [n_renames]
    replace = type(path).replace

    def replace_and_die(self, to):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return replace(self, to)

    monkeypatch.setattr(type(path), "replace", replace_and_die)
    if n_renames == 7:
        monkeypatch.setattr(file, "_open", lambda: replace_and_die(path, path))
    with pytest.raises(KeyboardInterrupt):
        file.write([step(7)])
    monkeypatch.undo()
    file.close()
    if n_renames == 7:
        assert read_trace(path)[1] == [f"{path}: no such file, only its older parts"]
    assert firsts(path) == list(range(7))
    file = TraceFile(path, SHAPE, max_bytes=HEADER_BYTES + len_of_block())
    file.write([step(7)])
    assert (firsts(path), read_trace(path)[1]) == (list(range(8)), [])
    file.write([step(8)])
    assert (firsts(path), read_trace(path)[1]) == (list(range(1, 9)), [])
    assert len(trace_parts(path)) == 8
    file.close()


def test_a_pipe_a_device_and_a_name_that_is_none_are_refused_at_once(path):
    os.mkfifo(path)
    for file in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="not a plain file"):
            read_trace(file)
    for name in ("a\0b", "a\nb", "a\x85b", "a\udcffb"):
        for use in (read_trace, lambda file: TraceFile(file, SHAPE)):
            with pytest.raises(ConfigError, match="no control characters"):
                use(path.with_name(name))
    with pytest.raises(ConfigError, match="at most 4095 bytes"):
        TraceFile(path / ("x/" * 3000), SHAPE)


def test_of_a_file_that_is_no_trace_only_the_first_bytes_are_read(path, monkeypatch):
    asked = []
    pread = os.pread

    def counted(descriptor, n_bytes, place):
        asked.append(n_bytes)
        return pread(descriptor, n_bytes, place)

    monkeypatch.setattr(os, "pread", counted)
    with path.open("wb") as file:
        file.truncate(200 << 30)
    for use in (read_trace, lambda file: TraceFile(file, SHAPE)):
        with pytest.raises(ConfigError, match="not a routing trace"):
            use(path)
    assert sum(asked) == 2 * HEADER_BYTES
    assert path.stat().st_size == 200 << 30


def test_a_trace_larger_than_a_part_may_be_is_not_read(path):
    TraceFile(path, SHAPE).close()
    os.truncate(path, 200 << 30)
    with pytest.raises(ConfigError, match=r"214748364800 bytes, a part has 1073741824 at most"):
        read_trace(path)
    file = TraceFile(path, SHAPE)
    file.write([step(1)])
    file.close()
    assert path.with_name("picks.trace.1").stat().st_size == 200 << 30
    assert firsts(path) == [1]
    assert "a part has 1073741824 at most: left out" in read_trace(path)[1][0]
    with pytest.raises(ConfigError, match="the most is 1073741824"):
        TraceFile(path, SHAPE, max_bytes=(1 << 30) + 1)


def test_a_made_up_trace_is_written_once_and_read_back(path):
    trace = synthetic_trace("recent", 700, shape=SHAPE)
    n_bytes = write_trace(path, trace)
    assert path.stat().st_size == n_bytes
    again, notes = read_trace(path)
    assert notes == []
    assert again.shape == SHAPE
    assert (again.keys == trace.keys).all()
    assert (again.starts == trace.starts).all()
    assert again.is_token.all()
    with pytest.raises(ConfigError, match="File exists"):
        write_trace(path, trace)


def test_what_is_not_there_cannot_be_read(path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(path)
