"""The longest context that memory holds. It serves where nobody says `--max-context`, and a plan says so too. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.config import PAGE, EngineConfig
from engine.errors import KVRingError, TooLittleMemory
from engine.kv.budget import SHORTER, Capacity, Memory, plan_capacity
from engine.kv.page import KVShape, page_count


def plan_within(config: EngineConfig, shape: KVShape, trained_context: int, memory: Memory, **sizes: Any) -> Capacity:
    """`plan_capacity`; where no context is asked for and the trained one doesn't fit, of the longest that does, with a
    note. ConfigError where a setting is in the way, or memory holds no context at all; where a shorter one would fit,
    its fix names the longest."""

    def plan(settings: EngineConfig) -> Capacity:
        return plan_capacity(settings, shape, trained_context, memory, **sizes)

    try:
        return plan(config)
    except TooLittleMemory as error:
        tokens, _ = longest(plan, config, config.max_context or trained_context)
        if config.max_context is not None or not tokens:
            fix = _with_numbers(error.fix, tokens, plan, config, trained_context)
            raise TooLittleMemory(error.message, fix) from None
    capacity = plan(replace(config, max_context=tokens))
    note = f"context {tokens:,} tokens: memory holds no more of the model's {trained_context:,} beside weights and pool"
    return replace(capacity, notes=(*capacity.notes, note))


def _with_numbers(
    fix: str, tokens: int, plan: Callable[[EngineConfig], Any], config: EngineConfig, trained: int
) -> str:
    """tokens: the longest context with these settings; 0: none, and none is offered then."""
    if tokens and SHORTER in fix:
        return f"--max-context {tokens} is the largest that fits"
    if fix != SHORTER:
        return fix.replace(f"{SHORTER}, ", "")
    if isinstance(config.host_kv_bytes, int):  # it is taken whole, whatever the context
        asked = config.max_context or trained
        tokens, _ = longest(plan, replace(config, host_kv_bytes=None), asked)
        if tokens:
            return "leave --host-kv-gib out" + (f", and --max-context {tokens}" if tokens < asked else "")
    return "free memory, raise --ram-limit, or a smaller --kv-capacity"


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
