"""A forward pass without pages, ring or recall, by the formula and one mask: what the engine is held against.

It shares the model's matrices with the engine and nothing that knows where a key lies: true positions, one softmax.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.dtype import Form, named
from engine.model.transformer import Transformer


@torch.inference_mode()
def plain_logits(
    model: Transformer, tokens: list[int], visible: Tensor | None = None, late: int = 0, kv: str = "auto"
) -> Tensor:
    """float32 [T, vocab]. visible bool [T, T]: which keys (columns) a row sees, beside what is ahead of it.

    `late` puts every key that many positions too far, on purpose. `kv`: the dtype that keys, turned by their offset in
    a page, and values are rounded to.
    """
    positions = torch.arange(len(tokens), device=model.device)
    seen = positions.unsqueeze(0) <= positions.unsqueeze(1)
    if visible is not None:
        seen &= visible.to(model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        frequencies, offset = model.rope.inv_freq, positions % PAGE
        k, v = _rounded(_turn(k, offset, frequencies).to(k.dtype), v, kv)
        q, k = _turn(q, positions, frequencies), _turn(k, positions - offset + late, frequencies)
        group = q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (k, v.float()))
        out = torch.empty_like(q)
        for head, rows in enumerate(q.transpose(0, 1)):
            scores = (rows @ keys[head].T) * model.rope.score_scale
            out[:, head] = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values[head]
        return out.to(model.dtype)

    return model.logits(model.forward(torch.tensor(tokens, device=model.device), attend))


def _rounded(k: Tensor, v: Tensor, kv: str) -> tuple[Tensor, Tensor]:
    """k and v [T, kv_head, head_dim] as pages of that dtype hold them."""
    form = Form(named(kv, k.dtype), *k.shape[1:])
    token = torch.arange(len(k), device=k.device)
    pages = torch.zeros(-(-len(k) // PAGE), *form.shape, dtype=form.dtype.element, device=k.device)
    form.write(pages, token // PAGE, token % PAGE, k, v)
    keys, values = form.decode(pages, k.dtype).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : len(k)]
    return keys, values


def _turn(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, heads, head_dim] as complex numbers (channel i with i + head_dim / 2) times e^(i position frequency)."""
    real, imaginary = x.double().chunk(2, -1)
    turn = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), positions[:, None] * frequencies.double())
    turned = torch.complex(real, imaginary) * turn.unsqueeze(1)
    return torch.cat([turned.real, turned.imag], -1).float()


def window_mask(tokens: int, chunk: int, pool: int, sink: int, working: int) -> Tensor:
    """bool [T, T]: what a windowed pass shows, as documented, before causality.

    Prompts go in chunks of whole pages. A chunk sees its own pages, the `sink` first ones, and as many of the newest
    past ones as the pool has slots for: sink + recent + own + working = pool.
    """
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    last = (tokens - 1) // PAGE * PAGE  # the question's phase begins on a page
    edges = [*range(0, last, chunk), last, tokens]
    for start, end in pairwise(edges):
        past, pages = start // PAGE, -(-end // PAGE)
        own = pages - past
        recent = past if pages <= pool else max(1, pool - sink - working - own)
        seen[start:end, : sink * PAGE] = True
        seen[start:end, max(0, past - recent) * PAGE :] = True
    return seen


def tolerance(dtype: torch.dtype, kv: str = "auto") -> float:
    """What rounding alone may move a logit by, between two orders of the same sums.

    Where pages hold fewer bits than that, a sum's last bit may put a number on the other side of a step.
    """
    near = {torch.float32: 1e-3, torch.float16: 0.25}.get(dtype, 1.0)
    return near if named(kv, dtype).element is dtype else max(near, 0.25)
