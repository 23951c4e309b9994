"""The decoder says what Hugging Face transformers says: float32 logits within 1e-4, for every family and format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.model.load import load_model
from tests.models import (
    LINEAR,
    LLAMA3,
    TOLERANCE,
    VOCAB,
    YARN,
    dense_logits,
    furthest,
    phantom_folder,
    random_tokens,
    reference_logits,
    save_folder,
    tiny_model,
)

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


def test_one_row_at_a_time_equals_all_rows_at_once_in_bfloat16(tmp_path: Path) -> None:
    """The route for one row differs from that for many; their results may differ by rounding only."""
    loaded = load_model(save_folder(tiny_model("llama"), tmp_path), dtype=torch.bfloat16)
    transformer, tokens = loaded.transformer, torch.tensor(random_tokens(20))
    with torch.inference_mode():
        hidden = transformer.forward(tokens, lambda layer, q, k, v: q)
        rows = [transformer.forward(tokens[i : i + 1], lambda layer, q, k, v: q) for i in range(20)]
    assert (hidden.float() - torch.cat(rows).float()).abs().max() < 0.05 * hidden.float().abs().max()


def test_a_tied_model_with_a_head_of_its_own_uses_it(tmp_path: Path) -> None:
    """As transformers does: it unties what the file holds twice with different values."""
    save_folder(tiny_model("llama", tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(same, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = load_model(tmp_path).transformer.weights
    assert weights.head is weights.embed
    own = {**tensors, "lm_head.weight": torch.randn(VOCAB, 64)}
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = random_tokens(20)
    ours = dense_logits(load_model(tmp_path).transformer, tokens)
    assert furthest(ours, reference_logits(model, tokens)) < TOLERANCE
