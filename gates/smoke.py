"""smoke: a real server, started, asked, asked again in the same conversation, and stopped. What a first user does.

Nothing here imports the engine: the server is a child process and everything is read off its lines and its answers.
Not in the registry of gates: it has no arms and no ceiling, and a server that refuses to start is a verdict of its own.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gates.child import LEASHED, Child, Stopped, free_port, indoors
from gates.haystack import Counter, build, matches
from gates.verdict import Check, Report

TOKENS = 2_000  # of the first prompt, about: a page of 64 that is not yet closed must stay far below a tenth of it
CACHED_SHARE = 0.9
MAX_TOKENS = 64
TAIL_LINES = 12
EXIT = {"PASS": 0, "FAIL": 1, "REFUSED": 3}
SERVE = (*LEASHED, "kvring_cli.app", "serve")

START_UP = (
    ("device profile", r"device profile .+: [\d,]+ routed keys \(.+\)"),
    ("[ring] scoring", r"\[ring\] (?!budgets).+"),
    ("engine ready", r"engine ready \| .+ \| total [\d.]+ ?s \| weights "),
    ("capacity", r"capacity \| KV [\d,]+ tokens, .+ \| pages [\d,]+/[\d,]+ \| runtime .+ \| free "),
    ("[ring] budgets", r"\[ring\] budgets: sink=\d+, selection=\d+, recent=\d+, free=\d+ .*\[sum == pool: yes\]"),
    ("reuse", r"reuse host-backed: (on|off)"),
    ("listening", r"listening on http://\S+ \| model .+ \| auth (disabled|enabled)"),
)
"""What spec/serving.md promises at start-up, in this order."""


class SmokeReport(Report):
    """Checks only. REFUSED: the server said why it won't start."""

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]


@dataclass(frozen=True)
class Answer:
    """One answered request, of what a check reads."""

    text: str
    finish: str
    prompt: int
    cached: int
    seconds: float

    @classmethod
    def read(cls, body: Any, seconds: float) -> Answer:
        """Raises KeyError, IndexError or TypeError where the body is no chat completion."""
        choice, usage = body["choices"][0], body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text = choice["message"]["content"] or ""
        return cls(text, choice["finish_reason"], usage["prompt_tokens"], cached, seconds)


