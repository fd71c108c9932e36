"""What runs beside the routed experts, or in its place: the same bytes, and the flag arrives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compute import assembly
from compute.config import ComputeConfig
from compute.graph import decode_step, decoding
from compute.graph.decoding import Decoding, GraphSettings
from compute.graph.side_stream import SideStream
from tests.support.decode_rig import beside, demo, demo_model, make_rig

PROMPT = [5, 901, 77, 3000, 12]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "segment"])
def test_no_byte_depends_on_them(mode: str) -> None:
    first = make_rig("cuda", mode=mode, lookahead=2)
    rigs = [first, beside(first, mode=mode, lookahead=2, side_streams=False)]
    ids = []
    for rig in rigs:
        rig.prefill(PROMPT)
        ids.append(rig.greedy(8))
    assert ids[0] == ids[1]
    states = zip(*(rig.state() for rig in rigs), strict=True)
    assert all(np.array_equal(one, other) for one, other in states)


@pytest.mark.gpu
def test_where_they_are_off_no_stream_is_made() -> None:
    device = torch.device("cuda")
    current = torch.cuda.current_stream()
    for is_on in (True, False):
        stream = SideStream(device, is_on=is_on)
        with stream.fork():
            assert (torch.cuda.current_stream() == current) is not is_on
        stream.join()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_setting_reaches_every_stream(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = make_rig(), []

    def noted(device: torch.device, *, is_on: bool = True) -> SideStream:
        told.append(is_on)
        return SideStream(device, is_on=is_on)

    monkeypatch.setattr(decode_step, "SideStream", noted)
    Decoding(made.model, made.experts, 512, GraphSettings("eager", side_streams=is_on))
    assert told == [is_on, is_on]


@pytest.mark.parametrize("word", ["on", "off"])
def test_the_flag_reaches_the_setting(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[GraphSettings] = []

    def taken(*arguments: Any) -> SimpleNamespace:
        given.append(arguments[-1])
        return SimpleNamespace()

    monkeypatch.setattr(assembly, "make_experts", lambda *_: None)
    monkeypatch.setattr(decoding, "Decoding", taken)
    config = ComputeConfig(graph="eager", side_streams=word)
    assembly.make_engine(demo(), config, demo_model("cpu"), None, None)  # type: ignore[arg-type]
    assert [one.side_streams for one in given] == [word == "on"]
