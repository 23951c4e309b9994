"""resend: the same request again, after a cancel, and after a copy that failed at any page. Nothing is lost or left."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from engine.config import PAGE, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from engine.faults import damage_checkpoint, fail_copy
from engine.result import AuditError, Progress, Result
from gates.arms import forgetting
from gates.context import ROOM, Context
from gates.haystack import Document, Fact
from gates.verdict import Check, Report

TOKENS, POOL, CHUNK = 3_000, 28 * PAGE, 256
QUICK_PAGES = 6  # at which a copy fails, spread evenly; else at every one


def run(context: Context, tokens: int = TOKENS) -> Report:
    """The gate of spec/gates.md; the audit compares bytes after every request."""
    report = Report("resend", environment=context.environment(), blinding_switches=forgetting(context.config))
    document = context.document("keyed", tokens, 3, asked=2, own=False)
    other = context.document("keyed", tokens, 4, asked=2, own=False)
    engine = context.engine(max_context=tokens + ROOM, kv_capacity=POOL, prefill_chunk=CHUNK, sink=PAGE, ring="on")
    try:
        _again(context, engine, document, report)
        _failing(context, engine, document, report)
        _other(engine, document, other, report)
        _audit_can_fail(engine, report)
    finally:
        engine.close()
    return report.judge()


def _prepare(context: Context, engine: Engine, document: Document):
    params = RecallParams(prefill=context.prefill)
    return engine.prepare(document.messages(document.asked[0]), SamplingParams(max_tokens=16), params)


def _ask(context: Context, engine: Engine, document: Document) -> Result:
    result = engine.complete(_prepare(context, engine, document))
    engine.audit(deep=True)
    return result


def _again(context: Context, engine: Engine, document: Document, report: Report) -> None:
    context.say("resend: twice, and after a cancel", 0.0)
    first, second = (_ask(context, engine, document) for _ in range(2))
    fact = document.asked[0]
    report.answered("the first answer", fact, first.text, partial(_seeing, engine, document, fact))
    same, cached = first.text == second.text, second.usage.cached / second.usage.prompt
    report.checks.append(
        Check("the same request again", same and cached > 0.9, f"'{second.text}', {cached:.1%} cached")
    )
    for stop in range(1, 1 + document.tokens // CHUNK, 2 if not context.options.quick else 5):
        engine.forget()
        with closing(engine.generate(_prepare(context, engine, document))) as events:
            steps = 0
            while steps <= stop and isinstance(next(events, None), Progress):
                steps += 1
        engine.audit(deep=True)
        again = _ask(context, engine, document)
        if again.text != first.text:
            break
    detail = f"'{again.text}' after a cancel at each of several chunks, audited after each"
    report.checks.append(Check("a cancel while the prompt is read", again.text == first.text, detail))


def _failing(context: Context, engine: Engine, document: Document, report: Report) -> None:
    """The copy of the k-th page fails: the request ends with the error, the next one is served as ever."""
    expected, pages = _ask(context, engine, document).text, document.tokens // PAGE
    step = max(1, pages // QUICK_PAGES) if context.options.quick else 1
    tried, answered, wrong = 0, [], []
    for number in range(0, pages, step):
        context.say(f"resend: the copy of page {number} fails", 0.3 + 0.6 * number / pages)
        engine.forget()
        fail_copy(engine, number)
        tried += 1
        try:
            engine.complete(_prepare(context, engine, document))
            answered.append(number)
        except EngineError:
            pass
        engine.audit(deep=True)
        if _ask(context, engine, document).text != expected:
            wrong.append(number)
    report.checks += [
        Check("control: a failed copy is no answer", not answered, f"{tried} pages tried, answered: {answered}", True),
        Check("after a failed copy the next request is right", not wrong, f"{tried} pages tried, wrong after: {wrong}"),
    ]


def _other(engine: Engine, document: Document, other: Document, report: Report) -> None:
    """Another document in the same pages: what was known of the first one's keys must not lead astray."""
    engine.forget()
    params = RecallParams(prefill="window", scorer="token", budget_pages=4)
    for one in (document, other):
        engine.forget()
        for fact in one.asked:
            prepared = engine.prepare(one.messages(fact), SamplingParams(max_tokens=16), params)
            said = engine.complete(prepared).text
            name = f"another document in the same pages, by key digests alone: {fact.key}"
            report.answered(name, fact, said, partial(_seeing, engine, one, fact))
    engine.audit(deep=True)


def _seeing(engine: Engine, document: Document, fact: Fact) -> str:
    """The model's answer where everything is visible."""
    params = RecallParams(prefill="exact", decode="exact")
    return engine.complete(engine.prepare(document.messages(fact), SamplingParams(max_tokens=16), params)).text


def _audit_can_fail(engine: Engine, report: Report) -> None:
    damage_checkpoint(engine, 0)
    try:
        engine.audit(deep=True)
        seen = False
    except AuditError:
        seen = True
    damage_checkpoint(engine, 0)
    engine.audit(deep=True)
    report.checks.append(Check("control: one flipped bit in a resident page", seen, "named by the audit", control=True))
