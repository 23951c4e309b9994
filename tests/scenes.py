"""Pages scattered over a pool and a host store, as a step finds them: what the tests of kernels give to kernels."""

from __future__ import annotations

import numpy as np
import torch

from engine.config import PAGE
from engine.kv.dtype import KV, Form
from engine.ops import geometry as g
from engine.ops.attention import PartialAttention
from engine.ops.geometry import Turns
from engine.ops.rope import RopeConfig, Rotary

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CASES = [("int8", 64), ("k8v4", 64), ("k8v4", 80), ("int4", 96), ("fp8", 64), ("fp8", 16)]
"""KV dtypes of codes, each with a head size."""


def geometry(**values: int) -> torch.Tensor:
    """int32 [GEOMETRY]: what a step says of itself, by the names in `engine.ops.geometry`."""
    return torch.from_numpy(g.vector({getattr(g, name): value for name, value in values.items()})).to(DEVICE)


def ints(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


class Scene:
    """Past pages, some of them cold, and the own ones of `tokens` rows from row `first` of the first on."""

    def __init__(self, dim: int, heads: int, kv_heads: int, tokens: int, first: int, past: int, dtype, cold=()) -> None:
        torch.manual_seed(dim + tokens + past)
        self.own = -(-(first + tokens) // PAGE)
        self.past, self.first, self.kv_heads = past, first, kv_heads
        pages = past + self.own
        self.rope = Rotary(RopeConfig(theta=10000.0), dim, DEVICE)
        self.kv = torch.randn(pages, 2, kv_heads, PAGE, dim, device=DEVICE).to(dtype)
        self.ids = np.random.default_rng(1).permutation(pages + 3)[:pages]
        slots = np.random.default_rng(2).permutation(pages + 2)[:pages]
        self.pool = torch.full((pages + 2, 2, kv_heads, PAGE, dim), float("nan"), device=DEVICE, dtype=dtype)
        self.host = torch.full((pages + 3, 1, 2, kv_heads, PAGE, dim), float("nan"), dtype=dtype)
        if CUDA:
            self.host = self.host.pin_memory()
        self.slot_of = np.full(pages + 3, -1)
        for page in range(pages):
            self.host[self.ids[page], 0] = self.kv[page].cpu()
            if page not in cold:
                self.slot_of[self.ids[page]] = slots[page]
                self.pool[slots[page]] = self.kv[page]
        self.q = torch.randn(tokens, heads, dim, device=DEVICE)
        self.turns = Turns.of(self.rope, pages + 1)

    def attended(self, attention, pages, *more, counters, dtype, cold: bool = True, spare: int = 0) -> torch.Tensor:
        """What `attention` makes of the past `pages` (None: all) and the own ones; more: compact, and the layout.

        spare: rows after the tokens that count for nothing.
        """
        count, window = len(self.q), self.past if pages is None else len(pages)
        state = geometry(PAST=self.past, FIRST=self.first, OWN=self.own, WINDOW=window, TOKENS=count)
        tables = ints(self.slot_of), ints(self.ids), None if pages is None else ints([*pages, 0])
        host, scale = self.host[:, 0] if cold else None, self.rope.score_scale
        q = torch.cat([self.q, self.q.new_full((spare, *self.q.shape[1:]), 1e4)])
        return attention(q, self.pool, host, *tables, state, self.turns, counters, scale, *more, dtype=dtype)[:count]

    def reference(self, window: list[int], compact: bool) -> torch.Tensor:
        distance = np.arange(len(window), 0, -1) if compact else self.past - np.asarray(window, dtype=np.int64)
        own = np.arange(self.past, self.past + self.own)
        partial = PartialAttention(self.rope, self.q, self.kv_heads)
        kv = self.kv[torch.tensor([*window, *own])].float()
        where = np.concatenate([distance, self.past - own]).astype(np.int64)
        partial.add(kv, where, len(window) * PAGE + self.first)
        return partial.result()


class CodedScene(Scene):
    """The same scene, its pages written by the torch form; `kv` is what they hold."""

    def __init__(self, name: str, dim: int, *more, cold=()) -> None:
        super().__init__(dim, *more, torch.float32, cold)
        self.form = Form(KV[name], self.kv_heads, dim)
        token = torch.arange(len(self.kv) * PAGE, device=DEVICE)
        stored = torch.zeros(len(self.kv), *self.form.shape, dtype=torch.uint8, device=DEVICE)
        numbers = self.kv.permute(1, 0, 3, 2, 4).reshape(2, len(token), self.kv_heads, dim)
        self.form.write(stored, token // PAGE, token % PAGE, *(numbers * torch.linspace(0.1, 9, dim, device=DEVICE)))
        self.kv = self.form.decode(stored, torch.float32)
        self.pool = torch.full((len(self.pool), *self.form.shape), 255, dtype=torch.uint8, device=DEVICE)
        self.host = torch.full((len(self.host), 1, *self.form.shape), 255, dtype=torch.uint8)
        self.host = self.host.pin_memory() if CUDA else self.host
        for page, identity in enumerate(self.ids):
            self.host[identity, 0] = stored[page].cpu()
            if self.slot_of[identity] >= 0:
                self.pool[self.slot_of[identity]] = stored[page]
