"""Sizes of well-known decoders, from their published configs: for names without a file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


class Weighed:
    """How many numbers a decoder's matrices hold, by its sizes."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """In one layer's matrices."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.ffn

    @property
    def head_weights(self) -> int:
        """In the output matrix."""
        return self.vocab * self.hidden


@dataclass(frozen=True)
class Sizes(Weighed):
    """As in `model.config.ModelConfig`; `theta`: rotary base; `bias`: on q, k and v;
    `window`: tokens that all but every sixth layer see, 0 = all see everything."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    trained_context: int
    tied: bool = False
    bias: bool = False
    window: int = 0

    @property
    def sliding_layers(self) -> int:
        """Layers that see their window only."""
        return self.layers - self.layers // 6 if self.window else 0


PUBLISHED = {
    "qwen3-0.6b": Sizes("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 1e6, 40_960, tied=True),
    "qwen3-4b": Sizes("qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 1e6, 40_960, tied=True),
    "qwen3-8b": Sizes("qwen3", 36, 4096, 12_288, 32, 8, 128, 151_936, 1e6, 40_960),
    "qwen3-14b": Sizes("qwen3", 40, 5120, 17_408, 40, 8, 128, 151_936, 1e6, 40_960),
    "llama-3.1-8b": Sizes("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 5e5, 131_072),
    "qwen2.5-7b": Sizes("qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064, 1e6, 131_072, bias=True),
    "qwen2.5-1.5b": Sizes("qwen2", 28, 1536, 8960, 12, 2, 128, 151_936, 1e6, 32_768, tied=True, bias=True),
    "gemma-3-270m": Sizes("gemma3", 18, 640, 2048, 4, 1, 256, 262_144, 1e6, 32_768, tied=True, window=512),
    "gemma-3-1b": Sizes("gemma3", 26, 1152, 6912, 4, 1, 256, 262_144, 1e6, 32_768, tied=True, window=512),
    "gemma-3-4b": Sizes("gemma3", 34, 2560, 10_240, 8, 4, 256, 262_208, 1e6, 131_072, tied=True, window=1024),
    "gemma-3-12b": Sizes("gemma3", 48, 3840, 15_360, 16, 8, 256, 262_208, 1e6, 131_072, tied=True, window=1024),
}
