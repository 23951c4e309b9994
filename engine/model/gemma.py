"""What makes a decoder a Gemma 3: most layers see a sliding window only, under a rotary base of their own.

Settings that a file leaves out are those of transformers' Gemma3TextConfig and of llama.cpp's gemma3.
"""

from __future__ import annotations

import math
from typing import Any

from engine.errors import ModelError
from engine.ops.rope import RopeConfig

PATTERN = 6
"""Of so many layers in a row the last one sees everything."""
LOCAL_THETA, GLOBAL_THETA = 1e4, 1e6
HF_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def gemma_fields(
    hidden: int, sliding: tuple[int, ...], window: int, local: RopeConfig, query_scalar: float
) -> dict[str, Any]:
    """The fields of ModelConfig that every Gemma 3 sets, whichever file it came from."""
    return {
        "qk_norm": True,
        "sandwich": True,
        "gelu": True,
        "embedding_scale": math.sqrt(hidden),
        "query_scale": query_scalar**-0.5,
        "window": window,
        "sliding": sliding,
        "sliding_rope": local,
    }


def every_but_sixth(layers: int, pattern: int = PATTERN) -> tuple[int, ...]:
    """The layers that slide."""
    return tuple(layer for layer in range(layers) if (layer + 1) % pattern)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """One flat dict of a `config.json`, whose text part lies in `text_config` where the model also sees pictures."""
    nested = config.get("text_config") or {}
    own = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    return {**HF_DEFAULTS, **own, **{key: value for key, value in nested.items() if value is not None}}


def layers_that_slide(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """From `layer_types`, or from the pattern that older files name or leave out."""
    kinds = config.get("layer_types")
    if kinds is None:
        return every_but_sixth(layers, config.get("sliding_window_pattern") or PATTERN)
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(
            f"config.json names {len(kinds)} layer_types for {layers} layers: {', '.join(sorted(set(kinds)))}",
            "they are sliding_attention or full_attention, one for each layer",
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def rope_parameters(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The settings of one kind of layer as a model with one kind would have them at its top level."""
    given = config.get("rope_parameters") or {}
    if kind == "sliding_attention":
        own = given.get(kind) or {}
        return {"rope_theta": config.get("rope_local_base_freq") or LOCAL_THETA, "rope_parameters": dict(own)}
    own = given.get(kind) or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta") or GLOBAL_THETA, "rope_parameters": dict(own)}


def refuse_what_differs(config: dict[str, Any]) -> None:
    """Settings of relatives of Gemma 3 (Gemma 2, EmbeddingGemma) that change the computation."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise ModelError(f"this model has {name} {config[name]}, which is not supported", "use a Gemma 3 model")
    act = config.get("hidden_activation")
    if act != "gelu_pytorch_tanh":
        raise ModelError(
            f"activation '{act}' is not supported", "use a Gemma 3 with hidden_activation gelu_pytorch_tanh"
        )
