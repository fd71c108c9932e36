from __future__ import annotations

import pytest

from expert_daemon.config import load_config
from expert_daemon.exporter_child import check_exporter
from expert_daemon.metrics_address import MetricsAddress, parse_address
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("127.0.0.1:9464", MetricsAddress(host="127.0.0.1", port=9464)),
        ("127.3.4.5:1", MetricsAddress(host="127.3.4.5", port=1)),
        ("localhost:80", MetricsAddress(host="127.0.0.1", port=80)),
        ("[::1]:9464", MetricsAddress(host="::1", port=9464)),
        ("unix:/run/headrace/m.sock", MetricsAddress(path="/run/headrace/m.sock")),
    ],
)
def test_addresses_of_this_machine_are_taken(text, wanted):
    assert parse_address(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0:9464",
        "192.168.1.4:9464",
        "[::]:9464",
        "example.org:9464",
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:x",
        ":9464",
        "unix:relative",
        "unix:/" + "x" * 101,
        "",
    ],
)
def test_every_other_address_is_refused(text):
    with pytest.raises(ConfigError, match="--metrics"):
        parse_address(text)


def test_the_daemon_refuses_an_address_before_anything_is_opened():
    base = ["--model", "m", "--runtime-dir", "/run/x", "--state-dir", "/var/x"]
    assert load_config([*base, "--metrics", "127.0.0.1:9464"], {}).metrics == "127.0.0.1:9464"
    with pytest.raises(ConfigError, match="outside"):
        load_config([*base, "--metrics", "0.0.0.0:9464"], {})


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[metrics\]' in the clone"):
        check_exporter()
