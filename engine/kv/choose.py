"""Which dtype the pages get: the one that was asked for, or the model's own where memory holds the context in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.budget import Capacity
from engine.kv.dtype import SMALL, named
from engine.kv.page import KVShape, page_count
from engine.units import format_bytes


def choose_kv(
    config: EngineConfig, shape: KVShape, trained_context: int, plan: Callable[[KVShape], Capacity]
) -> tuple[KVShape, Capacity]:
    """`shape` with its `kv`, and what `plan` makes of it; ConfigError where no dtype that may be taken fits.

    auto: the model's own dtype if that holds the whole context (the one asked for, or the trained one), else k8v4.
    """
    own = replace(shape, kv=named(config.kv_dtype, shape.dtype))
    if config.kv_dtype != "auto":
        return own, plan(own)
    wanted = config.max_context or trained_context
    try:
        capacity = plan(own)
        if capacity.context >= wanted:
            name = own.form.dtype.name
            return own, replace(capacity, kv_reason=f"auto: memory holds the context in the model's own {name}")
    except ConfigError:
        capacity = None
    small = replace(shape, kv=SMALL)
    smaller = plan(small)
    if capacity is not None and smaller.context <= capacity.context:
        return own, replace(capacity, kv_reason="auto: the model's own; k8v4 would hold no longer context")
    size = format_bytes(page_count(wanted) * own.page_bytes)
    why = f"auto: {wanted:,} tokens in {own.form.dtype.name} are {size}, which does not fit beside the rest"
    return small, replace(smaller, kv_reason=why)
