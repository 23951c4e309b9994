"""What a decoder looks like: every size and switch that the forward pass reads, whichever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelError
from engine.ops.rope import RopeConfig

_MOST_LAYERS = 4096
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes are elements; `trained_context` is tokens, counted after yarn stretched them."""

    family: str  # llama | qwen2 | qwen3
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope: RopeConfig
    trained_context: int
    tied: bool  # the head is the embedding, unless the file holds a head that differs from it
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    eos: tuple[int, ...] = ()
    bos: int | None = None

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "trained_context"):
            if getattr(self, field) < 1:
                raise ModelError(f"the model's {field} is {getattr(self, field)}", "it must be at least 1")
        if not 0 <= self.norm_eps < 1:  # nor infinity, nor what is not a number
            raise ModelError(f"the model's norm epsilon is {self.norm_eps}", "the file is damaged: download it again")
        if self.layers > _MOST_LAYERS:
            raise ModelError(f"the model claims {self.layers:,} layers", "the file is damaged: download it again")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads can't share {self.kv_heads} KV heads",
                "the number of KV heads must divide the number of query heads",
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in 16-bit, all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2
