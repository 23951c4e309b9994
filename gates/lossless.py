"""lossless: every page that went to the host came back byte for byte, in each KV dtype; one flipped bit is caught."""

from __future__ import annotations

import functools

import torch

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from engine.faults import damage_checkpoint
from engine.kv.dtype import KV
from engine.result import AuditError
from gates.context import Context
from gates.haystack import build
from gates.verdict import Check, Report

POOL = 2048
TOKENS = 6000
QUICK = ("bf16", "k8v4")


def run(context: Context) -> Report:
    """An over-pool prompt, read back twice: by recall into the pool, and by an exact pass."""
    report = Report("lossless", environment=context.environment())
    device = context.model.transformer.device
    memories = ("pageable", "pinned") if device.type == "cuda" else ("pageable",)
    if len(memories) == 1:
        report.not_run.append("pinned host memory: there is no card")
    own = "fp32" if context.model.transformer.dtype is torch.float32 else "bf16"
    dtypes = QUICK if context.options.quick else dict.fromkeys((own, *(name for name in KV if name != "fp32")))
    cases = [(dtype, memory) for dtype in dtypes for memory in memories]
    for index, (dtype, memory) in enumerate(cases):
        context.say(f"lossless: {dtype}, {memory}", index / len(cases))
        _case(context, dtype, memory, report)
    return report.judge()


def _case(context: Context, dtype: str, memory: str, report: Report) -> None:
    name = f"{dtype}, {memory}"
    engine_of = functools.partial(
        context.engine,
        max_context=TOKENS + 256,
        kv_capacity=POOL,
        kv_dtype=dtype,
        prefill_chunk=512,
        sink=256,
        host_memory=memory,
        prefill="window",
        retrieve="auto",
        ring="on",
        reuse=True,
    )
    document = build("keyed", TOKENS, context.counter, 2, asked=2)

    def ask(decode: str):
        prepared = engine.prepare(
            document.messages(document.asked[0]),
            SamplingParams(max_tokens=8, ignore_eos=True),
            RecallParams(decode=decode, prefill="window"),
        )
        return engine.complete(prepared).recall

    if context.model.transformer.device.type == "cuda":  # a step that is checked is the host's: here kernels move pages
        engine = engine_of(verify_pages=False)
        moved = ask("recall").layer_pages_fetched
        by = ", ".join(f"{count} {path}" for path, count in sorted(engine.stats()["steps_by"].items()))
        report.checks.append(Check(f"{name}, unchecked: pages moved", moved > 0, f"{moved} recalled; steps: {by}"))
        report.checks.append(_same(engine, f"{name}, unchecked: bytes", "pool and host compare equal"))
        engine.close()
    engine = engine_of(verify_pages=True)
    recalled, streamed = ask("recall"), ask("exact")
    moved = recalled.layer_pages_fetched, streamed.layer_pages_streamed
    report.checks.append(Check(f"{name}: pages moved", min(moved) > 0, f"{moved[0]} recalled, {moved[1]} streamed"))
    same = "every fetch matched its checksum, pool and host compare equal"
    report.checks.append(_same(engine, f"{name}: bytes", same))
    damaged = damage_checkpoint(engine)
    try:
        ask("exact")
        caught = False
    except EngineError:
        caught = True
    damage_checkpoint(engine, damaged)
    report.checks.append(
        Check(
            f"control: {name}, one flipped bit",
            caught,
            "caught at the next fetch" if caught else "an answer came from a damaged page",
            control=True,
        )
    )
    ask("exact")  # mended, the next request is served
    engine.audit(deep=True)
    engine.close()


def _same(engine: Engine, name: str, same: str) -> Check:
    """Whether each page of the pool equals its replica; `same`: what to say then."""
    try:
        engine.audit(deep=True)
    except AuditError as error:
        return Check(name, False, error.message)
    return Check(name, True, same)
