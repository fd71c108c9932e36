"""What of a model fits where: dense weights, device cache, arena, page cache for Engram rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from protocol.sizes import format_size

from .machine import Machine
from .rates import Work

if TYPE_CHECKING:
    from expert_daemon.simulate import Setting
    from protocol.files.checkpoint import Checkpoint

SPARE_BYTES = 2 << 30  # of the host's memory, for the processes and the kernel
DEVICE_SPARE_BYTES = 3 << 30  # of the device's: context, states, work space
ENGRAM_SHARE = 16  # a sixteenth of what is left may be page cache for Engram rows
MOST_ENGRAM_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes by place."""

    arena_bytes: int
    device_cache_bytes: int
    engram_cache_bytes: int  # left to the page cache
    dense_on_host_bytes: int
    dense_on_device_bytes: int
    setting: Setting  # slots of arena and device cache

    @property
    def resident(self) -> int:
        """Slots whose experts need no read; beside a small card the arena holds them too."""
        n_device, n_arena = self.setting.n_device, self.setting.n_resident
        return n_arena + n_device if n_device >= 0.4 * n_arena else n_arena


def fit(checkpoint: Checkpoint, machine: Machine, arena_bytes: int | None) -> Fit:
    """Lay a model out on a machine. Raises ConfigError where it has no room.

    arena_bytes   as chosen; None: what is left
    """
    from compute.commands.checkpoint_facts import bytes_by_kind
    from expert_daemon.routing_trace import shape_of

    kinds = bytes_by_kind(checkpoint)
    on_device = machine.device.kind == "discrete"
    dense_on_host = 0 if on_device else kinds["dense"]
    left = machine.host_bytes - SPARE_BYTES - dense_on_host
    engram = max(0, min(kinds["engram"], left // ENGRAM_SHARE, MOST_ENGRAM_BYTES))
    chosen = left - engram if arena_bytes is None else arena_bytes
    if chosen <= 0 or chosen > left:
        raise ConfigError(
            f"{format_size(machine.host_bytes)} of memory, less {format_size(SPARE_BYTES)} for "
            f"everything else and {format_size(dense_on_host)} of dense weights, leave "
            f"{format_size(max(0, left))} for an arena"
            + ("" if arena_bytes is None else f"; --arena is {format_size(arena_bytes)}")
        )
    shape = shape_of(checkpoint)
    cache = 0
    if on_device:
        cache = max(0, machine.device_bytes - DEVICE_SPARE_BYTES - kinds["dense"])
        if not cache:
            raise ConfigError(
                f"the GPU's {format_size(machine.device_bytes)} do not hold "
                f"{format_size(kinds['dense'])} of dense weights beside "
                f"{format_size(DEVICE_SPARE_BYTES)} for its work"
            )
    every = shape.n_keys * shape.slot_bytes
    setting = setting_of(checkpoint, chosen, min(cache, every) // shape.slot_bytes)
    return Fit(
        arena_bytes=min(chosen, setting.arena_bytes),
        device_cache_bytes=setting.n_device * shape.slot_bytes,
        engram_cache_bytes=engram,
        dense_on_host_bytes=dense_on_host,
        dense_on_device_bytes=kinds["dense"] if on_device else 0,
        setting=setting,
    )


def setting_of(checkpoint: Checkpoint, arena_bytes: int, n_device: int = 0) -> Setting:
    """Return the slots that a daemon's arena of this size has, and a device cache's."""
    from expert_daemon.arena_plan import plan
    from expert_daemon.simulate import Setting

    top_k = checkpoint.config.top_k
    planned = plan(checkpoint, size_bytes=arena_bytes, max_bytes=0, top_k_batch=top_k)
    budget = planned.budget
    return Setting(
        arena_bytes=planned.n_bytes,
        n_slots=planned.n_slots,
        n_resident=planned.n_slots - budget.free_pool - budget.hedge,
        max_experts=max(budget.max_experts, top_k),
        n_device=n_device,
    )


def work_of(checkpoint: Checkpoint) -> Work:
    """Return what a token of this checkpoint asks for."""
    from compute.commands.checkpoint_facts import bytes_by_kind, n_parameters
    from expert_daemon.fragments import expert_fragments
    from expert_daemon.read_plan import plan_parts

    config, image = checkpoint.config, checkpoint.slice_map.image
    parts = plan_parts(expert_fragments(checkpoint)((config.n_layers // 2, 0)))
    expert_weights = 3 * config.hidden_size * config.expert_width
    dense_weights = n_parameters(checkpoint, in_tables=False) - config.n_keys * expert_weights
    embed = config.vocab_size * config.hidden_size
    return Work(
        n_layers=config.n_layers,
        n_experts=config.n_experts,
        top_k=config.top_k,
        expert_bytes=image.expert_bytes,
        reads_per_expert=len(parts),
        dense_bytes=max(0, bytes_by_kind(checkpoint)["dense"] - _embed_bytes(checkpoint)),
        active_weights=dense_weights - embed + config.n_layers * config.top_k * expert_weights,
        expert_weights=expert_weights,
    )


def _embed_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the token embedding, of which a token reads one row."""
    names = ("model.embed_tokens.weight", "embed.weight", "token_embd.weight")
    return sum(checkpoint.tensors[name].n_bytes for name in names if name in checkpoint.tensors)
