"""reuse: a follow-up turn pays for its new tokens only, and its answer is the one of a cold run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from engine.config import PAGE, RecallParams, SamplingParams
from engine.engine import Engine
from engine.result import Progress, Result, Token
from gates.arms import forgetting
from gates.context import ROOM, Context
from gates.haystack import GATE_TOKENS, Document, Fact
from gates.multi_needle import POOL
from gates.verdict import Check, Report

SHARE = 0.99
SOONER = 20  # times, at 42,355 tokens; in proportion where the document is shorter
SMALL = 3_000  # tokens of the conversation that comes between, over a pool of 1,792
SMALL_POOL = 28 * PAGE
FOLLOW_UPS = 5
"""The quickest is timed: a card compiles its kernels in the first of a kind, and captures its graph in the second."""
RUNNERS_UP = 5
NEAR, NEAR_HALF = 0.02, 0.5  # nats between logprobs, warm and cold, in float32 and less: chunks of other sizes round so

Turns = list[tuple[Fact, str]]


def run(context: Context, tokens: int = GATE_TOKENS) -> Report:
    """The gate of spec/gates.md: cached, sooner, the same; also after another conversation; and never by mistake."""
    report = Report("reuse", environment=context.environment(), blinding_switches=forgetting(context.config))
    context.needs(SMALL + ROOM)
    tokens = context.fitted(context.options.length or tokens, report)
    document = context.document("keyed", tokens, 1, asked=2 + FOLLOW_UPS, own=False)
    other = context.document("keyed", SMALL, 2, asked=2, own=False)
    size = {**_store(context, document.tokens), "kv_capacity": context.pool(POOL, document.tokens)}
    with _open(context, **size) as warm, _open(context, **size, reuse=False) as cold:
        _follow(context, warm, cold, document, other, report)
    small = {"max_context": SMALL + ROOM, "kv_capacity": SMALL_POOL}
    with _open(context, **small) as warm, _open(context, **small, reuse=False) as cold:
        context.say("reuse: logprobs of a resumed turn", 0.95)
        report.checks.append(_same_logprobs(warm, cold, other))
    return report.judge()


def _store(context: Context, tokens: int) -> dict[str, object]:
    """A host store for this conversation and another, as one long context or as several of the model's own."""
    both, config = tokens + SMALL + 2 * ROOM, context.config
    trained = context.model.config.trained_context
    if both <= trained or config.positions == "compact":
        return {"max_context": both}
    return {"max_context": trained, "host_kv_bytes": config.host_kv_bytes or "auto"}


@contextmanager
def _open(context: Context, **settings: object) -> Iterator[Engine]:
    engine = context.engine(**settings)
    try:
        yield engine
        engine.audit(deep=True)
    finally:
        engine.close()


