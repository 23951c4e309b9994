"""lossless: every page that went to the host came back byte for byte, in each KV dtype; one flipped bit is caught."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
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
    own = "fp32" if context.model.transformer.dtype is torch.float32 else "bf16"
    dtypes = QUICK if context.options.quick else dict.fromkeys((own, *(name for name in KV if name != "fp32")))
    cases = [(dtype, memory) for dtype in dtypes for memory in memories]
    for index, (dtype, memory) in enumerate(cases):
        context.say(f"lossless: {dtype}, {memory}", index / len(cases))
        _case(context, dtype, memory, report)
    return report.judge()


def _case(context: Context, dtype: str, memory: str, report: Report) -> None:
    name = f"{dtype}, {memory}"
    config = replace(
        context.config,
        max_context=TOKENS + 256,
        kv_capacity=POOL,
        kv_dtype=dtype,
        prefill_chunk=512,
        sink=256,
        host_memory=memory,
        verify_pages=True,
        prefill="window",
        retrieve="auto",
        ring="on",
        reuse=True,
    )
    engine = Engine(config, context.model)
    document = build("keyed", TOKENS, context.counter, 2, asked=2)

    def ask(decode: str):
        prepared = engine.prepare(
            document.messages(document.asked[0]),
            SamplingParams(max_tokens=8, ignore_eos=True),
            RecallParams(decode=decode, prefill="window"),
        )
        return engine.complete(prepared).recall

    recalled, streamed = ask("recall"), ask("exact")
    moved = recalled.layer_pages_fetched, streamed.layer_pages_streamed
    report.checks.append(Check(f"{name}: pages moved", min(moved) > 0, f"{moved[0]} recalled, {moved[1]} streamed"))
    try:
        engine.audit(deep=True)
        fault = ""
    except AuditError as error:
        fault = error.message
    same = "every fetch matched its checksum, pool and host compare equal"
    report.checks.append(Check(f"{name}: bytes", not fault, fault or same))
    damaged = engine.damage_checkpoint()
    try:
        ask("exact")
        caught = False
    except EngineError:
        caught = True
    engine.damage_checkpoint(damaged)
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
