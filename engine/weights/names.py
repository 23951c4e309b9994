"""What each part of a decoder is called in a Hugging Face file and in a GGUF file.

`{}` is the layer's number. A part that a model doesn't have (a bias, a norm of q) has a name all the same; the loader
asks only for what the config says is there.
"""

from __future__ import annotations

from collections.abc import Iterable

HF_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
HF_LAYER = {
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "gate_bias": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{}.mlp.up_proj.bias",
    "down_bias": "model.layers.{}.mlp.down_proj.bias",
}

GEMMA_LAYER = {
    **HF_LAYER,
    "attention_out_norm": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "mlp_out_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
PICTURES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Starts of names of what a model that sees pictures has beside its language model."""
LANGUAGE = ("language_model.model.", "model.language_model.")
"""What its language model's names begin with instead of `model.`, in files of transformers 4 and 5."""

GGUF_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
GGUF_LAYER = {
    "attention_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
    "attention_out_norm": "blk.{}.post_attention_norm.weight",
    "mlp_out_norm": "blk.{}.post_ffw_norm.weight",
}

HF_DERIVED = ("rotary_emb.inv_freq",)  # ends of names that old checkpoints carry and that are computed, not loaded
GGUF_DERIVED = ("rope_freqs.weight",)  # read with the config


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""A layer's parts that are multiplied with."""


def gemma_tables(stored: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Top and layer names of a Gemma, whose language model may lie inside a model that sees pictures."""
    stored = list(stored)
    start = next((start for start in LANGUAGE if any(name.startswith(start) for name in stored)), "model.")

    def moved(name: str) -> str:
        return start + name.removeprefix("model.") if name.startswith("model.") else name

    head = "language_model.lm_head.weight"
    top = {part: moved(name) for part, name in HF_TOP.items()}
    return {**top, "head": head} if head in stored else top, {part: moved(name) for part, name in GEMMA_LAYER.items()}


def layer_names(table: dict[str, str], layer: int) -> dict[str, str]:
    """One layer's part -> tensor name."""
    return {part: name.format(layer) for part, name in table.items()}
