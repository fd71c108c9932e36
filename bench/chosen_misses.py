"""Tokens whose misses are chosen: experts that forget keys, routers biased to pick them."""

from __future__ import annotations

import random
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from compute.experts.device_experts import DeviceExperts
from compute.graph.runner import Runner
from compute.model.model import Model

CONTEXT = 4096
_PICKED = 1e4  # bias of what a router is to pick
_ROW_BYTE = 100
Key = tuple[int, int]  # layer, expert


class ForgetfulExperts(DeviceExperts):
    """Every expert on the device, until it is told to forget one. Engram rows cost nothing."""

    n_restored = 0

    def fill(self) -> None:
        """Copy every expert to the device.

        Half a layer's at a time: else the arena would end with whole layers, which no key can be
        dropped of.
        """
        n_layers, n_experts = self.places.table.shape
        for half in (range(n_experts // 2), range(n_experts // 2, n_experts)):
            for layer in range(n_layers):
                self._copy(layer, half)
        self.settle()

    def _copy(self, layer: int, chosen: range) -> None:
        self.begin_step()
        shapes = self._shapes[layer]
        for expert, pieces in self.stream(layer, chosen):
            (put,) = self.cache.begin(np.array([layer * self.places.n_experts + expert]), 1)
            row = self.places.cache[put.slot]
            places = zip(shapes.offsets, shapes.shapes, pieces, strict=True)
            for offset, (out, width), piece in places:
                row[offset : offset + out * width].copy_(piece.reshape(-1))
            self.cache.finish(put)
            self._copies.moved.add((layer, expert))
        self.end_step()

    def on_device(self, layer: int) -> list[int]:
        """Return the layer's experts that are on the device."""
        n_experts = self.places.n_experts
        slots = self.cache.slot_of[layer * n_experts : (layer + 1) * n_experts]
        return [int(expert) for expert in np.flatnonzero(slots >= 0)]

    def only_on_device(self, layer: int) -> list[int]:
        """Return those of them that a drop makes a miss: the arena has them not."""
        arena = self._table.slots[layer]
        return [expert for expert in self.on_device(layer) if arena[expert] < 0]

    def readable(self, layer: int) -> list[int]:
        """Return the layer's experts that the device may read in the arena."""
        n_experts = self.places.n_experts
        first = layer * n_experts
        return [expert for expert in range(n_experts) if self._is_readable(first + expert)]

    def restore(self, recent: Container[Key]) -> None:
        """Take back what was evicted before it could be copied, but for these keys.

        Nothing is copied: the slot's bytes are those of some expert, which is as good here.
        """
        for key in np.flatnonzero(self.cache.slot_of < 0).tolist():
            place = divmod(key, self.places.n_experts)
            if place not in recent:
                for put in self.cache.begin(np.array([key]), 1):  # none where it is on its way
                    self.cache.finish(put)
                    self._copies.moved.add(place)
                    self.n_restored += 1

    def forget(self, layer: int, expert: int) -> None:
        """Drop a key from the device cache."""
        self.cache.drop(layer * self.places.n_experts + expert)
        self._copies.moved.add((layer, expert))

    def enter_moved(self) -> None:
        """Let the device know of what was forgotten and restored; no copy begins."""
        self._enter(moved=True)

    def request_all(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Note how many rows are wanted."""
        return [len(rows) for _, rows in wanted]

    def take_rows(self, handle: int) -> NDArray[np.uint8]:
        """Return so many rows."""
        return np.full((handle, 4096), _ROW_BYTE, np.uint8)


@dataclass(slots=True)
class Bench:
    """One way to launch, with chosen picks."""

    experts: ForgetfulExperts
    model: Model
    runner: Runner
    drawn: random.Random
    recent: list[list[Key]] = field(default_factory=lambda: [[], []])

    def token(self, misses: Sequence[Key]) -> float:
        """Take one token in that picks these keys among others; its seconds."""
        self.recent = [self.recent[-1], list(misses)]
        token = self.prepare(misses)
        self._wait()
        began = time.perf_counter()
        self.runner.step(token)
        return time.perf_counter() - began

    def prepare(self, must: Sequence[Key]) -> int:
        """Bias the routers to these keys and others, and let the device know what was forgotten.

        Returns the token to take in next.
        """
        self._pick(must)
        if self.runner.sequence.position >= CONTEXT - 1:
            self.runner.finish()
            self.runner.sequence.reset()
        token = self.drawn.randrange(self.model.config.vocab_size)
        self.runner.expect(token)
        self.experts.enter_moved()
        return token

    def forget(self, n_misses: int) -> list[Key]:
        """Drop keys of as many layers, ascending."""
        self.experts.restore({key for keys in self.recent for key in keys})
        every = range(self.model.config.n_layers)
        able = [layer for layer in every if self.experts.only_on_device(layer)]
        layers = sorted(self.drawn.sample(able, n_misses))
        found = [(layer, self.drawn.choice(self.experts.only_on_device(layer))) for layer in layers]
        for key in found:
            self.experts.forget(*key)
        return found

    def reads_alone(self, keys: Sequence[Key], step_s: float) -> float:
        """Seconds for which requests that a token with these misses sends are waited for.

        What the host does around a request counts as the token's own: here it is left out.
        They leave at the token's pace, spread over the `step_s` seconds that it computes, and after
        what is done before a token: a drive and a daemon that had nothing to do for a while answer
        later than busy ones.
        """
        self._pick(())
        self.experts.begin_step()
        self.experts.enter_moved()
        self._wait()
        before = self.experts.io.stall_ms
        for layer, expert in keys:
            _spin(step_s / (len(keys) + 1))
            self.experts.fetch(layer, [expert])
        return (self.experts.io.stall_ms - before) / 1000

    def _pick(self, must: Sequence[Key]) -> None:
        """Bias the routers to keys on the device and to these."""
        config = self.model.config
        chosen = torch.zeros(config.n_layers, config.n_experts)
        for layer, block in enumerate(self.model.blocks):
            own = [expert for at, expert in must if at == layer]
            there = [e for e in self.experts.on_device(layer) if e not in own]
            own += self.drawn.sample(there, config.top_k - len(own))
            chosen[layer, own] = _PICKED
            block.weights.moe.bias.copy_(chosen[layer])

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def _spin(seconds: float) -> None:
    """Let time pass without sleeping, as a host does that watches its device."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
