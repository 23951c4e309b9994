"""One loaded model's pool, host store and recall, put together as the settings and this machine's memory allow."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.backend import FACTORIES, Factory, Say, choose_backend
from engine.config import EngineConfig
from engine.device import (
    explain_compute,
    free_memory,
    hiding_tokens,
    load_routes,
    pin_budget,
    use_device,
)
from engine.errors import ConfigError
from engine.kv.budget import activation_bytes
from engine.kv.choose import choose_kv
from engine.kv.host import HostStore
from engine.kv.longest import plan_within
from engine.kv.page import KVShape
from engine.kv.pinning import CudaRegistrar
from engine.kv.pool import DevicePool
from engine.kv.tail import TAILS, Tails, TailShape, plan_tails
from engine.model.load import LoadedModel
from engine.ops.attention import SEGMENT
from engine.ops.geometry import STAGED_PAGES
from engine.platform import Platform, this_platform
from engine.prefix import PrefixIndex
from engine.recall.digest import KIND_OF, Digests, digest_token_bytes
from engine.recall.far_heads import far_heads
from engine.runner import Runner
from engine.scheduler import HIDING
from engine.units import format_bytes
from engine.watchdog import chunk_for


class Ring:
    """The parts, and what they say of themselves. `config` and `capacity`: as they were resolved; `hiding`: tokens of a
    chunk that hides its stream of cold pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        platform: Platform | None = None,
        *,
        backends: Seq[Factory] = FACTORIES,
        say: Say = lambda line: None,
    ) -> None:
        """`say` is told of each step; `backends` are tried before torch serves.

        ConfigError with the numbers and the knob where memory doesn't hold what was asked for.
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
            plan_within,
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
        share = shape.layer_page_bytes / shape.decoded_bytes
        group = model.config.heads // model.config.kv_heads
        self.hiding = hiding_tokens(self.profile, transformer.dtype, group, share) or HIDING

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

    @property
    def degraded(self) -> str:
        """Why something slower than was meant serves: a faster backend, or its graphs; empty where nothing does."""
        return "; ".join(filter(None, (self.backend.degraded, self._runner.degraded)))

    @property
    def graphs(self) -> str:
        """Whether decode steps are CUDA graphs: on, off (as asked), failed, or none where the backend has none."""
        return self._runner.graphs
