"""Attention over pages, segment by segment; the torch reference of every kernel that will do it faster.

A key is stored rotated by its offset in the page only. Its page's base position stands in the *query*: few rows rotate
the query once per page (`_few_rows`), many rows rotate the staged keys by their bases instead (`_many_rows`).
Partial results merge by their log-sum-exp, always in the same order and over segments of the same size, so the
result depends on which pages are seen and not on where they were.

q is [T, heads, head_dim], rotated to its offset from `origin`, the base position of the chunk's first own page.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.ops.rope import Rotary, rotate

SEGMENT = 64
"""Pages a segment: 4,096 keys, long enough for a flash kernel, short enough to stage twice."""

_FEW = 8
"""Query rows up to which turning the query beats turning the keys."""


def takes_few(q: Tensor) -> bool:
    """Whether q [T, heads, head_dim] is attended by turning it page by page."""
    return q.shape[0] <= _FEW


class PartialAttention:
    """out [T, heads, head_dim] float32 and its log-sum-exp [T, heads], growing segment by segment."""

    def __init__(self, rope: Rotary, q: Tensor, kv_heads: int) -> None:
        self.rope, self.q, self.kv_heads = rope, q, kv_heads
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, kv: Tensor, distance: np.ndarray, first_row: int | None = None) -> None:
        """One segment: kv [n, 2, kv_head, 64, head_dim]; distance int64 [n]: pages from each page up to the origin.

        first_row None: every row sees every key. Else these are the chunk's own pages: row r is key `first_row + r`
        of the segment and sees the keys up to itself.
        """
        rows = _few_rows if takes_few(self.q) else _many_rows
        self._merge(*rows(self.rope, self.q, kv, distance, first_row))

    def _merge(self, out: Tensor, lse: Tensor) -> None:
        """Flash-decoding's merge: weights exp(lse - max), as in arXiv 2205.14135, section 3."""
        if self.out is None:
            self.out, self.lse = out, lse
            return
        total = torch.logaddexp(self.lse, lse)
        old, new = torch.exp(self.lse - total), torch.exp(lse - total)
        self.out = self.out * old.unsqueeze(-1) + out * new.unsqueeze(-1)
        self.lse = total

    def result(self) -> Tensor:
        """[T, heads, head_dim] in the query's dtype."""
        return self.out.to(self.q.dtype)


def _few_rows(
    rope: Rotary, q: Tensor, kv: Tensor, distance: np.ndarray, first_row: int | None
) -> tuple[Tensor, Tensor]:
    """Rotate the query once per page; keys are read as they lie. In float32: on a CPU also the faster way."""
    rows, heads, dim = q.shape
    pages, _, kv_heads, _, _ = kv.shape
    group = heads // kv_heads
    turned = turn_query(rope, q.float() * rope.score_scale, distance).view(pages, rows, kv_heads, group, dim)
    turned = turned.transpose(1, 2).reshape(pages, kv_heads, rows * group, dim)
    scores = kv[:, 0].float() @ turned.transpose(-1, -2)  # [n, kv_head, 64, T*group]
    scores = scores.permute(1, 3, 0, 2).reshape(kv_heads, rows * group, pages * PAGE)
    if first_row is not None and rows == 1:  # a decode step: only the rest of the open page lies ahead
        scores[:, :, first_row + 1 :] = -math.inf
    elif first_row is not None:
        key = torch.arange(pages * PAGE, device=q.device)
        row = torch.arange(first_row, first_row + rows, device=q.device).repeat_interleave(group)
        scores.masked_fill_(key > row.unsqueeze(1), -math.inf)
    values = kv[:, 1].transpose(0, 1).reshape(kv_heads, pages * PAGE, dim).float()
    shares = torch.softmax(scores, -1)
    out = (shares @ values).view(kv_heads, rows, group, dim).transpose(0, 1)
    lse = log_sum_exp(scores, shares).view(kv_heads, rows, group).transpose(0, 1)
    return out.reshape(rows, heads, dim), lse.reshape(rows, heads)


