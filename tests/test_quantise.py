"""The risk: a weight that is quantised here loses more than its type must, or in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, ModelError
from engine.model.load import load_model, open_model, quantised
from engine.ops.packed import Packed
from engine.weights.quant import TYPES
from engine.weights.quantise import quantise
from engine.weights.quantise_k import BITS
from tests.blocks import furthest, values
from tests.gguf_models import save_gguf
from tests.models import save_folder, tiny_model

DRAWN = {
    "normal": lambda random, size: random.normal(size=size),
    "heavy": lambda random, size: random.standard_t(3, size),
    "shifted": lambda random, size: random.normal(size=size) + 1,
    "negative": lambda random, size: -np.abs(random.normal(size=size)),
    "sparse": lambda random, size: random.normal(size=size) * (random.random(size) < 0.1),
}
ODD = DRAWN | {
    "alike": lambda random, size: random.uniform(0.1, 1) * (1 + 1e-3 * random.normal(size=size)),
    "one value": lambda random, size: np.full(size, random.uniform(-1, 1)),
    "unequal groups": lambda random, size: (
        random.normal(size=size) * np.repeat(2.0 ** -random.integers(0, 12, (size[0], size[1] // 32)), 32, axis=1)
    ),
}


def lost(x: np.ndarray, name: str) -> float:
    """By gguf's reading of it: the squared error, of large weights more."""
    weight = np.abs(x) + np.sqrt((x**2).mean())
    return float((weight * (values(quantise(x, name), TYPES[name]).numpy() - x) ** 2).sum())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(DRAWN)),
    st.integers(-12, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_k_types_never_lose_much_more_than_types_with_scales_of_16_bits(shape, size, rows, blocks, seed) -> None:
    x = (DRAWN[shape](np.random.default_rng(seed), (rows, 256 * blocks)) * 2.0**size).astype(np.float32)
    assert lost(x, "Q4_K") <= 5 * lost(x, "Q4_1") and lost(x, "Q5_K") <= 5 * lost(x, "Q5_1")


@pytest.mark.parametrize("shape", sorted(DRAWN))
def test_k_types_lose_less_than_types_of_half_a_bit_more(shape: str) -> None:
    x = DRAWN[shape](np.random.default_rng(0), (64, 2048)).astype(np.float32)
    assert lost(x, "Q4_K") < lost(x, "Q4_1") and lost(x, "Q5_K") < lost(x, "Q5_1")


@pytest.mark.parametrize("name", BITS)
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ODD)), st.integers(-24, 12), st.integers(0, 2**31))
def test_no_weight_is_further_off_than_a_step_of_its_group_and_the_rounding_of_scales(name, shape, size, seed) -> None:
    x = (ODD[shape](np.random.default_rng(seed), (4, 512)) * 2.0**size).astype(np.float32)
    off = np.abs(values(quantise(x, name), TYPES[name]).numpy() - x).reshape(-1, 8, 32)
    groups, top = x.reshape(-1, 8, 32), 2 ** BITS[name] - 1
    span = groups.max(-1).clip(min=0) - groups.min(-1).clip(max=0)
    rounded = 0.02 * span.max(-1, keepdims=True) + 2**-24 * top  # to 6 bits, and to the smallest float16 numbers
    assert (off.max(-1) <= span / top + rounded).all()
    assert (off.max(-1) <= 1.5 * np.abs(groups).max(-1) + 0.02 * span.max(-1)[:, None]).all()


@pytest.mark.parametrize("name", BITS)
def test_k_types_keep_what_has_one_value(name: str) -> None:
    for value in (0.0, -0.3, 0.3, 1e4, -1e4):
        x = np.full((2, 512), value, np.float32)
        assert np.abs(values(quantise(x, name), TYPES[name]).numpy() - x).max() <= 1e-3 * abs(value)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_a_folder_is_quantised_while_it_is_loaded(name: str, tmp_path: Path) -> None:
    folder = save_folder(tiny_model("qwen3", hidden_size=256, intermediate_size=512, head_dim=64), tmp_path / "model")
    loaded = load_model(folder, weights=name.lower())
    plain = load_model(folder)
    down = loaded.transformer.weights.layers[0].down
    original = plain.transformer.weights.layers[0].down
    assert torch.equal(down.dequantise(), values(quantise(original.numpy(), name), TYPES[name]))
    assert loaded.digest != plain.digest
    assert loaded.transformer.weight_bytes < 0.3 * plain.transformer.weight_bytes


@pytest.mark.parametrize(("wrong", "name"), [(np.nan, "q4_k"), (-np.inf, "q8_0"), (1e5, "q5_k")])
def test_a_weight_that_no_scale_can_hold_is_refused(wrong: float, name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = wrong
    with pytest.raises(ModelError, match=r"down_proj.*float16"):
        load_model(save_folder(model, tmp_path / "model"), weights=name)


def test_matrices_that_do_not_divide_into_blocks_are_named(tmp_path: Path) -> None:
    folder = save_folder(tiny_model("llama", hidden_size=48, head_dim=16, intermediate_size=64), tmp_path / "model")
    loaded = load_model(folder, weights="q8_0")
    assert isinstance(loaded.transformer.weights.layers[0].gate_up, torch.Tensor)
    assert isinstance(loaded.transformer.weights.layers[0].down, Packed)
    assert any("no whole blocks of Q8_0" in note for note in loaded.notes)


def test_only_a_model_trained_to_be_ternary_becomes_so(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    with pytest.raises(ModelError, match="not trained to be ternary"):
        load_model(save_folder(model, tmp_path / "plain"), weights="tq2_0")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "proj" in name:
                tensor.copy_(0.03 * torch.randint(-1, 2, tensor.shape))
    loaded = load_model(save_folder(model, tmp_path / "ternary"), weights="tq2_0")
    up = loaded.transformer.weights.layers[1].gate_up
    wanted = torch.cat([model.model.layers[1].mlp.gate_proj.weight, model.model.layers[1].mlp.up_proj.weight])
    assert furthest(up.dequantise(), wanted.detach()) < 1e-3


def test_what_cannot_be_quantised_to_is_refused_with_what_can(tmp_path: Path) -> None:
    folder = save_folder(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(ConfigError, match="nothing here can quantise to it") as refused:
        load_model(folder, weights="iq4_xs")
    assert "q8_0" in refused.value.fix and "llama-quantize" in refused.value.fix
    with pytest.raises(ConfigError, match="is what it is already"):
        quantised(open_model(save_gguf(tiny_model("llama"), tmp_path / "m.gguf", "Q5_0")), "q8_0")
