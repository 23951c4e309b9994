"""A page: 64 consecutive tokens of one sequence, their K and V in every layer. And what always holds of pages.

The invariants (`Engine.audit()` checks them; tests call it after every step):

1. Every closed page has a host replica, or is in a copy that has not been waited for; the open page is in the pool.
2. Slots: free + used = capacity, in every layer; no slot holds two pages; no page has two slots in one layer.
3. sink + recent + open + selection are in the window, the window is resident before attention runs, and attention
   sees the window and nothing else.
4. Pool >= context: selection is the identity, and logits equal those of the dense path bit for bit.
5. A device slot is reused only after the host copy of what it held is complete.
6. A published checkpoint refers to no copy in flight.
7. Cancel, error and out-of-memory at any point leave 1-6 true, and the next request is served.
8. What came back from the host is byte for byte what went there.
9. Layers that slide have no pages: a sequence's tail holds what its last page's first token sees, and a snapshot of a
   tail lives no longer than the page at whose end it stands.

A page's id is its place in the host store. It is given when the page opens and kept until nobody refers to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from engine.config import PAGE
from engine.kv.dtype import Form, KVDtype, plain


def page_count(tokens: int) -> int:
    """Pages that hold `tokens` tokens; an empty sequence still owns its open page."""
    return 1 + (tokens - 1) // PAGE if tokens > 0 else 1


@dataclass(frozen=True)
class KVShape:
    """The shape of one model's cache. `dtype`: what attention computes with; `kv`: what pages hold, None: the same."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv: KVDtype | None = None

    @cached_property
    def form(self) -> Form:
        """One layer of one page, contiguous on both sides."""
        return Form(self.kv or plain(self.dtype), self.kv_heads, self.head_dim)

    @property
    def element(self) -> torch.dtype:
        """Of the tensors that hold pages."""
        return self.form.dtype.element

    @property
    def layer_page(self) -> tuple[int, ...]:
        """One layer of one page, in elements: [k|v, kv_head, 64, head_dim], or its bytes where it holds codes."""
        return self.form.shape

    @property
    def layer_page_bytes(self) -> int:
        return self.form.bytes

    @property
    def decoded_bytes(self) -> int:
        """One layer of one page as attention computes with it."""
        return 2 * self.kv_heads * PAGE * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // PAGE

    def decode(self, pages: torch.Tensor) -> torch.Tensor:
        """pages [n, *layer_page] as stored -> [n, k|v, kv_head, 64, head_dim] of `dtype`."""
        return self.form.decode(pages, self.dtype)
