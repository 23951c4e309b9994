"""From what a person asked to what the engine will do: tokens, the question's span, limits, recall settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import MODES, PAGE, SCORERS, EngineConfig, RecallParams, SamplingParams
from engine.errors import ContextLengthError, RequestError
from engine.kv.budget import Capacity, WindowBudget
from engine.limits import check_sampling
from engine.model.load import LoadedModel
from engine.recall.recall import RecallSettings
from engine.scheduler import Plan

DEFAULT_MAX_TOKENS = 32768
LONGEST_QUESTION = 4
"""A user's turn is the question if it is no longer than this many query tails; else its last tail is."""


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


def tokenize(
    model: LoadedModel, prompt: str | Sequence[Mapping[str, Any]], tail: int, **template: Any
) -> tuple[list[int], tuple[int, int], int]:
    """Tokens, the question's span, and where system prompt and tools end. A text is a raw prompt, without template."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty", "ask something")
        tokens = model.tokenizer.encode(prompt)
        return tokens, (max(0, len(tokens) - tail), len(tokens)), 0
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
    if template.get("tools") and not system:
        system = min(span[0] for span in encoded.spans)
    return encoded.ids, (start, end), system if system < len(encoded.ids) else 0


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
    tokens, query, system = tokenize(model, prompt, tail, **template)
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
    budget = _budget(capacity, system, notes)
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


def _budget(capacity: Capacity, system: int, notes: list[str]) -> WindowBudget:
    """The window's shares, the sink grown over system prompt and tool definitions as far as a quarter of the pool."""
    window = capacity.window
    wanted = -(-system // PAGE)
    if not capacity.ring or wanted <= window.sink:
        return window
    sink = max(window.sink, min(wanted, window.pool // 4, window.sink + window.recent - 2))
    if sink < wanted:
        notes.append(
            f"system prompt and tools take {wanted} pages; {sink} of them stay in the window, the rest is recalled "
            f"(--kv-capacity {4 * wanted * PAGE} keeps all)"
        )
    grown = sink - window.sink
    from_recent = min(grown, window.recent - 2)
    return WindowBudget(
        window.pool, sink, window.selection - (grown - from_recent), window.recent - from_recent, window.free
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
