"""What a decoder looks like: every size and switch that the forward pass reads, whichever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.errors import ModelError
from engine.ops.rope import RopeConfig

_MOST_LAYERS = 4096
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes are elements; `trained_context` is tokens, counted after yarn stretched them."""

    family: str  # llama | qwen2 | qwen3 | gemma3
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
    sandwich: bool = False  # a norm behind attention and MLP too; all norms in float32
    gelu: bool = False  # its tanh form gates the MLP, instead of silu
    embedding_scale: float = 1.0  # in the model's dtype
    query_scale: float | None = None  # of q.k before the softmax; None = 1/sqrt(head_dim)
    window: int = 0  # tokens that a sliding layer sees, its own included
    sliding: tuple[int, ...] = ()  # layers that see their window only
    sliding_rope: RopeConfig | None = None  # theirs; None = that of the others
    eos: tuple[int, ...] = ()
    bos: int | None = None
    left_out: str = ""  # what the file holds beside the language model, and is not loaded

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
        if self.sliding and self.window < 1:
            raise ModelError(f"the sliding window is {self.window} tokens", "the file is damaged: download it again")
        if not self.paged:
            raise ModelError("every layer of this model slides: none looks beyond its window", "use another model")

    @cached_property
    def paged(self) -> tuple[int, ...]:
        """Layers that see the whole context: only their keys and values are pages."""
        sliding = frozenset(self.sliding)
        return tuple(layer for layer in range(self.layers) if layer not in sliding)

    @cached_property
    def row(self) -> dict[int, int]:
        """Where a layer lies among those of its kind: in pool and host store, or in a tail."""
        return {layer: row for kind in (self.paged, self.sliding) for row, layer in enumerate(kind)}

    @property
    def sliding_layers(self) -> int:
        """How many layers slide."""
        return len(self.sliding)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in 16-bit, in all layers that page."""
        return len(self.paged) * 2 * self.kv_heads * self.head_dim * 2
