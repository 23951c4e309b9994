"""The longest context that memory holds. It serves where nobody says `--max-context`, and a plan says so too. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.config import PAGE, EngineConfig
from engine.errors import KVRingError, TooLittleMemory
from engine.kv.budget import Capacity, Memory, plan_capacity
from engine.kv.page import KVShape, page_count


def plan_within(config: EngineConfig, shape: KVShape, trained_context: int, memory: Memory, **sizes: Any) -> Capacity:
    """`plan_capacity`; where no context is asked for and the trained one doesn't fit, of the longest that does, with a
    note. ConfigError where a setting is in the way, or memory holds no context at all."""

    def plan(settings: EngineConfig) -> Capacity:
        return plan_capacity(settings, shape, trained_context, memory, **sizes)

    try:
        return plan(config)
    except TooLittleMemory:
        if config.max_context is not None:
            raise
        tokens, _ = longest(plan, config, trained_context)
        if not tokens:
            raise
    capacity = plan(replace(config, max_context=tokens))
    note = f"context {tokens:,} tokens: memory holds no more of the model's {trained_context:,} beside weights and pool"
    return replace(capacity, notes=(*capacity.notes, note))


def longest(plan: Callable[[EngineConfig], Any], config: EngineConfig, most: int) -> tuple[int, str]:
    """Tokens of the longest context, up to `most`, that `plan` does not refuse, and why not the next page; 0: none."""
    low, high, why = 0, page_count(most), ""
    while low < high:
        middle = (low + high + 1) // 2
        try:
            plan(replace(config, max_context=min(middle * PAGE, most)))
            low = middle
        except KVRingError as error:
            high, why = middle - 1, error.message
    return min(low * PAGE, most), why
