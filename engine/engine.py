"""The facade: prepare, count_tokens, generate, logits, stats, audit, close. What is above the engine uses this only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import prepare as _prepare
from engine.audit import audit
from engine.backend import FACTORIES, Factory, Say
from engine.config import WEIGHT_TYPES, EngineConfig, RecallParams, SamplingParams
from engine.device import (
    free_memory,
    limit_memory,
    loading,
    resolve_device,
    resolve_dtype,
    set_threads,
    use_device,
)
from engine.errors import EngineError, RequestError
from engine.kv.budget import check_context, check_weights
from engine.model.config import ModelConfig
from engine.model.load import LoadedModel, load_model
from engine.platform import Platform, this_platform
from engine.prepare import Prepared
from engine.result import Progress, Result, Token
from engine.ring import Ring
from engine.session import Session
from engine.stats import EngineStats
from engine.turns import Turns, named
from engine.units import format_bytes

Event = Progress | Token | Result


class Engine(Ring):
    """One model over one ring. `admit`, `step` and `cancel` serve many requests; `generate` is all three for one."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        platform: Platform | None = None,
        *,
        backends: Seq[Factory] = FACTORIES,
        say: Say = lambda line: None,
    ) -> None:
        """Use `Engine.load`; this form shares a loaded model between engines of different settings."""
        super().__init__(config, model, platform, backends=backends, say=say)
        self._turn = threading.RLock()
        self._stats = EngineStats()
        self._turns = Turns(self.config, self._runner, self._prefix, self._stats, self.hiding)
        self._closed = False

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        model: LoadedModel | None = None,
        platform: Platform | None = None,
        *,
        backends: Seq[Factory] = FACTORIES,
        say: Say = lambda line: None,
    ) -> Engine:
        """Read the model and reserve the tiers; KVRingError with the numbers and the knob if it can't be served.

        `say` is told of each step on the way.
        """
        device = resolve_device(config.device)
        platform = platform or this_platform()
        set_threads(config.threads, platform)
        limit_memory(device, config.device_limit_bytes)
        with loading(config.model):
            if model is None:
                began, dtype = time.perf_counter(), resolve_dtype(config.dtype, device, config.model)
                if config.weights in WEIGHT_TYPES and Path(config.model).is_dir():
                    say(f"weights are quantised to {config.weights} while they are read: minutes, for billions of them")

                def check(found: ModelConfig, size: int) -> None:
                    check_context(config, found.trained_context)
                    check_weights(config, free_memory(device, platform, 0), size)

                model = load_model(config.model, device, dtype, config.weights, check)
                size = format_bytes(model.transformer.weight_bytes)
                say(f"weights {size} of {model.name} read in {time.perf_counter() - began:.1f} s")
            return cls(config, model, platform, backends=backends, say=say)

    def count_tokens(self, prompt: str | Seq[Mapping[str, Any]], **template: Any) -> int:
        """Tokens of a raw text or of messages in the model's template."""
        return len(_prepare.tokenize(self.model, prompt, self.config.query_tail, **template).tokens)

    def prepare(
        self,
        prompt: str | Seq[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        recall: RecallParams | None = None,
        **template: Any,
    ) -> Prepared:
        """Tokenise and plan; may refuse (RequestError). No device work. `template`: tools, enable_thinking, ..."""
        sampling, recall = sampling or SamplingParams(), recall or RecallParams()
        return _prepare.prepare(self.model, self.config, self.capacity, prompt, sampling, recall, **template)

    def generate(self, prepared: Prepared) -> Iterator[Event]:
        """Progress while the prompt is computed, then tokens, then the Result. Closing the iterator cancels cleanly."""
        session = self.admit(prepared)
        try:
            while not (session.done and not session.outbox):
                if not session.outbox:
                    self.step()
                while session.outbox:
                    event = session.outbox.popleft()
                    if isinstance(event, BaseException):
                        raise event
                    yield event
        finally:
            self.cancel(session)

    def admit(self, prepared: Prepared) -> Session:
        """Take a request in: it resumes from its checkpoint, and `step` serves it from now on."""
        with self._turn:
            self._enter()
            if prepared.used:
                raise RequestError("this prepared prompt was used already", "prepare it again")
            prepared.used = True
            session = Session(self._runner, prepared, self.model.tokenizer)
            self._turns.admit(session)
            return session

    def step(self) -> bool:
        """One turn: a chunk of one prompt, then one token of every answer. False when there was nothing to do.

        Events and errors go to each session's outbox; one session's error ends that session only.
        """
        with self._turn:
            self._enter()
            return self._turns.step()

    def cancel(self, session: Session) -> None:
        """End a request now; what it computed stays as a checkpoint. Nothing to do if it has ended."""
        with self._turn:
            if not session.done:
                self._turns.retire(session)

    def complete(self, prepared: Prepared) -> Result:
        """`generate` to its end, only the Result."""
        *_, result = self.generate(prepared)
        return result

    def warm_up(self) -> None:
        """Compute one real token, uncounted, so that the first request doesn't pay for what is made on first use."""
        with self._turn:
            self.complete(self.prepare("Hello", SamplingParams(max_tokens=1)))
            vars(self._stats).update(vars(EngineStats()))

    def logits(self, tokens: Seq[int], recall: RecallParams | None = None) -> Tensor:
        """float32 [len(tokens), vocab]: the logits of every position under the engine's settings (and `recall`'s)."""
        return torch.cat(list(self.logits_by_chunk(tokens, recall)))

    def logits_by_chunk(self, tokens: Seq[int], recall: RecallParams | None = None) -> Iterator[Tensor]:
        """`logits` in the pieces in which they are computed: all of them at once are vocab x 4 bytes a token."""
        if not len(tokens):
            raise RequestError("there are no tokens to score", "give at least one")
        if len(tokens) > self.capacity.context:
            raise RequestError(
                f"{len(tokens):,} tokens exceed the context of {self.capacity.context:,}",
                f"--max-context {len(tokens)}",
            )
        params = SamplingParams(max_tokens=1)
        settings = _prepare.prepare(self.model, self.config, self.capacity, "a", params, recall or RecallParams())
        settings.tokens, settings.query = list(tokens), (len(tokens), len(tokens))
        with self._turn:
            self._enter()
            session = Session(self._runner, settings, self.model.tokenizer)
            self._turns.active.append(session)
            try:
                session.phases = self._turns.phases(session)
                while session.phases:
                    yield self._turns.next_chunk(session, "all")
            except Exception as error:
                raise named(error) from error
            finally:
                self._turns.active.remove(session)
                self._runner.release(session.sequence.pages)

    def stats(self) -> dict[str, Any]:
        """Counters since the start and what is where now; plain numbers and strings."""
        with self._turn:  # reading the tables calls them home from the device, which a step in the middle must not see
            self._runner.transfer.settle()
            return self._stats.snapshot(self, self._runner, len(self._prefix))

    def audit(self, deep: bool = False) -> dict[str, int]:
        """Check the invariants of kv/page.py; AuditError names each that does not hold. `deep` compares bytes."""
        with self._turn:
            if deep:
                self._runner.transfer.settle(wait=True)
            return audit(self._runner, [session.sequence for session in self._turns.active], self._prefix, deep)

    def forget(self) -> None:
        """Drop every checkpoint: the next turn starts cold."""
        with self._turn:
            self._runner.release(self._prefix.evict(len(self._prefix), self._host.references))

    def close(self) -> None:
        """Free both tiers, whoever still holds this engine. Further requests are refused."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._runner.transfer.settle(wait=True)
                for part in (self._host, self._runner.pool, self._runner.digests, self._runner.tails):
                    if part is not None:
                        part.close()

    def _enter(self) -> None:
        """Each way in: refuse if the engine is closed, and be on its card, whichever thread this is."""
        if self._closed:
            raise EngineError("the engine is closed", "load it again")
        use_device(self.model.transformer.device)
