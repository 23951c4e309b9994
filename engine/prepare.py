"""From what a person asked to what the engine will do: tokens, the question's span, limits, recall settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from engine.config import MODES, PAGE, SCORERS, EngineConfig, RecallParams, SamplingParams
from engine.errors import ContextLengthError, RequestError
from engine.kv.budget import Capacity
from engine.kv.share import WindowBudget
from engine.limits import check_sampling
from engine.model.load import LoadedModel
from engine.recall.recall import RecallSettings
from engine.scheduler import Plan

DEFAULT_MAX_TOKENS = 32768
LONGEST_QUESTION = 4
"""A user's turn is the question if it is no longer than this many query tails; else its last tail is."""


@dataclass(frozen=True)
class Layout:
    """A prompt's tokens, and the tokens [start, end) of its parts."""

    tokens: list[int]
    query: tuple[int, int]  # the question
    system: int = 0  # where the system prompt ends
    tools: tuple[int, int] = (0, 0)


@dataclass
class Prepared:
    """A request that was accepted. Used once."""

    tokens: list[int]
    query: tuple[int, int]  # token span of the question
    max_tokens: int
    sampling: SamplingParams
    settings: RecallSettings
    plan: Plan
    budget: WindowBudget
    explain: bool
    notes: tuple[str, ...]
    used: bool = field(default=False, repr=False)

    @cached_property
    def ids(self) -> np.ndarray:
        """The tokens as int32 [n]."""
        return np.asarray(self.tokens, dtype=np.int32)


def tokenize(model: LoadedModel, prompt: str | Sequence[Mapping[str, Any]], tail: int, **template: Any) -> Layout:
    """A text is a raw prompt, without template."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty", "ask something")
        tokens = model.tokenizer.encode(prompt)
        return Layout(tokens, (max(0, len(tokens) - tail), len(tokens)))
    messages = list(prompt)
    if not messages or not any(str(message.get("content") or "").strip() for message in messages):
        raise RequestError("the prompt is empty", "give at least one message with content")
    if model.chat is None:
        raise RequestError(f"{model.name} has no chat template", "give a raw text prompt instead of messages")
    encoded = model.chat.encode(messages, model.tokenizer, **template)
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    start, end = encoded.spans[users[-1]] if users else (0, len(encoded.ids))
    if start >= end:
        start, end = 0, len(encoded.ids)
    if end - start > LONGEST_QUESTION * tail:
        start = end - tail
    system = max(
        (encoded.spans[i][1] for i, m in enumerate(messages) if m.get("role") in ("system", "developer")), default=0
    )
    total = len(encoded.ids)
    return Layout(
        encoded.ids,
        (start, end),
        system if system < total else 0,
        encoded.tools if encoded.tools[0] < total else (0, 0),
    )


def prepare(
    model: LoadedModel,
    config: EngineConfig,
    capacity: Capacity,
    prompt: str | Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    recall: RecallParams,
    **template: Any,
) -> Prepared:
    """RequestError for what can't be served, with the numbers. No device work."""
    check_sampling(sampling)
    notes: list[str] = []
    tail = config.query_tail if recall.query_tail is None else recall.query_tail
    layout = tokenize(model, prompt, tail, **template)
    tokens, query = layout.tokens, layout.query
    if recall.query_tail is not None:  # asked for by name: the tail counts, not the span
        query = (max(0, query[1] - tail), query[1])
    if not tokens:
        raise RequestError("the prompt came to no tokens at all", "check the model's chat template, or ask something")
    room = capacity.context - len(tokens)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(tokens):,} tokens; the context of {capacity.context:,} leaves no room for an answer",
            _longer(len(tokens) + 512, model, config),
        )
    wanted = sampling.max_tokens
    if wanted is not None and wanted > room:
        notes.append(f"max_tokens lowered from {wanted:,} to {room:,}: the context of {capacity.context:,} ends there")
    budget = _budget(capacity, layout.system, layout.tools, notes)
    scorer = _one_of("scorer", recall.scorer or config.scorer, SCORERS)
    off = config.retrieve == "off"
    decode = _mode("decode", recall.decode or config.decode, off, notes)
    decode = "recall" if decode == "auto" else decode
    if off and decode == "recall":
        decode = "window"
    prefill = _mode("prefill", recall.prefill or config.prefill, off, notes)
    compact = config.positions == "compact"
    if compact and (prefill == "exact" or decode == "exact" or scorer == "mass"):
        raise RequestError(
            "exact attention (and the scorer mass) needs absolute positions: compact ones pack a window from 0",
            "--prefill recall or window, --decode recall, or --positions absolute",
        )
    if not capacity.ring:
        # All ways are the dense one. Requests that share the pool may outgrow their part; only exact then sees all.
        prefill = decode = "exact"
    settings = RecallSettings(
        scorer=scorer,
        budget=budget.selection if recall.budget_pages is None else recall.budget_pages,
        neighbors=config.neighbor_pages if recall.neighbor_pages is None else recall.neighbor_pages,
        query_tail=tail,
        control=_one_of("control", recall.control, ("newest", "random")) if recall.control else None,
        excluded=recall.exclude_tokens,
        seed=recall.seed,
        compact=compact,
    )
    limit = min(room, DEFAULT_MAX_TOKENS if wanted is None else wanted)
    mass = scorer == "mass" and decode == "recall" and settings.control is None
    plan = Plan(prefill, decode, compact, mass)
    return Prepared(tokens, query, limit, sampling, settings, plan, budget, recall.explain, tuple(notes))


