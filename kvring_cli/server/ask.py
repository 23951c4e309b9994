"""From a checked request to tokens and back to parts: what OpenAI's and Anthropic's routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import RecallParams, SamplingParams
from engine.text.reasoning import CLOSING, OPEN, Reasoning, ThinkingBudget, thinking_limit
from engine.text.tools import Call, CallReader
from kvring_cli.server.errors import as_api_error, invalid
from kvring_cli.server.job import Unavailable
from kvring_cli.server.length import check_length
from kvring_cli.server.service import Service
from kvring_cli.server.stream import Stream

if TYPE_CHECKING:
    from engine.prepare import Prepared
    from engine.result import Progress, Result, Token


@dataclass
class Ask:
    """One request for tokens, whatever form it came in."""

    form: str  # openai-chat | openai-text | anthropic
    prompt: Any
    sampling: SamplingParams
    recall: RecallParams = field(default_factory=RecallParams)
    template: dict[str, Any] = field(default_factory=dict)
    tool_names: Collection[str] = ()
    one_call: bool = False  # further tool calls of the same answer are left out
    thinking: int | None = None  # tokens; None = what the answer's length allows
    arrived: float = field(default_factory=time.perf_counter)


@dataclass
class Part:
    """A piece of an answer. `kind`: reasoning | content | call."""

    kind: str
    text: str = ""
    call: Call | None = None


class Answer:
    """A request that runs: parts as they come, then `result`. Use as `async with`."""

    def __init__(self, service: Service, ask: Ask, prepared: Prepared) -> None:
        assert service.worker is not None and service.engine is not None
        self.service, self.ask, self.prepared = service, ask, prepared
        self.result: Result | None = None
        self.progress: Progress | None = None
        self.tokens: list[Token] = []  # those not taken by `take_tokens`
        tokenizer = service.engine.model.tokenizer
        chat = not isinstance(ask.prompt, str)
        inside = chat and tokenizer.decode(prepared.tokens[-8:], specials=True).rstrip().endswith(OPEN)
        closing = tokenizer.encode(CLOSING, bos=False)
        limit = thinking_limit(prepared.max_tokens, ask.thinking, len(closing))
        self.budget = ThinkingBudget(limit, closing, inside) if chat else None
        self._reasoning = Reasoning(inside) if chat else None
        self._calls = CallReader(ask.tool_names) if ask.tool_names else None
        self.stream = Stream(
            service.worker, prepared, ask.arrived, self.budget, asked_length=ask.sampling.max_tokens is not None
        )
        self.said: set[str] = set()  # kinds of parts that came
        self.error: BaseException | None = None  # what ended its stream
        self._closed = False
        self._left_out = 0
        self._spoken = 0.0  # when the client last heard something

    async def __aenter__(self) -> Answer:
        await self.stream.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self.close(details[1])

    async def close(self, error: BaseException | None = None) -> None:
        """End it, whatever state it is in; `error` is why. Once is enough."""
        if self._closed:
            return
        self._closed = True
        await self.stream.__aexit__(None, None, None)
        if self.result is None:
            self.service.log.failed(self, as_api_error(error).code if isinstance(error, Exception) else "cancelled")

    async def begin(self) -> bool:
        """Wait in the queue until it is time for a sign of life; whether it has left it. APIError at the deadline."""
        settings = self.service.settings
        return await self.stream.begin(settings.pending_timeout, settings.keep_alive)

    async def parts(self) -> AsyncIterator[Part | None]:
        """Parts until the end; None when it is time for a sign of life."""
        from engine.result import Progress, Result, Token

        while not await self.begin():
            yield None
        silence = self.service.settings.keep_alive
        self._spoken = time.perf_counter()
        async for event in self.stream.events(lambda: self._spoken + silence):
            parts: list[Part] = []
            if isinstance(event, Progress):
                self.progress = event
            elif isinstance(event, Token):
                self.tokens.append(event)
                parts = self._split(event.text)
            elif isinstance(event, Result):
                self.result = event
                parts = self._rest()
            for part in parts:
                if part.kind == "call" and self.ask.one_call and "call" in self.said:
                    self._left_out += 1
                    continue
                self.said.add(part.kind)
                yield part
            now = time.perf_counter()
            if parts:
                self._spoken = now
            elif event is None or now - self._spoken >= silence:
                self._spoken = now
                yield None
        self.service.log.done(self)

    def take_tokens(self) -> list[Token]:
        """Tokens since the last call, the one that ended the answer left out."""
        eos = self.service.engine.model.tokenizer.eos
        taken, self.tokens = [token for token in self.tokens if token.id not in eos], []
        return taken

    @property
    def length_source(self) -> str:
        """Where the answer's greatest length comes from: the request, the server's default, or the context's end."""
        wanted = self.ask.sampling.max_tokens
        if self.prepared.max_tokens < (wanted or self.service.settings.default_max_tokens):
            return "context"
        return "default" if wanted is None else "request"

    @property
    def finish(self) -> str:
        """stop, length or tool_calls."""
        assert self.result is not None
        return "tool_calls" if "call" in self.said and self.result.finish == "stop" else self.result.finish

    def _split(self, text: str) -> list[Part]:
        if self._reasoning is None:
            return [Part("content", text)] if text else []
        return self._sort(self._reasoning.push(text))

    def _rest(self) -> list[Part]:
        parts = self._sort(self._reasoning.finish()) if self._reasoning else []
        return parts + [_part(item) for item in (self._calls.finish() if self._calls else [])]

    def _sort(self, pieces: list[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for kind, text in pieces:
            if kind == "content" and self._calls is not None:
                parts += [_part(item) for item in self._calls.push(text)]
            else:
                parts.append(Part(kind, text))
        return parts

    def warnings(self) -> list[str]:
        """What a person must know of the answer; an empty one says why it is."""
        assert self.result is not None
        found = list(self.result.warnings)
        if not self.said & {"content", "call"}:
            if "reasoning" in self.said:
                why = "the answer is thinking only: it ended before anything was said; raise max_tokens"
            elif self.result.finish == "length":
                why = "the answer is empty: max_tokens ended it before any text was whole"
            else:
                why = "the answer is empty: the model ended it with its first words, or a stop string did"
            found.append(why)
        if self._left_out:
            found.append(f"{self._left_out} further tool calls were left out: parallel_tool_calls is false")
        if self.budget is not None and self.budget.spent:
            found.append("thinking was ended at its budget, so that room for the answer was left")
        return found


def _part(item: str | Call) -> Part:
    return Part("content", item) if isinstance(item, str) else Part("call", call=item)


async def start(service: Service, ask: Ask) -> Answer:
    """Tokenise and plan, away from the event loop. Refuses what can't be served, a full queue first."""
    engine, worker = service.engine, service.worker
    if engine is None or worker is None:
        raise Unavailable("the engine is not running")
    worker.room()
    prepared = await asyncio.to_thread(_prepare, engine, ask)
    if ask.sampling.max_tokens is None:
        room = engine.capacity.context - len(prepared.tokens)
        prepared.max_tokens = min(room, service.settings.default_max_tokens)
    return Answer(service, ask, prepared)


async def open_answer(service: Service, ask: Ask) -> Answer:
    """One that is to be streamed; close it.

    A refusal that comes soon has its own HTTP status. One that waits longer is a stream with signs of life, because
    clients give up on a silent one.
    """
    answer = await start(service, ask)
    await answer.__aenter__()
    try:
        await answer.begin()
    except BaseException as error:
        await answer.close(error)
        raise
    return answer


def _prepare(engine: Any, ask: Ask) -> Prepared:
    try:
        check_length(engine, [ask.prompt, ask.template])
        return engine.prepare(ask.prompt, ask.sampling, ask.recall, **ask.template)
    except RecursionError:
        raise invalid("the messages or tools are nested too deeply") from None
