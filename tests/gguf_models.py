"""The tiny models as GGUF files, in the row order of llama.cpp's converter, and as transformers reads those."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers

from tests.models import SPECIALS, TEMPLATE, tiny_tokenizer


def save_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    kind: str = "F32",
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    scaling: dict[str, object] | None = None,
    pre: str = "gpt-2",
) -> Path:
    """A GGUF file as llama.cpp's converter writes it; matrices in `kind`, vectors in F32.

    `raw` replaces tensors by bytes of a type that `gguf` can't quantise to. `scaling` adds rope keys, and under
    "rope_freqs" the tensor of that name.
    """
    config, family = model.config, model.config.model_type.removesuffix("_text")
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_byte_level(writer, tiny_tokenizer(), config.vocab_size, pre)
    for key, value in (scaling or {}).items():
        if key == "rope_freqs":
            writer.add_tensor("rope_freqs.weight", np.asarray(value, np.float32))
        else:
            {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](
                f"{family}.{key}", value
            )
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[family.upper()],
        config.num_hidden_layers,
    )
    quant = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and ".self_attn.q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if family == "llama" and ".self_attn.k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if raw and target in raw:
            writer.add_tensor(target, raw[target][0], raw_dtype=raw[target][1])
        elif values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_byte_level(writer: gguf.GGUFWriter, backend: tokenizers.Tokenizer, rows: int, pre: str) -> None:
    """The metadata of a byte-level BPE, padded to the embedding's rows as the converter pads it."""
    spec = json.loads(backend.to_str())
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    for index in range(len(tokens), rows):
        tokens.append(f"[PAD{index}]")
        kinds.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def from_gguf(path: Path) -> transformers.PreTrainedModel:
    """The GGUF file as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
