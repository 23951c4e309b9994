"""How much each page matters to the query rows of this step, per KV head that looks far. Higher is better; all in 0..1.

`token` is softmax attention over every closed page on 4-bit keys, summed inside each page: measured equal to dense
attention with 8 to 32 pages of 660 on the phantom. The others are coarser, or controls.
q is [rows, heads, head_dim]; `turned` means rotated to its offset from the chunk's origin, `plain` un-rotated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.ops.attention import log_sum_exp, turn_query
from engine.ops.rope import Rotary
from engine.recall.digest import Digests, unpack_codes

BLOCK = 512
"""Pages scored at once: bounds the workspace, whatever the context."""


def page_lse(rope: Rotary, q: Tensor, keys: Tensor, distance: np.ndarray, key_scales: Tensor | None = None) -> Tensor:
    """Log of the softmax mass that each page would get: float32 [kv_head, rows*group, n].

    q [rows, heads, head_dim] turned; keys [n, kv_head, 64, head_dim] rotated by offset; distance int64 [n] as in
    `PartialAttention.add`.
    """
    rows, heads, dim = q.shape
    pages, kv_heads = keys.shape[:2]
    turned = turn_query(rope, q, distance).view(pages, rows, kv_heads, heads // kv_heads, dim)
    turned = turned.permute(0, 2, 1, 3, 4).reshape(pages, kv_heads, -1, dim).to(keys.dtype)
    scores = (turned @ keys.transpose(-1, -2)).float()
    scores *= rope.score_scale if key_scales is None else (key_scales * rope.score_scale).unsqueeze(2)
    return log_sum_exp(scores, torch.softmax(scores, -1)).permute(1, 2, 0)


def mass(lse: Tensor) -> Tensor:
    """[kv_head, rows*group, n] -> [kv_head, n]: each row's attention per page, the best over rows and heads."""
    return torch.softmax(lse, -1).amax(1)


def token_scores(
    digests: Digests, rope: Rotary, layer: int, pages: np.ndarray, turned: Tensor, distance: np.ndarray
) -> Tensor:
    """[far head, n] from the key codes of `pages` (numpy ids): of the KV heads that look far."""
    if not digests.far.everything(layer):
        groups = turned.view(len(turned), digests.shape.kv_heads, -1, turned.shape[-1])
        turned = groups.index_select(1, digests.codes_of(layer).heads).flatten(1, 2)
    parts = []
    for start in range(0, len(pages), BLOCK):
        codes, scales = digests.read_codes(layer, pages[start : start + BLOCK])
        codes = unpack_codes(codes) if digests.packed else codes
        keys = codes.transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format)
        parts.append(page_lse(rope, turned, keys, distance[start : start + BLOCK], scales.transpose(0, 1)))
    return mass(torch.cat(parts, -1))


def digest_scores(digests: Digests, rope: Rotary, kind: str, layer: int, pages: np.ndarray, plain: Tensor) -> Tensor:
    """[kv_head, n] from `mean`, `bounds` or `subpage` digests and the un-rotated query.

    Bounds: the largest product that a key inside min..max could have (Quest, arXiv 2406.10774).
    """
    digest = digests.read(kind, layer, pages)
    rows, heads, dim = plain.shape
    kv_heads = digest.shape[-2]
    q = plain.float().view(rows, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    if kind == "mean":
        scores = torch.einsum("hrd,nhd->hrn", q, digest)
    else:
        low, high = digest[:, :, 0], digest[:, :, 1]  # [n, subpage, kv_head, head_dim]
        scores = torch.einsum("hrd,nshd->hrns", q.clamp_min(0), high) + torch.einsum(
            "hrd,nshd->hrns", q.clamp_max(0), low
        )
        scores = scores.amax(-1)
    return mass(scores * rope.score_scale)
