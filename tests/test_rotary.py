"""Rotations compose and are transformers' own; norms keep their statistics in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.norm import rms_norm
from engine.ops.rope import RopeConfig, Rotary
from tests.models import (
    LINEAR,
    LLAMA3,
    YARN,
    tiny_model,
)


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


@settings(max_examples=60)
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
