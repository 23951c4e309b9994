"""Tiny random models for the tests, as Hugging Face folders, and the attention that runs them.

The folders are written by transformers itself, so that what reads them is never tested against its own inverse.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers
from torch import Tensor

from engine.errors import ModelError
from engine.model.load import load_model
from engine.model.transformer import Transformer
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from kvring_cli.models import CATALOGUE, models_folder, resolve

VOCAB = 320  # rows of the embedding: more than the tokenizer has tokens, as in real models
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Don't stop: I'll say WE'RE here, they've gone.",
    "def area(r):\n    return 3.14159 * r**2  # round\n",
    "你好，世界！今天是2024年3月5日，气温12.5度。",
    "emoji 👩‍👩‍👧 🎉 and é à ü ñ",
    "   three before, two  between, trailing   ",
    "tabs\t\tand\n\n\nnew lines  \n x\r\n",
    "12345 6789012 1,000,000.00 0x1F",
    "https://example.org/a?b=c&d=%20#e <tag attr='1'/> {json: [1, 2]}",
    "Привет, мир. مرحبا بالعالم. नमस्ते",
    "",
)
CHAT = [
    {"role": "system", "content": "You are  terse."},
    {"role": "user", "content": "What is 12 + 7?\n\nSay it."},
    {"role": "assistant", "content": "19"},
    {"role": "user", "content": "再说一遍。 "},
]
TOLERANCE = 1e-4
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
    "十个人住在城里。 the end",
] * 4


def phantom_folder() -> Path:
    """The phantom that comes with the package."""
    return resolve("phantom")


def smollm2_file() -> Path:
    """The SmolLM2 GGUF from KVRING_SMOLLM2 or the cache; skips where it was never pulled."""
    path = Path(os.environ.get("KVRING_SMOLLM2") or models_folder() / CATALOGUE["smollm2-135m"].file)
    if not path.exists():
        pytest.skip("SmolLM2 is not on this machine: kvring pull smollm2-135m")
    return path


def gemma_file() -> Path:
    """The Gemma 3 270M GGUF from KVRING_GEMMA3 or the cache; skips where it was never pulled."""
    path = Path(os.environ.get("KVRING_GEMMA3") or models_folder() / CATALOGUE["gemma3-270m"].file)
    if not path.exists():
        pytest.skip("Gemma 3 is not on this machine: kvring pull gemma3-270m")
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
                if family == "gemma3":  # whose norms multiply by 1 + weight
                    tensor.sub_(1.0)
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


def dense_logits(transformer: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits of every position, float32 [T, vocab], with plain causal attention over true positions."""
    positions, config = torch.arange(len(tokens)), transformer.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slides = layer in config.sliding
        rope = transformer.sliding_rope if slides else transformer.rope
        group = q.shape[1] // k.shape[1]
        q, k = rope.rotate(q, positions), rope.rotate(k, positions).repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * rope.score_scale
        distance = positions[:, None] - positions[None, :]
        scores.masked_fill_((distance < 0) | (slides & (distance >= config.window)), float("-inf"))
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))

    with torch.inference_mode():
        return transformer.logits(transformer.forward(torch.tensor(tokens), attend))


def reference_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """What transformers says: float32 [T, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference, after making sure that the logits say something."""
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.1, "the reference's logits are flat: nothing would be seen"
    return (ours - theirs).abs().max().item()


def assert_spans(chat: ChatTemplate, tokenizer: Tokenizer, messages: list[dict]) -> None:
    encoded = chat.encode(messages, tokenizer)
    assert len(encoded.spans) == len(messages)
    for message, (start, end) in zip(messages, encoded.spans, strict=True):
        held = tokenizer.decode(encoded.ids[start:end], specials=True)
        assert message["content"].strip() in held
        assert len(held) - len(message["content"]) < 8, "a token or two at the seams, no more"


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert caught.value.message
    assert caught.value.fix, f"no fix beside: {caught.value.message}"
    return caught.value
