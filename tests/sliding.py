"""A tiny Gemma whose layers slide but one, and sessions over tokens as they are."""

from __future__ import annotations

from functools import cache

import transformers

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from tests.models import random_tokens, tiny_model

WINDOW = 100
SIX = {"num_hidden_layers": 6, "sliding_window": WINDOW, "max_position_embeddings": 4096, "query_pre_attn_scalar": 24}
TOKENS = random_tokens(1500, 290)
"""More than a tail has room for, so that it moves its window together on the way."""


@cache
def oracle() -> transformers.PreTrainedModel:
    """What transformers makes of it; don't change it."""
    return tiny_model("gemma3", num_key_value_heads=1, **SIX)


def admitted(engine: Engine, tokens: list[int], answer: int = 6, **recall: object):
    """A session over these very tokens, whose last 20 are its question."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    prepared = engine.prepare("x", params, RecallParams(**recall))
    prepared.tokens, prepared.query = list(tokens), (len(tokens) - 20, len(tokens))
    return engine.admit(prepared)


def answered(engine: Engine, tokens: list[int], **more: object):
    """Its Result."""
    session = admitted(engine, tokens, **more)
    while not session.done:
        engine.step()
        engine.audit(deep=True)
    *_, result = session.outbox
    if isinstance(result, BaseException):
        raise result
    return result
