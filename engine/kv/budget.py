"""How many pages each tier holds. Pure arithmetic; refuses with the numbers.

automatic pool = window/64 + prefill chunk/64 + 8 pages of slack
host           >= pages of the longest context, when the ring is on
device         = weights + pool + digests + staging + workspace of one prefill step
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.config import PAGE, SLACK, EngineConfig
from engine.errors import ConfigError, TooLittleMemory
from engine.kv.page import KVShape, page_count
from engine.kv.share import WindowBudget, least_pages, share_window
from engine.units import GIB, MIB, format_bytes

DEFAULT_WINDOW = 16384
RAM_HEADROOM = GIB
"""Host memory that is left alone: a recipe that left 0.5 GB free killed machines."""
CONTEXTS = 4
"""Longest contexts that an automatic host store has room for: below that, conversations in turn evict each other."""
SHORTER = "a smaller --max-context"
"""The fix where a shorter context may fit: `longest.plan_within` puts the longest in its place, found by trying."""
STORED_TOKENS = 262_144
"""More than so many it has no room for, if one context needs no more: each GiB costs RAM, and time at the start."""


@dataclass(frozen=True)
class Memory:
    """What is free when the engine starts, in bytes. `device` None: the device is the host (CPU)."""

    ram: int
    device: int | None = None


@dataclass(frozen=True)
class Capacity:
    """The sizes an engine is built with."""

    context: int  # tokens
    logical_pages: int
    pool_pages: int
    host_pages: int
    ring: bool  # the pool may be smaller than the context
    window: WindowBudget
    weight_bytes: int
    pool_bytes: int
    host_bytes: int
    digest_bytes: int
    staging_bytes: int
    notes: tuple[str, ...] = ()
    host_reason: str = "what the longest context needs"
    tail_bytes: int = 0  # of layers that slide, on the device
    workspace_bytes: int = 0  # activations of one prefill step, on a card
    snapshot_bytes: int = 0  # of tails, on the host
    kv: str = ""  # what pages hold, a name of config.KV_DTYPES
    kv_reason: str = "--kv-dtype"

    @property
    def device_bytes(self) -> int:
        kept = self.weight_bytes + self.pool_bytes + self.digest_bytes + self.tail_bytes
        return kept + self.staging_bytes + self.workspace_bytes


PRODUCT_BYTES = 64 * MIB
"""Of one matrix product on a card: a slice of packed weights in 16 bits."""


def activation_bytes(hidden: int, ffn: int, heads: int, head_dim: int, element: int) -> int:
    """Device bytes that a prefill step takes for each of its tokens. element: bytes of a number.

    192 KiB for Qwen3-8B's shape in 16 bits; on an H200 a step of 4,096 tokens took 205, of 8,192 tokens 188.
    """
    return element * (4 * ffn + 8 * hidden + 4 * heads * head_dim)


def plan_capacity(
    config: EngineConfig,
    shape: KVShape,
    trained_context: int,
    memory: Memory,
    *,
    weight_bytes: int,
    digest_token_bytes: int,
    staging_pages: int,
    tail_bytes: int = 0,
    snapshot_bytes: int = 0,
    token_bytes: int = 0,
) -> Capacity:
    """The sizes for `config` with `memory` free, or a ConfigError that names what fell short and the knob.

    token_bytes: `activation_bytes` of the model, for a card; a CPU's lie in what RAM is left alone.
    """
    notes: list[str] = []
    ram = min(memory.ram, config.ram_limit_bytes) if config.ram_limit_bytes else memory.ram
    beside = snapshot_bytes + (tail_bytes if memory.device is None else 0)
    ram_room = max(0, ram - RAM_HEADROOM - beside)
    asked = config.host_kv_bytes if isinstance(config.host_kv_bytes, int) else None
    host_room = ram_room if asked is None else min(ram_room, asked)
    page, fixed = shape.page_bytes, 0
    if memory.device is None:  # digests, pool and staging lie in the same memory
        pool = _pool_pages(config, page_count(config.max_context or trained_context), trained_context)
        page += PAGE * digest_token_bytes
        fixed = pool * shape.page_bytes + 2 * staging_pages * shape.decoded_bytes
    context = _context(config, max(PAGE, (host_room - fixed) // page * PAGE), trained_context, notes)
    logical = page_count(context)
    pool = _pool_pages(config, logical, trained_context)
    chunk = min(config.prefill_chunk, context)
    workspace = chunk * token_bytes + PRODUCT_BYTES if token_bytes else 0
    ring = pool < logical
    if config.ring == "off" and ring:
        raise ConfigError(
            f"the ring is off and a pool of {pool} pages ({pool * PAGE:,} tokens) can't hold the context of "
            f"{context:,} tokens ({logical} pages)",
            f"--ring auto, or --kv-capacity {logical * PAGE}, or --max-context {pool * PAGE}",
        )
    host = logical if asked is None else asked // shape.page_bytes
    if host < logical:
        enough = ceil(logical * shape.page_bytes / GIB * 100) / 100  # rounded up: what is told must hold it
        raise ConfigError(
            f"a host store of {format_bytes(asked)} holds {host} pages, the context of {context:,} "
            f"tokens needs {logical} ({format_bytes(logical * shape.page_bytes)})",
            f"--host-kv-gib {enough:.2f} or more" + (f", or --max-context {host * PAGE}" if host else ""),
        )
    digest_page = PAGE * digest_token_bytes if ring else 0
    host_reason = Capacity.host_reason if asked is None else "--host-kv-gib"
    if config.host_kv_bytes == "auto":
        fixed = weight_bytes + tail_bytes + pool * shape.page_bytes + 2 * staging_pages * shape.decoded_bytes
        fixed += workspace
        limit = _device_limit(config, memory)
        spare = None if limit is None else max(0, limit - fixed - logical * digest_page)
        host, host_reason = _automatic_host(logical, shape.page_bytes, digest_page, ram_room, spare)
    host_bytes = host * shape.page_bytes
    if host_bytes > ram_room:
        free = "RAM is free" if ram == memory.ram else "RAM is allowed"
        raise TooLittleMemory(
            f"the host store for {context:,} tokens needs {format_bytes(host_bytes)}; {format_bytes(ram)} of {free} "
            f"and {format_bytes(RAM_HEADROOM)} of it is left to the system"
            + (f", {format_bytes(beside)} to layers that slide" if beside else ""),
            SHORTER,
        )
    # A pool that holds the whole context shares it out too, should a smaller request budget be asked for.
    if ring:
        window = share_window(pool, config.sink, config.retrieve_share, chunk, config.retrieve)
    else:
        sink = min(-(-config.sink // PAGE), pool)
        window = WindowBudget(pool, sink, 0, pool - sink, 0)
    capacity = Capacity(
        context=context,
        logical_pages=logical,
        pool_pages=pool,
        host_pages=host,
        ring=ring,
        window=window,
        weight_bytes=weight_bytes,
        pool_bytes=pool * shape.page_bytes,
        host_bytes=host_bytes,
        digest_bytes=host * digest_page,
        staging_bytes=2 * staging_pages * shape.decoded_bytes,
        notes=tuple(notes),
        host_reason=host_reason,
        tail_bytes=tail_bytes,
        workspace_bytes=workspace,
        snapshot_bytes=snapshot_bytes,
        kv=shape.form.dtype.name,
    )
    _check_device(config, shape, memory, capacity, host * PAGE * digest_token_bytes)
    return capacity


def _automatic_host(logical: int, page_bytes: int, digest_page: int, ram: int, spare: int | None) -> tuple[int, str]:
    """Pages, and what set their number. `spare`: bytes of the device that digests of more pages may take half of.

    Never less than one context: whether that fits is for others to refuse.
    """
    most = max(logical, min(CONTEXTS * logical, STORED_TOKENS // PAGE))
    by_ram = ram // 2 // (page_bytes + (digest_page if spare is None else 0))
    by_device = most if spare is None or not digest_page else logical + spare // 2 // digest_page
    pages = max(logical, min(most, by_ram, by_device))
    if pages == most:
        return pages, f"auto: {CONTEXTS} contexts, or {STORED_TOKENS:,} tokens"
    if pages == logical:
        return pages, "auto: one context, memory holds no second"
    return (
        pages,
        "auto: half of the free RAM" if by_ram <= by_device else "auto: half of the free device memory in digests",
    )


def check_context(config: EngineConfig, trained: int) -> None:
    """Refuse what is wrong of the context by itself: known before a weight is read. ConfigError."""
    if config.max_context is None:
        return
    if config.max_context < 1:
        raise ConfigError(f"a context of {config.max_context} tokens holds nothing", "--max-context 4096, say")
    if config.max_context > trained and config.positions == "absolute":
        raise ConfigError(
            f"a context of {config.max_context:,} tokens is beyond the {trained:,} that the model was trained on, and "
            "positions are absolute",
            f"--max-context {trained}, or --positions compact (the window is packed from 0)",
        )


def check_weights(config: EngineConfig, memory: Memory, weight_bytes: int) -> None:
    """Refuse weights that memory can't hold before they are read: Linux promises more RAM than there is, and ends the
    process that takes it without a word. `memory`: as it is without them. TooLittleMemory."""
    limit = _device_limit(config, memory)
    if weight_bytes <= (memory.ram if limit is None else limit):
        return
    where = f"{format_bytes(memory.ram)} of RAM that is free" if limit is None else f"device's {format_bytes(limit)}"
    raise TooLittleMemory(
        f"weights {format_bytes(weight_bytes)} exceed the {where}",
        "--weights q4_k for a folder of plain ones, a GGUF file in fewer bits, or a smaller model",
    )


def _context(config: EngineConfig, largest: int, trained: int, notes: list[str]) -> int:
    check_context(config, trained)
    if config.max_context is not None:
        return config.max_context
    if trained > largest:
        notes.append(f"context {largest:,} tokens: host memory holds no more of the model's {trained:,}")
    return min(trained, largest)


def _pool_pages(config: EngineConfig, logical: int, trained: int) -> int:
    if config.kv_capacity is not None:
        pages = config.kv_capacity // PAGE
        if pages < 1:
            raise ConfigError(
                f"a pool of {config.kv_capacity} tokens holds no page of {PAGE}", "--kv-capacity 4032, say"
            )
        if config.positions == "compact" and min(pages, logical) * PAGE > trained:
            raise ConfigError(
                f"compact positions pack the window from 0, and a pool of {pages * PAGE:,} tokens reaches beyond the "
                f"{trained:,} that the model was trained on",
                f"--kv-capacity {trained // PAGE * PAGE} or less",
            )
        return min(pages, logical)
    if config.ring == "off":
        return logical
    window = config.kv_window or DEFAULT_WINDOW
    pages = min(-(-window // PAGE) + -(-config.prefill_chunk // PAGE) + SLACK, logical)
    return min(pages, trained // PAGE) if config.positions == "compact" else pages


def _check_device(config: EngineConfig, shape: KVShape, memory: Memory, capacity: Capacity, ring_digests: int) -> None:
    limit = _device_limit(config, memory)
    if limit is None:
        used = capacity.host_bytes + capacity.device_bytes - capacity.weight_bytes + capacity.snapshot_bytes
        if used > memory.ram - RAM_HEADROOM:
            raise TooLittleMemory(
                f"pool {format_bytes(capacity.pool_bytes)} + host store {format_bytes(capacity.host_bytes)} + digests "
                f"{format_bytes(capacity.digest_bytes)}"
                f"{_more('layers that slide', capacity.tail_bytes + capacity.snapshot_bytes)} "
                f"exceed the {format_bytes(memory.ram)} of RAM that is free, {format_bytes(RAM_HEADROOM)} of it left "
                "to the system",
                SHORTER,
            )
        return
    if capacity.device_bytes > limit:
        raise TooLittleMemory(
            f"weights {format_bytes(capacity.weight_bytes)} + pool {format_bytes(capacity.pool_bytes)} + digests "
            f"{format_bytes(capacity.digest_bytes)} + staging {format_bytes(capacity.staging_bytes)}"
            f"{_more('a step of prefill', capacity.workspace_bytes)}"
            f"{_more('layers that slide', capacity.tail_bytes)} = {format_bytes(capacity.device_bytes)} exceed the "
            f"device's {format_bytes(limit)}",
            _smaller_device(config, shape, capacity, limit, ring_digests),
        )


def _more(what: str, size: int) -> str:
    return f" + {what} {format_bytes(size)}" if size else ""


def _device_limit(config: EngineConfig, memory: Memory) -> int | None:
    """Bytes of the device that may be used; None: the device is the host, and only its RAM limits."""
    limits = [limit for limit in (memory.device, config.device_limit_bytes) if limit is not None]
    return min(limits, default=None)


def _smaller_device(config: EngineConfig, shape: KVShape, capacity: Capacity, limit: int, digests: int) -> str:
    """`digests`: what they take once the pool is smaller than the context, which this advice makes it."""
    if capacity.weight_bytes >= limit:
        return "--weights q4_k, if these are plain ones, or a smaller model: they alone are more than that"
    if config.ring == "off":
        return SHORTER
    fixed = capacity.weight_bytes + capacity.staging_bytes + capacity.tail_bytes + digests
    asked = chunk = min(config.prefill_chunk, capacity.context)
    recalled = config.retrieve if isinstance(config.retrieve, int) else 0
    workspace = capacity.workspace_bytes
    while chunk >= PAGE:  # a pool must hold a chunk: where the rest is too small for one, smaller chunks leave more
        pool = (limit - fixed - workspace) // shape.page_bytes
        if pool >= least_pages(config.sink, max(chunk, recalled)):
            smaller = f"--prefill-chunk {chunk} together with " if chunk < asked else ""
            return f"{smaller}--kv-capacity {pool * PAGE} is the largest pool that fits"
        workspace = min(workspace, PRODUCT_BYTES) + (workspace - min(workspace, PRODUCT_BYTES)) // 2
        chunk //= 2
    return (
        f"{format_bytes(fixed)} are taken beside a pool: {SHORTER}, a smaller model, or --weights q4_k of a plain one"
    )
