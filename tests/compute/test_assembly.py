"""How the engine's tokens are launched where not every model has launches."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compute.assembly import find_mode, make_engine
from compute.config import ComputeConfig
from kernels.reference.route_m1 import MAX_EXPERTS, MAX_TOP_K
from protocol.errors import ConfigError
from tests.support.decode_rig import demo, demo_model
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.local_model import LocalModel


def model_with(device: str, **config: Any) -> Any:
    """The demo's model, of other sizes and said to be elsewhere."""
    own = demo_model("cpu")
    return SimpleNamespace(
        config=replace(own.config, **config),
        precision=own.precision,
        numerics=own.numerics,
        device=torch.device(device),
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"n_experts": MAX_EXPERTS + 1}, "routing 6 of 1025 experts: 16 of 1024 at most"),
        ({"top_k": MAX_TOP_K + 1}, "routing 17 of 32 experts: 16 of 1024 at most"),
    ],
)
def test_beyond_the_routers_limits_tokens_go_plainly_with_one_warning(
    sizes: dict[str, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with("cuda", **sizes)
    with caplog.at_level(logging.WARNING):
        assert find_mode(demo(), ComputeConfig(device="cuda"), model) == "plain"
    (record,) = caplog.records
    assert record.getMessage() == f"tokens go by torch's operators, slowly: {said}"
    for graph in ("eager", "segment"):
        with pytest.raises(ConfigError, match=f"--graph {graph}: {said}"):
            find_mode(demo(), ComputeConfig(device="cuda", graph=graph), model)


def test_within_them_a_gpu_has_launches_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for sizes in ({}, {"n_experts": MAX_EXPERTS, "top_k": MAX_TOP_K}):
        model = model_with("cuda", **sizes)
        assert find_mode(demo(), ComputeConfig(device="cuda"), model) == "segment"
    assert find_mode(demo(), ComputeConfig(), model_with("cpu")) == "plain"
    assert not caplog.records


def test_the_plain_path_takes_a_model_beyond_them(tmp_path: Path) -> None:
    top_k = MAX_TOP_K + 1
    local = LocalModel(write_fake_checkpoint(tmp_path, n_layers=3, n_experts=20, top_k=top_k))
    logits = local.cut(local.at("highway"), [3, 5, 7], [2, 1])
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("check_routes", True),
        ("device_cache", 1 << 20),
        ("graph_log", True),
        ("lookahead", 2),
        ("predict_trace", Path("guesses")),
        ("side_streams", "off"),
        ("timings", True),
        ("trace_hash", True),
    ],
)
def test_what_only_launches_can_do_is_refused_without_them(name: str, value: Any) -> None:
    config = ComputeConfig(**{name: value})
    said = f"--{name.replace('_', '-')}: .* wanted --graph"
    with pytest.raises(ConfigError, match=said):
        make_engine(demo(), config, demo_model("cpu"), None, None)  # type: ignore[arg-type]
