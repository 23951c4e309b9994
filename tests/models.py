"""Tiny random models for the tests, as Hugging Face folders and as GGUF files, and the attention that runs them.

The folders are written by transformers itself and the GGUF files by the `gguf` package with the row order of
llama.cpp's converter, so that what reads them is never tested against its own inverse.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers
from torch import Tensor

from engine.errors import ModelError
from engine.model.transformer import Transformer
from kvring_cli.models import CATALOGUE, cache_folder, resolve

SHARED_PHANTOM = Path("/work/shared/phantom")
VOCAB = 320  # rows of the embedding: more than the tokenizer has tokens, as in real models
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
    "十个人住在城里。 the end",
] * 4


def phantom_folder() -> Path:
    """The phantom that comes with the package, or the shared first one; skips where there is neither."""
    try:
        return resolve("phantom")
    except ModelError:
        if SHARED_PHANTOM.exists():
            return SHARED_PHANTOM
        pytest.skip("no phantom on this machine")


def smollm2_file() -> Path:
    """The SmolLM2 GGUF from KVRING_SMOLLM2 or the cache; skips where it was never pulled."""
    path = Path(os.environ.get("KVRING_SMOLLM2") or cache_folder() / CATALOGUE["smollm2-135m"].file)
    if not path.exists():
        pytest.skip("SmolLM2 is not on this machine: kvring pull smollm2-135m")
    return path


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of about 300 tokens, special ones first."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def tiny_config(family: str, **changes: object) -> transformers.PretrainedConfig:
    """Two layers, 4 query heads over 2 KV heads of 16, unless changed."""
    settings: dict = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **changes,
    }
    spread = 1.6 / settings["hidden_size"] ** 0.5  # logits of order 1: at the default 0.02 they are all but equal
    return _CLASSES[family][0](initializer_range=spread, **settings)


def tiny_model(family: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A float32 transformers model whose biases and norms are random too: at their defaults a dropped one is unseen."""
    torch.manual_seed(seed)
    model = _CLASSES[family][1](tiny_config(family, **changes)).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    return model


def save_folder(model: transformers.PreTrainedModel, folder: Path, **arguments: object) -> Path:
    """Weights, config, tokenizer and chat template, as transformers saves them."""
    model.save_pretrained(folder, **arguments)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token=SPECIALS[0], eos_token=SPECIALS[2], pad_token=SPECIALS[0]
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def tiny_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """A ready Hugging Face folder."""
    return save_folder(tiny_model(family, seed, **changes), folder)


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
    config, family = model.config, model.config.model_type
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[family],
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
    import json

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


def dense_logits(transformer: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits of every position, float32 [T, vocab], with plain causal attention over true positions."""
    rope = transformer.rope
    positions = torch.arange(len(tokens))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k = rope.rotate(q, positions), rope.rotate(k, positions).repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * rope.score_scale
        scores.masked_fill_(positions[None, :] > positions[:, None], float("-inf"))
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))

    with torch.inference_mode():
        return transformer.logits(transformer.forward(torch.tensor(tokens), attend))


def reference_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """What transformers says: float32 [T, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
