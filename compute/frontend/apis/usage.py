"""What an answer cost, as each API writes it; our own figures stand beside, under `headrace`."""

from __future__ import annotations

from typing import Any

from compute.frontend.answer import Answer, Usage


def own_figures(usage: Usage) -> dict[str, Any]:
    """Return what no API has a name for."""
    return {
        "hits": int(usage.io["hits"]),
        "hits_by_tier": dict(usage.tiers),
        "misses": int(usage.io["misses"]),
        "bytes_read": int(usage.io["bytes_read"]),
        "stall_ms": round(usage.io["stall_ms"], 3),
        "copy_ms": round(usage.io["copy_ms"], 3),
        "queue_ms": round(usage.queue_ms, 3),
        "prefill_ms": round(usage.prefill_ms, 3),
        "decode_ms": round(usage.decode_ms, 3),
        "prefill_tokens_per_second": round(usage.prefill_per_second, 3),
        "decode_tokens_per_second": round(usage.decode_per_second, 3),
    }


def chat_usage(answer: Answer) -> dict[str, Any]:
    """Return the usage block of Chat Completions and Completions."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_new,
        "total_tokens": usage.n_prompt + usage.n_new,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "headrace": own_figures(usage),
    }


def responses_usage(answer: Answer) -> dict[str, Any]:
    """Return the usage block of Responses."""
    usage = answer.usage
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_new,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_new,
        "headrace": own_figures(usage),
    }


def messages_usage(answer: Answer) -> dict[str, Any]:
    """Return the usage block of Messages: tokens that were taken over are counted apart."""
    usage = answer.usage
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_new,
        "headrace": own_figures(usage),
    }
