"""The model: whether it is whole, and whether its tokenizer reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol.errors import ConfigError, HeadraceError
from protocol.sizes import format_size
from protocol.wording import to_install

from .check import Check
from .memory import Needs

if TYPE_CHECKING:
    from protocol.files.checkpoint import Checkpoint


def model_checks(model: str) -> tuple[list[Check], Checkpoint | None]:
    """Return the checks of a model and the model, None where it cannot be opened.

    Reads headers, never a weight: `headrace verify` reads every byte.
    """
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    wanted = "config.json, tokenizer.json and every shard, all of the right dtypes and shapes"
    try:
        checkpoint = open_checkpoint(resolve_model(model))
    except (HeadraceError, OSError) as error:
        fix = "fetch the missing or broken file again; see docs/models.md for what counts as one"
        return [Check("model", "error", _one_line(str(error)), wanted, fix)], None
    n_bytes = sum(shard.n_bytes for shard in checkpoint.shards)
    found = (
        f"{checkpoint.path}: {checkpoint.kind}, {len(checkpoint.shards)} shards, "
        f"{format_size(n_bytes)}"
    )
    return [Check("model", "ok", found, wanted), *_tokenizer(checkpoint)], checkpoint


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Check]:
    try:
        from compute.frontend.tokenizer import Tokenizer
    except ImportError as error:
        fix = to_install("compute")
        yield Check("tokenizer", "error", str(error), "the package tokenizers", fix)
        return
    try:
        special = Tokenizer.of(checkpoint).special
    except HeadraceError as error:
        fix = "put the model's tokenizer.json into its folder"
        yield Check("tokenizer", "error", _one_line(str(error)), "tokenizer.json", fix)
        return
    wanted = "ids of the markers that begin and end a text"
    missing = [name for name in ("begin", "end") if getattr(special, name) is None]
    if missing:
        fix = "take the tokenizer.json that came with the model"
        yield Check("tokenizer", "warning", f"no marker: {', '.join(missing)}", wanted, fix)
        return
    yield Check("tokenizer", "ok", f"{len(special.present())} markers known", wanted)


def needs_of(checkpoint: Checkpoint, *, on_host: bool) -> Needs:
    """Return what a model wants of the host's memory.

    on_host   whether the dense weights lie there
    """
    from compute.commands.checkpoint_facts import bytes_by_kind
    from expert_daemon.arena_plan import plan

    kinds = bytes_by_kind(checkpoint)
    try:
        plan(checkpoint, size_bytes=4096, max_bytes=0, top_k_batch=checkpoint.config.top_k)
        smallest = 4096
    except ConfigError as error:
        smallest = int(str(error).rpartition("smallest: ")[2].split()[0])
    return Needs(smallest, kinds["expert"], kinds["dense"] if on_host else 0)


def _one_line(text: str) -> str:
    return " ".join(text.split())
