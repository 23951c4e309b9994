"""The decoder says what Hugging Face transformers says: float32 logits within 1e-4, for every family and format."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    dense_logits,
    from_gguf,
    phantom_folder,
    random_tokens,
    reference_logits,
    save_folder,
    save_gguf,
    smollm2_file,
    tiny_model,
)
from torch import Tensor

from engine.model.load import load_model
from engine.ops.norm import rms_norm
from engine.ops.rope import RopeConfig, Rotary
from engine.weights.nibbles import read_nibbles

TOLERANCE = 1e-4

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

MODELS = {
    "llama, grouped heads": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one KV head for 3": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "llama, 9 heads over 3": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72},
    ),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, heads wider than hidden": ("llama", {"head_dim": 32, "hidden_size": 40}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with its own factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "llama, yarn with mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4, "truncate": False, "beta_fast": 16}},
    ),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2, tied, 7 heads over 1": (
        "qwen2",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "tie_word_embeddings": True},
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, 5 heads over 5, wide": (
        "qwen3",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "qwen3, biases, linear": ("qwen3", {"attention_bias": True, "rope_parameters": LINEAR}),
}


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference, after making sure that the logits say something."""
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    assert theirs.std() > 0.1, "the reference's logits are flat: nothing would be seen"
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    changes = {key: value for key, value in changes.items() if value is not None}
    model = tiny_model(family, **changes)
    loaded = load_model(save_folder(model, tmp_path))
    tokens = random_tokens(150)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    save_folder(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = random_tokens(60)
    loaded = load_model(tmp_path)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_sixteen_bit_files_load_into_float32(stored: torch.dtype, tmp_path: Path) -> None:
    loaded = load_model(save_folder(tiny_model("llama").to(stored), tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = random_tokens(60)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


def test_settings_of_transformers_4_mean_the_same(tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, where transformers 5 writes `rope_parameters`."""
    import json

    model = tiny_model("llama", rope_parameters=YARN)
    save_folder(model, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    file.write_text(json.dumps(config))
    tokens = random_tokens(60)
    loaded = load_model(tmp_path)
    assert loaded.config.rope.kind == "yarn"
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


def test_the_phantom_gives_the_logits_of_transformers() -> None:
    folder = phantom_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loaded = load_model(folder)
    tokens = loaded.tokenizer.encode("The code of the north gate is 4719.\nThe ferry leaves at six. " * 3)
    assert furthest(dense_logits(loaded.transformer, tokens), reference_logits(model, tokens)) < TOLERANCE


# GGUF. head_dim 128 for qwen3, because transformers doesn't read the head's size of such a file.
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


KIND_OF_CODES = ("Q4_0", "Q4_1", "Q4_K")

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


# Rotary embedding and norm


@pytest.mark.parametrize("parameters", [LINEAR, LLAMA3, YARN, {**YARN, "truncate": False}], ids=lambda p: str(len(p)))
def test_frequencies_are_those_of_transformers(parameters: dict) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_model("llama", rope_parameters=dict(parameters), head_dim=64).config
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    fields = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    original = fields.pop("original_max_position_embeddings", 0)
    ours = Rotary(
        RopeConfig(theta=parameters["rope_theta"], kind=parameters["rope_type"], original_context=original, **fields),
        64,
    )
    assert torch.equal(ours.inv_freq, theirs)
    assert ours.score_scale == pytest.approx(factor**2 / 8)


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(-300_000, 300_000), second=st.integers(-300_000, 300_000), kind=st.sampled_from(["none", "yarn"])
)
def test_two_rotations_are_one_by_their_sum(first: int, second: int, kind: str) -> None:
    rope = Rotary(RopeConfig(theta=1e6, kind=kind, factor=4.0, original_context=4096), 64)
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    twice = rope.rotate(rope.rotate(x, torch.tensor([first])), torch.tensor([second]))
    once = rope.rotate(x, torch.tensor([first + second]))
    assert (twice - once).abs().max() < 1e-5


def test_a_rotation_is_undone_by_its_negative_far_out() -> None:
    rope = Rotary(RopeConfig(theta=2e6), 64)
    x = torch.randn(5, 2, 64)
    positions = torch.tensor([0, 1, 4096, 262_143, 1_000_000])
    assert (rope.rotate(rope.rotate(x, positions), -positions) - x).abs().max() < 1e-5


def test_rotation_keeps_the_dtype_and_computes_in_float32() -> None:
    rope = Rotary(RopeConfig(), 16)
    x = torch.randn(7, 2, 16).bfloat16()
    positions = torch.arange(7)
    rotated = rope.rotate(x, positions)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope.rotate(x.float(), positions).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_keeps_its_statistics_in_float32(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(576, 1e-5).to(dtype)
    theirs.weight.data.uniform_(0.5, 2)
    x = (torch.randn(4, 576) * 30).to(dtype)
    difference = rms_norm(x, theirs.weight.data, 1e-5).float() - theirs(x).float()
    assert difference.abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.07, torch.float16: 0.01}[dtype]


def test_one_row_at_a_time_equals_all_rows_at_once_in_bfloat16(tmp_path: Path) -> None:
    """The route for one row differs from that for many; their results may differ by rounding only."""
    loaded = load_model(save_folder(tiny_model("llama"), tmp_path), dtype=torch.bfloat16)
    transformer, tokens = loaded.transformer, torch.tensor(random_tokens(20))
    with torch.inference_mode():
        hidden = transformer.forward(tokens, lambda layer, q, k, v: q)
        rows = [transformer.forward(tokens[i : i + 1], lambda layer, q, k, v: q) for i in range(20)]
    assert (hidden.float() - torch.cat(rows).float()).abs().max() < 0.05 * hidden.float().abs().max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_four_bit_route_errs_no_more_than_bfloat16_does(kind: str, tmp_path: Path) -> None:
    """One row on a CPU is computed from the codes; many rows from the dequantised weights."""
    path = save_gguf(tiny_model("llama", hidden_size=256, head_dim=64), tmp_path / "model.gguf", kind)
    exact = load_model(path).transformer
    half = load_model(path, dtype=torch.bfloat16).transformer
    assert half.weights.layers[0].qkv_four is not None
    assert half.weights.layers[1].down_four is not None
    tokens = torch.tensor(random_tokens(40))

    def alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1) + 0.1 * q

    with torch.inference_mode():
        truth = exact.forward(tokens, alone)
        many = half.forward(tokens, alone).float()
        rows = torch.cat([half.forward(token[None], alone) for token in tokens]).float()
    assert (rows - truth).abs().mean() < 1.5 * (many - truth).abs().mean()


@pytest.mark.parametrize("kind", KIND_OF_CODES)
def test_codes_of_four_bit_blocks_are_the_weights(kind: str) -> None:
    raw, quant = _random_blocks(kind, (8, 512), seed=1)
    found = read_nibbles(raw, quant)
    weights = (found.codes.reshape(8, -1, 32).astype(np.float32) - 8) * found.scale[..., None] + found.centre[..., None]
    assert np.abs(weights.reshape(8, -1) - gguf.dequantize(raw, quant)).max() < 1e-7
