"""ModelConfig from a GGUF file's metadata and tensor table."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import ModelError
from engine.model import gemma
from engine.model.config import ModelConfig
from engine.ops.rope import RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_LAYERS_27B = 62
_SCALINGS = ("none", "linear", "yarn")


def from_gguf(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], divisors: tuple[float, ...] | None
) -> ModelConfig:
    """`divisors` is the content of rope_freqs.weight, how GGUF stores llama3's scaling. `eos` is left to the tokenizer.

    Raises ModelError for architectures and settings that this engine doesn't compute.
    """
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ModelError(
            f"this GGUF file holds a model of architecture {family!r}",
            f"architectures that work: {', '.join(ARCHITECTURES)}",
        )
    read = _Keys(metadata, family)
    if read.whole("expert_count", 0):
        raise ModelError("this model is a mixture of experts", "use a dense llama, qwen2 or qwen3 model")
    if family != "gemma3" and read.whole("attention.sliding_window", 0):
        raise ModelError("this model's layers use a sliding window, which the ring would fight", "use another model")
    if "token_embd.weight" not in shapes:
        raise ModelError("tensor 'token_embd.weight' is missing", "download the file again")
    heads, hidden = read.whole("attention.head_count"), read.whole("embedding_length")
    head_dim = read.whole("attention.key_length", read.whole("rope.dimension_count", hidden // heads))
    rotated, value_dim = read.whole("rope.dimension_count", head_dim), read.whole("attention.value_length", head_dim)
    if rotated != head_dim or value_dim != head_dim:
        raise ModelError(
            f"this model's keys have {head_dim} dimensions, {rotated} of them rotated, and its values {value_dim}",
            "use a model whose heads are rotated whole and whose keys and values are of one size",
        )
    context = read.whole("context_length")
    rope = _rope(read, divisors, gemma.GLOBAL_THETA if family == "gemma3" else 10000.0)
    own = _gemma(read, hidden, heads, head_dim) if family == "gemma3" else {"qk_norm": family == "qwen3"}
    stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
    return ModelConfig(
        family=family,
        layers=read.whole("block_count"),
        hidden=hidden,
        ffn=read.whole("feed_forward_length"),
        heads=heads,
        kv_heads=read.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=shapes["token_embd.weight"][0],
        norm_eps=float(read.number("attention.layer_norm_rms_epsilon", 1e-5)),
        rope=rope,
        trained_context=max(context, stretched),
        tied="output.weight" not in shapes,
        attention_bias=family == "qwen2" or "blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        bos=metadata.get("tokenizer.ggml.bos_token_id"),
        **own,
    )


def _gemma(read: _Keys, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if read.number(key, 0):
            raise ModelError(f"this model has {key} {read.number(key)}, which is not supported", "use a Gemma 3 model")
    layers = read.whole("block_count")
    # The 27B divides by its embedding's share of a head; llama.cpp too knows it by its layers.
    scalar = hidden / heads if layers == _LAYERS_27B else head_dim
    local = RopeConfig(theta=float(read.number("rope.freq_base_swa", gemma.LOCAL_THETA)))
    return gemma.gemma_fields(hidden, read.sliding(layers), read.whole("attention.sliding_window"), local, scalar)


class _Keys:
    """Metadata of one architecture by the name behind its prefix."""

    def __init__(self, metadata: dict[str, Any], family: str) -> None:
        self._metadata = metadata
        self._family = family

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self._family}.{key}"
        value = self._metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"GGUF metadata '{name}' is {value!r}, a number is needed", "download the file again")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def text(self, key: str, default: str) -> str:
        return str(self._metadata.get(f"{self._family}.{key}", default))

    def sliding(self, layers: int) -> tuple[int, ...]:
        """The layers that slide: all but every n-th, or as a list of the layers says."""
        given = self._metadata.get(f"{self._family}.attention.sliding_window_pattern")
        if given is None or isinstance(given, int):
            return gemma.every_but_sixth(layers, given or gemma.PATTERN)
        if len(given) != layers:
            raise ModelError(f"the file says of {len(given)} layers whether they slide", f"the model has {layers}")
        return tuple(layer for layer, slides in enumerate(given) if slides)

    def has(self, key: str) -> bool:
        return f"{self._family}.{key}" in self._metadata


def _rope(read: _Keys, divisors: tuple[float, ...] | None, theta: float) -> RopeConfig:
    theta = float(read.number("rope.freq_base", theta))
    kind = read.text("rope.scaling.type", "none")
    factor = float(read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0)))
    if kind == "none" and read.has("rope.scale_linear"):
        kind = "linear"  # files from before there were kinds
    if kind not in _SCALINGS:
        raise ModelError(
            f"rotary scaling '{kind}' is not supported",
            f"rotary scalings that work: {', '.join(_SCALINGS)}, rope_freqs",
        )
    if kind != "yarn":
        return RopeConfig(theta=theta, kind=kind, factor=factor if kind == "linear" else 1.0, divisors=divisors)
    own = read.number("rope.scaling.attn_factor", 1.0) * read.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=read.whole("rope.scaling.original_context_length", read.whole("context_length")),
        beta_fast=float(read.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(read.number("rope.scaling.yarn_beta_slow", 1.0)),
        # llama.cpp multiplies the file's factor with yarn's own
        attention_factor=own * (0.1 * math.log(factor) + 1.0) if factor > 1 else own,
        divisors=divisors,
    )
