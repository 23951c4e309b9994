"""Arms over one frozen conversation: who is asked what, under which settings, and what the instrument saw meanwhile."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.result import PageView, Result
from gates.bare import stops
from gates.haystack import Document, Fact
from gates.verdict import Arm, Check, Outcome, Question

ANSWER = 16  # tokens; the phantom's answers take about 7
STRIPS = 3  # misses of an arm whose pages are kept: each is asked for once more
MARGIN = 4  # tokens beside a fact that belong to it, when its pages are hidden


class Exam(Protocol):
    """A conversation that is prefilled once, and the trials that are asked of it."""

    task: str
    seed: int
    tokens: int

    def trials(self) -> Sequence[Sequence[Question]]:
        """Each trial's questions, in turns of one conversation."""
        ...

    def messages(self, question: Question, earlier: Sequence[tuple[Question, str]] = ()) -> list[dict[str, str]]: ...

    def depth(self, question: Question) -> float: ...


Settings = Callable[[Question], RecallParams]


@dataclass(frozen=True)
class ArmSpec:
    name: str
    kind: str
    settings: Settings
    tasks: tuple[str, ...] = ()  # none = every task
    twin: str = ""
    where: str = "pool"  # which engine
    quick: bool = True
    red: float = 0.25  # a control's hits up to this share are red: a value is guessed or left in a neighbour's keys
    warns: bool = False  # recall was off on purpose: every answer must say so
    explains: bool = False  # where pages were is kept of its misses too, as of a positive arm's

    def new_arm(self, task: str, question: Question) -> Arm:
        red = self.red if self.kind == "control" else 0.0
        return Arm(
            self.name, task, self.kind, twin=self.twin, red_share=red, settings=describe(self.settings(question))
        )


def plain(prefill: str, **changes: object) -> Settings:
    """The same settings for every question."""
    return lambda question: RecallParams(prefill=prefill, **changes)


def describe(params: RecallParams) -> str:
    """The settings that were given, in words; token ranges by their number."""
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    default = RecallParams()
    shown = {name: value for name, value in given.items() if value != getattr(default, name)}
    if params.exclude_tokens:
        shown["exclude_tokens"] = f"{len(params.exclude_tokens)} ranges"
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def blinding(config: EngineConfig) -> list[str]:
    """Switches of the user's under which no positive arm can be green."""
    if config.retrieve == "off":
        return ["NINFER_KV_RETRIEVE=0 (--retrieve off) turns recall off"]
    if config.decode == "window":
        return ["NINFER_KV_DECODE=window (--decode window) sees sink and recent pages only"]
    if config.decode == "exact":
        return ["NINFER_KV_DECODE=exact (--decode exact) reads every page: nothing is recalled"]
    return []


def forgetting(config: EngineConfig) -> list[str]:
    """Switches of the user's under which no turn can be cheaper than a cold one."""
    return [] if config.reuse else ["NINFER_KV_REUSE_HOSTBACKED=0 (--no-reuse) keeps no checkpoint"]


def run_arm(engine: Engine, exam: Exam, spec: ArmSpec, arm: Arm, answer: int = ANSWER) -> list[Result]:
    """All trials of one arm on one conversation, added to `arm`; the results in the order of asking."""
    began = time.perf_counter()
    results: list[Result] = []
    first = not arm.outcomes
    for trial in exam.trials():
        said: list[tuple[Question, str]] = []
        for turn, question in enumerate(trial, 1):
            messages, params = exam.messages(question, said), spec.settings(question)
            sampling = SamplingParams(max_tokens=answer, stop=stops(engine.model))
            result = engine.complete(engine.prepare(messages, sampling, params))
            outcome = judge(exam, question, turn, result)
            explains = (spec.kind == "positive" or spec.explains) and not outcome.hit
            if explains and sum(bool(past.strip) for past in arm.outcomes) < STRIPS:
                outcome = _explained(engine, exam, question, messages, params, answer, outcome)
            said.append((question, result.text))
            arm.outcomes.append(outcome)
            results.append(result)
            arm.pages_selected += result.recall.pages_selected
            arm.bytes_fetched += result.recall.bytes_fetched
    engine.audit()
    hidden = min(result.recall.hidden_pages for result in results)
    arm.hidden_pages = hidden if first else min(arm.hidden_pages, hidden)
    arm.seconds += time.perf_counter() - began
    return results


