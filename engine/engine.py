"""The facade: prepare, count_tokens, generate, logits, stats, audit, close. What is above the engine uses this only."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import faults
from engine import prepare as _prepare
from engine.audit import audit
from engine.backend import FACTORIES, Factory, Say, choose_backend
from engine.config import PAGE, WEIGHT_TYPES, EngineConfig, RecallParams, SamplingParams
from engine.device import (
    explain_compute,
    free_memory,
    hiding_tokens,
    limit_memory,
    load_routes,
    loading,
    pin_budget,
    resolve_device,
    resolve_dtype,
    set_threads,
    use_device,
)
from engine.errors import ConfigError, EngineError, RequestError
from engine.kv.budget import activation_bytes, plan_capacity
from engine.kv.choose import choose_kv
from engine.kv.host import HostStore
from engine.kv.page import KVShape
from engine.kv.pinning import CudaRegistrar
from engine.kv.pool import DevicePool
from engine.kv.tail import TAILS, Tails, TailShape, plan_tails
from engine.model.load import LoadedModel, load_model
from engine.ops.attention import SEGMENT
from engine.ops.geometry import STAGED_PAGES
from engine.platform import Platform, this_platform
from engine.prefix import PrefixIndex
from engine.prepare import Prepared
from engine.recall.digest import KIND_OF, Digests, digest_token_bytes
from engine.recall.far_heads import far_heads
from engine.recall.recall import Look
from engine.result import Progress, Result, Token
from engine.runner import Runner
from engine.scheduler import HIDING
from engine.session import Session
from engine.stats import EngineStats
from engine.turns import Turns, named
from engine.units import format_bytes
from engine.watchdog import chunk_for

Event = Progress | Token | Result


class Engine:
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
        """Use `Engine.load`; this form shares a loaded model between engines of different settings.

        `say` is told of each step; `backends` are tried before torch serves.
        """
        self.model = model
        platform = platform or this_platform()
        transformer, device = model.transformer, model.transformer.device
        use_device(device)
        core = KVShape(len(model.config.paged), model.config.kv_heads, model.config.head_dim, transformer.dtype)
        kind = KIND_OF.get(config.scorer)
        self.far_heads = far = far_heads(
            config.far_heads, core.layers, core.kv_heads, name=model.name, digest=model.digest
        )
        self.profile, self.routes = load_routes(config, device, platform)
        say(f"device {device}: profile {self.profile.source}, {self.routes.routed} routed keys")
        chunk, self.chunk_note = chunk_for(
            config.prefill_chunk, model.config, device, transformer.dtype, self.profile, platform
        )
        self.config = config = replace(config, prefill_chunk=chunk)
        tail = TailShape(
            model.config.sliding_layers,
            model.config.kv_heads,
            model.config.head_dim,
            model.config.window,
            transformer.dtype,
        )
        sizes = (model.config.hidden, model.config.ffn, model.config.heads, model.config.head_dim)
        plan = functools.partial(
            plan_capacity,
            config,
            trained_context=model.config.trained_context,
            memory=free_memory(device, platform, transformer.weight_bytes),
            weight_bytes=transformer.weight_bytes,
            digest_token_bytes=digest_token_bytes(kind, core, device.type, far) if kind else 0,
            token_bytes=activation_bytes(*sizes, transformer.dtype.itemsize) if device.type == "cuda" else 0,
            staging_pages=STAGED_PAGES if device.type == "cuda" else SEGMENT,
            **plan_tails(tail, config, model.config.trained_context),
        )
        shape, self.capacity = choose_kv(config, core, model.config.trained_context, plan)
        if model.config.left_out:
            note = f"{model.name}: {model.config.left_out} is not loaded; it serves text only"
            self.capacity = replace(self.capacity, notes=(*self.capacity.notes, note))
        say(f"kv {self.capacity.kv} ({self.capacity.kv_reason})")
        pages, began = self.capacity.host_pages, time.perf_counter()
        pinnable = device.type == "cuda" and config.host_memory != "pageable"
        self._host = HostStore(
            shape,
            pages,
            platform,
            registrar=CudaRegistrar(device) if pinnable else None,
            pin_budget=pin_budget(device, platform) if pinnable and config.host_memory == "auto" else None,
            verify=config.verify_pages,
        )
        say(f"host store {format_bytes(self._host.bytes)} committed in {time.perf_counter() - began:.1f} s")
        if config.host_memory == "pinned":
            self._insist_on_pinned()
        pool = DevicePool(shape, self.capacity.pool_pages, pages, device, self.routes)
        digests = Digests(shape, pages, device, transformer.rope, far)
        say(f"pool {format_bytes(pool.bytes)}, {self.capacity.pool_pages:,} pages")
        if kind == "token":
            say(f"key codes of {far}")
        if tail.layers:
            tails, kept = format_bytes(self.capacity.tail_bytes), format_bytes(self.capacity.snapshot_bytes)
            say(f"{tail.layers} layers slide over {tail.window:,} tokens and don't page")
            say(f"{TAILS} tails {tails}, their snapshots up to {kept} of the host")
        runner = Runner(
            transformer,
            pool,
            self._host,
            digests,
            kind if self.capacity.ring else None,
            config.positions == "compact",
            self.capacity.logical_pages,
            graphs=config.cuda_graph == "on",
            tails=Tails(tail, device, config, model.config.trained_context) if tail.layers else None,
        )
        self.backend, self._runner = choose_backend(runner, device, backends, say)
        self._prefix = PrefixIndex()
        self._turn = threading.RLock()
        self._stats = EngineStats()
        share = shape.layer_page_bytes / shape.decoded_bytes
        group = model.config.heads // model.config.kv_heads
        hiding = hiding_tokens(self.profile, transformer.dtype, group, share)
        self._turns = Turns(config, self._runner, self._prefix, self._stats, hiding or HIDING)
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
                model = load_model(config.model, device, dtype, config.weights)
                size = format_bytes(model.transformer.weight_bytes)
                say(f"weights {size} of {model.name} read in {time.perf_counter() - began:.1f} s")
            return cls(config, model, platform, backends=backends, say=say)

    def _insist_on_pinned(self) -> None:
        """`--host-memory pinned` is a wish, not a preference: ConfigError if it can't be had whole."""
        pinning = self._host.pinning
        if pinning is None:
            raise ConfigError(
                "host memory is pinned for a card, and this engine computes on the CPU", "--host-memory auto"
            )
        pinning.wait()
        if pinning.bytes < self._host.bytes:
            got = format_bytes(pinning.bytes)
            self._host.close()
            raise ConfigError(
                f"{format_bytes(self._host.bytes)} of host memory should be pinned, the driver gave {got}",
                "--host-memory auto pins what it gets and leaves the rest pageable; or lower --max-context",
            )

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

    def looks(self, prepared: Prepared) -> list[Look]:
        """Serve a request, and tell what each layer saw in each step that recalled; the steps are the host's."""
        with self._turn:
            session = self.admit(prepared)
            session.recall.looks = found = []
            while not session.done:
                self.step()
        for event in session.outbox:
            if isinstance(event, BaseException):
                raise event
        return found

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

    def coverage(self, messages: str | Seq[Mapping[str, Any]], recall: RecallParams | None = None) -> list[float]:
        """By layer: the share of an exact step's attention that recall's window for the same step holds, 0..1.

        The step is the first of the answer; empty where everything fits in the pool.
        """
        looks = []
        token = 0
        with self._turn:
            self._enter()
            for decode in ("exact", "recall"):
                params = replace(recall or RecallParams(), decode=decode)
                session = Session(self._runner, self.prepare(messages, SamplingParams(), params), self.model.tokenizer)
                self._turns.admit(session)
                try:
                    while session.phases:
                        logits = self._turns.next_chunk(session, "last")
                    token = token or int(logits[-1].argmax())
                    self._turns.look(session, token, decode)
                finally:
                    self._turns.retire(session)
                looks.append(session.recall)
        return looks[1].covered(looks[0])

    def fail_copy(self, after: int) -> None:
        """Let the copy to the host fail once, `after` pages from now, for the gate that must see nothing lost."""
        faults.fail_copy(self._runner, after)

    def adopt(self, other: Engine, prepared: Prepared) -> int:
        """Copy the pages that `prepared` would resume in `other`: one prefill under several pools. Tokens copied."""
        if other.model is not self.model:
            raise EngineError("only an engine of the same loaded model can be adopted from")
        if other.capacity.kv != self.capacity.kv:
            raise EngineError(
                f"pages of {other.capacity.kv} can't be adopted as {self.capacity.kv}", "the same --kv-dtype for both"
            )
        with self._turn, other._turn:
            pages, tags = other._prefix.match(prepared.ids, Session.accepts(prepared))
            self._turns.make_room(len(pages))
            fresh = self._host.allocate(len(pages))
            self._host.data[fresh] = other._host.data[pages]
            self._host.seal(fresh)
            self._host.retain(self._prefix.publish(prepared.tokens, fresh, tags))
            if self._runner.tails is not None:
                self._runner.tails.adopt(self._prefix.standing(prepared.tokens, tags), other._runner.tails, pages)
            self._runner.release(fresh)
        return len(pages) * PAGE

    def damage_checkpoint(self, page: int | None = None) -> int:
        """Flip one bit in a checkpoint page that only the host holds, for the gate that must notice; the page's id.

        Called again with that page it mends it.
        """
        if page is None:
            page = next(page for page in self._prefix.pages() if self._runner.pool.slot_of[0, page] < 0)
        faults.flip_bit(self._runner, page)
        return page

    def shuffle_checkpoints(self, seed: int) -> None:
        """Let every checkpoint page hold another one's bytes, for the gate that must notice. Nothing mends it."""
        with self._turn:
            faults.shuffle_pages(self._runner, self._prefix.pages(), seed)

    @property
    def compute(self) -> str:
        """Device, dtype and threads, each with where it comes from."""
        transformer = self.model.transformer
        return explain_compute(self.config, transformer.device, transformer.dtype)

    def unpinned(self, wait: bool = False) -> str:
        """What of the host store copies slower because the driver pinned no more; `wait` until all was tried."""
        pinning = self._host.pinning
        if pinning is None:
            return ""
        if wait:
            pinning.wait()
        held, whole = pinning.bytes, self._host.bytes
        if not pinning.done or held == whole:
            return ""
        return f"{format_bytes(held)} of the {format_bytes(whole)} of host store are pinned; the rest copies slower"

    def stats(self) -> dict[str, Any]:
        """Counters since the start and what is where now; plain numbers and strings."""
        with self._turn:  # reading the tables calls them home from the device, which a step in the middle must not see
            self._runner.transfer.settle()
            return self._stats.snapshot(self, self._runner, len(self._prefix))

    @property
    def degraded(self) -> str:
        """Why something slower than was meant serves: a faster backend, or its graphs; empty where nothing does."""
        return "; ".join(filter(None, (self.backend.degraded, self._runner.degraded)))

    @property
    def graphs(self) -> str:
        """Whether decode steps are CUDA graphs: on, off (as asked), failed, or none where the backend has none."""
        return self._runner.graphs

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
