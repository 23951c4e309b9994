"""multi-needle: a 42,355-token conversation through a pool of 63 pages, six trials of two turns, three kinds of fact.

One document a task and seed is prefilled once; every trial of every arm resumes from its checkpoint. A trial asks for
one fact, keeps the answer, and asks for another: turn 2 goes through turn 1's checkpoint.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.result import Result
from gates.context import Context
from gates.haystack import GATE_TOKENS, Document, Fact, build, matches
from gates.verdict import Arm, Check, Report

POOL = 4032
LARGER_POOL = 17_920
ROOM = 1024  # tokens beyond the document: two questions, two answers
ANSWER = 16  # tokens; the phantom's answers take about 7
TASKS = ("keyed", "disjoint", "lines")
TAIL_PAGES = 3
"""Budget of the query-tail twins: one page and its neighbours. The question takes about 14 tokens; a tail of 16 finds
48 of 48 pages first, one of 64 finds 34 and one of 256 finds 20, so the green twin is 16 and red is at most half."""

Settings = Callable[[Fact], RecallParams]


@dataclass(frozen=True)
class ArmSpec:
    name: str
    kind: str
    settings: Settings
    tasks: tuple[str, ...] = TASKS
    twin: str = ""
    where: str = "pool"  # pool | larger | fitting: which engine
    quick: bool = True
    red: float = 0.25  # a control's hits up to this share are red: a value is guessed or left in a neighbour's keys


def specs(prefill: str, excluded: Settings) -> list[ArmSpec]:
    """Every arm. `excluded` gives the settings that hide a fact's own pages from the selection."""

    def plain(**changes: object) -> Settings:
        return lambda fact: RecallParams(prefill=prefill, **changes)

    def tail(tokens: int) -> Settings:
        return plain(scorer="lexical", query_tail=tokens, budget_pages=TAIL_PAGES)

    return [
        ArmSpec("dense", "dense", plain(decode="exact")),
        ArmSpec("default", "positive", plain()),
        ArmSpec("pool 17,920", "positive", plain(), where="larger", quick=False),
        ArmSpec("fitting", "positive", plain(), where="fitting", quick=False),
        ArmSpec("recall off", "control", plain(decode="window"), twin="default"),
        ArmSpec("newest pages", "control", plain(control="newest"), twin="default", quick=False),
        ArmSpec("random pages", "control", plain(control="random"), twin="default", quick=False),
        ArmSpec("fact excluded", "control", excluded, twin="default"),
        ArmSpec("scorer lexical", "control", plain(scorer="lexical"), ("disjoint",), twin="default"),
        ArmSpec("token, 8 pages", "positive", plain(scorer="token", budget_pages=8), ("keyed",), quick=False),
        ArmSpec(
            "mean, 8 pages",
            "control",
            plain(scorer="mean", budget_pages=8),
            ("keyed",),
            twin="token, 8 pages",
            quick=False,
        ),
        ArmSpec("lexical, tail 16", "positive", tail(16), ("keyed",), quick=False),
        ArmSpec("lexical, tail 256", "control", tail(256), ("keyed",), twin="lexical, tail 16", quick=False, red=0.5),
    ]


def run(context: Context, tokens: int = GATE_TOKENS, trials: int = 6) -> Report:
    """The gate of spec/gates.md; `--quick`: one task, fewer trials and arms."""
    tasks = ("keyed", "disjoint") if context.quick else TASKS
    trials = 2 if context.quick else trials
    report = Report("multi-needle", environment=context.environment())
    report.environment["seeds"] = list(range(1, context.seeds + 1))
    if context.config.retrieve == "off":
        report.blinding_switches.append("NINFER_KV_RETRIEVE=0 (--retrieve off) turns recall off")
    work = [(seed, task) for seed in range(1, context.seeds + 1) for task in tasks]
    arms: dict[tuple[str, str], Arm] = {}
    for number, (seed, task) in enumerate(work):
        document = build(task, tokens, context.counter, seed, asked=2 * trials)
        _run_document(context, document, arms, lambda what, share, n=number: context.say(what, (n + share) / len(work)))
    report.arms = list(arms.values())
    report.checks = _instrument(report.arms)
    return report.judge()