def _longer(context: int, model: LoadedModel, config: EngineConfig) -> str:
    """What would let a prompt in that needs `context` tokens."""
    if context > model.config.trained_context and config.positions == "absolute":
        return (
            f"shorten the prompt, or --max-context {context} --positions compact (beyond what the model was trained on)"
        )
    return f"shorten the prompt, or --max-context {context} or more"


def _budget(capacity: Capacity, system: int, tools: tuple[int, int], notes: list[str]) -> WindowBudget:
    """The window's shares: the sink grown over the system prompt, as far as a quarter of the pool, and tool definitions
    kept wherever they stand, as far as half of it together."""
    window = capacity.window
    begin, end, wanted = tools[0] // PAGE, -(-tools[1] // PAGE), -(-system // PAGE)
    if not capacity.ring or max(end, wanted) <= window.sink:
        return window
    half = max(window.sink, window.pool // 2)
    sink = max(window.sink, min(wanted, window.pool // 4))
    if sink + max(0, end - max(begin, sink)) > half:
        sink = max(window.sink, min(sink, half - (end - begin)))
    first = max(begin, sink)
    kept = (first, first + min(end - first, half - sink)) if first < end else (0, 0)
    cut = first < end and kept[1] < end
    if cut:
        notes.append(
            f"tool definitions take {end - begin} pages; {kept[1] - begin} of them stay in the window, the rest is "
            f"recalled (--kv-capacity {2 * (window.sink + end - begin) * PAGE} keeps all)"
        )
    seen = sink + max(0, min(kept[1], wanted) - kept[0])
    if seen < wanted and not cut:
        notes.append(
            f"system prompt and tools take {wanted} pages; {seen} of them stay in the window, the rest is recalled "
            f"(--kv-capacity {4 * wanted * PAGE} keeps all)"
        )
    grown = sink - window.sink + kept[1] - kept[0]
    from_recent = -(-grown * window.recent // (window.recent + window.selection))
    return WindowBudget(
        window.pool, sink, window.selection - (grown - from_recent), window.recent - from_recent, window.free, kept
    )


def _mode(name: str, value: str, off: bool, notes: list[str]) -> str:
    value = _one_of(name, value, ("auto", *MODES))
    if off and value == "recall":
        notes.append(f"{name} asked for recall, and recall is off: it ran as window")
        return "window"
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise RequestError(f"{name} '{value}' is not known", f"one of {', '.join(known)}")
    return value
