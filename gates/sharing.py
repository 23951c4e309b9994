"""What several clients that begin alike hold and compute, with sharing and without: bytes on both tiers, tokens, time.

All ask at once and cold, so nothing is shared that an earlier request had left; `--no-reuse` is the other arm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import KVRingError
from engine.kv.page import KVShape
from engine.result import Result
from gates.context import Say, load_context
from gates.facts import matches
from gates.haystack import build
from gates.options import GateOptions

ANSWER = 32  # tokens
WINDOW = 4032  # tokens of the pool a client


@dataclass(frozen=True)
class Held:
    """One arm. Bytes are the most that were in use at a time; fetches and hits are sums over the clients."""

    sharing: bool
    host_bytes: int
    pool_bytes: int
    digest_bytes: int
    prompt_tokens: int
    computed_tokens: int
    bytes_fetched: int
    seconds: float
    hits: int


def measure(config: EngineConfig, say: Say, *, clients: int, prefix: int) -> list[Held]:
    """Both arms, sharing first. A client's prompt is a document of `prefix` tokens and a question of its own."""
    context = load_context(config, GateOptions(), say)
    document = build("keyed", prefix, context.counter, 1, asked=clients)
    core, dtype = context.model.config, context.model.transformer.dtype
    shape = KVShape(len(core.paged), core.kv_heads, core.head_dim, dtype)
    room = -(-(document.tokens + 256 + ANSWER) // PAGE)
    sizes = {
        "max_context": min(clients * room * PAGE, core.trained_context),
        "kv_capacity": config.kv_capacity or clients * WINDOW,
        "host_kv_bytes": (clients + 1) * room * shape.page_bytes,
    }
    arms = []
    for number, sharing in enumerate((True, False)):
        say(f"{clients} clients, {document.tokens:,} tokens each, sharing {'on' if sharing else 'off'}", number / 2)
        engine = context.engine(**sizes, reuse=sharing)
        settings = RecallParams(prefill=context.prefill)
        prepared = [
            engine.prepare(document.messages(fact), SamplingParams(max_tokens=ANSWER), settings)
            for fact in document.asked
        ]
        arms.append(_run(engine, prepared, [fact.expected for fact in document.asked], sharing))
        engine.audit()
        engine.close()
    return arms


def _run(engine: Engine, prepared: list, expected: list[str], sharing: bool) -> Held:
    began, sessions = time.perf_counter(), [engine.admit(one) for one in prepared]
    host = pool = 0
    while engine.step():
        stats = engine.stats()
        host, pool = max(host, stats["host_pages_used"]), max(pool, stats["pool_pages_used"])
    seconds = time.perf_counter() - began
    results = [_result(session) for session in sessions]
    stats = engine.stats()
    page = stats["host_bytes"] // stats["host_pages"]
    return Held(
        sharing=sharing,
        host_bytes=host * page,
        pool_bytes=pool * page,
        digest_bytes=host * (stats["digest_bytes"] // stats["host_pages"]),
        prompt_tokens=sum(result.usage.prompt for result in results),
        computed_tokens=sum(result.usage.computed for result in results),
        bytes_fetched=sum(result.recall.bytes_fetched for result in results),
        seconds=seconds,
        hits=sum(matches(result.text, value) for result, value in zip(results, expected, strict=True)),
    )


def _result(session: Any) -> Result:
    last = session.outbox[-1]
    if isinstance(last, Result):
        return last
    raise KVRingError(f"a client was not answered: {last}", "a larger --kv-capacity, or fewer --clients")
