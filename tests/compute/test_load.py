"""Which device a model goes to where nobody says so."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from compute.config import ComputeConfig, load_config
from compute.load import find_device
from protocol.errors import ConfigError
from tests.support.decode_rig import demo


def with_a_gpu(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let torch find a GPU of so much memory, and take what is put there on the CPU."""
    gpu = SimpleNamespace(name="a card", total_memory=n_bytes)
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "empty", lambda *size, device: empty(*size, device="cpu"))


def test_without_a_gpu_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ComputeConfig().device == "auto"
    assert find_device("auto", demo()) == torch.device("cpu")


def test_a_gpu_with_room_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_a_gpu(monkeypatch, 100_000_000)
    assert find_device("auto", demo()) == torch.device("cuda")
    assert find_device("cpu", demo()) == torch.device("cpu")
    assert caplog.text == ""


def test_a_gpu_without_room_is_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_a_gpu(monkeypatch, 8 << 20)
    assert find_device("auto", demo()) == torch.device("cpu")
    assert "the CPU computes: a card has 8.0 MiB, the dense weights are 8.0 MiB" in caplog.text


@pytest.mark.parametrize("name", ["tpu", "gpu", "mps", "meta", "cuda:x", "cuda:-1", "CUDA"])
def test_a_device_that_is_no_name_of_one_is_an_error(name: str) -> None:
    words = f"^--device: '{name}' is none of auto, cpu, cuda and cuda:N$"
    with pytest.raises(ConfigError, match=words):
        find_device(name, demo())
    with pytest.raises(ConfigError, match=words):
        load_config(argparse.Namespace(device=name), {})


def test_a_device_that_is_asked_for_and_not_there_is_an_error_with_advice() -> None:
    advice = "use --device cpu or auto; headrace doctor says what torch sees"
    with pytest.raises(ConfigError, match=f"^--device: 'cuda:99' cannot be used: .*; {advice}$"):
        find_device("cuda:99", demo())
