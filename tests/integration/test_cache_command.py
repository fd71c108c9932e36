"""`headrace cache`, `cache warm` and `cache resize` with a real daemon."""

from __future__ import annotations

import json

import pytest

import headrace
from compute.commands import cache
from compute.commands.cache_facts import hits, troubles
from compute.commands.cache_warm import in_file_order
from protocol.files.checkpoint import open_checkpoint
from protocol.sizes import format_size
from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.faulty_source import Faults, overlaps
from tests.support.running_daemon import daemon_process, daemon_thread, smallest_arena
from tests.support.shard_bytes import expert_bytes, slot_bytes

pytestmark = pytest.mark.timeout(60)

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_checkpoint(model)


@pytest.fixture
def daemon(model, runtime_dir):
    with daemon_process(model, runtime_dir) as started:
        yield started


def engine_of(runtime_dir, checkpoint):
    return ExpertClient(runtime_dir, "engine", checkpoint.fingerprint, TOP_K)


def use(engine, step, layer, experts):
    answer = engine.miss(layer, experts, step=step)
    assert answer.errors == ()
    engine.applied = answer.to_version
    engine.touch(step, [(layer, expert) for expert in experts])
    return answer


def run(capsys, *arguments):
    """(exit status, the object printed last, standard error)."""
    status = headrace.main(["cache", *map(str, arguments)])
    found = capsys.readouterr()
    last = found.out.strip().splitlines()[-1] if found.out.strip() else "null"
    return status, json.loads(last), found.err


def test_it_shows_tiers_hit_rates_and_the_hottest(daemon, checkpoint, runtime_dir, capsys):
    with engine_of(runtime_dir, checkpoint) as engine:
        for step, experts in enumerate([(3, 5), (3, 7), (3, 5), (3, 9)]):
            use(engine, step, 2, experts)
        engine.ping()
        status, facts, _ = run(capsys, "--runtime-dir", runtime_dir, "--json", "--top", 2)
    assert status == 0
    assert facts["tiers"]["arena"]["resident"] == 4
    assert facts["tiers"]["arena"]["of_experts"] == N_LAYERS * N_EXPERTS
    assert facts["tiers"]["device"]["resident"] == 0
    since = facts["since_start"]
    assert (since["picks"], since["misses"], since["hits"]) == (8, 4, 4)
    assert since["hit_rate"] == 0.5
    assert facts["layers"][2]["resident"] == 4
    assert [one["expert"] for one in facts["layers"][2]["hottest"]] == [3, 5]
    assert facts["layers"][0] == {"layer": 0, "resident": 0, "hottest": []}
    assert facts["troubles"] == []
    assert facts["daemon"]["pid"] == daemon.pid


def test_for_people_it_prints_tables(daemon, checkpoint, runtime_dir, capsys):
    with engine_of(runtime_dir, checkpoint) as engine:
        use(engine, 0, 1, (3, 5))
        engine.ping()
        assert headrace.main(["cache", "--runtime-dir", str(runtime_dir)]) == 0
    text = capsys.readouterr().out
    for words in ("2 of 96 experts", "hit rate", "this arena", "hottest experts", "3 (1)"):
        assert words in text


def test_counts_of_the_arenas_life_go_on_over_a_restart(daemon, checkpoint, runtime_dir, capsys):
    with engine_of(runtime_dir, checkpoint) as engine:
        use(engine, 0, 1, (3, 5))
    daemon.stop()
    daemon.start()
    with engine_of(runtime_dir, checkpoint) as engine:
        engine.applied = engine.welcome.version
        use(engine, 0, 1, (3, 5))
        engine.ping()
    daemon.stop()
    daemon.start()
    _, facts, _ = run(capsys, "--runtime-dir", runtime_dir, "--json")
    assert facts["since_start"]["picks"] == 0
    assert facts["since_start"]["hit_rate"] is None
    assert (facts["arena_life"]["picks"], facts["arena_life"]["misses"]) == (4, 2)
    assert facts["arena_life"]["daemons"] == 3


def test_a_cold_daemon_is_refilled_from_the_saved_list(
    daemon, checkpoint, model, runtime_dir, capsys
):
    with engine_of(runtime_dir, checkpoint) as engine:
        for layer in range(N_LAYERS):
            use(engine, layer, layer, range(0, N_EXPERTS, 2))
    assert daemon.stop() == 0
    daemon._keep(-1)
    daemon.start()
    status, answer, _ = run(capsys, "warm", "--runtime-dir", runtime_dir, "--json")
    assert status == 0
    assert (answer["listed"], answer["wanted"], answer["loaded"]) == (48, 48, 48)
    assert answer["bytes"] > 0
    with engine_of(runtime_dir, checkpoint) as engine:
        engine.applied = engine.welcome.version
        for layer in range(N_LAYERS):
            found = use(engine, layer, layer, range(0, N_EXPERTS, 2))
            assert found.n_bytes == 0
            assert slot_bytes(engine, found.slots[3]) == expert_bytes(checkpoint, layer, 6)
    status, answer, _ = run(capsys, "warm", "--runtime-dir", runtime_dir, "--json")
    assert (status, answer["wanted"]) == (0, 0)


def test_a_smaller_arena_takes_the_hottest_only(checkpoint, model, runtime_dir, capsys):
    size = smallest_arena(checkpoint, TOP_K)
    with daemon_process(model, runtime_dir) as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            for layer in range(N_LAYERS):
                use(engine, layer, layer, range(N_EXPERTS))
            for step in range(10, 14):
                use(engine, step, 5, (1, 2))
        daemon.stop()
        daemon._keep(-1)
        daemon._command += ["--arena", str(size)]
        daemon.start()
        status, answer, _ = run(capsys, "warm", "--runtime-dir", runtime_dir, "--json")
        assert status == 0
        assert answer["listed"] == N_LAYERS * N_EXPERTS
        assert 0 < answer["wanted"] < N_LAYERS * N_EXPERTS
        with ExpertClient(runtime_dir) as reader:
            there = {(int(la), int(ex)) for la, ex, _ in reader.keys().tolist()}
        assert {(5, 1), (5, 2)} <= there


