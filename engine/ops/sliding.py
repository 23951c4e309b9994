"""Attention of a layer that sees only a window: a token sees itself and the `window - 1` tokens before it.

Keys are rotated to their true positions; a window is all the distance they are ever seen from, so nothing is re-based.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.attention import takes_few

_ROWS = 256
"""Query rows that share one mask: of their keys, at least two in three are seen at a window of 512."""


def attend_window(q: Tensor, keys: Tensor, values: Tensor, window: int, scale: float) -> Tensor:
    """q [T, heads, dim] of the last T tokens of keys and values [kv_head, S, dim] -> [T, heads, dim] in q's dtype."""
    rows, total = q.shape[0], keys.shape[1]
    step = 1 if takes_few(q) else _ROWS
    outs = []
    for start in range(0, rows, step):
        part = q[start : start + step]
        first = total - rows + start  # the first row's own key
        seen = slice(max(0, first - window + 1), first + len(part))
        attend = _one_row if step == 1 else _many_rows
        outs.append(attend(part, keys[:, seen], values[:, seen], first - seen.start, window, scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _one_row(q: Tensor, keys: Tensor, values: Tensor, first: int, window: int, scale: float) -> Tensor:
    """Every key is seen. In float32: on a CPU also the faster way."""
    grouped = q.float().view(keys.shape[0], -1, q.shape[-1]) * scale  # [kv_head, group, dim]
    weights = torch.softmax(grouped @ keys.float().transpose(-1, -2), -1)
    return (weights @ values.float()).view(q.shape).to(q.dtype)


def _many_rows(q: Tensor, keys: Tensor, values: Tensor, first: int, window: int, scale: float) -> Tensor:
    row = torch.arange(first, first + q.shape[0], device=q.device).unsqueeze(1)
    key = torch.arange(keys.shape[1], device=q.device)
    mask = torch.zeros(q.shape[0], keys.shape[1], dtype=q.dtype, device=q.device)
    mask.masked_fill_((key > row) | (key <= row - window), -math.inf)
    batched = (x.unsqueeze(0) for x in (q.transpose(0, 1), keys, values))
    if q.device.type == "cpu":  # called by name: the public way would repeat keys and values for each query head
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batched, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        out = F.scaled_dot_product_attention(*batched, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
