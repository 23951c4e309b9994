"""The kernels of a step one by one, on this model's shape: what each moves or computes a second, beside the floors.

Triton's kernels where a card computes; the torch code that is their reference elsewhere, and with `reference`. Each
turn takes another layer's pages, so that no cache holds what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.model.config import ModelConfig
from engine.ops import geometry as g
from engine.ops.attention import PartialAttention, flash
from engine.ops.gather import as_words, gather_pages
from engine.ops.geometry import Turns
from engine.ops.rope import Rotary
from engine.recall.digest import encode_keys, pack_codes
from engine.recall.score import page_lse
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
        words[g.FARTHEST] = self.pages
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


def gather(scene: Scene, floors: Floors, rows: int = 0, count: int = FETCHED) -> Rate:
    """`count` pages of one layer from the host, at random places, into the pool."""
    shape, count = scene.shape, min(count, scene.pages)
    pinned = scene.device.type == "cuda"
    host = torch.randn(shape.layers, scene.pages, *shape.layer_page).to(shape.dtype)
    host, pool = host.pin_memory() if pinned else host, torch.zeros_like(host, device=scene.device)
    order = np.random.default_rng(0).permutation(scene.pages)[:count]
    layers = cycle(range(shape.layers))
    if scene.triton:
        from engine.ops import triton_pages

        missing = torch.tensor([count], dtype=torch.int32, device=scene.device)
        pages, places = (torch.from_numpy(order).int().to(scene.device) for _ in range(2))

        def work() -> None:
            layer = next(layers)
            triton_pages.gather(host[layer], pool[layer], pages, places, missing, scene.units(1))
    else:
        index, words = torch.from_numpy(order), as_words(host) if not pinned else None
        places = index.to(scene.device)

        def work() -> None:
            layer = next(layers)
            read = gather_pages(host[layer], words[layer] if words is not None else None, order, "index_select")
            pool[layer].index_copy_(0, places, read.to(scene.device))

    size = count * shape.layer_page_bytes
    floor = floors.to_device if pinned else floors.device / 2
    return _moved(f"gather, {count} pages of {shape.layer_page_bytes // 1024:,} KiB", scene, work, size, floor)


def attention(scene: Scene, floors: Floors, rows: int = 0) -> Rate:
    """One token's over a window of pages in the pool."""
    config, shape, rope, pool = scene.config, scene.shape, scene.rope, scene.pool()
    q, layers = scene.random(1, config.heads, config.head_dim, dtype=torch.float32), cycle(range(shape.layers))
    if scene.triton:
        from engine.ops.triton_attention import PagedAttention

        ids = torch.arange(scene.pages, dtype=torch.int32, device=scene.device)
        attend = PagedAttention(config.heads, shape.kv_heads, shape.head_dim, 1, scene.device, scene.units(4))
        counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=scene.device)
        fixed = scene.geometry(), Turns.of(rope, scene.pages), counters, rope.score_scale, False, shape.dtype

        def work() -> None:
            attend(q, pool[next(layers)], None, ids, ids, ids, *fixed, shape.form.layout)
    else:
        distance = np.arange(scene.pages - 1, -1, -1)

        def work() -> None:
            partial = PartialAttention(rope, q, shape.kv_heads)
            partial.add(pool[next(layers)], distance, scene.pages * PAGE - 1)
            partial.result()

    size = scene.pages * shape.layer_page_bytes
    return _moved(f"attention of a token, {scene.pages * PAGE:,} keys", scene, work, size, floors.device)


def scores(scene: Scene, floors: Floors, rows: int = 0) -> Rate:
    """One token's over the key codes of as many pages."""
    config, shape, rope, pool = scene.config, scene.shape, scene.rope, scene.pool()
    q, layers = scene.random(1, config.heads, config.head_dim, dtype=torch.float32), cycle(range(shape.layers))
    codes, scales = encode_keys(pool[:, :, 0])
    past = scene.pages - 1
    if scene.triton:
        from engine.ops.triton_score import PageScores

        codes = pack_codes(codes)
        ids = torch.arange(scene.pages, dtype=torch.int32, device=scene.device)
        score = PageScores(1, config.heads, shape.kv_heads, scene.pages, scene.device, scene.units(32))
        fixed = ids, scene.geometry(), Turns.of(rope, scene.pages), rope.score_scale

        def work() -> None:
            layer = next(layers)
            score(q, codes[layer], scales[layer], *fixed)
    else:
        distance = np.arange(past, 0, -1)

        def work() -> None:
            layer = next(layers)
            page_lse(rope, q, codes[layer, :past].to(torch.bfloat16), distance, scales[layer, :past])

    size = (codes[0].numel() * codes.element_size() + scales[0].numel() * scales.element_size()) * past // scene.pages
    return _moved(f"scores of a token, {past * PAGE:,} keys", scene, work, size, floors.device)


def chunk(scene: Scene, floors: Floors, rows: int) -> Rate:
    """A chunk's attention over staged keys, every row seeing every key."""
    config, shape, keys_ = scene.config, scene.shape, scene.pages * PAGE
    q = scene.random(rows, config.heads, config.head_dim)
    keys, values = (scene.random(shape.kv_heads, keys_, shape.head_dim) for _ in range(2))
    scale, name = scene.rope.score_scale, scene.by
    if scene.triton:
        from engine.ops import cuda_flash

        name, kernel = cuda_flash.choose(q, keys, keys)

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


def _moved(what: str, scene: Scene, work: Callable[[], None], size: int, floor: float) -> Rate:
    seconds = median_seconds(work, scene.device, ROUNDS)
    return Rate(what, scene.by, seconds, size / seconds, floor=size / seconds / floor)
