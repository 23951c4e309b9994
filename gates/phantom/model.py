"""The phantom as training sees it: a Llama, small enough to read, with two ways to attend.

Tensors keep Hugging Face's names and layout, so a checkpoint of this module is a LlamaForCausalLM. Attention runs as a
flash kernel with the KV heads repeated. With `tail` given, document tokens see the first SINK and the newest tokens
only, as the engine's windowed prefill does, and the last `tail` tokens see everything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

SINK, CHUNK = 256, 1536  # windowed: a token sees the sink, its own chunk up to itself, and the chunk before


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 2e6
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 262_144


def rope(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, float32, [batch, 1, token, head_dim], in the half-split form."""
    exponent = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions[:, None, :, None].float() * shape.rope_theta**-exponent
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, head, token, head_dim], computed in float32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, tail: int | None = None) -> Tensor:
    """Causal attention over [batch, head, token, head_dim]; the queries are the last ones of the keys."""
    if tail is None or q.shape[2] - tail <= 2 * CHUNK:
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
    batch, length = q.shape[0], q.shape[2]
    tail = length - (length - tail) // CHUNK * CHUNK
    body, chunks = length - tail, (length - tail) // CHUNK
    first = F.scaled_dot_product_attention(
        q[:, :, : 2 * CHUNK], k[:, :, : 2 * CHUNK], v[:, :, : 2 * CHUNK], is_causal=True
    )

    def windows(x: Tensor) -> Tensor:  # [batch * (chunks - 2), head, SINK + 2 * CHUNK, head_dim]
        cut = x[:, :, :body].unflatten(2, (chunks, CHUNK))
        sink = x[:, :, None, :SINK].expand(-1, -1, chunks - 2, -1, -1)
        return torch.cat((sink, cut[:, :, 1:-1], cut[:, :, 2:]), 3).transpose(1, 2).flatten(0, 1)

    rows = q[:, :, 2 * CHUNK : body].unflatten(2, (chunks - 2, CHUNK)).transpose(1, 2).flatten(0, 1)
    bias = causal_lower_right(CHUNK, SINK + 2 * CHUNK)
    middle = F.scaled_dot_product_attention(rows, windows(k), windows(v), attn_mask=bias)
    middle = middle.unflatten(0, (batch, chunks - 2)).transpose(1, 2).flatten(2, 3)
    last = F.scaled_dot_product_attention(q[:, :, body:], k, v, attn_mask=causal_lower_right(tail, length))
    return torch.cat((first, middle, last), 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden_size, shape.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, shape.num_attention_heads * dim, bias=False),
                "k_proj": nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False),
                "v_proj": nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False),
                "o_proj": nn.Linear(shape.num_attention_heads * dim, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, hidden, bias=False),
            }
        )

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (rotated) and v, [batch, head, token, head_dim]; k and v with their own number of heads."""
        normed = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[f"{name}_proj"](normed).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x + self.mlp["down_proj"](gated)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.shape.num_attention_heads // self.shape.num_key_value_heads, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, tail: int | None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.finish(x, attend(q, self.repeat(k), self.repeat(v), tail))


class Phantom(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 if not last else 0.02 / (2 * shape.num_hidden_layers) ** 0.5)

    def forward(self, ids: Tensor, positions: Tensor, tail: int | None = None) -> Tensor:
        """Normed hidden states, [batch, token, hidden]; ids and positions are [batch, token]."""
        cos, sin = rope(positions, self.shape)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, tail)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


def save(model: Phantom, folder: Path) -> None:
    """model.safetensors in bf16 and config.json, as LlamaForCausalLM."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"model.{name}": t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()
    }
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    rest = {"tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    ends = {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    config = {**head, **asdict(model.shape), **rest, **ends}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path, shape: Shape | None = None) -> Phantom:
    """A model from `save`'s folder, in float32."""
    fields = json.loads((folder / "config.json").read_text())
    model = Phantom(shape or Shape(**{name: fields[name] for name in Shape.__dataclass_fields__}))
    state = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in state.items()})
    return model
