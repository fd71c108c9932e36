"""What Keys and Stats cost the daemon's loop, through the real daemon."""

from __future__ import annotations

import pytest

from protocol.wire.client import ExpertClient
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.running_daemon import daemon_thread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_checkpoint(tmp_path_factory.mktemp("model"), n_layers=2, n_experts=16)


@pytest.fixture
def daemon(model, runtime_dir):
    with daemon_thread(model, runtime_dir) as started:
        yield started


def count_calls(monkeypatch, owner, name):
    """The list that grows by one with every call of a method."""
    calls = []
    original = getattr(owner, name)

    def counted(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


def listed(cache):
    return [tuple(key) for key in cache.resident()]


def test_keys_are_listed_anew_only_where_the_table_has_changed(daemon, monkeypatch):
    cache = daemon.daemon._server._works.loading.cache
    with ExpertClient(daemon.runtime_dir) as client:
        client.release(client.fetch([(1, 3), (0, 7)]))
        lists = count_calls(monkeypatch, cache, "resident_keys")
        for _ in range(3):
            assert [tuple(key) for key in client.keys().tolist()] == listed(cache)
        assert len(lists) == 1
        client.release(client.fetch([(1, 4)]))
        assert [tuple(key) for key in client.keys().tolist()] == listed(cache)
        assert len(lists) == 2


def test_stats_count_the_residents_without_a_list_of_them(daemon, monkeypatch):
    cache = daemon.daemon._server._works.loading.cache
    with ExpertClient(daemon.runtime_dir) as client:
        client.release(client.fetch([(1, 3), (0, 7)]))
        lists = [count_calls(monkeypatch, cache, name) for name in ("resident", "resident_keys")]
        assert client.stats()["n_resident"] == 2
        assert lists == [[], []]
