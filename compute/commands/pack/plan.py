"""What a pack will consist of: every output, every directory, every byte, before any is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import ConfigError
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME
from protocol.files.checkpoint import Checkpoint
from protocol.files.model_config import ModelConfig
from protocol.files.pack_format import STRIPE_UNIT, VERSION, PackHeader, Stripe, digest_bytes
from protocol.files.pack_manifest import HOME, MIRROR, SourceFile, stripe_place
from protocol.files.safetensors_header import TensorEntry
from protocol.files.slice_map import FP4, ExpertLayout
from protocol.files.tensor_table import (
    ExpectedTensor,
    expert_piece_names,
    expert_pieces,
    is_engram_table,
    is_expert,
    tensor_label,
)

from .dense_files import copied_output, dense_outputs, engram_copies, engram_rows
from .gguf_files import gguf_dense_output, gguf_engram_outputs
from .outputs import FillRecord, LayerOutput, Output, PlannedFile
from .source_files import copied_files, stamps

# What --experts takes: the formats of gate, up and down.
TARGETS = {
    "fp4": (FP4, FP4, FP4),
    "q2k-q3k": ("Q2_K", "Q2_K", "Q3_K"),
    "q4k": ("Q4_K", "Q4_K", "Q4_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
SOURCE_FORMATS = "source"  # experts stay as they are, layer by layer
ENGRAM_LINKED, ENGRAM_COPIED, ENGRAM_ROWS = "linked", "copied", "interleaved"


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What the user asked for."""

    source: Path
    target: Path
    experts: str = "fp4"  # one of TARGETS, or SOURCE_FORMATS
    stripes: tuple[Path, ...] = ()
    mirror: Path | None = None
    layers: tuple[int, ...] | None = None  # None: all
    engram: str = ENGRAM_LINKED


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One pack of one checkpoint."""

    options: PackOptions
    checkpoint: Checkpoint
    pack_id: bytes
    layers: tuple[int, ...]
    layouts: tuple[ExpertLayout, ...]  # of the pack, one a layer
    stamps: tuple[SourceFile, ...]
    links: tuple[Path, ...]  # shards of the source that are linked
    copies: tuple[Path, ...]
    dense: tuple[TensorEntry, ...]  # all tensors but experts and Engram tables

    def directory(self, place: str) -> Path:
        """Return where the files of a place go."""
        options = self.options
        if place == MIRROR and options.mirror is not None:
            return options.mirror
        numbered = [stripe_place(number) for number in range(len(options.stripes))]
        return options.stripes[numbered.index(place)] if place in numbered else options.target

    def record_directories(self) -> tuple[Path, ...]:
        """Return the directories of stripes and mirror."""
        options = self.options
        return (*options.stripes, *((options.mirror,) if options.mirror else ()))

    def plain_outputs(self) -> list[Output]:
        """Everything but the records, what is small first."""
        outputs: list[Output] = [copied_output(path) for path in self.copies]
        if self.checkpoint.gguf is not None:
            outputs.append(gguf_dense_output(self.checkpoint.gguf))
            if self.options.engram != ENGRAM_LINKED:  # rows are whole in a GGUF
                outputs += gguf_engram_outputs(self.checkpoint)
            return outputs
        outputs += dense_outputs(self.dense)
        if self.options.engram == ENGRAM_COPIED:
            outputs += engram_copies(self.checkpoint)
        if self.options.engram == ENGRAM_ROWS:
            outputs += engram_rows(self.checkpoint)
        return outputs

    def layer_outputs(self, fill: FillRecord) -> list[Output]:
        """The records, a layer at a time."""
        n_stripes = max(1, len(self.options.stripes))
        stripes = [Stripe(number, n_stripes, STRIPE_UNIT) for number in range(n_stripes)]
        places = [
            stripe_place(number) if self.options.stripes else HOME for number in range(n_stripes)
        ]
        if self.options.mirror is not None:
            stripes.append(Stripe())
            places.append(MIRROR)
        return [
            LayerOutput([self._header(layer, stripe) for stripe in stripes], places, fill)
            for layer in self.layers
        ]

    def planned_files(self) -> list[PlannedFile]:
        """Every file that will be written, but for the manifest."""
        outputs = [*self.plain_outputs(), *self.layer_outputs(_no_fill)]
        return [file for output in outputs for file in output.files]

    def place_texts(self) -> tuple[tuple[str, ...], str]:
        """Stripes and mirror as the manifest keeps them: relative where inside the pack."""
        home = self.options.target
        stripes = tuple(_place_text(path, home) for path in self.options.stripes)
        mirror = self.options.mirror
        return stripes, "" if mirror is None else _place_text(mirror, home)

    def _header(self, layer: int, stripe: Stripe) -> PackHeader:
        return PackHeader(
            self.pack_id, self.checkpoint.fingerprint, layer, self.checkpoint.config.n_experts,
            stripe, self.layouts[layer],
        )  # fmt: skip


def make_plan(options: PackOptions, checkpoint: Checkpoint) -> PackPlan:
    """Return the plan; raises ConfigError on layers or row lengths that do not go."""
    config = checkpoint.config
    layouts = checkpoint.slice_map.layouts
    if options.experts == SOURCE_FORMATS and all(layout.format == FP4 for layout in layouts):
        options = replace(options, experts="fp4")
    if options.experts != SOURCE_FORMATS:
        layouts = (target_layout(config, options.experts, 0),) * config.n_layers
    layers = tuple(range(config.n_layers)) if options.layers is None else options.layers
    if layers and layers[-1] >= config.n_layers:
        raise ConfigError(f"--layers: {layers[-1]} is none of the model's {config.n_layers} layers")
    copies = tuple(copied_files(checkpoint))
    dense, tables = _by_kind(checkpoint)
    return PackPlan(
        options=options,
        checkpoint=checkpoint,
        pack_id=_pack_id(checkpoint, layouts, len(options.stripes)),
        layers=layers,
        layouts=layouts,
        stamps=stamps(checkpoint, copies),
        links=tables if options.engram == ENGRAM_LINKED else (),
        copies=copies,
        dense=dense,
    )


def target_layout(config: ModelConfig, experts: str, layer: int) -> ExpertLayout:
    """Return an expert's layout in one of TARGETS.

    Raises ConfigError naming a tensor whose rows are no whole blocks.
    """
    formats = TARGETS[experts]
    official = expert_pieces(config)
    names = expert_piece_names(layer, 0)
    width, inner = config.hidden_size, config.expert_width
    shapes = ((inner, width), (inner, width), (width, inner))
    pieces: list[ExpectedTensor] = []
    for number, (name, shape) in enumerate(zip(formats, shapes, strict=True)):
        if name == FP4:
            pieces += official[2 * number : 2 * number + 2]
            continue
        block = BLOCK_TYPE_OF_NAME[name]
        if shape[1] % block.n_values:
            raise ConfigError(
                f"--experts {experts}: {tensor_label(names[2 * number])} has rows of {shape[1]} "
                f"values, {name} wants a multiple of {block.n_values}"
            )
        pieces += [ExpectedTensor(name, shape, "expert"), ExpectedTensor("F8_E8M0", (0,), "expert")]
    return ExpertLayout.of_pieces(pieces)


def experts_bytes(config: ModelConfig, options: PackOptions) -> int:
    """Return about how many bytes the records take, in all their copies: from the config alone."""
    n_layers = config.n_layers if options.layers is None else len(options.layers)
    slot_bytes = target_layout(config, options.experts, 0).image.slot_bytes
    n_copies = 1 if options.mirror is None else 2
    return n_layers * config.n_experts * slot_bytes * n_copies


def _pack_id(checkpoint: Checkpoint, layouts: Iterable[ExpertLayout], n_stripes: int) -> bytes:
    """16 bytes that all files of one pack share: of the model, the formats and the stripes."""
    text = json.dumps(
        {
            "version": VERSION,
            "fingerprint": checkpoint.fingerprint.hex(),
            "formats": [layout.format for layout in layouts],
            "stripes": n_stripes,
            "unit": STRIPE_UNIT,
        },
        sort_keys=True,
    )
    return digest_bytes(text.encode())


def _by_kind(checkpoint: Checkpoint) -> tuple[tuple[TensorEntry, ...], tuple[Path, ...]]:
    """Return the dense tensors, and the shards that hold Engram tables."""
    dense: list[TensorEntry] = []
    tables: set[Path] = set()
    for entry in checkpoint.tensors.values():
        if is_engram_table(entry.name):
            tables.add(entry.shard.path)
        elif not is_expert(entry.name):
            dense.append(entry)
    return tuple(dense), tuple(sorted(tables))


def _place_text(path: Path, home: Path) -> str:
    path = path.resolve()
    home = home.resolve()
    return os.path.relpath(path, home) if path.is_relative_to(home) else str(path)


def _no_fill(*_: object) -> None:
    raise AssertionError("a plan writes nothing")
