"""One token through the model as launches alone: no host decision, no wait, fixed addresses.

`embed`, then for each layer `attention` and `experts`, then `head`, and `draw` where the next id is
drawn. All of them read the token's id, position, Engram rows and random word from buffers, so that
a graph of them serves every token. What they write is addressed by position or by layer and depends
on inputs alone: each may run again.

Invariants: an absent expert adds nothing and raises the layer's flag in its header; the step is
true when no header has a flag. Runs on the current CUDA stream; on the CPU with the references.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.experts.tiers import ExpertTiers
from compute.model.model import Model
from compute.model.sequence import Sequence
from kernels.bring import bring
from kernels.draw import draw
from kernels.hc_collapse import hc_collapse_norm
from kernels.likeliest import likeliest
from kernels.reference.route_m1 import MAX_EXPERTS, MAX_TOP_K

from .attention_step import AttentionStep
from .engram_step import EngramStep
from .experts_step import ExpertsStep
from .hashes import hash_of
from .look_ahead import LookAhead
from .products import product
from .side_stream import SideStream
from .step_buffers import FIRST_REACH, StepBuffers


class DecodeStep:
    """Launches one token of one sequence.

    sequence  whose state the launches read and write; its tensors stay where they are
    tiers     where present experts lie
    beside    whether what can run beside the rest does so, on CUDA streams of its own
    n_ahead   later layers whose routers take each layer's input too; 0: none
    """

    def __init__(
        self,
        model: Model,
        sequence: Sequence,
        tiers: ExpertTiers,
        *,
        beside: bool = True,
        n_ahead: int = 0,
    ) -> None:
        config, numerics, device = model.config, model.numerics, model.device
        self.model = model
        self.sequence = sequence
        self.buffers = StepBuffers(config, numerics, device)
        turns = {
            kind: table.table(sequence.context)
            for kind, table in (("plain", model.plain_turns), ("yarn", model.yarn_turns))
        }
        mixing, sharing = (SideStream(device, is_on=beside) for _ in range(2))
        self._attention = [
            AttentionStep(model, layer, sequence, self.buffers, turns, mixing)
            for layer in range(config.n_layers)
        ]
        self.ahead = LookAhead(model, self.buffers.row, n_ahead) if n_ahead else None
        self._experts = ExpertsStep(model, self.buffers, tiers, mixing, sharing, self.ahead)
        self.engram = EngramStep(model, self.buffers)

    def embed(self) -> None:
        """Bring the token's id and position, fill the streams before layer 0 with its embedding."""
        buffers = self.buffers
        bring(buffers.staged_inputs, buffers.inputs)
        row = self.model.embed.index_select(0, buffers.token)
        first = buffers.before_engram_of(0)
        first.copy_(row.unsqueeze(1).expand_as(first))

    def attention(self, layer: int) -> None:
        """Add the layer's Engram where it has one, then its attention: fills `middle`."""
        if self.engram.has(layer):
            self.engram.add(layer)
        self._attention[layer].run()

    def experts(self, layer: int) -> None:
        """Route the layer, add its experts, write its header: fills the next streams."""
        self._experts.run(layer, self.buffers.before_engram_of(layer + 1))

    def head(self) -> None:
        """Turn the streams into logits and find the likeliest id."""
        buffers, head = self.buffers, self.model.head
        hc_collapse_norm(
            buffers.streams[-1],
            buffers.pre[-1],
            head.norm,
            head.eps,
            self.model.numerics.activation,
            out=buffers.row,
        )
        product(buffers.row, head.matrix, out=buffers.logits)
        likeliest(buffers.logits[0], out=buffers.likeliest)

    def draw(self, *, filtered: bool) -> None:
        """Draw the next id with the staged numbers; filtered: top_k or top_p is among them."""
        buffers = self.buffers
        bring(buffers.staged_numbers, buffers.draw_numbers)
        draw(
            buffers.logits[0],
            buffers.likeliest,
            buffers.draw_numbers,
            filtered=filtered,
            out=buffers.drawn,
        )

    def layers(self, first: int, end: int) -> None:
        """Launch whole layers `first` to `end` - 1."""
        for layer in range(first, end):
            self.attention(layer)
            self.experts(layer)

    def snapshot(self, first: int, end: int) -> list[tuple[str, Tensor]]:
        """Return copies of what layers first to end - 1 have left, with their names.

        Of a header the picks and their weights: experts may move meanwhile.
        """
        b, decided = self.buffers, slice(1, 1 + 2 * self.model.config.top_k)
        found: list[tuple[str, Tensor]] = []
        for layer in range(first, end):
            found.append((f"layer {layer}, after its attention", b.middle[layer].clone()))
            found.append((f"layer {layer}, its header", b.headers[layer, decided].clone()))
            found.append((f"layer {layer}, its streams", b.before_engram_of(layer + 1).clone()))
            found.append((f"layer {layer}, its pre-mix", b.pre[layer + 1].clone()))
            found.append((f"layer {layer}, its window", self.sequence.windows[layer].clone()))
        for source, rows in self.sequence.rows.items():
            if first <= source < end:
                found.append((f"layer {source}, its compressed rows", rows.clone()))
                found.append(
                    (f"layer {source}, its index keys", self.sequence.keys[source].clone())
                )
        if end == self.model.config.n_layers:
            found.append(("the logits", b.logits.clone()))
        return found

    @staticmethod
    def first_difference(one: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> str:
        """Return the first name whose bytes differ, and both hashes; "" where none does."""
        for (name, left), (_, right) in zip(one, other, strict=True):
            if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
                return f"{name}: {hash_of(left)} and {hash_of(right)}"
        return ""

    @property
    def reach(self) -> int:
        """Positions that the launches look at: any token below it may be launched."""
        return self.buffers.reach

    def extend_reach(self, position: int) -> None:
        """Let the launches reach `position`: a power of two, so that few graphs serve all."""
        while self.buffers.reach <= position:
            self.buffers.reach *= 2

    def begin(self) -> None:
        """Forget how far an earlier sequence reached."""
        self.buffers.reach = FIRST_REACH

    def pointers(self) -> tuple[int, ...]:
        """Addresses that a graph bakes in and that may change under it: the sequence's state."""
        sequence = self.sequence
        state: list[Tensor] = [*sequence.windows, *sequence.rows.values(), *sequence.keys.values()]
        for group in sequence.open_groups.values():
            state += [group.kv, group.scores]
        return tuple(tensor.data_ptr() for tensor in state)


def supports(model: Model) -> str:
    """Return why the model's tokens cannot go by launches alone, "" where they can."""
    config = model.config
    if model.precision.value == "unrounded":
        return "precision unrounded has no kernels for the experts"
    if config.n_experts > MAX_EXPERTS or config.top_k > MAX_TOP_K:
        limits = f"{MAX_TOP_K} of {MAX_EXPERTS} at most"
        return f"routing {config.top_k} of {config.n_experts} experts: {limits}"
    if config.hidden_size % 32 or config.expert_width % 32:
        return f"widths {config.hidden_size} and {config.expert_width} are no multiples of 32"
    if model.numerics.activation not in {torch.bfloat16, torch.float32}:
        return f"activations are {model.numerics.activation}"
    return ""
