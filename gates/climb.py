"""What a newcomer asks of a machine: first token, tokens a second and memory, climbing from context to context.

Each rung is an engine of its own over the same weights, with a store for that context. The next one is begun only if
the memory that it is expected to take is there: what was measured at the last rung, and what each further token adds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.device import free_memory, resolve_device
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.budget import RAM_HEADROOM, Capacity
from engine.platform import Platform, this_platform
from engine.units import format_bytes
from gates.rates import document

Say = Callable[[str], None]
WARM = 4096
"""Tokens of the prompt that compiles a card's kernels before anything is timed."""


@dataclass(frozen=True)
class Rung:
    """Measured at one context; bytes, None without a card. `ram`: all that the process holds."""

    context: int  # tokens, as asked
    prompt: int  # tokens of the document
    first_token: float  # seconds, nothing of it computed before
    tokens_per_second: float
    ram: int
    device: int | None
    fetched: float  # layer pages a token
    backend: str
    ram_per_token: float  # by the plan
    device_per_token: float


@dataclass(frozen=True)
class Stopped:
    """Why the climb ended before a context."""

    context: int
    reason: str


def expected(last: Rung, context: int) -> tuple[int, int | None]:
    """Bytes of RAM and of the device at `context`: measured below it, and what each further token adds."""
    more = context - last.context
    device = None if last.device is None else last.device + round(more * last.device_per_token)
    return last.ram + round(more * last.ram_per_token), device


def too_much(last: Rung, context: int, ram: int, device: int | None) -> str:
    """Why `context` is not tried with so much memory in all, in words; empty where it is."""
    kinds = ("RAM", last.ram, ram), ("device memory", last.device, device)
    for (what, now, have), need in zip(kinds, expected(last, context), strict=True):
        if need is not None and have is not None and need > have:
            more = f"{format_bytes(need - now)} more than at {last.context:,} tokens"
            return f"{format_bytes(need)} of {what} are expected, {more}; {format_bytes(have)} may be used"
    return ""


def climb(config: EngineConfig, contexts: Sequence[int], tokens: int, fill: str, say: Say) -> Iterator[Rung | Stopped]:
    """Rungs in ascending order; the last one may be why it went no further.

    fill: how documents are computed, `auto` is exact on a card and window on a CPU. Raises ConfigError where not even
    the first context can be served.
    """
    platform, model, last = this_platform(), None, None
    for context in sorted(set(contexts)):
        if last is not None:
            reason = too_much(last, context, *_room(config, platform))
            if reason:
                yield Stopped(context, reason)
                return
        say(f"{context:,} tokens")
        try:
            engine = Engine.load(replace(config, max_context=context), model)
        except ConfigError as error:
            if last is None:
                raise
            yield Stopped(context, error.message)
            return
        try:
            model = engine.model
            if last is None and model.transformer.device.type == "cuda":
                _ask(engine, min(context // 2, WARM), "warm", 8, fill)
            last = _measure(engine, context, tokens, fill)
        finally:
            engine.close()
            del engine
            gc.collect()
        yield last


def _measure(engine: Engine, context: int, tokens: int, fill: str) -> Rung:
    device = engine.model.transformer.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    length = context - context // PAGE - tokens - PAGE  # what counting by words may be off by
    cold = _ask(engine, length, str(context), 1, fill)
    warm = _ask(engine, length, str(context), tokens, fill)  # resumes from the first one's pages
    engine.audit()
    on_ram, on_device = _per_token(engine.capacity, device)
    return Rung(
        context,
        cold.usage.prompt,
        cold.timings.first_token,
        warm.timings.rates(warm.usage)[1],
        _resident(),
        torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        warm.recall.layer_pages_fetched / max(1, warm.usage.generated),
        engine.backend.name,
        on_ram,
        on_device,
    )


def _ask(engine: Engine, length: int, salt: str, tokens: int, fill: str):
    if fill == "auto":
        fill = "exact" if engine.model.transformer.device.type == "cuda" else "window"
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return engine.complete(engine.prepare(document(engine, length, salt), params, RecallParams(prefill=fill)))


def _per_token(capacity: Capacity, device: torch.device) -> tuple[float, float]:
    """Bytes of RAM and of the device that one more token of context takes."""
    host, digests = capacity.host_bytes / capacity.context, capacity.digest_bytes / capacity.context
    dense = 0.0 if capacity.ring else capacity.pool_bytes / capacity.context
    return (host + digests + dense, 0.0) if device.type == "cpu" else (host, digests + dense)


def _room(config: EngineConfig, platform: Platform) -> tuple[int, int | None]:
    """Bytes of RAM and of the device that this process may hold in all."""
    device = resolve_device(config.device)
    free = free_memory(device, platform, 0)
    ram = _resident() + max(0, free.ram - RAM_HEADROOM)
    ram = min(ram, config.ram_limit_bytes or ram)
    if free.device is None:
        return ram, None
    most = torch.cuda.memory_allocated(device) + free.device
    return ram, min(most, config.device_limit_bytes or most)


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss
