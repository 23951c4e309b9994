"""The risk: a packed matrix that is not the matrix of its file, in any type, shape or number of rows.

The oracle is `gguf.quants.dequantize` and a product in float32. Kernels run on a GPU where there is one, else under
Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import WEIGHT_TYPES, EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError, ModelError
from engine.model.load import load_model, open_model, quantised
from engine.model.packing import held_bits, held_bytes
from engine.ops.linear import linear
from engine.ops.packed import TORCH, Kernels, Mixed, Packed, multiplied, pack, pack_blocks, stack, takes_four_bit
from engine.ops.packed_kernels import disagreement
from engine.weights.quant import TYPES, QuantType
from engine.weights.quantise import quantise, quantisers
from engine.weights.quantise_k import BITS
from engine.weights.random_parts import random_parts
from tests.gguf_models import save_gguf
from tests.models import save_folder, smollm2_file, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(
    ("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)
)
"""Where a block's float16 numbers lie, if not at its start alone."""


def random_blocks(kind: QuantType, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes at all, save for the scales: every combination of codes is one that a file may hold."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    for at in FLOATS.get(kind.name, (0,)):
        raw[..., at : at + 2] = random.uniform(0.01, 0.1, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def values(raw: np.ndarray, kind: QuantType) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))


def packed(raw: np.ndarray, kind: QuantType, dtype: torch.dtype = torch.float32, kernels: Kernels = TORCH) -> Packed:
    return pack_blocks(torch.from_numpy(raw), kind, dtype, DEVICE, kernels)


def triton_kernels() -> Kernels:
    pytest.importorskip("triton", reason="triton has no wheel here")
    from engine.ops.triton_packed import TRITON

    return TRITON


def tensor_core_kernels() -> Kernels:
    triton_kernels()
    from engine.ops.triton_packed import TENSOR_CORES

    return TENSOR_CORES


def furthest(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float().cpu() - wanted).abs().max() / wanted.abs().max())


def test_the_types_that_may_be_named_are_those_that_are_described() -> None:
    assert {name.upper() for name in WEIGHT_TYPES} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_no_value_of_a_file_is_changed_by_packing_it(name: str) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, 5, 3, seed=1)
    matrix = packed(raw, kind)
    assert torch.equal(matrix.dequantise().cpu(), values(raw, kind))
    assert matrix.nbytes - (matrix.table.nbytes if kind.table else 0) == matrix.rows * matrix.columns * kind.bits / 8
    wider = {"IQ3_S": 1.26, "TQ1_0": 1.23, "Q3_K": 1.04}.get(name, 1.03)
    assert kind.bits <= wider * kind.file_bits


