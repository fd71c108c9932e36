"""How the parts of a step are launched: eagerly or recorded, whole or with marks between.

Whatever the way, the launches are the same, and so are their results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial

from compute.experts.tiers import ExpertTiers

from .decode_step import DecodeStep
from .recording import GraphCounters, Recorder
from .timings import StepTimer

MODES = ("eager", "layer", "segment", "oracle")
BY_LAYER = ("eager", "layer")
SPANNING = ("segment", "oracle")


class Launches:
    """Launches the pieces of segments, and what of one runs again after a miss.

    mode    eager: kernel after kernel; layer: a graph for each layer; segment: graphs that span
            layers; oracle: segments, compared by the caller with their eager runs
    places  what the launches read of the experts
    timer   measures parts, which are then launched one by one
    """

    def __init__(
        self,
        step: DecodeStep,
        places: ExpertTiers,
        mode: str,
        counters: GraphCounters,
        timer: StepTimer | None,
    ) -> None:
        self.mode = mode
        self._step = step
        self._places = places
        self._counters = counters
        self._timer = timer
        self._n_layers = step.model.config.n_layers
        self._recorder = Recorder(step.model.device, counters, keeps=mode not in SPANNING)

    def begin(self) -> None:
        """Before a step: single launches where graphs failed; else recordings must be true."""
        if self.mode in SPANNING and not self._recorder.works:
            self.mode = "eager"
        self._recorder.check("the sequence", self._step.pointers())

    def layers(self, first: int, end: int) -> None:
        """Launch layers first to end - 1, and what stands before the first and after the last."""
        if self._timer is None:
            self._launch(("layers", first, end), partial(self.at_once, first, end))
        else:
            self._parts(first, end)

    def at_once(self, first: int, end: int) -> None:
        """Launch the same kernel after kernel."""
        step = self._step
        if first == 0:
            step.embed()
        step.layers(first, end)
        if end == self._n_layers:
            step.head()

    def again(self, layer: int, end: int, *, eagerly: bool = False) -> None:
        """Launch from a layer's experts to a segment's end; eagerly: whatever the mode."""
        if self._timer is not None and not eagerly:
            self._parts(layer, end, attends=False)
            return
        step, launch = self._step, _now if eagerly else self._launch
        launch(("experts", layer), partial(step.experts, layer))
        for later in range(layer + 1, end):
            launch(("layer", later), partial(step.layers, later, later + 1))
        if end == self._n_layers:
            launch(("head",), step.head)

    def draw(self, *, filtered: bool) -> None:
        """Launch the draw of an id from the logits; filtered: from the likeliest ones."""
        with nullcontext() if self._timer is None else self._timer.launched("sampling"):
            self._launch(("draw", filtered), partial(self._step.draw, filtered=filtered))

    def _parts(self, first: int, end: int, *, attends: bool = True) -> None:
        """Launch layers part by part with marks between, from `first`'s experts if not `attends`.

        The launches are those of `at_once`, and so are their results.
        """
        step, timer = self._step, self._timer
        assert timer is not None
        if attends and first == 0:
            self._launch(("embed",), step.embed)
        for layer in range(first, end):
            if attends or layer > first:
                with timer.launched("attention"):
                    self._launch(("attention", layer), partial(step.attention, layer))
            with timer.launched("compute"):
                self._launch(("experts", layer), partial(step.experts, layer))
        if end == self._n_layers:
            with timer.launched("sampling"):
                self._launch(("head",), step.head)

    def _launch(self, key: tuple[Hashable, ...], launch: Callable[[], None]) -> None:
        if self.mode == "eager":
            self._counters.eager += 1
            launch()
            return
        places = self._places  # a fetch may have found another daemon with another arena
        tensors = (places.addresses, places.table, places.cache)
        self._recorder.check("the arena", tuple(tensor.data_ptr() for tensor in tensors))
        self._recorder.run((*key, self._step.reach), launch)


def _now(_key: tuple[Hashable, ...], launch: Callable[[], None]) -> None:
    launch()