def _follow(context: Context, warm: Engine, cold: Engine, document: Document, other: Document, report: Report) -> None:
    params, checks = RecallParams(prefill=context.prefill), report.checks
    everything = RecallParams(prefill=context.prefill, decode="exact")
    computed: list[list[int]] = []  # by the warm engine so far

    def ask(
        engine: Engine, fact: Fact, said: Turns, about: Document = document, params: RecallParams = params
    ) -> tuple[Result, int]:
        """The result, and how many of its prompt's tokens the warm engine had computed before."""
        prepared = engine.prepare(about.messages(fact, said), SamplingParams(max_tokens=16), params)
        tokens, result = prepared.tokens, engine.complete(prepared)
        shared = max((_common(tokens, past) for past in computed), default=0)
        if engine is warm:
            computed.append([*tokens, *result.tokens[:-1]])  # the last one was drawn and not computed
        return result, shared

    context.say(f"reuse: {document.tokens:,} tokens, cold", 0.0)
    first, _ = ask(warm, document.asked[0], [])
    said: Turns = [(document.asked[0], first.text)]
    follow = []
    for number, fact in enumerate(document.asked[1 : 1 + FOLLOW_UPS]):
        context.say(f"reuse: follow-up {number + 1}", 0.4 + number / 50)
        before = _stored(warm)
        result, shared = ask(warm, fact, said)
        follow.append(result)
        checks.append(_cached(f"follow-up {number + 1}", result, shared))
        checks.append(_counted(f"follow-up {number + 1}", result, _stored(warm) - before))
    context.say("reuse: the same turn with reuse off", 0.5)
    again, _ = ask(cold, document.asked[1], said)
    checks.append(
        Check("the answer of a cold run", again.text == follow[0].text, f"warm '{follow[0].text}', cold '{again.text}'")
    )
    checks.append(_none("reuse off", again.usage.cached))
    soon = min(result.timings.first_token for result in follow)
    slow = min(first.timings.first_token, again.timings.first_token)
    sooner = SOONER * min(1.0, document.tokens / GATE_TOKENS)
    detail = f"{soon * 1e3:,.0f} ms against {slow:,.1f} s cold: {slow / soon:.0f} times sooner, at least {sooner:.0f}"
    checks.append(Check("first token", slow >= sooner * soon, detail))
    context.say("reuse: A, B, A", 0.85)
    ask(warm, other.asked[0], [], other)
    last, shared = ask(warm, document.asked[-1], said)
    checks.append(_cached("A, B, A", last, shared))
    fact = document.asked[-1]
    report.answered("A, B, A: right", fact, last.text, lambda: ask(cold, fact, said, params=everything)[0].text)
    context.say("reuse: another first word", 0.9)
    changed = document.messages(document.asked[1], said)
    changed[0] = {**changed[0], "content": f"Mind: {changed[0]['content']}"}
    with closing(warm.generate(warm.prepare(changed, SamplingParams(max_tokens=1), params))) as events:
        resumed = next(event.done for event in events if isinstance(event, Progress))
    checks.append(_none("another first word", resumed))


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _stored(engine: Engine) -> int:
    engine.audit(deep=True)  # waits for what is in flight
    return int(engine.stats()["pages_stored"])


def _cached(name: str, result: Result, shared: int) -> Check:
    """Whole pages resume: up to 63 tokens of what is shared are computed again."""
    share = result.usage.cached / shared
    detail = f"{result.usage.cached:,} of {shared:,} shared tokens ({share:.2%})"
    whole = result.usage.cached >= (shared - 1) // PAGE * PAGE  # the share of a short document is less
    return Check(f"{name}: cached", share <= 1 and (share >= SHARE or whole), detail)


def _counted(name: str, result: Result, stored: int) -> Check:
    """What is said to be cached was not computed: the pages that closed since are those beyond it, and no fewer."""
    usage = result.usage
    computed = (usage.prompt + usage.generated - 1) // PAGE - usage.cached // PAGE
    honest = stored == computed and usage.cached + usage.computed == usage.prompt
    return Check(f"{name}: counted", honest, f"{stored} pages were computed, {computed} by the usage it reports")


def _none(name: str, cached: int) -> Check:
    return Check(f"control: {name}", cached == 0, f"{cached:,} tokens cached, none expected", control=True)


def _same_logprobs(warm: Engine, cold: Engine, document: Document) -> Check:
    """Exact attention, so that warm and cold differ by rounding only: a resume that is one token off does not.

    The runners-up are compared too: of a value that was looked up the model is certain either way.
    """
    params = RecallParams(prefill="exact", decode="exact")
    first, second = document.asked

    def ask(engine: Engine, fact: Fact, said: Turns) -> tuple[Result, list[dict[int, float]]]:
        sampling = SamplingParams(max_tokens=16, logprobs=RUNNERS_UP)
        *events, result = engine.generate(engine.prepare(document.messages(fact, said), sampling, params))
        return result, [dict(event.top) for event in events if isinstance(event, Token)]

    opening, _ = ask(warm, first, [])
    said = [(first, opening.text)]
    (resumed, ours), (fresh, theirs) = ask(warm, second, said), ask(cold, second, said)
    near = NEAR if warm.model.transformer.dtype == torch.float32 else NEAR_HALF
    pairs = [(a.get(id), b[id]) for a, b in zip(ours, theirs, strict=False) for id in b]
    worst = max((abs(a - b) for a, b in pairs if a is not None), default=0.0)
    known = [pair for pair in pairs if pair[0] is not None]
    ok = resumed.tokens == fresh.tokens and worst <= near and len(known) >= 0.8 * len(pairs) > 0
    detail = f"largest difference from cold {worst:.2g} nats, at most {near:g}, over {len(known)} of {len(pairs)}"
    return Check("logprobs of a resumed turn", ok and resumed.usage.cached > 0, detail)
