"""Which page should leave a full pool: the one seen least recently, or the one whose last score was least?

Selections don't depend on what is resident, so one recorded run serves every policy: its windows are replayed against
a pool of each. The best that any policy could do, which knows the future, is the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import PAGE, RecallParams, SamplingParams
from engine.errors import ConfigError
from engine.examine import looks
from engine.recall.recall import Look
from gates.context import Context
from gates.haystack import GATE_TOKENS

ANSWER = 24  # tokens
NEVER = 1 << 60


@dataclass(frozen=True)
class Step:
    """One layer's window in one step: page ids; `score` of each page that was scored."""

    window: frozenset[int]
    score: dict[int, float]


@dataclass(frozen=True)
class Row:
    """`misses`: layer pages a step, by policy."""

    task: str
    spare: int  # slots beside the largest window
    steps: int
    misses: dict[str, float]


def misses(steps: Sequence[Step], slots: int, policy: str) -> int:
    """Pages that had to be fetched by one layer's pool of `slots`, empty before."""
    if max(len(step.window) for step in steps) > slots:
        raise ValueError("a window is larger than the pool")
    rank = POLICIES[policy](steps)
    held: set[int] = set()
    fetched = 0
    for now, step in enumerate(steps):
        missing = step.window - held
        fetched += len(missing)
        surplus = len(held) + len(missing) - slots
        if surplus > 0:
            ranks = sorted((rank(page, now), page) for page in held - step.window)
            held -= {page for _, page in ranks[:surplus]}
        held |= missing
    return fetched


def _least_recent(steps: Sequence[Step]) -> Callable[[int, int], float]:
    seen: dict[int, int] = {}
    clock = [-1]

    def rank(page: int, now: int) -> float:
        while clock[0] < now - 1:
            clock[0] += 1
            seen.update(dict.fromkeys(steps[clock[0]].window, clock[0]))
        return seen[page]

    return rank


def _least_mass(steps: Sequence[Step]) -> Callable[[int, int], float]:
    return lambda page, now: steps[now].score.get(page, 0.0)


def _farthest(steps: Sequence[Step]) -> Callable[[int, int], float]:
    """Belady: the page that is needed last."""
    places: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for page in step.window:
            places.setdefault(page, []).append(at)

    def rank(page: int, now: int) -> float:
        times = places[page]
        after = int(np.searchsorted(times, now, side="right"))
        return -times[after] if after < len(times) else -NEVER

    return rank


POLICIES: dict[str, Callable[[Sequence[Step]], Callable[[int, int], float]]] = {
    "least recently used": _least_recent,
    "least recent mass": _least_mass,
    "floor (knows the future)": _farthest,
}
"""By name: given the steps, the rank of a held page at one of them; the lowest leaves first."""


def compare(context: Context, pool: int, share: int, tasks: Sequence[str], questions: int) -> list[Row]:
    """Questions over a gate's document in turn, each answered for so many tokens; the pool keeps what it holds.

    pool: tokens; share: percent of it that the selection may fill.
    """
    rows = []
    for number, task in enumerate(tasks):
        context.say(f"{task}: {GATE_TOKENS:,} tokens", number / len(tasks))
        document = context.document(task, GATE_TOKENS, 1, asked=questions)
        engine = context.engine(max_context=document.tokens + 1024, kv_capacity=pool, retrieve_share=share)
        layers: dict[int, list[Step]] = {}
        for asked, fact in enumerate(document.asked):
            context.say(f"{task}: question {asked + 1} of {questions}", (number + asked / questions) / len(tasks))
            prepared = engine.prepare(
                document.messages(fact),
                SamplingParams(max_tokens=ANSWER, ignore_eos=True),
                RecallParams(prefill=context.prefill),
            )
            shared = document.tokens // PAGE - 2  # pages of the document itself; the rest is this question's own
            for look in looks(engine, prepared):
                layers.setdefault(look.layer, []).append(_step(look, shared, (asked + 1) * NEVER))
        engine.audit()
        if not layers:
            raise ConfigError("here the device drives steps, which tells nothing of their windows", "--device cpu")
        slots = engine.capacity.pool_pages - 2  # the open page and one that closes
        engine.close()
        count = len(next(iter(layers.values())))
        found = {name: sum(misses(steps, slots, name) for steps in layers.values()) / count for name in POLICIES}
        largest = max(len(step.window) for steps in layers.values() for step in steps)
        rows.append(Row(task, slots - largest, count, found))
    return rows


def _step(look: Look, shared: int, away: int) -> Step:
    """Pages by id: logical ones of the document, and `away` from them those that only this question has."""

    def identity(page: int) -> int:
        return page if page < shared else page + away

    score = {} if look.scores is None else dict(enumerate(look.scores.max(0).tolist()))
    return Step(
        frozenset(identity(int(page)) for page in look.window),
        {identity(page): value for page, value in score.items()},
    )
