"""One decoder for every family: embedding, layers, final norm, head. Attention is the caller's.

`forward` hands each layer's q, k and v, un-rotated, to `attend`, because where a key stands is the ring's business, not
the model's. Matrices are plain or packed, with q, k, v and gate, up fused: one token on a CPU costs what its matrix
calls cost, so there are four a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.ops.linear import Matrix, embedding, gated, linear
from engine.ops.norm import TORCH, Passes
from engine.ops.packed import Packed
from engine.ops.rope import Rotary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v [T, kv_heads, head_dim]) -> [T, heads, head_dim]

q and k are un-rotated (after bias and QK norm). The callee rotates, stores K and V, and attends with
`Rotary.score_scale`. q, k and v may be views of one tensor: copy what is kept.
"""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Q = heads * head_dim, K = kv_heads * head_dim; all of the model's dtype, a Gemma's norms float32."""

    attention_norm: Tensor  # [hidden]
    qkv: Matrix  # [Q + 2K, hidden]
    o: Matrix  # [hidden, Q]
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix  # [2 * ffn, hidden]
    down: Matrix  # [hidden, ffn]
    qkv_bias: Tensor | None = None  # [Q + 2K]
    o_bias: Tensor | None = None  # [hidden]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    gate_up_bias: Tensor | None = None  # [2 * ffn]
    down_bias: Tensor | None = None  # [hidden]
    attention_out_norm: Tensor | None = None  # [hidden]
    mlp_out_norm: Tensor | None = None  # [hidden]


@dataclass(frozen=True)
class Weights:
    """A whole model. `head` is `embed` itself when they are tied."""

    embed: Tensor | Packed  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor | Packed  # [vocab, hidden]


class Transformer:
    """The forward pass. Holds weights and nothing else; safe to call from any one thread at a time."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.rope = Rotary(config.rope, config.head_dim, self.device, config.query_scale)
        self.sliding_rope = self.rope
        if config.sliding_rope is not None:
            self.sliding_rope = Rotary(config.sliding_rope, config.head_dim, self.device, config.query_scale)
        self._scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self._parts = [config.heads, config.kv_heads, config.kv_heads]

    @property
    def weight_bytes(self) -> int:
        """Bytes on the device; a tied head counts once."""
        tensors = {id(tensor): tensor for tensor in _tensors(self.weights)}
        return sum(tensor.nbytes for tensor in tensors.values())

    def forward(self, tokens: Tensor, attend: Attend, passes: Passes = TORCH) -> Tensor:
        """tokens int64 [T] -> final-normed hidden states [T, hidden] of the model's dtype."""
        eps = self.config.norm_eps
        hidden, delta = embedding(tokens, self.weights.embed), None  # [T, hidden]
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self._scale
        for index, layer in enumerate(self.weights.layers):
            hidden, x = passes.add_rms_norm(hidden, delta, layer.attention_norm, eps)
            q, k, v = self._project(layer, x, passes)
            attended = attend(index, q, k, v).reshape(tokens.shape[0], -1)  # [T, heads * head_dim]
            delta = linear(attended, layer.o, layer.o_bias)
            if layer.attention_out_norm is not None:
                delta = passes.add_rms_norm(delta, None, layer.attention_out_norm, eps)[1]
            hidden, x = passes.add_rms_norm(hidden, delta, layer.mlp_norm, eps)
            delta = linear(self._gated(layer, x, passes), layer.down, layer.down_bias)
            if layer.mlp_out_norm is not None:
                delta = passes.add_rms_norm(delta, None, layer.mlp_out_norm, eps)[1]
        return passes.add_rms_norm(hidden, delta, self.weights.norm, eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> float32 [N, vocab]. Ask only for the rows that are needed: a row is vocab * 4 bytes."""
        return linear(hidden, self.weights.head).float()

    def _project(self, layer: LayerWeights, x: Tensor, passes: Passes) -> list[Tensor]:
        """x [T, hidden] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim], after bias and QK norm."""
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        q, k, v = qkv.view(x.shape[0], -1, self.config.head_dim).split(self._parts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = passes.head_norm(q, k, layer.q_norm, layer.k_norm, self.config.norm_eps)
        return [q, k, v]

    def _gated(self, layer: LayerWeights, x: Tensor, passes: Passes) -> Tensor:
        """x [T, hidden] -> act(gate) * up, [T, ffn]."""
        if self.config.gelu:
            return passes.geglu(linear(x, layer.gate_up, layer.gate_up_bias))
        return gated(x, layer.gate_up, layer.gate_up_bias, passes.swiglu)


def _tensors(weights: Weights) -> list[Matrix]:
    layers = (getattr(layer, field.name) for layer in weights.layers for field in fields(layer))
    return [weights.embed, weights.norm, weights.head, *(tensor for tensor in layers if tensor is not None)]
