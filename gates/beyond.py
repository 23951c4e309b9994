"""One request far beyond the pool, through a real server: does it end as asked, and is its usage what was asked for?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

from gates.child import Child, free_port
from gates.load import WORDS
from gates.smoke import SERVE, SmokeReport
from gates.verdict import Check, Report

SLOWEST = 15.0  # tokens a second, below which the request is given up


def run(
    model: str = "phantom",
    *,
    prompt: int = 60_000,
    tokens: int = 2_000,
    pool: int = 4_032,
    prefill: str = "window",
    serve: Sequence[str] = SERVE,
    say: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """`prompt` tokens exactly, `tokens` of answer; the answer goes on where the model would stop."""
    port, context = free_port(), prompt + tokens + 64
    options = ["--port", str(port), "--max-context", str(context), "--kv-capacity", str(pool)]
    report = SmokeReport("beyond", environment={"model": model, "prompt": prompt, "tokens": tokens, "pool": pool})
    say("start the server", 0.0)
    with Child([*serve, model, *options], port) as child:
        if child.wait_ready(120.0) != "ready":
            report.checks.append(Check("ready in time", False, " | ".join(child.lines[-3:])))
            report.judge()
            return report
        body = {"prompt": _text(child, prompt), "max_tokens": tokens, "ignore_eos": True}
        say(f"{prompt:,} tokens of prompt, {tokens:,} of answer, a pool of {pool:,}", 0.2)
        began = time.monotonic()
        limit = 60.0 + (prompt + tokens) / SLOWEST
        status, answer = child.request("/v1/completions", {**body, "kvring": {"prefill": prefill}}, limit)
        report.seconds = time.monotonic() - began
        audit = child.request("/v1/ring?audit=true")[1].get("audit", {})
    report.checks.append(Check("answered", status == 200, "" if status == 200 else str(answer)[:200]))
    if status == 200:
        usage, recall = answer["usage"], answer["kvring"]["recall"]
        finish = answer["choices"][0]["finish_reason"]
        said = (usage["prompt_tokens"], usage["completion_tokens"])
        report.environment |= {"timings": answer["timings"], "recall": recall}
        report.checks += [
            Check("ends as asked", finish == "length", finish),
            Check("usage is what was asked", said == (prompt, tokens), f"{said[0]:,} + {said[1]:,}"),
            Check("pages were hidden", recall["hidden_pages"] > 0, f"{recall['hidden_pages']:,} at the end"),
            Check("pages were selected", recall["pages_selected"] > 0, f"{recall['pages_selected']:,}"),
        ]
    report.checks.append(Check("the audit is clean", audit.get("clean") is True, str(audit)))
    report.judge()
    return report


def _text(child: Child, tokens: int) -> str:
    """A text that the server counts as exactly so many tokens."""
    rng, text, missing, more = Random(0), "So", tokens, tokens // 2
    while missing and more:
        longer = f"{text} {' '.join(rng.choices(WORDS, k=more))}" if more > 1 else f"{text} so"
        count = child.request("/tokenize", {"prompt": longer}, 120.0)[1]["count"]
        if count <= tokens:
            text, missing = longer, tokens - count
        else:
            more //= 2
    return text