def log_sum_exp(scores: Tensor, shares: Tensor) -> Tensor:
    """Over the last dimension, from its softmax `shares`: the largest score less the log of its share.

    As near as torch.logsumexp, which takes 20 times as long on a CPU over rows of 64 (measured, Zen 4).
    """
    return scores.amax(-1) - shares.amax(-1).log()


def turn_query(rope: Rotary, q: Tensor, distance: np.ndarray) -> Tensor:
    """[n, T, heads, head_dim]: the query as each page sees it, rotated on by its distance from the origin."""
    pages = len(distance)
    spread = q.unsqueeze(0).expand(pages, *q.shape).flatten(1, 2)
    return rotate(spread, *rope.page_turns(distance)).view(pages, *q.shape)


def _many_rows(
    rope: Rotary, q: Tensor, kv: Tensor, distance: np.ndarray, first_row: int | None
) -> tuple[Tensor, Tensor]:
    """Rotate the keys of each page by its base (relative to the chunk's) and run one flash kernel."""
    pages, _, kv_heads, _, dim = kv.shape
    keys = rotate(kv[:, 0].reshape(pages, kv_heads * PAGE, dim), *rope.page_turns(-distance))
    keys = keys.view(pages, kv_heads, PAGE, dim).transpose(0, 1).reshape(kv_heads, pages * PAGE, dim)
    values = kv[:, 1].transpose(0, 1).reshape(kv_heads, pages * PAGE, dim)
    if first_row is None:
        return flash(q, keys, values, None, rope.score_scale)
    length = first_row + q.shape[0]
    return flash(q, keys[:, :length], values[:, :length], first_row, rope.score_scale)


def flash(q: Tensor, keys: Tensor, values: Tensor, first_row: int | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, heads, dim], keys and values [kv_head, S, dim] -> out float32 [T, heads, dim], lse [T, heads].

    first_row None: every row sees every key; else row r sees keys 0..first_row + r.
    """
    if q.device.type == "cpu":
        return _flash_cpu(q, keys, values, first_row, scale)
    return attend_reference(q, keys, values, first_row, scale)


def _flash_cpu(q: Tensor, keys: Tensor, values: Tensor, first_row: int | None, scale: float) -> tuple[Tensor, Tensor]:
    mask = None
    if first_row:
        row = first_row + torch.arange(q.shape[0]).view(-1, 1)
        mask = torch.zeros(q.shape[0], keys.shape[1], dtype=q.dtype)
        mask.masked_fill_(torch.arange(keys.shape[1]).view(1, -1) > row, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        0.0,
        first_row == 0,
        attn_mask=mask,
        scale=scale,
    )
    return out[0].transpose(0, 1).float(), lse[0].transpose(0, 1)


def attend_reference(
    q: Tensor, keys: Tensor, values: Tensor, first_row: int | None, scale: float, rows: int = 256
) -> tuple[Tensor, Tensor]:
    """The plain formula in float32, `rows` query rows at a time. Same arguments and results as `flash`."""
    group = q.shape[1] // keys.shape[0]
    keys = keys.float().repeat_interleave(group, 0)  # [heads, S, dim]
    values = values.float().repeat_interleave(group, 0)
    outs, lses = [], []
    for start in range(0, q.shape[0], rows):
        part = q[start : start + rows].float().transpose(0, 1)  # [heads, t, dim]
        scores = (part @ keys.transpose(1, 2)) * scale
        if first_row is not None:
            row = first_row + start + torch.arange(part.shape[1], device=q.device).view(-1, 1)
            scores = scores.masked_fill(torch.arange(keys.shape[1], device=q.device).view(1, -1) > row, -math.inf)
        lse = torch.logsumexp(scores, -1)
        outs.append((torch.exp(scores - lse.unsqueeze(-1)) @ values).transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)
