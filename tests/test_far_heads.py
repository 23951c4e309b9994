"""The risk: the wrong head groups are scored, or none in some layer; a measurement of another model counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.config import PAGE, EngineConfig
from engine.errors import ConfigError
from engine.kv.page import KVShape
from engine.ops.rope import RopeConfig, Rotary
from engine.recall.digest import Digests, digest_token_bytes
from engine.recall.far_heads import FAR, FarHeads, far_heads, looks_file, write_looks
from engine.recall.score import token_scores
from gates.context import Context
from gates.far_heads import measure
from gates.options import GateOptions
from kvring_cli.app import call

SHARES = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.floats(0, 1))


@given(SHARES, st.floats(0.01, 1))
def test_every_layer_keeps_its_farthest_looking_group_and_no_left_out_one_looks_farther(looks, share):
    for far in (FarHeads.best(looks, share, ""), FarHeads.above(looks, FAR, "")):
        for heads, row in zip(far.by_layer, looks, strict=True):
            assert heads and list(heads) == sorted(set(heads))
            left_out = set(range(looks.shape[1])) - set(heads)
            assert all(row[head] <= row[list(heads)].min() for head in left_out)
    assert FarHeads.best(looks, share, "").count >= max(1, round(share * looks.size))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 100))
def test_a_share_of_random_weights_is_that_share_in_every_layer(layers, kv_heads, percent):
    far = far_heads(percent, layers, kv_heads, name="random:x", digest="random")
    assert {len(heads) for heads in far.by_layer} == {max(1, round(percent / 100 * kv_heads))}
    assert far.first[-1] == far.count == sum(map(len, far.by_layer))


def test_a_measurement_counts_for_its_own_model_only_and_a_share_needs_one(tmp_path):
    looks = np.array([[0.9, 0.01, 0.3], [0.01, 0.02, 0.0]])

    def of(setting, digest):
        return far_heads(setting, 2, 3, name="m", digest=digest, folder=tmp_path)

    write_looks(looks, "a" * 64, "here", tmp_path)
    assert of("auto", "a" * 64).by_layer == ((0, 2), (1,))
    assert of(17, "a" * 64).by_layer == ((0,), (1,))
    assert of("all", "a" * 64).count == of("auto", "b" * 64).count == 6
    with pytest.raises(ConfigError, match="nobody measured"):
        of(50, "b" * 64)
    for damage in ("{", "[]", '{"schema": "kvring.far-heads/1"}', looks_file("a" * 64, tmp_path).read_text()[:-9]):
        looks_file("a" * 64, tmp_path).write_text(damage)
        with pytest.raises(ConfigError, match="no measurement"):
            of("auto", "a" * 64)
    write_looks(looks[:1], "a" * 64, "another shape", tmp_path)
    with pytest.raises(ConfigError, match="no measurement"):
        of("auto", "a" * 64)
    looks_file("a" * 64, tmp_path).unlink()
    looks_file("a" * 64, tmp_path).mkdir()  # as little to be read as another user's file
    assert of("auto", "a" * 64).count == 6


@pytest.mark.parametrize("packed", [False, True])
def test_far_groups_score_as_they_do_among_all(packed):
    shape, pages = KVShape(2, 4, 32, torch.float32), 9
    rope, generator = Rotary(RopeConfig(theta=1e5), 32), torch.Generator().manual_seed(3)
    stored = torch.randn(2, pages, 2, 4, PAGE, 32, generator=generator)
    q, ids = torch.randn(3, 8, 32, generator=generator), np.array([6, 1, 4, 0])
    far = FarHeads(((1, 3), (0, 1, 2, 3)), 4)
    scores = []
    for chosen in (far, None):
        digests = Digests(shape, pages, torch.device("cpu"), rope, chosen)
        digests.packed = packed
        digests.ensure("token", ids, lambda layer, some: stored[layer, some])
        scores.append([token_scores(digests, rope, layer, ids, q, np.arange(4, 0, -1)) for layer in range(2)])
        assert digests.bytes == pages * PAGE * digest_token_bytes(
            "token", shape, "cuda" if packed else "cpu", digests.far
        )
    for layer, heads in enumerate(far.by_layer):
        assert torch.equal(scores[0][layer], scores[1][layer][list(heads)])


def test_groups_that_find_facts_are_measured_to_look_far(phantom):
    looks = measure(Context(EngineConfig(model=""), phantom, GateOptions(), lambda *_: None), 3000)
    assert looks.shape == (4, 2) and looks.max() > 0.9 and (looks > 0).all()


def test_random_weights_are_not_measured(capsys):
    assert call(["heads", "-m", "random:tiny"]) == 1
    assert "random weights look nowhere" in capsys.readouterr().err
