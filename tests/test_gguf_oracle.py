"""A GGUF file gives the logits of its safetensors form and those that transformers reads from it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model.load import load_model
from tests.gguf_models import from_gguf, save_gguf
from tests.models import (
    LINEAR,
    LLAMA3,
    TOLERANCE,
    YARN,
    dense_logits,
    furthest,
    random_tokens,
    reference_logits,
    smollm2_file,
    tiny_model,
)

# GGUF. head_dim 128 for qwen3, because transformers doesn't read the head's size of such a file; 256 for gemma3, as
# that is what it divides scores by.
GGUF_MODELS = {
    "llama": ("llama", {}),
    "llama, 9 over 3, tied": (
        "llama",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 288,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 7, "sliding_window": 24, "head_dim": 256, "tie_word_embeddings": True},
    ),
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_file_gives_the_logits_of_its_safetensors_form(name: str, tmp_path: Path) -> None:
    family, changes = GGUF_MODELS[name]
    model = tiny_model(family, **changes)
    path = save_gguf(model, tmp_path / "model.gguf")
    tokens = random_tokens(100)
    ours = dense_logits(load_model(path).transformer, tokens)
    assert furthest(ours, reference_logits(model, tokens)) < TOLERANCE
    assert furthest(ours, reference_logits(from_gguf(path), tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantised_file_gives_the_logits_that_transformers_reads_from_it(
    family: str, kind: str, tmp_path: Path
) -> None:
    path = save_gguf(tiny_model(family), tmp_path / "model.gguf", kind)
    tokens = random_tokens(60)
    ours = dense_logits(load_model(path).transformer, tokens)
    assert furthest(ours, reference_logits(from_gguf(path), tokens)) < TOLERANCE


# (type, bytes of 16-bit scales, counted in the block): random blocks with sane scales, for types gguf only reads
_BLOCKS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
}


def _random_blocks(kind: str, shape: tuple[int, int], seed: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    quant = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quant]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    for at in _BLOCKS[kind]:
        scale = random.uniform(1e-4, 4e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(shape[0], -1), quant


def test_k_quants_give_the_logits_that_transformers_reads_from_them(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    shapes = {
        "attn_q": (256, 256),
        "attn_k": (128, 256),
        "attn_v": (128, 256),
        "attn_output": (256, 256),
        "ffn_gate": (512, 256),
        "ffn_up": (512, 256),
        "ffn_down": (256, 512),
    }
    raw = {
        f"blk.{layer}.{part}.weight": _random_blocks(kind, shape, seed=layer)
        for layer in range(2)
        for kind, (part, shape) in zip(_BLOCKS, shapes.items(), strict=False)
    }
    path = save_gguf(model, tmp_path / "model.gguf", raw=raw)
    tokens = random_tokens(60)
    ours = dense_logits(load_model(path).transformer, tokens)
    assert furthest(ours, reference_logits(from_gguf(path), tokens)) < TOLERANCE


def _llama3_divisors(head_dim: int, scaling: dict[str, float]) -> list[float]:
    """rope_freqs.weight, as llama.cpp's converter computes it."""
    divisors = []
    for power in range(0, head_dim, 2):
        wave = 2 * np.pi * scaling["rope_theta"] ** (power / head_dim)
        turns = scaling["original_max_position_embeddings"] / wave
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return divisors


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "old linear"])
def test_rotary_scaling_in_gguf_metadata_is_honoured(kind: str, tmp_path: Path) -> None:
    """transformers doesn't read it, so the safetensors form is the oracle."""
    parameters, keys = {
        "linear": (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        "old linear": (LINEAR, {"rope.scale_linear": 4.0}),
        "yarn": (
            YARN,
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        ),
        "llama3": (LLAMA3, {"rope_freqs": _llama3_divisors(32, LLAMA3)}),
    }[kind]
    model = tiny_model("llama", rope_parameters=dict(parameters), head_dim=32)
    loaded = load_model(save_gguf(model, tmp_path / "model.gguf", scaling=keys))
    tokens = random_tokens(150)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


def test_biases_of_a_llama_gguf_are_reordered_with_their_rows(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    loaded = load_model(save_gguf(model, tmp_path / "model.gguf"))
    tokens = random_tokens(60)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


@pytest.mark.slow
def test_smollm2_gives_the_logits_that_transformers_reads_from_its_gguf() -> None:
    path = smollm2_file()
    loaded = load_model(path)
    tokens = loaded.tokenizer.encode(
        "The lighthouse keeper counted 17 ships before noon; none of them flew a flag. " * 3
    )
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(from_gguf(path), tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_four_bit_route_errs_no_more_than_bfloat16_does(kind: str, tmp_path: Path) -> None:
    """One row on a CPU is computed from the codes; many rows from the dequantised weights."""
    path = save_gguf(tiny_model("llama", hidden_size=256, head_dim=64), tmp_path / "model.gguf", kind)
    exact = load_model(path).transformer
    half = load_model(path, dtype=torch.bfloat16).transformer
    assert half.weights.layers[0].qkv.four is not None
    assert half.weights.layers[1].down.four is not None
    tokens = torch.tensor(random_tokens(40))

    def alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1) + 0.1 * q

    with torch.inference_mode():
        truth = exact.forward(tokens, alone)
        many = half.forward(tokens, alone).float()
        rows = torch.cat([half.forward(token[None], alone) for token in tokens]).float()
    assert (rows - truth).abs().mean() < 1.5 * (many - truth).abs().mean()
