"""reuse and resend from outside: what any server's answers, its usage and a clock tell of a conversation sent again."""

from __future__ import annotations

from gates.haystack import GATE_TOKENS, Counter, Document, build
from gates.options import GateOptions
from gates.outside import ANSWER, SHORT, Say, fitted
from gates.remote import Reply, Server
from gates.reuse import SHARE, SOONER
from gates.verdict import Check, Report

PAGE_SLACK = 128
"""Tokens that a server may compute again: it resumes in blocks of its own."""

SEEDS = 16  # documents tried, if the server has read the ones before


def run(report: Report, server: Server, count: Counter, options: GateOptions, say: Say) -> Report:
    """`reuse` or `resend` (the report's gate) against `server`, on one document, in prose: answers are quoted."""
    tokens = fitted(server, options.length or GATE_TOKENS, report)
    say(f"{report.gate}: first", 0.0)
    document, cold = _cold(server, tokens, count)
    report.environment["seeds"] = [document.seed]
    {"reuse": _reuse, "resend": _resend}[report.gate](server, document, cold, count, report, say)
    return report.judge()


def _cold(server: Server, tokens: int, count: Counter) -> tuple[Document, Reply]:
    """A document that the server has not read yet, by its own count, and its reply to the first question."""
    for seed in range(1, 1 + SEEDS):
        document = build("keyed", tokens, count, seed, asked=3)
        cold = server.ask(document.messages(document.asked[0]), 1)
        if (cold.cached or 0) <= PAGE_SLACK:
            break
    return document, cold


def _reuse(server: Server, document: Document, cold: Reply, count: Counter, report: Report, say: Say) -> None:
    """A follow-up is sooner than its conversation was cold, and by the server's own count cached."""
    report.not_run.append("the answer of a cold run, logprobs, counted pages: they need the inside of the engine")
    first, second, third = document.asked
    answer = server.ask(document.messages(first), ANSWER)
    if _faults(report, cold, answer):
        return
    said = [(first, answer.text)]
    say("reuse: follow-up", 0.6)
    follow = [server.ask(document.messages(fact, said), 1) for fact in (second, third)]
    say("reuse: another first word", 0.8)
    changed = document.messages(second, said)
    changed[0] = {**changed[0], "content": f"Mind: {changed[0]['content']}"}
    other = server.ask(changed, 1)
    if _faults(report, *follow, other):
        return
    soon = min(reply.seconds for reply in follow)
    least = SOONER * min(1.0, document.tokens / GATE_TOKENS)
    detail = (
        f"{1e3 * soon:,.0f} ms against {cold.seconds:,.2f} s cold: {cold.seconds / soon:.1f} times sooner, at least "
    )
    report.checks.append(Check("first token", cold.seconds >= least * soon, f"{detail}{least:.1f}"))
    late = f"{other.seconds:,.2f} s after a changed first word, {cold.seconds:,.2f} s cold"
    report.checks.append(
        Check("control: another first word is not sooner", 2 * other.seconds >= cold.seconds, late, control=True)
    )
    if any(reply.cached is None for reply in (*follow, other)):
        report.not_run.append("cached tokens: the server's usage doesn't say")
        return
    shared = cold.prompt_tokens
    for number, reply in enumerate(follow, 1):
        enough = reply.cached >= min(SHARE * shared, shared - PAGE_SLACK) and reply.cached <= reply.prompt_tokens
        detail = f"{reply.cached:,} of about {shared:,} shared tokens"
        report.checks.append(Check(f"follow-up {number}: cached", enough, detail))
    few = other.cached <= PAGE_SLACK
    detail = f"{other.cached:,} tokens cached, at most {PAGE_SLACK} of a common template"
    report.checks.append(Check("control: another first word", few, detail, control=True))


def _resend(server: Server, document: Document, cold: Reply, count: Counter, report: Report, say: Say) -> None:
    """The same request again, and after it was given up half-way, is answered alike; so is the next one."""
    report.not_run.append("failed copies, flipped bits, the audit: they need the inside of the engine")
    asked, other = document.asked[:2]
    messages = document.messages(asked)
    first = server.ask(messages, ANSWER)
    say("resend: again", 0.4)
    again = server.ask(messages, ANSWER)
    say("resend: given up half-way, then again", 0.6)
    gone = server.give_up(document.messages(other), ANSWER)
    after = server.ask(messages, ANSWER)
    say("resend: others", 0.8)
    short = build("keyed", SHORT, count, 2, asked=1)
    next_, different = server.ask(short.messages(short.asked[0]), ANSWER), server.ask(document.messages(other), ANSWER)
    if _faults(report, cold, first, again, after, next_, different):
        return
    for name, reply in (("again", again), ("after a request that was given up", after)):
        detail = f"'{reply.text[:60]}', first '{first.text[:60]}'"
        report.checks.append(Check(f"{name}: the same answer", reply.text == first.text, detail))
    report.checks.append(Check("a request was given up half-way", not gone, gone or "its connection was closed"))
    report.checks.append(Check("the next request is served", bool(next_.text.strip()), f"'{next_.text[:60]}'"))
    detail = f"'{different.text[:60]}' to another question"
    report.checks.append(Check("control: answers differ", different.text != first.text, detail, control=True))


def _faults(report: Report, *replies: Reply) -> bool:
    """Whether one wasn't answered: what was meant to be served and wasn't is a finding."""
    faults = [reply.fault for reply in replies if reply.fault]
    if faults:
        report.checks.append(Check("every request is answered", False, faults[0]))
    return bool(faults)
