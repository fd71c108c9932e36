"""The real daemon records routing traces, and gives up first what the device keeps."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from expert_daemon.routing_trace import shape_of
from expert_daemon.trace_file import TraceFile, read_trace
from protocol.errors import ConfigError
from protocol.files.checkpoint import open_checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from protocol.wire.codec import encode
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.raw_client import RawClient, hello
from tests.support.running_daemon import daemon_process, daemon_thread, smallest_arena

pytestmark = pytest.mark.timeout(90)

N_LAYERS, N_EXPERTS, TOP_K = 5, 24, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


def engine_of(runtime_dir, checkpoint):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def picks_of(step):
    """(layer, expert) of one token, other ones in each step."""
    pairs = [(layer, (step + layer + at) % N_EXPERTS) for layer in range(N_LAYERS) for at in (0, 5)]
    return np.array(sorted(pairs), np.uint16)


def keys_of(step):
    return (picks_of(step).astype(np.int64) @ [N_EXPERTS, 1]).tolist()


def touched(engine, steps):
    """Touch these steps and wait until the daemon has counted them."""
    before = engine.stats()["touches"]
    for step in steps:
        engine.touch(step, picks_of(step))
    deadline = time.monotonic() + 10
    while engine.stats()["touches"] < before + len(steps) * N_LAYERS * TOP_K:
        assert time.monotonic() < deadline
    return engine.stats()


def test_the_picks_of_every_step_are_in_the_trace(model, checkpoint, runtime_dir, tmp_path):
    path = tmp_path / "picks.trace"
    with (
        daemon_process(model, runtime_dir, "--trace", str(path)) as daemon,
        engine_of(runtime_dir, checkpoint) as engine,
    ):
        stats = touched(engine, range(30))
        assert stats["trace"] == str(path)
        engine.touch(30, picks_of(30)[:3])
        engine.stats()
        assert daemon.stop() == 0
    trace, notes = read_trace(path)
    assert notes == []
    assert trace.shape == shape_of(checkpoint)
    assert (len(trace), trace.n_tokens) == (31, 30)
    assert [keys.tolist() for keys in trace.steps()] == [
        *map(keys_of, range(30)),
        keys_of(30)[:3],
    ]


def test_a_killed_daemon_loses_a_moment_and_its_successor_goes_on(
    model, checkpoint, runtime_dir, tmp_path
):
    path = tmp_path / "picks.trace"
    with daemon_process(model, runtime_dir, "--trace", str(path)) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            touched(engine, range(10))
            deadline = time.monotonic() + 10
            while engine.stats()["trace_steps"] < 10:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            daemon.kill()
        with path.open("ab") as file:
            file.write(b"HRB\ntorn")
        daemon.start()
        with engine_of(runtime_dir, checkpoint) as engine:
            touched(engine, range(10, 15))
        daemon.stop()
    trace, notes = read_trace(path)
    assert notes == []
    assert [keys.tolist() for keys in trace.steps()] == list(map(keys_of, range(15)))


def test_a_full_trace_becomes_an_older_part(model, checkpoint, runtime_dir, tmp_path):
    path = tmp_path / "picks.trace"
    flags = ("--trace", str(path), "--trace-size", "200")
    with (
        daemon_process(model, runtime_dir, *flags) as daemon,
        engine_of(runtime_dir, checkpoint) as engine,
    ):
        for step in range(3):
            touched(engine, [step])
            deadline = time.monotonic() + 10
            while engine.stats()["trace_steps"] <= step:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        daemon.stop()
    assert path.with_name("picks.trace.1").exists()
    assert len(read_trace(path)[0]) == 3


def test_a_trace_is_turned_on_and_off_by_message(model, checkpoint, runtime_dir, tmp_path):
    first, second = tmp_path / "first.trace", tmp_path / "second.trace"
    letter = tmp_path / "letter"
    letter.write_text("dear")
    with daemon_thread(model, runtime_dir), engine_of(runtime_dir, checkpoint) as engine:
        touched(engine, [0])

        assert engine.trace(first) == f"recording to {first}"
        touched(engine, [1, 2])
        assert engine.trace(second) == f"recording to {second}"
        touched(engine, [3])
        with pytest.raises(ConfigError, match="not a routing trace"):
            engine.trace(letter)
        with pytest.raises(ConfigError, match="wanted a path from / on"):
            engine.trace("here")
        touched(engine, [4])
        assert engine.trace(None) == f"{second} has ended"
        assert engine.trace(None) == "no trace was running"
        touched(engine, [5])
        assert engine.stats()["trace"] == ""
    assert [keys.tolist() for keys in read_trace(first)[0].steps()] == [keys_of(1), keys_of(2)]
    assert [keys.tolist() for keys in read_trace(second)[0].steps()] == [keys_of(3), keys_of(4)]
    assert letter.read_text() == "dear"


def test_no_path_of_a_trace_harms_the_daemon(model, runtime_dir, tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(200 << 30)
    paths = {
        str(weights): "not a routing trace",
        "/dev/zero": "not a plain file",
        str(tmp_path): "Is a directory",
        "/": "Is a directory",
        "/tmp/a\0b": "no control characters",
        "/tmp/a\nb": "no control characters",
        "\u00ad" * 4000: "at most 4095 bytes",
        "\u00ad" * 2000: "wanted a path from / on",
        "/" + "x" * 8191: "at most 4095 bytes",
        "/" + "x" * 4094: "File name too long",
    }
    with daemon_process(model, runtime_dir) as daemon, ExpertClient(runtime_dir) as reader:
        for path, text in paths.items():
            with pytest.raises(ConfigError, match=text):
                reader.trace(path)
        assert reader.stats()["trace"] == ""
        assert daemon.stop() == 0


def test_no_disk_of_a_trace_is_waited_for_beside_others(
    model, checkpoint, runtime_dir, tmp_path, monkeypatch
):
    goes_on = threading.Event()
    real = TraceFile.__init__

    def hung(file, path, *args, **kwargs):
        if path.name == "hung":
            goes_on.wait(60)
        real(file, path, *args, **kwargs)

    monkeypatch.setattr(TraceFile, "__init__", hung)
    monkeypatch.setattr(TraceFile, "write", lambda file, steps: goes_on.wait(60))
    with (
        daemon_thread(model, runtime_dir),
        engine_of(runtime_dir, checkpoint) as engine,
        ExpertClient(runtime_dir) as reader,
    ):
        engine.trace(tmp_path / "first")
        touched(engine, [0])
        errors: list[str] = []
        asked = threading.Thread(target=error_of, args=(engine, tmp_path / "hung", errors))
        asked.start()
        while asked.is_alive():
            reader.ping()
        assert errors == [f"trace {tmp_path / 'hung'}: the disk does not answer"]
        assert engine.trace(None).endswith("its disk does not answer, the last steps are lost")
        began = time.monotonic()
    assert time.monotonic() - began < 8
    goes_on.set()


def error_of(engine, path, errors):
    try:
        engine.trace(path)
    except ConfigError as error:
        errors.append(str(error))


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(model, runtime_dir, tmp_path):
    letter = tmp_path / "letter"
    letter.write_text("dear")
    started = daemon_process(model, runtime_dir, "--trace", str(letter))
    with pytest.raises(AssertionError, match="not a routing trace"), started:
        pass


@pytest.mark.parametrize("policy", ["lfu-da", "lru", "lru-random"])
def test_what_the_device_surely_keeps_leaves_the_arena_first(
    model, checkpoint, runtime_dir, policy
):
    settings = {"arena_bytes": smallest_arena(checkpoint, TOP_K), "policy": policy}
    started = daemon_thread(model, runtime_dir, **settings)
    with started, engine_of(runtime_dir, checkpoint) as engine:
        step = 0

        def load(layer, expert):
            nonlocal step
            step += 1
            answer = engine.miss(layer, [expert], step=step)
            engine.applied = answer.to_version
            assert answer.errors == ()

        def held():
            slots = engine.keys()
            return set(zip(slots["layer"].tolist(), slots["expert"].tolist(), strict=True))

        for key in range(N_LAYERS * N_EXPERTS):
            load(*divmod(key, N_EXPERTS))
            if len(held()) < key + 1:
                break
        before = held()
        newest = sorted(before)[-4:]
        for layer, expert in newest:
            engine.touch(step := step + 1, np.array([(layer, expert)], np.uint16))
        engine.arena.tier[:] = 1
        for layer, expert in newest:
            engine.arena.tier[layer, expert] = 2
        absent = sorted(set(np.ndindex(N_LAYERS, N_EXPERTS)) - before)[:4]
        for layer, expert in absent:
            load(layer, expert)
        assert before - held() == set(newest)


def test_what_an_engine_said_of_its_device_cache_goes_with_it(model, checkpoint, runtime_dir):
    with daemon_thread(model, runtime_dir), ExpertClient(runtime_dir) as reader:
        with engine_of(runtime_dir, checkpoint) as engine:
            engine.arena.tier[:] = 2
            reader.stats()
            assert (reader.arena.tier == 2).all()
        end = time.monotonic() + 5
        while reader.arena.tier.any():
            assert time.monotonic() < end
            reader.stats()
        with engine_of(runtime_dir, checkpoint) as engine:
            assert not engine.arena.tier.any()


def test_a_stranger_to_the_daemon_cannot_begin_a_trace(model, runtime_dir, tmp_path):
    path = tmp_path / "picks.trace"
    with daemon_thread(model, runtime_dir), RawClient(runtime_dir) as client:
        welcome = client.ask(hello())
        trace = m.Trace(1, str(path), on=True)
        answer = client.ask(encode(trace, welcome.session, welcome.generation))
        assert isinstance(answer, m.Refused)
        assert answer.reason == "hello_first"
    assert not path.exists()
