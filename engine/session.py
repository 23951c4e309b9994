"""One request from resume to result: its sequence, its recall, its sampler, its clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.config import PAGE
from engine.prepare import Prepared
from engine.recall.recall import Recall
from engine.result import PageView, Progress, RecallReport, Result, Timings, Token, Usage
from engine.runner import Runner
from engine.sampler import Sampler
from engine.scheduler import Phase
from engine.sequence import Sequence
from engine.step import Trace
from engine.text.stop import StopMatcher
from engine.text.tokenizer import StreamDecoder, Tokenizer


class Session:
    """Created when the request is admitted. The engine drives it and fills `outbox`; it never calls back."""

    def __init__(self, runner: Runner, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self.prepared = prepared
        self.sequence = Sequence(marks={prepared.query[0] // PAGE * PAGE})
        self.trace = Trace()
        self.recall = Recall(
            prepared.settings, runner.host.shape, runner.digests, runner.model.rope, runner.transfer.load
        )
        self.cached = 0
        self.phases: list[Phase] = []  # of the prompt, those not finished
        self.follows: tuple[Session, int] | None = None  # who computes this prompt's first tokens, and how many
        self.pending: int | None = None  # the token that was drawn and not yet computed
        self.finish: str | None = None
        self.done = False
        self.outbox: deque[Progress | Token | Result | BaseException] = deque()
        self._runner = runner
        self._eos = frozenset(tokenizer.eos)
        self._sampler = Sampler(prepared.sampling, prepared.tokens)
        self._forced: deque[int] = deque()
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopMatcher(prepared.sampling.stop)
        self._generated: list[int] = []
        self._text: list[str] = []
        self._modes: list[str] = []
        self._began = time.perf_counter()
        self._prefilled = self._first = 0.0
        self._prompt_hidden = 0

    @staticmethod
    def accepts(prepared: Prepared) -> set[str]:
        """Tags of the pages that this request may resume beside exact ones."""
        plan, tag = prepared.plan, prepared.settings.tag
        suffix = {"recall": {tag}, "window": {"window"}, "exact": set()}[plan.decode]
        return {"exact": set(), "window": {"window"}, "recall": {tag}, "auto": set()}[plan.prefill] | (
            suffix if plan.prefill != "exact" else set()
        )

    def resume(self, pages: list[int], tags: list[str]) -> None:
        """Begin after these closed pages of the prompt (their references are the session's from now on)."""
        self.sequence.pages, self.sequence.tags = list(pages), list(tags)
        self.cached = len(tags) * PAGE
        self.sequence.tokens = self.prepared.tokens[: self.cached]

    def enter(self, phase: Phase, start: int, end: int) -> None:
        """Before a step of the prompt: note its mode, and ask the question when its first token comes up."""
        if not self._modes or self._modes[-1] != phase.mode:
            self._modes.append(phase.mode)
        first, last = self.prepared.query
        if start <= max(first, self.cached) < end and first < last:
            self.recall.ask(self.prepared.ids[:start], self.prepared.ids[first:last])

    def prefilled(self, logits: Tensor) -> None:
        """After the prompt's last step, which gave `logits`: once they are there, for launches run a second ahead."""
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self._prefilled = time.perf_counter()
        if self.trace.over_pool and self._modes[-1] == "recall" and not self.recall.pages_selected:
            self._prompt_hidden = self.trace.hidden_pages

    def draw(self, logits: Tensor) -> Token:
        """The next token, and `finish` if it ends the answer."""
        sampled = self._sampler.draw(logits, self._forced.popleft() if self._forced else None)
        if not self._generated:
            self._first = time.perf_counter()
        self._generated.append(sampled.token)
        ended = sampled.token in self._eos and not self.prepared.sampling.ignore_eos
        text = "" if ended else self._stop.push(self._decoder.push(sampled.token))
        if ended or self._stop.stopped is not None:
            self.finish = "stop"
        elif len(self._generated) >= self.prepared.max_tokens:
            self.finish = "length"
        if self.finish is not None and self._stop.stopped is None:
            text += self._stop.push(self._decoder.flush())
            text += self._stop.flush()
        self._text.append(text)
        return Token(sampled.token, text, sampled.logprob, sampled.top)

    def force(self, tokens: Iterable[int]) -> None:
        """These come next, whatever the model would say: so a server ends thinking that used up its budget."""
        self._forced.extendleft(reversed(list(tokens)))

    @property
    def stop_string(self) -> str | None:
        """Which stop string ended the answer."""
        return self._stop.stopped

    def places(self) -> str:
        """A letter for each page now: s sink or tools, k selected, r recent, o open, w else in the pool, . cold."""
        closed, budget = self.sequence.closed, self.prepared.budget
        resident = (self._runner.pool.slot_of[:, self.sequence.ids()] >= 0).any(axis=0)
        held, recent = set(self.recall.held), closed - budget.recent + 1

        def letter(page: int) -> str:
            if page >= closed:
                return "o"
            if not resident[page]:
                return "."
            if page < budget.sink or budget.kept[0] <= page < budget.kept[1]:
                return "s"
            return "k" if page in held else "r" if page >= recent else "w"

        return "".join(map(letter, range(len(self.sequence.pages))))

    def result(self) -> Result:
        now = time.perf_counter()
        self._runner.collect()
        usage = Usage(
            prompt=len(self.prepared.tokens),
            cached=self.cached,
            computed=len(self.prepared.tokens) - self.cached,
            generated=len(self._generated),
        )
        moved = self.trace.moved
        report = RecallReport(
            over_pool=self.trace.over_pool,
            prefill_modes=tuple(self._modes) if self.trace.over_pool else ("exact",),
            decode_mode=self.prepared.plan.decode if self.trace.over_pool else "exact",
            scorer=self.prepared.settings.scorer,
            selections=self.recall.selections,
            pages_selected=self.recall.pages_selected,
            hidden_pages=self.trace.hidden_pages,
            layer_pages_fetched=moved.layer_pages_fetched,
            layer_pages_streamed=moved.layer_pages_streamed,
            bytes_fetched=moved.bytes_fetched,
            fetch_seconds=moved.fetch_seconds,
            lexical_matches=self.recall.lexical_matches,
            prompt_hidden=self._prompt_hidden,
        )
        timings = Timings(self._prefilled - self._began, self._first - self._began, now - self._first)
        warnings = self.prepared.notes + self._warnings(report)
        text = "".join(self._text)
        return Result(text, tuple(self._generated), self.finish, usage, report, timings, warnings, self._strip())

    def _warnings(self, report: RecallReport) -> tuple[str, ...]:
        if not report.over_pool:
            return ()
        found = []
        if report.decode_mode == "window":
            found.append(
                f"recall was off and the request is larger than the pool: the answer saw {report.hidden_pages} of "
                f"{len(self.sequence.pages)} pages not at all (--retrieve auto brings them back)"
            )
        if report.scorer == "lexical" and report.decode_mode == "recall" and not report.lexical_matches:
            found.append("lexical recall found no page that shares a word with the question; nothing was selected")
        if report.blind and report.decode_mode != "window":
            whole = not report.pages_selected
            found.append(
                f"recall selected nothing {'at all' if whole else 'for the prompt'}, and "
                f"{report.hidden_pages if whole else report.prompt_hidden:,} pages stayed out of sight: this is a fault"
            )
        return tuple(found)

    def _strip(self) -> tuple[PageView, ...]:
        if not self.prepared.explain:
            return ()
        pool, trace = self._runner.pool, self.trace
        everything = not trace.over_pool or self.prepared.plan.decode == "exact"
        return tuple(
            PageView(
                resident=bool((pool.slot_of[:, page] >= 0).any()),
                seen=everything or index in trace.seen or index >= self.sequence.closed,
                fetched=index in trace.fetched,
                steps=dict(sorted(trace.reasons.get(index, {}).items())),
            )
            for index, page in enumerate(self.sequence.pages)
        )
