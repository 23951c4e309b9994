"""Whose tokens are computed next: a chunk of one prompt, then one token of every answer, in turn.

A long prompt never starves short ones, answers share each pass over the weights, and one request's error ends that
request only. Holds the sessions that are being served; nothing here knows of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.config import PAGE, EngineConfig
from engine.device import is_out_of_memory
from engine.errors import OutOfMemoryError
from engine.kv.page import page_count
from engine.kv.share import WindowBudget
from engine.prefix import PrefixIndex, shared_tokens
from engine.result import Progress
from engine.runner import Runner
from engine.scheduler import HIDING, Phase, schedule
from engine.session import Session
from engine.stats import EngineStats
from engine.step import StepInput


class Turns:
    """The active sessions over one runner; checkpoints go to `prefix`, totals to `stats`."""

    def __init__(
        self, config: EngineConfig, runner: Runner, prefix: PrefixIndex, stats: EngineStats, hiding: int = HIDING
    ) -> None:
        """`hiding`: tokens from which an exact chunk hides the stream of cold pages on this hardware."""
        self.config, self.runner, self.prefix, self.stats, self.hiding = config, runner, prefix, stats, hiding
        self.active: list[Session] = []

    def admit(self, session: Session) -> None:
        """Resume the session from its longest checkpoint and lay out the phases of what is left of its prompt."""
        if self.config.reuse:
            self._resume(session)
            self._follow(session)
        self.active.append(session)
        session.phases = self.phases(session)
        session.outbox.append(Progress(session.cached, len(session.prepared.tokens), session.phases[0].mode))

    def step(self) -> bool:
        """One turn; events and errors go to each session's outbox. False when there was nothing to do."""
        filling = next((session for session in self.active if session.phases and not self._waits(session)), None)
        if filling is not None:
            self.active.remove(filling)
            self.active.append(filling)  # the next turn is another's
            self._try([filling], self._prefill)
        answering = [session for session in self.active if session.pending is not None]
        if answering:
            self._try(answering, self._decode)
        return bool(filling or answering)

    def _resume(self, session: Session) -> None:
        """Take the longest checkpoint that this request accepts; at least one token is always computed."""
        pages, tags = self.prefix.match(session.prepared.ids[:-1], Session.accepts(session.prepared))
        count, sequence = self.runner.resumable(pages), session.sequence
        if count < len(pages):  # prompts part here: the next one that does shall find where to go on from
            sequence.marks.add(len(pages) * PAGE)
        self.runner.host.retain(pages[:count])
        self.runner.release(sequence.pages)
        session.resume(pages[:count], tags[:count])
        self.runner.resume_tail(sequence)

    def _follow(self, session: Session) -> None:
        """Note who computes the longest prefix that `session` lacks: it is computed, and stored, once.

        Who follows is not followed, and who has begun follows nobody: so none waits in a circle.
        """
        ahead = [
            other
            for other in self.active
            if other.phases and not other.follows and other is not session
            if other.prepared.plan == session.prepared.plan
        ]
        shared = {other: shared_tokens(other.prepared.tokens, session.prepared.tokens[:-1]) for other in ahead}
        leader = max(ahead, key=shared.__getitem__, default=None)
        session.follows = (leader, shared[leader]) if leader and shared[leader] > session.cached else None
        if session.follows:
            leader.sequence.marks.add(shared[leader])

    @staticmethod
    def _waits(session: Session) -> bool:
        """Whether another is still computing what this one will resume from."""
        if session.follows is None:
            return False
        leader, shared = session.follows
        return bool(leader.phases) and leader.sequence.length < shared

    def _catch_up(self, session: Session) -> None:
        """Resume from what the followed one has computed by now."""
        if session.follows[0] in self.active:
            self._publish(session.follows[0])
        self._resume(session)
        self._follow(session)
        session.phases = self.phases(session)

    def phases(self, session: Session) -> list[Phase]:
        prepared = session.prepared
        total, pool = len(prepared.tokens), prepared.budget.pool
        chunk = self.config.prefill_chunk
        return schedule(prepared.plan, session.cached, prepared.query[0], total, pool, chunk, self.hiding)

    def _try(self, sessions: list[Session], act: Callable[[list[Session]], None]) -> None:
        """Act on all together; if that fails, on each alone, so that an error ends only the session that caused it."""
        try:
            act(sessions)
        except Exception as error:
            if len(sessions) > 1:
                for session in sessions:
                    self._try([session], act)
                return
            sessions[0].outbox.append(named(error))
            self.retire(sessions[0])

    def _prefill(self, sessions: list[Session]) -> None:
        (session,) = sessions
        if session.follows:
            self._catch_up(session)
            if self._waits(session):
                return
            session.follows = None  # it has begun: what it computes is never given up for another's
        total, mode = len(session.prepared.tokens), session.phases[0].mode
        last = len(session.phases) == 1
        logits = self.next_chunk(session, "last" if last else "none")
        session.outbox.append(Progress(session.sequence.length, total, mode))
        if not session.phases:
            session.prefilled(logits)
            self._draw(session, logits)
            if not session.done:
                self._publish(session)

    def next_chunk(self, session: Session, rows: str) -> Tensor | None:
        """Compute one step of the first phase; drop the phase when it is done."""
        phase, start = session.phases[0], session.sequence.length
        budget = self._share(session)
        end = phase.step(start, budget.step_tokens if self._sharing else budget.longest_step)
        session.enter(phase, start, end)
        tokens = tuple(session.prepared.tokens[start:end])
        how = {"logits": rows, "observe": phase.observe, "turn": phase.turn}
        (logits,) = self._advance([self._input(session, tokens, phase.mode, **how)])
        if end == phase.end:
            session.phases.pop(0)
        return logits

    def _decode(self, sessions: list[Session]) -> None:
        steps = [self._input(session, (session.pending,), session.prepared.plan.decode) for session in sessions]
        for session, logits in zip(sessions, self._advance(steps), strict=True):
            self._try([session], lambda _, session=session, logits=logits: self._draw(session, logits))

    def _draw(self, session: Session, logits: Tensor) -> None:
        """Draw the next token; the Result follows the last."""
        token = session.draw(logits[-1])
        session.outbox.append(token)
        session.pending = token.id
        if session.finish is not None:
            result = session.result()
            self.stats.count(result)
            session.outbox.append(result)  # before the session is done: who waits in another thread looks at that first
            self.retire(session)

    @property
    def _sharing(self) -> bool:
        return len(self.active) > 1

    def _share(self, session: Session) -> WindowBudget:
        return session.prepared.budget.part(len(self.active))

    def _input(self, session: Session, tokens: tuple[int, ...], mode: str, **how: Any) -> StepInput:
        """how: fields of StepInput that differ from their defaults."""
        return StepInput(
            sequence=session.sequence,
            tokens=tokens,
            mode=mode,
            budget=self._share(session),
            recall=session.recall,
            trace=session.trace,
            explain=session.prepared.explain,
            **how,
        )

    def look(self, session: Session, token: int, mode: str) -> None:
        """Compute `token` next in `mode`; an exact look keeps its attention mass in the session's recall."""
        self._advance([self._input(session, (token,), mode, observe=mode == "exact")])

    def _advance(self, steps: list[StepInput]) -> list[Tensor | None]:
        need = sum(page_count(s.sequence.length + len(s.tokens)) - len(s.sequence.pages) for s in steps)
        self.make_room(need)
        return self.runner.step(steps)

    def make_room(self, pages: int) -> None:
        short = pages - self.runner.host.free_pages
        if short > 0:
            self.runner.release(self.prefix.evict(short, self.runner.host.references))

    def retire(self, session: Session) -> None:
        """Publish the closed pages as a checkpoint and let go of the rest; also after a cancel or an error."""
        sequence = session.sequence
        self.active.remove(session)
        session.done, session.pending, session.phases = True, None, []
        self._publish(session)
        self.runner.release(sequence.pages)

    def _publish(self, session: Session) -> None:
        """Make a checkpoint of the pages that are closed by now."""
        if self.config.reuse:
            sequence = session.sequence
            self.runner.transfer.settle(wait=True)
            pages = sequence.pages[: sequence.closed]
            self.runner.keep_end(sequence)
            self.runner.host.retain(self.prefix.publish(sequence.tokens, pages, sequence.tags))
            if self.runner.tails is not None:
                self.runner.tails.hand_over(pages, self.prefix.standing(sequence.tokens, sequence.tags))


def named(error: Exception) -> Exception:
    """Out of memory as an error with a fix; the request's pages are free by then. Anything else as it is."""
    text = str(error)
    if is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        named = OutOfMemoryError(
            f"memory ran out inside the request: {text.splitlines()[0] if text else 'no detail'}",
            "lower --prefill-chunk or --kv-capacity, or free memory; the engine serves on",
        )
        named.__cause__ = error
        return named
    return error