def _run_document(context: Context, document: Document, arms: dict, say: Callable[[str, float], None]) -> None:
    size = document.tokens + ROOM
    pool = context.config.kv_capacity or POOL
    main = context.engine(max_context=size, kv_capacity=pool)
    engines = {"pool": main}
    chosen = [
        spec
        for spec in specs(context.prefill, _excluding(main, document, context.prefill))
        if document.task in spec.tasks and (spec.quick or not context.quick)
    ]
    say(f"{document.task}: {document.tokens:,} tokens, prefill {context.prefill}", 0.0)
    try:
        opening = RecallParams(prefill=context.prefill)
        messages = document.messages(document.asked[0])
        main.complete(main.prepare(messages, SamplingParams(max_tokens=1), opening))
        for index, spec in enumerate(chosen):
            say(f"{document.task}: {spec.name}", (1 + index) / (1 + len(chosen)))
            if spec.where not in engines:
                capacity = LARGER_POOL if spec.where == "larger" else size
                engines[spec.where] = context.engine(max_context=size, kv_capacity=capacity)
                engines[spec.where].adopt(main, main.prepare(messages, None, opening))
            arm = arms.setdefault((document.task, spec.name), Arm(spec.name, document.task, spec.kind, twin=spec.twin))
            run_arm(engines[spec.where], document, spec, arm)
    finally:
        for engine in engines.values():
            engine.close()


def run_arm(engine: Engine, document: Document, spec: ArmSpec, arm: Arm) -> None:
    """All trials of one arm on one document, added to `arm`."""
    began = time.perf_counter()
    hidden = []
    for first, second in zip(document.turn(1), document.turn(2), strict=True):
        said: list[tuple[Fact, str]] = []
        for fact in (first, second):
            prepared = engine.prepare(
                document.messages(fact, said), SamplingParams(max_tokens=ANSWER), spec.settings(fact)
            )
            result = engine.complete(prepared)
            said.append((fact, result.text))
            count(arm, fact, result)
            hidden.append(result.recall.hidden_pages)
    engine.audit()
    arm.hidden_pages = min([*hidden, *([arm.hidden_pages] if arm.seconds else [])])
    arm.seconds += time.perf_counter() - began
    arm.red_at_most = int(arm.trials * spec.red)


def count(arm: Arm, fact: Fact, result: Result) -> None:
    """Add one answer to the arm."""
    hit = matches(result.text, fact.expected)
    arm.trials += 1
    arm.hits += hit
    arm.outcomes.append(hit)
    if not hit:
        if not result.text.strip() or result.finish == "length":
            arm.inconclusive += 1
        else:
            arm.silent_wrong += 1
    arm.pages_selected += result.recall.pages_selected
    arm.bytes_fetched += result.recall.bytes_fetched


def _excluding(engine: Engine, document: Document, prefill: str) -> Settings:
    """Settings that keep the pages of a fact's own tokens out of the selection."""
    tokenizer, chat = engine.model.tokenizer, engine.model.chat
    base = chat.encode(document.messages(document.asked[0]), tokenizer).spans[0][0]
    offsets = tokenizer.encode_spans(document.text, specials=False)[1]
    ends, starts = [end for _, end in offsets], [start for start, _ in offsets]

    def settings(fact: Fact) -> RecallParams:
        start, end = document.where(fact).span
        span = (max(0, base + bisect_right(ends, start) - 4), base + bisect_left(starts, end) + 4)
        return RecallParams(prefill=prefill, exclude_tokens=(span,))

    return settings


def _instrument(arms: list[Arm]) -> list[Check]:
    """Pages hidden where the pool is smaller than the prompt and none where it is not; what recall lost and won."""
    checks = []
    dense = {arm.task: arm for arm in arms if arm.kind == "dense"}
    for arm in arms:
        if arm.name == "fitting":
            ok, detail = arm.hidden_pages == 0, f"{arm.hidden_pages} pages hidden, none expected"
        elif arm.name == "dense":
            ok, detail = arm.hidden_pages == 0, f"{arm.hidden_pages} pages hidden from an exact pass"
        elif arm.kind == "positive":
            ok = arm.hidden_pages > 0 and arm.pages_selected > 0
            lost, won = arm.against(dense[arm.task])
            detail = (
                f"{arm.hidden_pages} pages hidden, {arm.pages_selected} selected; against dense lost {lost}, won {won}"
            )
        else:
            ok, detail = arm.hidden_pages > 0, f"{arm.hidden_pages} pages hidden"
        checks.append(Check(f"instrument, {arm.label}", ok, detail))
    return checks
