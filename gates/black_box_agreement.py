"""agreement from outside: a server's greedy answers held against this engine, seeing everything, on the same model.

Two implementations round differently, so words may part where the model itself is undecided. So this engine is led
through the server's answer: each of its tokens must be this engine's first choice there, or within TIE nats of it. The
control is the server's answers without the facts, where this engine finds them: those it must hold something against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.result import Token
from gates.agreement import QUICK_TOKENS, TOKENS
from gates.bare import is_bare
from gates.context import Context
from gates.haystack import TASKS, Document, Fact, Message
from gates.outside import ANSWER, RECALL_OFF, ROOM, fitted, judged, new_report, without_facts
from gates.remote import Reply, Server
from gates.verdict import Arm, Check, Report

WHOLE = "server"
TIE = 1.0
"""Nats. llama.cpp, which rounds activations to 8 bits, came to 0.37 on SmolLM2's Q4_1; a made-up value to 2.6, the
phantom's to 13 and more."""
SAME_PROMPT = 8  # tokens by which two counts of one prompt may differ: what a server puts before it
ALIKE = 0.25  # of a control's answers, at most


@dataclass
class Compared:
    """Answers of one kind as the local engine sees them."""

    equal: int = 0
    tied: int = 0  # it was undecided where they part
    widest: float = 0.0  # nats, among those
    parted: int = 0
    example: str = ""

    def add(self, said: str, margin: float, local: str) -> None:
        """`margin`: nats by which the local engine prefers another token, where that is most."""
        if margin <= 0:
            self.equal += 1
        elif margin <= TIE:
            self.tied, self.widest = self.tied + 1, max(self.widest, margin)
        else:
            self.parted += 1
            self.example = self.example or f"; '{said[:60]}' where this engine says '{local[:60]}' ({margin:.1f} nats)"

    @property
    def alike(self) -> int:
        return self.equal + self.tied

    @property
    def trials(self) -> int:
        return self.alike + self.parted

    def __str__(self) -> str:
        tied = f", {self.tied} parting at a tie ({self.widest:.2f} nats at most)" if self.tied else ""
        return f"{self.equal} of {self.trials} word for word{tied}{self.example}"


Found = dict[tuple[str, str], tuple[Arm, Compared]]
"""By task and kind of answer."""


def run(server: Server, context: Context) -> Report:
    """Every kind of fact, asked of both; `context` has the model that is served."""
    options = context.options
    if is_bare(context.model):
        raise ConfigError(f"{context.model.name} has no chat template", "a model that was taught to chat")
    report = new_report("agreement", server, options)
    report.environment = {**context.environment(), **report.environment}
    report.not_run.append("the attention that its window covers: it needs the inside of the engine")
    wanted = options.tokens(TOKENS, QUICK_TOKENS)
    tokens = context.fitted(fitted(server, wanted, report), report)
    found: Found = {}
    counts: list[tuple[int, int]] = []
    work = [(seed, task) for seed in options.seed_numbers for task in TASKS]
    engine = context.engine(
        max_context=tokens + 2 * ROOM, kv_capacity=None, ring="off", positions="absolute", reuse=True
    )
    try:
        for number, (seed, task) in enumerate(work):
            document = context.document(task, tokens, seed, asked=2 if options.quick else 6)
            context.say(f"{task}: {document.tokens:,} tokens", number / len(work))
            _ask_both(server, engine, document, found, counts)
            engine.forget()
    finally:
        engine.close()
    report.arms = [arm for arm, _ in found.values()]
    if options.haystack:
        for _, compared in found.values():
            compared.example = ""  # it may quote the user's text
    report.checks = [_same_prompts(counts), *_checks(found, report.notes)]
    report.judge()
    controls = any(compared.trials for (_, name), (_, compared) in found.items() if name != WHOLE)
    if faults := [f"{arm.label}: {arm.note}" for arm in report.arms if arm.note]:
        report.verdict, report.reasons = "INCONCLUSIVE", faults
    elif report.verdict == "PASS" and not controls:
        report.verdict, report.reasons = "WEAK MODEL", ["no control: see the notes"]
    return report


def _ask_both(server: Server, engine: Engine, document: Document, found: Found, counts: list[tuple[int, int]]) -> None:
    """Each question, to the server (whole, without the facts and, if it is ours, with recall off) and to `engine`."""
    bare = without_facts(document)
    for trial in document.trials():
        said: list[tuple[Fact, str]] = []
        for turn, fact in enumerate(trial, 1):
            messages = document.messages(fact, said)
            whole = server.ask(messages, ANSWER)
            replies = {WHOLE: whole, "facts left out": server.ask(bare(fact, said), ANSWER)}
            if whole.ours:
                replies["recall off"] = server.ask(messages, ANSWER, **RECALL_OFF)
            local, _ = answered(engine, messages)
            for name, reply in replies.items():
                new = Arm(name, document.task, "shown"), Compared()
                arm, compared = found.setdefault((document.task, name), new)
                arm.outcomes.append(judged(document, fact, turn, reply))
                arm.seconds += reply.seconds
                arm.hidden_pages = max(arm.hidden_pages, reply.hidden_pages)
                if reply.fault:
                    arm.note = reply.fault
                elif name == WHOLE or fact.answered(local):
                    compared.add(reply.text, against(engine, messages, reply), local)
            if not whole.fault:
                counts.append((engine.count_tokens(messages), whole.prompt_tokens))
            said.append((fact, whole.text))


def answered(engine: Engine, messages: list[Message], said: Sequence[int] = ()) -> tuple[str, list[Token]]:
    """The engine's greedy answer, or `said` in its mouth; each token with its logprob and the likeliest one's."""
    sampling = SamplingParams(max_tokens=len(said) or ANSWER, logprobs=1, ignore_eos=bool(said))
    session = engine.admit(engine.prepare(messages, sampling, RecallParams(prefill="exact", decode="exact")))
    session.force(said)
    while not session.done:
        engine.step()
    *events, result = session.outbox
    if isinstance(result, BaseException):
        raise result
    return result.text, [event for event in events if isinstance(event, Token)]


def against(engine: Engine, messages: list[Message], reply: Reply) -> float:
    """By how many nats the engine prefers another token than the answer's, where that is most; 0: nowhere."""
    tokenizer = engine.model.tokenizer
    said = tokenizer.encode(reply.text.strip(), bos=False)
    if reply.finish != "length":
        said.append(tokenizer.eos[0])
    _, tokens = answered(engine, messages, said)
    return max((token.top[0][1] - token.logprob for token in tokens), default=0.0)


def _same_prompts(counts: list[tuple[int, int]]) -> Check:
    """Both counted the same prompts alike: another model or template would be compared in vain."""
    apart = max((abs(ours - theirs) for ours, theirs in counts), default=0)
    detail = f"{apart} tokens apart at most, of {max((ours for ours, _ in counts), default=0):,}"
    return Check("instrument, the same model and template (-m)", apart <= SAME_PROMPT, detail)


def _checks(found: Found, notes: list[str]) -> list[Check]:
    checks = []
    for (task, name), (_, compared) in found.items():
        if name == WHOLE:
            alike = compared.alike == compared.trials
            checks.append(Check(f"{task}: the server says what this engine says", alike, str(compared)))
        elif compared.trials:
            few = compared.alike <= ALIKE * compared.trials
            checks.append(Check(f"control: {task}, {name}", few, str(compared), control=True))
        else:
            notes.append(f"{task}, {name}: no control, the model finds none of these facts seeing everything")
    return checks
