"""perplexity: on a long text the ring's exact pass is the dense one, and hidden pages cost what they should.

Windows of 4,096 tokens with stride 2,048, each scored on its second half. The built-in text is prose in which every
passage of 2,048 tokens stands twice in a row, so that half of the scored tokens can be known from 32 pages back only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import torch
from torch import Tensor

from engine.config import PAGE, RecallParams
from engine.engine import Engine
from engine.errors import ConfigError
from gates.arms import blinding
from gates.context import Context
from gates.filler import FILLERS
from gates.verdict import Check, Report

TOKENS, QUICK_TOKENS = 100_000, 8_192
WINDOW, STRIDE, CHUNK = 4096, 2048, 512
SMALL_POOL, SMALL_CHUNK = 24, 64  # pages, tokens: what lies one stride back is out of the pool
STREAMING_POOL = 32  # pages: half of a window
LONG_WINDOWS = 4  # that the slower arms read: those whose second half repeats the first
PASSAGES = "log"
WORSE = 1.10
NEAR = {torch.float32: 1e-4, torch.float16: 0.02}  # nats, at any one token; bfloat16: 0.1


@dataclass
class Score:
    """Negative log-likelihoods, in nats, of what one engine read."""

    losses: list[Tensor] = field(default_factory=list)  # of the scored tokens, window by window

    @property
    def mean(self) -> float:
        return float(torch.cat(self.losses).mean())


def run(context: Context, tokens: int | None = None) -> Report:
    """The gate of spec/gates.md; `--length` for another length of text, `--haystack` for another text."""
    report = Report("perplexity", environment=context.environment(), blinding_switches=blinding(context.config))
    wanted = tokens or context.options.tokens(TOKENS, QUICK_TOKENS)
    text = _text(context, wanted)
    if context.options.haystack is None:
        report.environment["haystack"] = f"{PASSAGES}, every {STRIDE:,} tokens twice"
    window = min(WINDOW, context.model.config.trained_context // 2 // PAGE * PAGE)
    windows = [text[start : start + window] for start in range(0, len(text) - window + 1, window // 2)]
    if not windows:
        raise ConfigError(f"the text has {len(text):,} tokens, one window has {window:,}", "a longer text")
    common = {"max_context": window + PAGE, "positions": "absolute", "reuse": False, "sink": PAGE}
    made = {
        "dense": context.engine(**common, prefill_chunk=CHUNK, ring="off", kv_capacity=None),
        "fits": context.engine(**common, prefill_chunk=CHUNK, ring="on", kv_capacity=window + CHUNK),
        "streams": context.engine(**common, prefill_chunk=CHUNK, ring="on", kv_capacity=STREAMING_POOL * PAGE),
        "small": context.engine(**common, prefill_chunk=SMALL_CHUNK, ring="on", kv_capacity=SMALL_POOL * PAGE),
    }
    try:
        dense = _exact(context, made, windows, report)
        _hidden(context, made["small"], windows[: 2 * LONG_WINDOWS : 2], dense, report)
        for engine in made.values():
            engine.audit(deep=True)
    finally:
        for engine in made.values():
            engine.close()
    return report.judge()


def _exact(context: Context, made: dict[str, Engine], windows: Sequence[list[int]], report: Report) -> Score:
    """Dense beside a ring that holds the window and beside one that streams half of it, chunk by chunk."""
    dense, streamed, same, worst = Score(), Score(), True, 0.0
    params = RecallParams(prefill="exact", decode="exact")
    for number, window in enumerate(windows):
        context.say(f"perplexity: window {number + 1} of {len(windows)}, exact", 0.7 * number / len(windows))
        rows = {name: made[name].logits_by_chunk(window, params) for name in ("dense", "fits", "streams")}
        kept: dict[str, list[Tensor]] = {"dense": [], "streams": []}
        at = 0
        for expected, fitting, streaming in zip(*rows.values(), strict=True):
            same &= torch.equal(expected, fitting)
            for name, logits in (("dense", expected), ("streams", streaming)):
                kept[name].append(_losses(logits, window, at))
            at += len(expected)
        for score, name in ((dense, "dense"), (streamed, "streams")):
            score.losses.append(torch.cat(kept[name]))
        worst = max(worst, float((dense.losses[-1] - streamed.losses[-1]).abs().max()))
    dense.losses = [losses[len(losses) // 2 :] for losses in dense.losses]
    near = NEAR.get(context.model.transformer.dtype, 0.1)
    pages = made["streams"].stats()["layer_pages_streamed"]
    difference = f"largest difference {worst:.2g}, at most {near:g}"
    size = f"{sum(map(len, windows)):,} tokens in {len(windows)} windows"
    report.checks += [
        Check("ring that holds the window: bit for bit", same, f"logits of {size}"),
        Check("ring that streams: NLL at every token", worst <= near, difference),
        Check("instrument, pages streamed", pages > 0, f"{pages:,} layer pages"),
    ]
    report.notes.append(f"NLL of the dense engine: {dense.mean:.4f} nats a token")
    return dense


def _hidden(context: Context, engine: Engine, windows: Sequence[list[int]], dense: Score, report: Report) -> None:
    """The same text through a pool of 24 pages: with recall, without, and with every second page out of its reach."""
    odd = tuple((page * PAGE, (page + 1) * PAGE) for page in range(1, len(windows[0]) // PAGE, 2))
    arms = {
        "recall": RecallParams(prefill="recall", decode="recall"),
        "window": RecallParams(prefill="window", decode="window"),
        "half": RecallParams(prefill="recall", decode="recall", exclude_tokens=odd),
    }
    found: dict[str, Score] = {}
    for step, (name, params) in enumerate(arms.items()):
        found[name] = Score()
        for number, window in enumerate(windows):
            share = 0.7 + 0.3 * (step + number / len(windows)) / len(arms)
            context.say(f"perplexity: window {number + 1} of {len(windows)}, {name}", share)
            losses = torch.cat(list(_scored(engine.logits_by_chunk(window, params), window)))
            found[name].losses.append(losses[len(losses) // 2 :])
    base = Score(dense.losses[: 2 * len(windows) : 2]).mean
    mean = {name: score.mean for name, score in found.items()}
    lost, kept = mean["window"] - base, mean["recall"] - base
    against = f"dense {base:.4f}, recall {mean['recall']:.4f} nats a token"
    report.checks.append(
        Check("recall keeps at least half of what the window loses", kept <= lost / 2, f"{against}; lost {lost:.4f}")
    )
    for name, what in (("window", "without recall"), ("half", "every second page hidden")):
        ratio = mean[name] / mean["recall"]
        detail = f"{mean[name]:.4f} nats, {ratio:.3f} times its twin 'recall'; must be worse than {WORSE:g} times"
        report.checks.append(Check(f"control: {what}", ratio > WORSE, detail, control=True))


def _scored(chunks: Iterator[Tensor], window: list[int]) -> Iterator[Tensor]:
    at = 0
    for logits in chunks:
        yield _losses(logits, window, at)
        at += len(logits)


def _losses(logits: Tensor, window: list[int], at: int) -> Tensor:
    """Nats of the tokens that follow rows `at`, at + 1, ...; the last row has none."""
    following = torch.tensor(window[at + 1 : at + 1 + len(logits)], device=logits.device)
    return torch.nn.functional.cross_entropy(logits[: len(following)].float(), following, reduction="none").cpu()


def _text(context: Context, tokens: int) -> list[int]:
    """The user's text, or passages that stand twice."""
    tokenizer = context.model.tokenizer
    if not isinstance(context.filler, str):
        units = islice(context.filler.stream(Random(1)), tokens)
        return tokenizer.encode(context.filler.joiner.join(units), bos=False)[:tokens]
    joiner, stream, text = FILLERS[PASSAGES].joiner, FILLERS[PASSAGES].stream(Random(1)), []
    while len(text) < tokens:
        passage: list[int] = []
        while len(passage) < STRIDE:
            passage += tokenizer.encode(joiner + next(stream), bos=False)
        text += 2 * passage[:STRIDE]
    return text[:tokens]
