"""The risk: a packed matrix that is not the matrix of its file, in any type, shape or number of rows.

The oracle is `gguf.quants.dequantize` and a product in float32. Kernels run on a GPU where there is one, else under
Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import WEIGHT_TYPES
from engine.model.packing import held_bits
from engine.ops.linear import gated, linear
from engine.ops.norm import swiglu
from engine.ops.packed import TORCH, Kernels, Mixed, Packed, multiplied, pack, pack_blocks, stack, takes_four_bit
from engine.ops.packed_kernels import disagreement
from engine.weights.quant import TYPES, QuantType
from engine.weights.quantise import quantise, quantisers
from engine.weights.random_parts import random_parts
from tests.blocks import DEVICE, below_three, furthest, random_blocks, values


def packed(raw: np.ndarray, kind: QuantType, dtype: torch.dtype = torch.float32, kernels: Kernels = TORCH) -> Packed:
    of_planes = kernels is not TORCH  # under the interpreter too, where a CPU has another form
    return pack_blocks(torch.from_numpy(raw), kind, dtype, DEVICE, kernels, multiply=not of_planes)


def triton_kernels() -> Kernels:
    pytest.importorskip("triton", reason="triton has no wheel here")
    from engine.ops.triton_packed import TRITON

    return TRITON


def tensor_core_kernels() -> Kernels:
    triton_kernels()
    from engine.ops.triton_packed import TENSOR_CORES

    return TENSOR_CORES


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
    raw = below_three(raw, kind) if name == "TQ2_0" else raw
    matrix = packed(raw, kind, dtype, tensor_core_kernels())
    x = torch.randn(count, matrix.columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.full((count, rows + 3), torch.nan, device=DEVICE)
    matrix.kernels.multiply(x.to(DEVICE), matrix, out[:, 2 : 2 + rows])
    terms = x.float().abs() @ values(raw, kind).abs().T
    wanted = x.float() @ values(raw, kind).T
    assert float((out[:, 2 : 2 + rows].cpu() - wanted).abs().max()) <= 2e-4 * float(terms.max())
    assert out[:, :2].isnan().all() and out[:, 2 + rows :].isnan().all()


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=2)
@given(
    ffn=st.integers(1, 35),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_gated_product_is_silu_of_its_upper_half_times_its_lower(name, ffn, blocks, dtype, seed) -> None:
    kind = TYPES[name]
    raw = random_blocks(kind, 2 * ffn, blocks if kind.block == 32 else 1 + blocks // 5, seed)
    matrix = packed(raw, kind, dtype, tensor_core_kernels())
    x = torch.randn(1, matrix.columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.full((1, ffn + 3), torch.nan, device=DEVICE)
    matrix.kernels.gated(x.to(DEVICE), matrix, out[:, 2 : 2 + ffn])
    gate, up = (x.float() @ values(raw, kind).T).chunk(2, 1)
    error = 2e-4 * float((x.float().abs() @ values(raw, kind).abs().T).max())
    allowed = error * (1.1 * up.abs() + gate.abs() + error) + 1e-5 * (gate * up).abs()
    assert ((out[:, 2 : 2 + ffn].cpu() - swiglu(torch.cat([gate, up], 1))).abs() <= allowed).all()
    assert out[:, :2].isnan().all() and out[:, 2 + ffn :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q4_K", "TQ2_0"])
def test_one_row_is_gated_in_its_product_as_it_would_be_after_it(name: str, dtype: torch.dtype) -> None:
    """Rounded twice, too. Several rows, and those with a bias, have their gate after the product."""
    from engine.ops.triton_layers import swiglu as triton_swiglu

    def unwanted(*_) -> None:
        raise AssertionError

    kernels = tensor_core_kernels()
    matrix = packed(random_blocks(TYPES[name], 2 * 35, 2, 4), TYPES[name], dtype, kernels)
    x = 0.05 * torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    x = x.to(DEVICE, dtype)
    bias = torch.randn(70).to(DEVICE, dtype)
    fused = replace(matrix, kernels=replace(kernels, multiply=unwanted))
    plain = replace(matrix, kernels=replace(kernels, gated=unwanted))
    assert torch.equal(gated(x[:1], fused, None, unwanted), triton_swiglu(linear(x[:1], matrix)))
    for rows, more in ((1, bias), (3, None)):
        assert torch.equal(gated(x[:rows], plain, more, triton_swiglu), triton_swiglu(linear(x[:rows], matrix, more)))


def test_a_ternary_file_with_a_fourth_code_is_multiplied_as_it_stands() -> None:
    kind = TYPES["TQ2_0"]
    whole = below_three(random_blocks(kind, 22, 2, 8), kind)
    damaged = whole.copy()
    damaged[17, 40] |= 0b1100
    pieces = [packed(raw, kind, torch.float16, tensor_core_kernels()) for raw in (whole, damaged)]
    assert [piece.ternary for piece in pieces] == [True, False]
    raws = [whole, damaged, np.concatenate([whole, damaged])]
    for raw, matrix in zip(raws, [*pieces, stack(pieces)], strict=True):
        for count in (1, 3):
            x = torch.randn(count, 512, generator=torch.Generator().manual_seed(count)).half()
            wanted = x.float() @ values(raw, kind).T
            assert furthest(linear(x.to(DEVICE), matrix), wanted) < 1e-3
        out = torch.empty(1, len(raw) // 2, device=DEVICE)
        matrix.kernels.gated(x[:1].to(DEVICE), matrix, out)
        assert furthest(out, swiglu(wanted[:1])) < 1e-3


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
    kernels = tensor_core_kernels()
    assert disagreement(name, kernels, DEVICE, torch.float16) == ""
    wrong = replace(kernels, gated=lambda x, matrix, out: kernels.multiply(x, matrix.part(slice(len(out[0]))), out))
    assert "differ" in disagreement(name, wrong, DEVICE, torch.float16)


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