def test_without_a_list_the_error_names_the_place(daemon, runtime_dir, capsys):
    assert headrace.main(["cache", "warm", "--runtime-dir", str(runtime_dir)]) == 2
    assert str(runtime_dir / "state") in capsys.readouterr().err


def test_nothing_was_saved_where_that_was_not_wanted(model, checkpoint, runtime_dir, capsys):
    with daemon_process(model, runtime_dir, "--no-save") as daemon:
        with engine_of(runtime_dir, checkpoint) as engine:
            use(engine, 0, 1, (3, 5))
        daemon.stop()
        assert not (runtime_dir / "state").exists()
        daemon.start()
        assert headrace.main(["cache", "warm", "--runtime-dir", str(runtime_dir)]) == 2


def test_without_a_daemon_the_error_names_the_directory(runtime_dir, capsys, monkeypatch):
    monkeypatch.setattr(cache, "HELLO_MS", 300)
    assert headrace.main(["cache", "--runtime-dir", str(runtime_dir)]) == 1
    assert f"no daemon answers in {runtime_dir}" in capsys.readouterr().err


def test_it_resizes(model, checkpoint, runtime_dir, capsys):
    smallest = smallest_arena(checkpoint, TOP_K)
    largest = smallest + (1 << 20)
    flags = ("--arena", str(smallest + (1 << 16)), "--arena-max", str(largest))
    with daemon_process(model, runtime_dir, *flags):
        place = ("--runtime-dir", runtime_dir, "--json")
        for size in (smallest + 3 * (1 << 16), smallest + (1 << 17)):
            status, answer, err = run(capsys, "resize", size, *place)
            assert (status, answer["text"]) == (0, "")
            assert size - 8192 < answer["bytes"] <= size
            assert format_size(answer["bytes"]) in err
        status, answer, err = run(capsys, "resize", "1TiB", *place)
        assert status == 1
        assert answer["text"]
        assert answer["bytes"] <= smallest + (1 << 17)
        assert headrace.main(["cache", "resize", "lots", *map(str, place)]) == 2


def test_a_quarantine_is_shown_and_lifted(model, checkpoint, runtime_dir, capsys):
    bad = [one for one in checkpoint.slice_map.slices(1, 2) if one.n_bytes]
    rules = [overlaps(checkpoint.shards.index(o.shard), o.offset, o.n_bytes) for o in bad]
    faults = Faults()
    size = smallest_arena(checkpoint, TOP_K)
    settings = {"arena_bytes": size, "read_mode": "buffered"}
    with daemon_thread(model, runtime_dir, faults, **settings):
        with engine_of(runtime_dir, checkpoint) as engine:
            use(engine, 0, 1, (2,))
            for step in range(1, 12):
                use(engine, step, step % 5 + 1 if step % 5 else 0, range(8))
                use(engine, step + 100, (step + 2) % 6, range(8, 16))
            faults.wrong = lambda *read: any(rule(*read) for rule in rules)
            held = {(int(la), int(ex)) for la, ex, _ in engine.keys().tolist()}
            assert (1, 2) not in held
            assert [code for *_, code, _ in engine.miss(1, (2,)).errors] == ["CHECKSUM"]
        place = ("--runtime-dir", runtime_dir)
        _, facts, _ = run(capsys, *place, "--json")
        assert any("quarantined: layer 1 expert 2" in line for line in facts["troubles"])
        assert headrace.main(["cache", "unquarantine", *map(str, place), "1:two"]) == 2
        assert headrace.main(["cache", "unquarantine", *map(str, place), "1:2000"]) == 2
        assert "6 layers of 16 experts" in capsys.readouterr().err
        assert headrace.main(["cache", "unquarantine", *map(str, place)]) == 0
        assert "lifted from 1 of 1 experts" in capsys.readouterr().err
        assert headrace.main(["cache", "unquarantine", *map(str, place)]) == 0
        assert "nothing is in quarantine" in capsys.readouterr().err


def test_keys_are_loaded_as_they_stand_in_the_files(checkpoint):
    keys = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]
    ordered = in_file_order(checkpoint, keys[::-1])
    assert sorted(ordered) == keys
    places = []
    for key in ordered:
        slices = [one for one in checkpoint.slice_map.slices(*key) if one.n_bytes]
        places.append(min((checkpoint.shards.index(one.shard), one.offset) for one in slices))
    assert places == sorted(places)


def test_rates_and_troubles_come_from_the_statistics():
    stats = {"n_uses": 10, "n_misses": 2, "n_adopted": 1, "reads": 4, "read_ns": 8_000_000}
    found = hits(stats, "")
    assert (found["hits"], found["misses"], found["read_ms"]) == (7, 3, 2.0)
    assert hits({}, "lifetime_")["hit_rate"] is None
    lines = troubles(
        {
            "quarantined": 2,
            "quarantine layer 1 expert 2": "layer 1 expert 2: bad",
            "stuck_clients": 1,
            "stuck": "engine 5",
            "reads_not_back": 1,
            "read_errors": 0,
            "slow_reads": 3,
            "hash_mismatches": 0,
        }
    )
    assert lines == [
        "quarantined: layer 1 expert 2: bad",
        "and 1 more in quarantine",
        "stuck: engine 5",
        "reads that have not returned: 1",
        "reads that took over 2 s: 3",
    ]