def judge(exam: Exam, question: Question, turn: int, result: Result) -> Outcome:
    hit = question.answered(result.text)
    cut = not hit and (not result.text.strip() or result.finish == "length")
    depth = round(exam.depth(question), 4)
    return Outcome(exam.seed, result.usage.prompt, turn, depth, question.expected, result.text, hit, cut)


def _explained(engine, exam, question, messages, params, answer, outcome: Outcome) -> Outcome:
    """Ask once more and keep where each page was: the strip of a failing trial."""
    explained = replace(params, explain=True)
    sampling = SamplingParams(max_tokens=answer, stop=stops(engine.model))
    result = engine.complete(engine.prepare(messages, sampling, explained))
    pages: tuple[int, ...] = ()
    if isinstance(exam, Document):
        start, end = spans(engine, exam)(question)
        pages = tuple(range(start // PAGE, (end - 1) // PAGE + 1))
    return replace(outcome, strip="".join(map(letter, result.pages)), pages=pages)


def letter(page: PageView) -> str:
    """k selected, w seen otherwise (sink, recent, open), o in the pool and not seen, . out of sight."""
    if page.selected:
        return "k"
    return "w" if page.seen else "o" if page.resident else "."


def spans(engine: Engine, document: Document) -> Callable[[Fact], tuple[int, int]]:
    """The prompt's token span of a fact's own sentence."""
    base, ends, starts = _offsets(engine, document)

    def span(fact: Fact) -> tuple[int, int]:
        start, end = document.where(fact).span
        return base + bisect_right(ends, start), base + bisect_left(starts, end)

    return span


def straddling(engine: Engine, document: Document) -> int:
    """How many of the asked values really lie on two pages."""
    base, ends, starts = _offsets(engine, document)
    found = 0
    for fact in document.asked:
        start, end = document.where(fact).value_span
        found += (base + bisect_right(ends, start)) // PAGE != (base + bisect_left(starts, end) - 1) // PAGE
    return found


def _offsets(engine: Engine, document: Document) -> tuple[int, list[int], list[int]]:
    tokenizer, chat = engine.model.tokenizer, engine.model.chat
    base = chat.encode(document.messages(document.asked[0]), tokenizer).spans[0][0]
    spans = tokenizer.encode_spans(document.text, specials=False)
    return base, spans.ends.tolist(), spans.starts.tolist()


def excluding(engine: Engine, document: Document, prefill: str) -> Settings:
    """Settings that keep the pages of a fact's own tokens out of the selection."""
    span = spans(engine, document)

    def settings(fact: Fact) -> RecallParams:
        start, end = span(fact)
        return RecallParams(prefill=prefill, exclude_tokens=((max(0, start - MARGIN), end + MARGIN),))

    return settings


def instrument(arms: Sequence[Arm], fitting: str = "fitting") -> list[Check]:
    """Pages hidden where the pool is smaller than the prompt and none where it is not; what recall lost and won."""
    checks = []
    dense = {arm.task: arm for arm in arms if arm.kind == "dense"}
    for arm in arms:
        if arm.name == fitting:
            ok, detail = arm.hidden_pages == 0, f"{arm.hidden_pages} pages hidden, none expected"
        elif arm.kind == "dense":
            ok, detail = arm.hidden_pages == 0, f"{arm.hidden_pages} pages hidden from an exact pass"
        elif arm.kind == "positive":
            ok = arm.hidden_pages > 0 and arm.pages_selected > 0
            lost, won = arm.against(dense[arm.task])
            detail = f"{arm.hidden_pages} pages hidden, {arm.pages_selected:,} selected; against dense lost {lost}, "
            detail += f"won {won}"
        else:
            ok, detail = arm.hidden_pages > 0, f"{arm.hidden_pages} pages hidden"
        checks.append(Check(f"instrument, {arm.label}", ok, detail))
    return checks
