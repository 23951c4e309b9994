"""A crowd of clients against a real server for a bounded time: each request is answered or refused by rule, and
afterwards the server holds no more than before.

The crowd comes twice. What the first half leaves (checkpoints, digests, warm allocators) is the server's to keep; what
the second half adds to that is a leak. Some clients stream, some leave in the middle, some send what is no request.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from random import Random
from typing import Any

from gates.child import Child, free_port, indoors
from gates.smoke import SERVE, SmokeReport
from gates.verdict import Check, Report

TIMEOUT = 120.0  # seconds for one answer
RULES = {(429, "server_overloaded"), (429, "kv_exhausted"), (503, "request_queue_timeout")}
"""How a sound request may be refused."""
GROWTH = 0.05  # of the memory after the first half
SYSTEM = "You answer in few words. " * 40  # what all conversations begin with
WORDS = "river stone garden letter market window bridge valley engine village walked under".split()  # noqa: SIM905


@dataclass
class Tally:
    """What a half of the load came to. `wrong`: ends that no rule allows."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of answered requests
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, end: str, seconds: float = 0.0, tokens: int = 0, allowed: bool = True) -> None:
        with self.lock:
            self.ends[end] += 1
            self.tokens += tokens
            if end == "answered":
                self.seconds.append(seconds)
            if not allowed:
                self.wrong.append(end)


def run(
    model: str = "phantom",
    *,
    clients: int = 200,
    seconds: float = 60.0,
    serve: Sequence[str] = SERVE,
    options: Sequence[str] = (),
    say: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """`seconds` are those of both halves together; a request that runs at their end is waited for."""
    port, options = free_port(), indoors(options)
    report = SmokeReport("load", environment={"model": model, "clients": clients, "options": options})
    say("start the server", 0.0)
    with Child([*serve, model, "--host", "127.0.0.1", "--port", str(port), *options], port) as child:
        if child.wait_ready(TIMEOUT) != "ready":
            report.checks.append(Check("ready in time", False, " | ".join(child.lines[-3:])))
            report.judge()
            return report
        begin = child.resources()
        halves, after = [], []
        for half in range(2):
            say(f"{clients} clients for {seconds / 2:g} s, half {half + 1} of 2", half / 2)
            began = time.monotonic()
            halves.append(_crowd(port, _served(child), clients, began + seconds / 2, half))
            report.environment[f"half {half + 1} seconds"] = round(time.monotonic() - began, 1)
            after.append(_rested(child))
        audit = child.request("/v1/ring?audit=true", timeout=TIMEOUT)[1].get("audit", {})
        stopped = child.stop()
    report.seconds = sum(report.environment[f"half {half + 1} seconds"] for half in range(2))
    _judge(report, halves, [begin, *after], audit, stopped.clean)
    return report


def _judge(report: Report, halves: list[Tally], held: list[dict[str, int]], audit: Any, clean: bool) -> None:
    ends = sum((half.ends for half in halves), Counter())
    wrong = [end for half in halves for end in half.wrong]
    answered = sum(len(half.seconds) for half in halves)
    spent = sum(report.environment[f"half {half + 1} seconds"] for half in range(2))
    waits = [wait for half in halves for wait in half.seconds]
    shown = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    begin, first, second = held
    growth = (second["memory"] - first["memory"]) / first["memory"]
    sizes = " -> ".join(f"{state['memory'] / 2**20:,.0f}" for state in held)
    report.environment |= {
        "ends": dict(ends),
        "requests_per_second": round(sum(ends.values()) / spent, 1),
        "answers_per_second": round(answered / spent, 1),
        "tokens_per_second": round(sum(half.tokens for half in halves) / spent, 1),
        "answer_seconds_median": round(statistics.median(waits), 2) if waits else None,
        "answer_seconds_most": round(max(waits, default=0.0), 2),
        "held": held,
    }
    report.checks += [
        Check("every request is answered or refused by rule", not wrong, shown + "".join(f"; {w}" for w in wrong[:3])),
        Check("some are answered", answered > 0, f"{answered:,} in {spent:.0f} s, {answered / spent:.1f} a second"),
        Check("memory is flat", growth <= GROWTH, f"{sizes} MiB at the start and after each half ({growth:+.1%})"),
        Check(
            "no thread and no connection stays",
            second["threads"] <= first["threads"] + 2 and second["handles"] <= begin["handles"] + 4,
            ", ".join(f"{state['threads']} threads {state['handles']} handles" for state in held),
        ),
        Check("the audit is clean", audit.get("clean") is True, str(audit)),
        Check("the server stops and leaves nothing", clean, "gone" if clean else "not cleanly"),
    ]
    report.judge()


def _rested(child: Child) -> dict[str, int]:
    """What the server holds once it has nothing to do."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        queue = child.request("/v1/ring")[1].get("queue", {})
        if not queue.get("active") and not queue.get("waiting"):
            break
        time.sleep(0.2)
    time.sleep(1.0)
    return child.resources()


def _served(child: Child) -> str:
    return child.request("/v1/models")[1]["data"][0]["id"]


def _crowd(port: int, model: str, clients: int, until: float, half: int) -> Tally:
    tally = Tally()
    threads = [
        threading.Thread(target=_client, args=(port, model, Random(1000 * half + number), until, tally), daemon=True)
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT + max(0.0, until - time.monotonic()))
    for thread in threads:
        if thread.is_alive():
            tally.add("never answered", allowed=False)
    return tally


def _client(port: int, model: str, rng: Random, until: float, tally: Tally) -> None:
    """One person: a few turns of a conversation, then another, until the time is over."""
    while time.monotonic() < until:
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(5, 200)))})
            body = {"model": model, "messages": messages, "max_tokens": rng.randint(1, 24)}
            way = rng.choices(("whole", "stream", "leave", "nonsense"), (60, 25, 10, 5))[0]
            try:
                said = _ask(port, body, way, tally)
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:  # the last: not the form
                tally.add(f"{way}: {type(error).__name__}: {error}", allowed=False)
                said = None
            if said is None or time.monotonic() >= until:
                break
            messages.append({"role": "assistant", "content": said})
        time.sleep(rng.uniform(0.0, 0.2))


def _ask(port: int, body: dict[str, Any], way: str, tally: Tally) -> str | None:
    """One request; the answer's text, or None where there was none."""
    if way == "nonsense":
        body = {**body, "messages": [{"role": "wizard"}]}
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    began = time.monotonic()
    try:
        data = json.dumps({**body, "stream": way in ("stream", "leave")})
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            error = json.loads(answer.read())["error"]["code"]
            rule = answer.status == 400 if way == "nonsense" else (answer.status, error) in RULES
            tally.add("refused as nonsense" if way == "nonsense" else error, allowed=rule)
            return None
        if way == "leave":
            answer.read(16)
            tally.add("left by the client")
            return None
        return _read(answer.read(), way, time.monotonic() - began, tally)
    finally:
        connection.close()


def _read(raw: bytes, way: str, seconds: float, tally: Tally) -> str | None:
    if way == "whole":
        body = json.loads(raw)
        tokens, text = body["usage"]["completion_tokens"], body["choices"][0]["message"]["content"]
    else:
        lines = raw.decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        error = next((event["error"]["code"] for event in events if "error" in event), None)
        if error is not None:
            tally.add(error, allowed=error in {code for _, code in RULES})
            return None
        if "data: [DONE]" not in lines:
            tally.add("stream without an end", allowed=False)
            return None
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        tokens = sum(event.get("timings", {}).get("predicted_n", 0) for event in events)
    tally.add("answered", seconds, tokens)
    return text
