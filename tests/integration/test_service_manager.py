"""The conversations of the services with their manager: notify, watchdog, descriptor store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_process
from tests.support.service_manager import ServiceManager, service_manager


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_fake_checkpoint(directory)
    return directory


def daemon_command(model: Path, runtime_dir: Path) -> list[str]:
    command = ["-m", "expert_daemon", "--model", str(model), "--runtime-dir", str(runtime_dir)]
    return [*command, "--state-dir", str(runtime_dir / "state")]


@pytest.fixture
def manager(model: Path, runtime_dir: Path) -> Iterator[ServiceManager]:
    with service_manager(daemon_command(model, runtime_dir), runtime_dir) as manager:
        yield manager


def test_a_cold_daemon_stores_its_arena_before_it_is_ready(manager: ServiceManager):
    manager.start()
    *before, ready = manager.said
    assert [lines for lines in before if "FDSTORE" in lines] == [
        {"FDSTORE": "1", "FDPOLL": "0", "FDNAME": "arena"}
    ]
    assert ready["READY"] == "1"
    assert ready["STATUS"] == "serving, generation 1"
    assert [name for name, _ in manager.store] == ["arena"]


def test_a_stop_is_announced_and_keeps_the_arena(manager: ServiceManager):
    manager.start()
    assert manager.stop() == 0
    manager.listen(0.1)
    assert manager.count("STOPPING") == 1
    assert [name for name, _ in manager.store] == ["arena"]


def test_a_successor_takes_the_stored_arena_and_stores_it_no_second_time(
    manager: ServiceManager, runtime_dir: Path
):
    manager.start()
    inode = os.fstat(manager.store[0][1]).st_ino
    with ExpertClient(runtime_dir) as client:
        arena_id = client.welcome.arena_id
        with client.leased([(0, 1)]):
            pass
    manager.kill()
    manager.start()
    assert manager.count("FDSTORE") == 0
    assert manager.said[-1]["STATUS"] == "serving, generation 2"
    assert [os.fstat(descriptor).st_ino for _, descriptor in manager.store] == [inode]
    with ExpertClient(runtime_dir) as client:
        assert client.welcome.arena_id == arena_id
        with client.leased([(0, 1)]):
            assert client.stats()["reads"] == 0


def test_an_arena_that_does_not_fit_is_replaced_in_the_store(manager: ServiceManager, model: Path):
    manager.start()
    small = os.fstat(manager.store[0][1]).st_ino
    manager.kill()
    write_fake_checkpoint(model, seed=1, n_experts=64)
    manager.start()
    assert manager.count("FDSTOREREMOVE") == 1
    assert len(manager.store) == 1
    assert os.fstat(manager.store[0][1]).st_ino != small


def test_the_daemons_loop_shows_life_and_a_stopped_one_is_started_again(
    model: Path, runtime_dir: Path
):
    command = daemon_command(model, runtime_dir)
    with service_manager(command, runtime_dir, watchdog_s=2.0) as manager:
        manager.start()
        manager.until(lambda: manager.count("WATCHDOG") >= 3, 10)
        assert manager.n_watchdog_kills == 0
        manager.signal(signal.SIGSTOP)
        while manager.is_alive:
            manager.listen(0.1)
        assert manager.n_watchdog_kills == 1
        manager.start()
        assert manager.said[-1]["STATUS"] == "serving, generation 2"


def test_the_frontends_loop_shows_life_and_a_stopped_one_is_noticed(runtime_dir: Path):
    command = ["-m", "compute.frontend", "--runtime-dir", str(runtime_dir), "--port", "0"]
    with service_manager(command, runtime_dir, watchdog_s=3.0) as manager:
        manager.start(60)
        manager.until(lambda: manager.count("WATCHDOG") >= 2, 10)
        manager.signal(signal.SIGSTOP)
        while manager.is_alive:
            manager.listen(0.1)
        assert manager.n_watchdog_kills == 1


def test_computes_loops_show_life_and_a_stopped_one_is_noticed(
    demo_dir: Path, runtime_dir: Path, tmp_path: Path
):
    command = ["-m", "compute", "--model", "demo", "--runtime-dir", str(runtime_dir)]
    other = tmp_path / "compute"
    other.mkdir()
    with (
        daemon_process(demo_dir, runtime_dir),
        service_manager(command, other, watchdog_s=2.0) as manager,
    ):
        manager.start(60)
        manager.until(lambda: manager.count("WATCHDOG") >= 2, 10)
        manager.signal(signal.SIGSTOP)
        while manager.is_alive:
            manager.listen(0.1)
        assert manager.n_watchdog_kills == 1
