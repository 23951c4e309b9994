"""fits: where the pool holds the context, nothing is hidden and every logit is the dense engine's, bit for bit.

And the dense engine's are those of the plain formula, and a window shows the pages that it says and no others.
"""

from __future__ import annotations

import torch

from engine.config import PAGE, RecallParams, SamplingParams
from engine.kv.share import WORKING
from gates.context import Context
from gates.haystack import build
from gates.plain import plain_logits, tolerance, window_mask
from gates.verdict import Check, Report

POOL_PAGES, CHUNK = 24, 256
QUICK_PAGES, QUICK_CHUNK = 14, 128
MODES = ("exact", "recall", "window")


def run(context: Context) -> Report:
    """Logits at pool - 1, pool and pool + 1 pages against an engine whose ring is off."""
    report = Report("fits", environment=context.environment())
    pages, chunk = (QUICK_PAGES, QUICK_CHUNK) if context.options.quick else (POOL_PAGES, CHUNK)
    longest = (pages + 1) * PAGE
    document = build("keyed", longest + 200, context.counter, 1, asked=2)
    tokens = context.model.chat.encode(document.messages(document.asked[0]), context.model.tokenizer).ids[:longest]
    common = {"prefill_chunk": chunk, "positions": "absolute", "reuse": False, "decode": "auto", "prefill": "auto"}
    dense = context.engine(**common, ring="off", max_context=longest + PAGE, kv_capacity=None, retrieve="auto")
    ring = context.engine(**common, ring="on", max_context=longest + PAGE, kv_capacity=pages * PAGE)
    for size in (pages - 1, pages):
        part = tokens[: size * PAGE - (size % 2) * 5]  # an open page in one of them
        expected = dense.logits(part)
        for mode in MODES:
            context.say(f"fits: {size} pages, {mode}", (size - pages + 1) / 3)
            report.checks.append(
                _equal(
                    f"{size} pages in a pool of {pages}, {mode}",
                    expected,
                    ring.logits(part, RecallParams(prefill=mode)),
                )
            )
    expected = dense.logits(tokens)
    context.say("fits: one page more than the pool", 0.8)
    report.checks.append(
        _equal(f"{pages + 1} pages, exact (streams)", expected, ring.logits(tokens, RecallParams(prefill="exact")))
    )
    seen = ring.logits(tokens, RecallParams(prefill="window"))
    worst = float((seen - expected).abs().max())
    report.checks.append(
        Check(
            "control: a page dropped",
            not torch.equal(seen, expected),
            f"{pages + 1} pages through a window of {pages} differ by {worst:.3g}; equal would be blind",
            control=True,
        )
    )
    report.checks += _against_plain(context, tokens, expected, pages - 4, chunk, dense.capacity.kv)
    text = context.model.tokenizer.decode(tokens[: (pages - 2) * PAGE])
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


def _against_plain(
    context: Context, tokens: list[int], dense: torch.Tensor, pool: int, chunk: int, kv: str
) -> list[Check]:
    """The pages against the formula itself: what dense and ring would both get wrong shows here only."""
    context.say("fits: against a pass without pages", 0.9)
    model = context.model.transformer
    near, checks = tolerance(model.dtype, kv), []

    def compare(name: str, got: torch.Tensor, expected: torch.Tensor, control: bool = False) -> None:
        worst = float((got - expected).abs().max())
        ok = worst > near if control else worst <= near
        detail = f"largest difference {worst:.3g}, {'must exceed' if control else 'at most'} {near:g}"
        checks.append(Check(f"control: {name}" if control else name, ok, detail, control))

    compare("dense against a pass without pages", dense, plain_logits(model, tokens, kv=kv))
    compare("keys one position late", dense, plain_logits(model, tokens, late=1, kv=kv), control=True)
    sink = 2
    ring = context.engine(
        ring="on",
        positions="absolute",
        prefill_chunk=chunk,
        max_context=len(tokens) + PAGE,
        kv_capacity=pool * PAGE,
        sink=sink * PAGE,
        retrieve="off",
        decode="auto",
        prefill="auto",
    )
    windowed = ring.logits(tokens, RecallParams(prefill="window", decode="window"))
    ring.close()
    for name, size, control in (("the window against its mask", pool, False), ("one page short", pool - 1, True)):
        mask = window_mask(len(tokens), chunk, size, sink, WORKING)
        compare(name, windowed, plain_logits(model, tokens, mask, kv=kv), control)
    return checks


def _equal(name: str, expected: torch.Tensor, got: torch.Tensor) -> Check:
    worst = float((expected - got).abs().max())
    return Check(name, torch.equal(expected, got), f"{len(got):,} positions, largest difference {worst:.3g}")
