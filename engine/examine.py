"""What gates ask of an engine and no request does: what its steps saw, and one prefill under several pools."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from engine.config import PAGE, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from engine.prepare import Prepared
from engine.recall.recall import Look
from engine.session import Session


def looks(engine: Engine, prepared: Prepared) -> list[Look]:
    """Serve a request, and tell what each layer saw in each step that recalled; the steps are the host's."""
    with engine._turn:
        session = engine.admit(prepared)
        session.recall.looks = found = []
        while not session.done:
            engine.step()
    for event in session.outbox:
        if isinstance(event, BaseException):
            raise event
    return found


def coverage(engine: Engine, messages: str | Seq[Mapping[str, Any]], recall: RecallParams | None = None) -> list[float]:
    """By layer: the share of an exact step's attention that recall's window for the same step holds, 0..1.

    The step is the first of the answer; empty where everything fits in the pool.
    """
    seen, token = [], 0
    with engine._turn:
        engine._enter()
        for decode in ("exact", "recall"):
            params = replace(recall or RecallParams(), decode=decode)
            session = Session(
                engine._runner, engine.prepare(messages, SamplingParams(), params), engine.model.tokenizer
            )
            engine._turns.admit(session)
            try:
                while session.phases:
                    logits = engine._turns.next_chunk(session, "last")
                token = token or int(logits[-1].argmax())
                engine._turns.look(session, token, decode)
            finally:
                engine._turns.retire(session)
            seen.append(session.recall)
    return seen[1].covered(seen[0])


def adopt(engine: Engine, other: Engine, prepared: Prepared) -> int:
    """Copy the pages that `prepared` would resume in `other`: one prefill under several pools. Tokens copied."""
    if other.model is not engine.model:
        raise EngineError("only an engine of the same loaded model can be adopted from")
    if other.capacity.kv != engine.capacity.kv:
        raise EngineError(
            f"pages of {other.capacity.kv} can't be adopted as {engine.capacity.kv}", "the same --kv-dtype for both"
        )
    with engine._turn, other._turn:
        pages, tags = other._prefix.match(prepared.ids, Session.accepts(prepared))
        engine._turns.make_room(len(pages))
        fresh = engine._host.allocate(len(pages))
        engine._host.data[fresh] = other._host.data[pages]
        engine._host.seal(fresh)
        engine._host.retain(engine._prefix.publish(prepared.tokens, fresh, tags))
        if engine._runner.tails is not None:
            engine._runner.tails.adopt(engine._prefix.standing(prepared.tokens, tags), other._runner.tails, pages)
        engine._runner.release(fresh)
    return len(pages) * PAGE