def run(
    model: str = "phantom",
    *,
    serve: Sequence[str] = SERVE,
    options: Sequence[str] = (),
    timeout: float = 120.0,
    strict: bool = False,
    say: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """`timeout` seconds until it is ready, and for each answer. `strict` judges the values of any model's answers."""
    port, options = free_port(), indoors(options)
    command = [*serve, model, "--host", "127.0.0.1", "--port", str(port), *options]
    report = SmokeReport("smoke", environment={"model": model, "options": options, "python": platform.python_version()})
    report.environment["platform"] = platform.platform()
    say("start the server", 0.0)
    began = time.monotonic()
    with Child(command, port) as child:
        state = child.wait_ready(timeout)
        seconds = time.monotonic() - began
        report.environment["ready_seconds"] = round(seconds, 3)
        if state == "ready":
            report.checks.append(Check("ready in time", True, f"{seconds:.1f} s of {timeout:g}"))
            _talk(child, model, strict or model == "phantom", timeout, report, say)
            report.checks.insert(1, start_up(child.lines))
        say("stop the server", 0.9)
        stopped = child.stop()
    report.seconds = time.monotonic() - began
    if state != "ready":
        return _not_ready(report, state, child, seconds)
    report.checks.append(_gone(stopped))
    report.judge()
    if report.exit_code:
        report.reasons += [f"server | {line}" for line in child.lines[-TAIL_LINES:]]
    return report


def start_up(lines: Sequence[str]) -> Check:
    """Each of START_UP, after the one before it."""
    at, missing = 0, []
    for name, pattern in START_UP:
        found = next((index for index in range(at, len(lines)) if re.search(pattern, lines[index])), None)
        if found is None:
            missing.append(name)
        else:
            at = found + 1
    detail = f"{len(START_UP) - len(missing)} of {len(START_UP)}, in order"
    return Check("start-up lines", not missing, detail + (f"; missing: {', '.join(missing)}" if missing else ""))


def repeats(text: str) -> bool:
    """Whether at least half of the text is one piece said four times or more in a row."""
    flat = " ".join(text.split())
    runs = (len(run.group()) for run in re.finditer(r"(.{1,60}?)(?: ?\1){3,}", flat))
    return max(runs, default=0) >= max(8, len(flat) / 2)


def _talk(
    child: Child, model: str, judged: bool, timeout: float, report: Report, say: Callable[[str, float], None]
) -> None:
    """Two turns of one conversation, and the first turn again with another beginning."""
    count = Counter(lambda text: len(text) // 3 + 1, lambda turns: sum(len(turn["content"]) // 3 for turn in turns))
    document = build("keyed", TOKENS, count, seed=7, asked=2)
    first, second = document.asked
    checks = report.checks

    def ask(name: str, messages: list[dict[str, str]], share: float) -> Answer | None:
        say(name, share)
        body = {"model": _served(child, model), "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        began = time.monotonic()
        try:
            status, value = child.request("/v1/chat/completions", body, timeout)
            answer = Answer.read(value, time.monotonic() - began)
        except OSError as error:
            checks.append(Check(f"{name} is answered", False, f"nothing came in {timeout:g} s: {error}"))
        except (KeyError, IndexError, TypeError):
            checks.append(Check(f"{name} is answered", False, f"HTTP {status}: {str(value)[:200]}"))
        else:
            report.environment[name] = {**answer.__dict__, "seconds": round(answer.seconds, 3)}
            return answer
        return None

    opening = ask("turn 1", document.messages(first), 0.3)
    if opening is None:
        return
    checks.append(_good("turn 1", opening, first.expected if judged else None))
    follow = ask("turn 2", document.messages(second, [(first, opening.text)]), 0.6)
    if follow is not None:
        checks.append(_good("turn 2", follow, second.expected if judged else None))
        share = follow.cached / max(1, follow.prompt)
        detail = f"{follow.cached:,} of {follow.prompt:,} ({share:.1%}), in {follow.seconds:.2f} s"
        checks.append(Check("turn 2 is cached to 90 %", CACHED_SHARE <= share <= 1, detail))
    changed = document.messages(first)
    changed[0]["content"] = f"Mind: {changed[0]['content']}"
    other = ask("turn 1 with another first word", changed, 0.8)
    if other is not None:
        detail = f"cached {other.cached:,} of {other.prompt:,}; turn 1 itself: {opening.cached:,}"
        checks.append(
            Check("control: another beginning finds nothing cached", not other.cached and not opening.cached, detail)
        )


def _served(child: Child, model: str) -> str:
    """The id under which the server lists its model."""
    listed = child.request("/v1/models")[1]
    try:
        return listed["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        return model


def _good(name: str, answer: Answer, expected: str | None) -> Check:
    """At least two characters, an ordinary end, no repetition, and `expected` in it where the model can be judged."""
    text = answer.text.strip()
    faults = [
        fault
        for fault, found in (
            ("shorter than 2 characters", len(text) < 2),
            (f"finish {answer.finish}", answer.finish not in ("stop", "length")),
            ("a repetition", repeats(text)),
            (f"{expected} is not in it", expected is not None and not matches(text, expected)),
        )
        if found
    ]
    shown = " ".join(text.split())[:60]
    detail = f"'{shown}'" + (f", {', '.join(faults)}" if faults else "" if expected else ", value not judged")
    return Check(f"{name} answers", not faults, f"{detail}; {answer.prompt:,} tokens in {answer.seconds:.2f} s")


def _gone(stopped: Stopped) -> Check:
    detail = f"gone in {stopped.seconds:.1f} s"
    if stopped.killed:
        detail = f"had to be killed after {stopped.seconds:.1f} s"
    if stopped.left:
        detail += f"; left behind: {', '.join(stopped.left)}"
    if stopped.still_listening:
        detail += "; its port still answers"
    return Check("stops and leaves nothing behind", stopped.clean, detail)


def _not_ready(report: SmokeReport, state: str, child: Child, seconds: float) -> Report:
    refused = state != "late" and any(re.match(r"error: ", line) for line in child.lines)
    what = {"exited": f"it ended with exit code {child.exit_code}", "failed": "its health is 'failed'"}
    detail = what.get(state, "it is still not ready") + f" after {seconds:.1f} s"
    report.checks.append(Check("ready in time", False, detail))
    report.judge()
    if refused:
        report.verdict = "REFUSED"
    report.reasons = [f"server | {line}" for line in child.lines[-TAIL_LINES:]]
    return report
