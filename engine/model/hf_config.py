"""ModelConfig from a Hugging Face `config.json` (and `generation_config.json`), of transformers 4 or 5."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError
from engine.model import gemma
from engine.model.config import ModelConfig
from engine.ops.rope import KINDS, RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_THETA = 10000.0


def from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Read the two files' dicts. Raises ModelError for what this engine doesn't compute, naming what it does."""
    family = _family(config)
    if family == "gemma3":
        config = gemma.flatten(config)
    _refuse_what_differs(config, family)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    context = _whole(config, "max_position_embeddings")
    own: dict[str, Any] = {"qk_norm": family == "qwen3"}
    rope_source = config
    if family == "gemma3":
        own, rope_source = _gemma(config), gemma.rope_parameters(config, "full_attention")
    rope = _rope(rope_source, context)
    stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
        vocab=_whole(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        trained_context=max(context, stretched),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        eos=_token_ids(config.get("eos_token_id"), (generation or {}).get("eos_token_id")),
        bos=config.get("bos_token_id"),
        **own,
    )


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    layers = _whole(config, "num_hidden_layers")
    local = _rope(gemma.rope_parameters(config, "sliding_attention"), _whole(config, "max_position_embeddings"))
    sliding, window = gemma.layers_that_slide(config, layers), _whole(config, "sliding_window")
    scalar = float(config["query_pre_attn_scalar"])
    return gemma.gemma_fields(_whole(config, "hidden_size"), sliding, window, local, scalar)


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ModelError(f"this model is a {found}", f"architectures that work: {', '.join(ARCHITECTURES)}")


def _refuse_what_differs(config: dict[str, Any], family: str) -> None:
    """Settings that change the computation in ways that this engine doesn't follow."""
    act = config.get("hidden_act", "silu") if family != "gemma3" else "silu"
    if act not in ("silu", "swish"):
        raise ModelError(f"activation '{act}' is not supported", "use a model with hidden_act silu")
    sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    if family == "gemma3":
        gemma.refuse_what_differs(config)
    elif sliding:
        raise ModelError(
            "this model's layers use a sliding window, which the ring would fight",
            "set use_sliding_window to false in config.json if the model was trained to work without it",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"the folder holds weights quantised by '{method}'",
            "use the 16-bit safetensors, or a GGUF file of the model",
        )


def _rope(config: dict[str, Any], context: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` beside `rope_scaling` (with `type` before 4.43)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta") or config.get("rope_theta") or _THETA
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("this model rotates only a part of each head", "use a model with partial_rotary_factor 1")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind not in KINDS:
        works = ", ".join(("default", *KINDS[1:]))
        raise ModelError(f"rotary scaling '{kind}' is not supported", f"rotary scalings that work: {works}")
    original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = context / original
    if factor is None:
        raise ModelError(f"rotary scaling '{kind}' has no factor", "add rope_scaling.factor to config.json")
    fields: dict[str, Any] = {"theta": float(theta), "kind": kind, "factor": float(factor)}
    if kind in ("llama3", "yarn"):
        fields["original_context"] = int(original or context)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if scaling.get(name) is None:
                raise ModelError(f"rotary scaling 'llama3' has no {name}", f"add rope_scaling.{name} to config.json")
            fields[name] = float(scaling[name])
    if kind == "yarn":
        fields["beta_fast"] = float(scaling.get("beta_fast") or 32)
        fields["beta_slow"] = float(scaling.get("beta_slow") or 1)
        fields["truncate"] = bool(scaling.get("truncate", True))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            fields[name] = scaling.get(name)
    return RopeConfig(**fields)


def _whole(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config.json has no whole number '{name}' (found {value!r})", "download config.json again")
    return value


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """The ids of all arguments together, each once, in order."""
    ids: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                ids[int(token)] = None
    return tuple(ids)
