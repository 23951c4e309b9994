"""The numbers of one answer as its response carries them: usage, llama.cpp's timings, and what recall did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvring_cli.server.ask import Answer


def usage(answer: Answer) -> dict[str, Any]:
    counts = answer.result.usage
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


def beside(answer: Answer) -> dict[str, Any]:
    """What every form carries beside its own fields."""
    return {"timings": timings(answer), "kvring": kvring(answer)}


def timings(answer: Answer) -> dict[str, Any]:
    """cache_n + prompt_n = prompt_tokens; rates are those of computed tokens, without the time in the queue."""
    counts, times = answer.result.usage, answer.result.timings
    prefill, decode = times.rates(counts)
    return {
        "cache_n": counts.cached,
        "prompt_n": counts.computed,
        "prompt_ms": 1000 * times.prefill,
        "prompt_per_token_ms": 1000 * times.prefill / max(1, counts.computed),
        "prompt_per_second": prefill,
        "predicted_n": counts.generated,
        "predicted_ms": 1000 * times.decode,
        "predicted_per_token_ms": 1000 * times.decode / max(1, counts.generated - 1),
        "predicted_per_second": decode,
        "queue_ms": 1000 * answer.stream.queued,
    }


def kvring(answer: Answer) -> dict[str, Any]:
    result, recall = answer.result, answer.result.recall
    report = {
        "over_pool": recall.over_pool,
        "prefill": list(recall.prefill_modes),
        "decode": recall.decode_mode,
        "scorer": recall.scorer,
        "recall": {
            "over_pool": recall.over_pool,
            "pages_selected": recall.pages_selected,
            "selections": recall.selections,
            "hidden_pages": recall.hidden_pages,
            "layer_pages_fetched": recall.layer_pages_fetched,
            "layer_pages_streamed": recall.layer_pages_streamed,
            "bytes_fetched": recall.bytes_fetched,
            "stall_ms": 1000 * recall.fetch_seconds,
        },
        "max_tokens": answer.prepared.max_tokens,
        "max_tokens_source": answer.length_source,
        "warnings": answer.warnings(),
    }
    if result.pages:
        report["pages"] = [vars(page) for page in result.pages]
    return report
