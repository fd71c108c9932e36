"""Two reports beside each other: ratios, cold against cold and warm against warm."""

from __future__ import annotations

from typing import Any

from protocol.errors import ConfigError

from .report import KINDS

_COMPARED = ("first_token_s", "prefill_tokens_per_second", "decode_tokens_per_second")
_MUST_AGREE = ("prompt_tokens", "new_tokens", "precision", "chunk")
_SETTINGS_TOLD = ("device", "arena_bytes", "graph", "segments", "side_streams", "device_cache")
_TOLD = ("cpu", "cores", "memory_bytes", "gpus", "file_system", "torch", "headrace")


def compare(ours: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ours over the other's figures, and in what the machines differ.

    name   of the other report, for messages

    Raises ConfigError where the two did not do the same work.
    """
    if ours["model"]["fingerprint"] != other["model"]["fingerprint"]:
        raise ConfigError(
            f"{name}: measured on another model, {other['model']['path']} "
            f"({other['model']['fingerprint']}); this is {ours['model']['fingerprint']}"
        )
    for setting in _MUST_AGREE:
        found, wanted = other["settings"][setting], ours["settings"][setting]
        if found != wanted:
            raise ConfigError(f"{name}: {setting} was {found}, here {wanted}: not comparable")
    ratios: dict[str, Any] = {}
    for kind in KINDS:
        if ours[kind] is None or other[kind] is None:
            continue
        ratios[kind] = {
            figure: ours[kind][figure] / other[kind][figure]
            for figure in _COMPARED
            if other[kind][figure]
        }
        ratios[kind]["hit_rate_difference"] = ours[kind]["hit_rate"] - other[kind]["hit_rate"]
    differences = {
        fact: [other["machine"].get(fact), ours["machine"].get(fact)]
        for fact in _TOLD
        if other["machine"].get(fact) != ours["machine"].get(fact)
    }
    differences |= {
        setting: [other["settings"].get(setting), ours["settings"].get(setting)]
        for setting in _SETTINGS_TOLD
        if other["settings"].get(setting) != ours["settings"].get(setting)
    }
    return {"other": name, "ratios": ratios, "differences": differences}