@pytest.mark.parametrize("name", quantisers())
def test_a_types_own_quantiser_is_read_too(name: str) -> None:
    kind = TYPES[name.upper()]
    raw = quantise(np.random.default_rng(0).standard_normal((6, 2 * kind.block)).astype(np.float32), kind.name)
    assert torch.equal(packed(raw, kind).dequantise().cpu(), values(raw, kind))


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=3)
@given(
    rows=st.integers(1, 21),
    blocks=st.integers(1, 3),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_dequantised_matrix(name, rows, blocks, count, dtype, seed) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, rows, blocks, seed)
    x = torch.randn(count, blocks * kind.block, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wanted = x.float() @ values(raw, kind).T
    for kernels in (TORCH, triton_kernels()):
        got = linear(x.to(DEVICE), packed(raw, kind, dtype, kernels))
        terms = x.float().abs() @ values(raw, kind).abs().T
        allowed = {torch.float32: 3e-5, torch.bfloat16: 4e-3}[dtype] * float(terms.max())
        assert float((got.float().cpu() - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=3)
@given(
    rows=st.integers(1, 35),
    blocks=st.integers(1, 9),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_on_tensor_cores_are_exact_sums_of_what_they_are_given(name, rows, blocks, count, dtype, seed) -> None:
    """Tails of rows, of chunks and of pairs of x; float32 is written, so that nothing hides behind its rounding."""
    kind = TYPES[name]
    raw = random_blocks(kind, rows, blocks if kind.block == 32 else 1 + blocks // 5, seed)
    matrix = packed(raw, kind, dtype, tensor_core_kernels())
    x = torch.randn(count, matrix.columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.full((count, rows + 3), torch.nan, device=DEVICE)
    matrix.kernels.multiply(x.to(DEVICE), matrix, out[:, 2 : 2 + rows])
    terms = x.float().abs() @ values(raw, kind).abs().T
    wanted = x.float() @ values(raw, kind).T
    assert float((out[:, 2 : 2 + rows].cpu() - wanted).abs().max()) <= 2e-4 * float(terms.max())
    assert out[:, :2].isnan().all() and out[:, 2 + rows :].isnan().all()


@pytest.mark.parametrize("name", TYPES)
def test_many_rows_and_look_ups_are_those_of_the_dequantised_matrix(name: str) -> None:
    kind, kernels = TYPES[name], triton_kernels()
    raw = random_blocks(kind, 9, 2, seed=3)
    matrix, wanted = packed(raw, kind, kernels=kernels), values(raw, kind)
    index = torch.tensor([8, 0, 8], device=DEVICE)
    assert furthest(kernels.rows_of(matrix, index), wanted[[8, 0, 8]]) < 1e-6
    x = torch.randn(11, 2 * kind.block)
    assert furthest(linear(x.to(DEVICE), matrix), x @ wanted.T) < 1e-4


@pytest.mark.parametrize("name", TYPES)
def test_random_matrices_have_the_spread_that_was_asked_for(name: str) -> None:
    kind = TYPES[name]
    random = torch.Generator().manual_seed(0)
    weights = pack(random_parts(kind, 64, 1024, 0.02, random), kind, torch.float32, TORCH).dequantise()
    assert abs(float(weights.mean())) < 5e-3 and float(weights.std()) == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("name", ["Q6_K", "TQ2_0"])
def test_kernels_that_disagree_are_found_before_they_serve(name: str) -> None:
    assert disagreement(name, triton_kernels(), DEVICE, torch.float32) == ""
    wrong = Kernels(lambda x, matrix, out: out.zero_(), TORCH.rows_of)
    assert "differ" in disagreement(name, wrong, DEVICE, torch.float32)


def test_parts_of_several_types_are_one_matrix() -> None:
    kinds = [TYPES["Q4_K"], TYPES["Q6_K"]]
    raws = [random_blocks(kind, rows, 1, 5) for kind, rows in zip(kinds, (7, 4), strict=True)]
    plain = torch.randn(3, 256)
    pieces = [packed(raw, kind) for raw, kind in zip(raws, kinds, strict=True)]
    mixed = Mixed((stack([pieces[0], pieces[0]]), pieces[1], plain.to(DEVICE)))
    assert mixed.shape == (21, 256)
    x, bias = torch.randn(2, 256), torch.randn(21)
    whole = torch.cat([values(raws[0], kinds[0]), values(raws[0], kinds[0]), values(raws[1], kinds[1]), plain])
    assert furthest(linear(x.to(DEVICE), mixed, bias.to(DEVICE)), x @ whole.T + bias) < 1e-5


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if takes_four_bit(kind, torch.bfloat16)])
def test_the_cpus_four_bit_form_errs_as_rounding_to_bfloat16_does_and_keeps_every_value(name: str) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, 192, 2, 7)
    plain = pack_blocks(torch.from_numpy(raw), kind, torch.bfloat16, torch.device("cpu"))
    matrix = multiplied(plain)
    assert matrix.four is not None and not matrix.planes
    assert matrix.nbytes * 8 == pytest.approx(held_bits(kind, "cpu", torch.bfloat16) * matrix.rows * matrix.columns)
    assert torch.equal(matrix.dequantise(), plain.dequantise())
    index = torch.tensor([191, 0, 77, 64])
    assert torch.equal(TORCH.rows_of(matrix, index), plain.dequantise()[index])
    for count in (1, 40, 100):
        x = torch.randn(count, matrix.columns, generator=torch.Generator().manual_seed(count)).bfloat16()
        wanted = x.float() @ values(raw, kind).T
        assert furthest(linear(x, matrix), wanted) < 8e-3  # 2^-9 for each: scales, weights, two sums


# --- models -----------------------------------------


def mixed_file(path: Path) -> Path:
    """Q5_0 with V in other types, as files for small cards mix them."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    raw = {
        f"blk.{layer}.attn_v.weight": (random_blocks(TYPES[name], 128, 1, layer), gguf.GGMLQuantizationType[name])
        for layer, name in enumerate(("Q6_K", "IQ4_XS"))
    }
    return save_gguf(model, path, "Q5_0", raw)


def test_a_model_of_packed_weights_is_the_dequantised_one(tmp_path: Path) -> None:
    path = mixed_file(tmp_path / "model.gguf")
    dense, packed_model = (load_model(path, DEVICE, weights=form) for form in ("dense", "packed"))
    assert isinstance(packed_model.transformer.weights.layers[0].qkv, Mixed)
    engines = [
        Engine.load(EngineConfig(model="", max_context=256, prefill_chunk=64), model) for model in (dense, packed_model)
    ]
    tokens = list(range(3, 103))
    try:
        first, second = (engine.logits(tokens) for engine in engines)
        assert float((first - second).abs().max() / first.abs().max()) < 1e-4
    finally:
        for engine in engines:
            engine.audit()
            engine.close()
    source = open_model(path).source
    for loaded, types in ((dense, ()), (packed_model, TYPES)):
        expected = held_bytes(source, source.shapes, types, DEVICE.type, torch.float32)
        assert loaded.transformer.weight_bytes == pytest.approx(expected, rel=1e-3)


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
        quantised(open_model(mixed_file(tmp_path / "m.gguf")), "q8_0")


def smollm2(dtype: str, form: str) -> Engine:
    config = EngineConfig(model=str(smollm2_file()), device="cpu", dtype=dtype, weights=form, max_context=1024)
    return Engine.load(config)


def test_smollm2_packed_is_as_near_to_float32_as_dequantised_weights_in_bfloat16_are() -> None:
    """Both round; so in bfloat16 a near tie may tip either way, and greedy answers part there sooner or later."""
    text = "The keeper counted 17 ships before noon; none of them flew a flag. They came from the south, one by one."
    found = []
    for dtype, form in (("float32", "dense"), ("bfloat16", "dense"), ("bfloat16", "packed")):
        engine = smollm2(dtype, form)
        found.append(engine.logits(engine.model.tokenizer.encode(text)))
        engine.audit()
        engine.close()
    exact, dense, packed_logits = found
    error, usual = (float((logits - exact).pow(2).mean().sqrt()) for logits in (packed_logits, dense))
    assert error < 1.2 * usual
    assert (packed_logits.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.95
    file = smollm2_file().stat().st_size
    assert engine.model.transformer.weight_bytes < 1.25 * file


@pytest.mark.slow
def test_smollm2_says_the_same_packed_and_dequantised() -> None:
    """In float32, where both forms have the file's very values. KVRING_TOKENS=200 takes minutes: see the README."""
    tokens = int(os.environ.get("KVRING_TOKENS", 32))
    texts = []
    for form in ("dense", "packed"):
        engine = smollm2("float32", form)
        question = [{"role": "user", "content": "Count from one to fifty in words."}]
        texts.append(engine.complete(engine.prepare(question, SamplingParams(max_tokens=tokens, ignore_eos=True))).text)
        engine.audit()
        engine.close()
    assert texts[0] == texts[1]
