"""How far each KV head group of a model really looks, while it answers from a long text.

Every group is scored: the attention mass of each page, in the question's last rows and in every token of the answer.
How far a group looks is what its best page beyond sink and recent ones got: the mean over a task's questions, the most
over tasks, since a group that finds by word need not find by meaning.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.examine import looks
from engine.recall.recall import Look
from gates.arms import ANSWER
from gates.bare import stops
from gates.context import SMALLEST_POOL, Context
from gates.verdict import Report

TASKS = ("keyed", "disjoint", "lines")
TOKENS = 8000
QUESTIONS = 4


def measure(context: Context, tokens: int = TOKENS) -> np.ndarray:
    """float [paging layer, kv_head], 0..1. `tokens` in a document, or what the model was trained on if that is less."""
    tokens = context.fitted(tokens, Report("heads"))
    found = []
    for number, task in enumerate(TASKS):
        context.say(f"{task}: {tokens:,} tokens", number / len(TASKS))
        document = context.document(task, tokens, 1, asked=QUESTIONS)
        changes = {"far_heads": "all", "scorer": "token", "kv_capacity": SMALLEST_POOL, "kv_window": None}
        config = replace(context.config, max_context=document.tokens + 1024, **changes)
        engine = Engine(config, context.model, backends=())  # torch: a device that drives tells nothing of its windows
        window = engine.capacity.window
        farthest = []
        for asked, fact in enumerate(document.asked):
            context.say(f"{task}: question {asked + 1}", (number + asked / QUESTIONS) / len(TASKS))
            sampling = SamplingParams(max_tokens=ANSWER, stop=stops(context.model))
            recall = RecallParams(prefill=context.prefill, decode="recall")
            seen = looks(engine, engine.prepare(document.messages(fact), sampling, recall))
            farthest.append(_farthest(seen, window.sink, window.recent))
        engine.audit()
        engine.close()
        found.append(np.mean(farthest, axis=0))
    return np.max(found, axis=0)


def _farthest(seen: list[Look], sink: int, recent: int) -> np.ndarray:
    """float [layer, kv_head]: the most that one page between sink and recent ones got in any step."""
    layers = 1 + max(look.layer for look in seen)
    most = np.zeros((layers, len(seen[0].scores)))
    for look in seen:
        between = look.scores[:, sink : look.scores.shape[1] - recent]
        most[look.layer] = np.maximum(most[look.layer], between.max(1, initial=0.0))
    return most


def origin(context: Context, tokens: int = TOKENS) -> str:
    """Where a measurement comes from, for who reads its file."""
    kvring = context.environment()["kvring"]
    return f"kvring {kvring}: {', '.join(TASKS)}, {tokens:,} tokens, {QUESTIONS} questions each"
