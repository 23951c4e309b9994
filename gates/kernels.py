"""The kernels of a step one by one, on this model's shape: what each moves or computes a second, beside the floors.

Triton's kernels where a card computes; the torch code that is their reference elsewhere, and with `reference`. Each
turn takes another layer's pages, so that no cache holds what is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.model.config import ModelConfig
from engine.ops import geometry as g
from engine.ops.attention import PartialAttention, flash
from engine.ops.gather import gather_pages
from engine.ops.geometry import Turns
from engine.ops.rope import Rotary
from engine.recall.digest import encode_keys, pack_codes
from engine.recall.score import page_lse
from engine.routes import COMPILED_IN, pick
from engine.trials import median_seconds
from engine.units import MIB
from gates.floors import Floors

PARTS = ("gather", "attention", "scores", "chunk")
FETCHED = 64
"""Pages of one gather: what a layer may miss in a step."""
ROUNDS = 11


@dataclass(frozen=True)
class Rate:
    """`floor`: the share of it that was reached; `by`: which code ran."""

    what: str
    by: str
    seconds: float
    bytes_per_second: float | None = None
    flops: float | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class Scene:
    """Random pages of several layers, as a ring would hold them. `pages`: of the window, the open one the last."""

    config: ModelConfig
    shape: KVShape
    device: torch.device
    pages: int
    triton: bool

    @classmethod
    def of(
        cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, pages: int, reference: bool = False
    ) -> Scene:
        """Enough layers that their pages outgrow the caches."""
        shape = KVShape(1, config.kv_heads, config.head_dim, dtype)
        layers = max(2, -(-256 * MIB // (pages * shape.layer_page_bytes)))
        triton = device.type == "cuda" and not reference
        return cls(config, replace(shape, layers=min(layers, 64)), device, pages, triton)

    @property
    def by(self) -> str:
        return "triton" if self.triton else "torch"

    @property
    def rope(self) -> Rotary:
        return Rotary(self.config.rope, self.config.head_dim, self.device)

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*size, device=self.device).to(dtype or self.shape.dtype)

    def pool(self) -> Tensor:
        return self.random(self.shape.layers, self.pages, *self.shape.layer_page)

    def geometry(self) -> Tensor:
        words = torch.zeros(g.GEOMETRY, dtype=torch.int32)
        words[[g.PAST, g.FIRST, g.OWN, g.WINDOW]] = torch.tensor([self.pages - 1, PAGE - 1, 1, self.pages - 1]).int()
        words[g.FARTHEST], words[g.TOKENS] = self.pages, 1
        return words.to(self.device)

    def units(self, each: int) -> int:
        """Programs that fill the device, `each` a multiprocessor."""
        if self.device.type != "cuda":
            return each
        return each * torch.cuda.get_device_properties(self.device).multi_processor_count


def measure(scene: Scene, floors: Floors, parts: tuple[str, ...], rows: int) -> Iterator[Rate]:
    """One Rate a part. rows: tokens of the chunk."""
    for part in parts:
        yield {"gather": gather, "attention": attention, "scores": scores, "chunk": chunk}[part](scene, floors, rows)


Work = Callable[[int], Tensor]
"""One launch over the pages of a layer, the number modulo theirs; what it wrote."""


class Gathering:
    """`count` pages of one layer from the host, at random places, into a pool."""

    def __init__(self, scene: Scene, count: int = FETCHED) -> None:
        self.scene, self.count = scene, min(count, scene.pages)
        host = torch.randn(scene.shape.layers, scene.pages, *scene.shape.layer_page).to(scene.shape.dtype)
        self.host = host.pin_memory() if scene.device.type == "cuda" else host
        self.order = np.random.default_rng(0).permutation(scene.pages)[: self.count]

    @property
    def bytes(self) -> int:
        return self.count * self.scene.shape.layer_page_bytes

    def work(self, units: int) -> Work:
        """units: programs that copy. Each work has a pool of its own, empty before."""
        scene, host, fetched = self.scene, self.host, self.count
        pool = torch.zeros(scene.shape.layers, fetched, *host.shape[2:], dtype=host.dtype, device=scene.device)
        layers, places = len(host), torch.arange(fetched, device=scene.device)
        if scene.triton:
            from engine.ops.triton_moves import gather

            missing = torch.tensor([fetched], dtype=torch.int32, device=scene.device)
            pages, into = torch.from_numpy(self.order).int().to(scene.device), places.int()

            def work(number: int) -> Tensor:
                layer = number % layers
                gather(host[layer], pool[layer], pages, into, missing, units)
                return pool[layer]
        else:

            def work(number: int) -> Tensor:
                layer = number % layers
                read = gather_pages(host[layer], None, self.order, "index_select")
                return pool[layer].index_copy_(0, places, read.to(scene.device))

        return work


class Attending:
    """One token's attention over a window of pages in the pool."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.pool = scene, scene.pool()
        self.q = scene.random(1, scene.config.heads, scene.config.head_dim, dtype=torch.float32)
        self.bytes = scene.pages * scene.shape.layer_page_bytes

    def work(self, units: int) -> Work:
        """units: programs that fill the device."""
        scene, shape, q, pool = self.scene, self.scene.shape, self.q, self.pool
        layers, rope = shape.layers, scene.rope
        if scene.triton:
            from engine.ops.triton_attention import PagedAttention

            ids = torch.arange(scene.pages, dtype=torch.int32, device=scene.device)
            attend = PagedAttention(scene.config.heads, shape.kv_heads, shape.head_dim, 1, scene.device, units)
            counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=scene.device)
            fixed = scene.geometry(), Turns.of(rope, scene.pages), counters, rope.score_scale, False
            form, dtype = shape.form.layout, shape.dtype

            def work(number: int) -> Tensor:
                return attend(q, pool[number % layers], None, ids, ids, ids, *fixed, form, dtype=dtype)
        else:
            distance = np.arange(scene.pages - 1, -1, -1)

            def work(number: int) -> Tensor:
                partial = PartialAttention(rope, q, shape.kv_heads)
                partial.add(pool[number % layers], distance, scene.pages * PAGE - 1)
                return partial.result()

        return work


