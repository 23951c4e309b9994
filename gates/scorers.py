"""Hits by scorer, task and budget: the table that the default scorer and its quota were chosen by. Judges nothing."""

from __future__ import annotations

from engine.config import SCORERS, EngineConfig, RecallParams, SamplingParams
from gates.arms import ArmSpec, run_arm
from gates.context import ROOM, Say, load_context
from gates.haystack import GATE_TOKENS, build
from gates.multi_needle import POOL, TASKS
from gates.options import GateOptions
from gates.verdict import Arm

BUDGETS = (4, 8, 16, 32)
POOL_WITH_ROOM = POOL + 64 * 4  # 32 selected pages beside sink, recent and working ones


def table(config: EngineConfig, say: Say, *, seeds: int, tokens: int = GATE_TOKENS, trials: int = 6) -> list[Arm]:
    """One arm a scorer, task and budget, and `exact` as the ceiling; each over `seeds` documents of 2 x `trials`."""
    context = load_context(config, GateOptions(seeds=seeds), say)
    arms: dict[tuple[str, str, int], Arm] = {}
    work = [(seed, task) for seed in range(1, seeds + 1) for task in TASKS]
    for number, (seed, task) in enumerate(work):
        document = build(task, tokens, context.counter, seed, asked=2 * trials)
        engine = context.engine(max_context=document.tokens + ROOM, kv_capacity=config.kv_capacity or POOL_WITH_ROOM)
        opening = RecallParams(prefill=context.prefill)
        engine.complete(engine.prepare(document.messages(document.asked[0]), SamplingParams(max_tokens=1), opening))
        cases = [("exact", 0), *((scorer, budget) for scorer in SCORERS for budget in BUDGETS)]
        for index, (scorer, budget) in enumerate(cases):
            say(f"{task}, seed {seed}: {scorer} {budget or ''}", (number + index / len(cases)) / len(work))
            settings = (
                RecallParams(prefill=context.prefill, decode="exact")
                if scorer == "exact"
                else RecallParams(prefill=context.prefill, scorer=scorer, budget_pages=budget)
            )
            arm = arms.setdefault((scorer, task, budget), Arm(scorer, task, "table", note=str(budget or "all")))
            run_arm(engine, document, ArmSpec(scorer, "table", lambda fact, settings=settings: settings), arm)
        engine.close()
    return list(arms.values())
