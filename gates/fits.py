"""fits: where the pool holds the context, nothing is hidden and every logit is the dense engine's, bit for bit."""

from __future__ import annotations

import torch

from engine.config import PAGE, RecallParams, SamplingParams
from gates.context import Context
from gates.haystack import build
from gates.verdict import Check, Report

POOL_PAGES = 24
CHUNK = 256
MODES = ("exact", "recall", "window")


def run(context: Context) -> Report:
    """Logits at pool - 1, pool and pool + 1 pages against an engine whose ring is off."""
    report = Report("fits", environment=context.environment())
    pool, longest = POOL_PAGES * PAGE, (POOL_PAGES + 1) * PAGE
    document = build("keyed", longest + 200, context.counter, 1, asked=2)
    tokens = context.model.chat.encode(document.messages(document.asked[0]), context.model.tokenizer).ids[:longest]
    common = {"prefill_chunk": CHUNK, "positions": "absolute", "reuse": False, "decode": "auto", "prefill": "auto"}
    dense = context.engine(**common, ring="off", max_context=longest + PAGE, kv_capacity=None, retrieve="auto")
    ring = context.engine(**common, ring="on", max_context=longest + PAGE, kv_capacity=pool)
    for pages in (POOL_PAGES - 1, POOL_PAGES):
        part = tokens[: pages * PAGE - (pages % 2) * 5]  # an open page in one of them
        expected = dense.logits(part)
        for mode in MODES:
            context.say(f"fits: {pages} pages, {mode}", (pages - POOL_PAGES + 1) / 3)
            report.checks.append(
                _equal(
                    f"{pages} pages in a pool of {POOL_PAGES}, {mode}",
                    expected,
                    ring.logits(part, RecallParams(prefill=mode)),
                )
            )
    expected = dense.logits(tokens)
    context.say("fits: one page more than the pool", 0.8)
    report.checks.append(
        _equal(f"{POOL_PAGES + 1} pages, exact (streams)", expected, ring.logits(tokens, RecallParams(prefill="exact")))
    )
    seen = ring.logits(tokens, RecallParams(prefill="window"))
    worst = float((seen - expected).abs().max())
    report.checks.append(
        Check(
            "control: a page dropped",
            not torch.equal(seen, expected),
            f"{POOL_PAGES + 1} pages through a window of {POOL_PAGES} differ by {worst:.3g}; equal would be blind",
            control=True,
        )
    )
    text = context.model.tokenizer.decode(tokens[: (POOL_PAGES - 2) * PAGE])
    answers = [engine.complete(engine.prepare(text, SamplingParams(max_tokens=16))) for engine in (dense, ring)]
    report.checks.append(
        Check(
            "16 greedy tokens",
            answers[0].tokens == answers[1].tokens and answers[1].recall.hidden_pages == 0,
            f"dense and ring decode the same tokens, {answers[1].recall.hidden_pages} pages hidden",
        )
    )
    for engine in (dense, ring):
        engine.audit(deep=True)
        engine.close()
    return report.judge()


def _equal(name: str, expected: torch.Tensor, got: torch.Tensor) -> Check:
    worst = float((expected - got).abs().max())
    return Check(name, torch.equal(expected, got), f"{len(got):,} positions, largest difference {worst:.3g}")