class Scoring:
    """One token's scores of every page but the open one, from their key codes."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.q = scene.random(1, scene.config.heads, scene.config.head_dim, dtype=torch.float32)
        codes, self.scales = encode_keys(scene.pool()[:, :, 0].transpose(1, 2))  # [layer, kv_head, page, 64, dim]
        self.codes = pack_codes(codes) if scene.triton else codes
        each = sum(part[0, :, 0].numel() * part.element_size() for part in (self.codes, self.scales))
        self.bytes = each * (scene.pages - 1)

    def work(self, units: int) -> Work:
        """units: programs that fill the device."""
        scene, shape, q, past = self.scene, self.scene.shape, self.q, self.scene.pages - 1
        layers, rope, codes, scales = shape.layers, scene.rope, self.codes, self.scales
        if scene.triton:
            from engine.ops.triton_score import PageScores

            ids = torch.arange(scene.pages, dtype=torch.int32, device=scene.device)
            score = PageScores(1, scene.config.heads, shape.kv_heads, scene.pages, scene.device, units, units)
            heads = torch.arange(shape.kv_heads, dtype=torch.int32, device=scene.device)
            fixed = heads, ids, scene.geometry(), Turns.of(rope, scene.pages), rope.score_scale
            rows = scene.config.heads // shape.kv_heads

            def work(number: int) -> Tensor:
                layer = number % layers
                score(q, codes[layer], scales[layer], *fixed)
                return score.lse[:, :rows, :past]
        else:
            distance = np.arange(past, 0, -1)

            def work(number: int) -> Tensor:
                layer = number % layers
                keys = codes[layer, :, :past].transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format)
                return page_lse(rope, q, keys, distance, scales[layer, :, :past].transpose(0, 1))

        return work


def gather(scene: Scene, floors: Floors, rows: int = 0, count: int = FETCHED) -> Rate:
    """As the engine does it: by few programs on a card, which keep PCIe busy."""
    subject = Gathering(scene, count)
    floor = floors.to_device if scene.device.type == "cuda" else floors.device / 2
    what = f"gather, {subject.count} pages of {scene.shape.layer_page_bytes // 1024:,} KiB"
    return _moved(what, scene, subject.work(pick(COMPILED_IN["gather_units"], 1)), subject.bytes, floor)


def attention(scene: Scene, floors: Floors, rows: int = 0) -> Rate:
    subject = Attending(scene)
    units = scene.units(pick(COMPILED_IN["decode_attention"], 1))
    what = f"attention of a token, {scene.pages * PAGE:,} keys"
    return _moved(what, scene, subject.work(units), subject.bytes, floors.device)


def scores(scene: Scene, floors: Floors, rows: int = 0) -> Rate:
    subject = Scoring(scene)
    units = scene.units(pick(COMPILED_IN["page_scores"], 1))
    what = f"scores of a token, {(scene.pages - 1) * PAGE:,} keys"
    return _moved(what, scene, subject.work(units), subject.bytes, floors.device)


def chunk(scene: Scene, floors: Floors, rows: int) -> Rate:
    """A chunk's attention over staged keys, every row seeing every key."""
    config, shape, keys_ = scene.config, scene.shape, scene.pages * PAGE
    q = scene.random(rows, config.heads, config.head_dim)
    keys, values = (scene.random(shape.kv_heads, keys_, shape.head_dim) for _ in range(2))
    scale, name = scene.rope.score_scale, scene.by
    if scene.triton:
        from engine.ops import cuda_flash

        kernel = cuda_flash.choose(q, keys, keys).of(rows)
        name = kernel.__name__

        def work() -> None:
            kernel(q, keys, values, False, scale)
    else:

        def work() -> None:
            flash(q, keys, values, None, scale)

    seconds = median_seconds(work, scene.device, ROUNDS)
    flops = 4 * config.heads * config.head_dim * rows * keys_ / seconds
    return Rate(
        f"attention of {rows:,} tokens, {keys_:,} keys", name, seconds, flops=flops, floor=flops / floors.matmul
    )


def _moved(what: str, scene: Scene, work: Work, size: int, floor: float) -> Rate:
    number = itertools.count()
    seconds = median_seconds(lambda: work(next(number)), scene.device, ROUNDS)
    return Rate(what, scene.by, seconds, size / seconds, floor=size / seconds / floor)
