"""The ranges of what a request may ask of its sampling; light to import, so that a command line refuses at once."""

from __future__ import annotations

from engine.config import SamplingParams
from engine.errors import RequestError


def check_sampling(params: SamplingParams) -> None:
    """RequestError for a value out of its range."""
    if isinstance(params.stop, str):
        raise RequestError("stop is one string", f"give a tuple: stop=({params.stop!r},)")
    for name, value, low, high in (
        ("temperature", params.temperature, 0, 100),
        ("top_p", params.top_p, 0, 1),
        ("min_p", params.min_p, 0, 1),
        ("presence_penalty", params.presence_penalty, -2, 2),
        ("frequency_penalty", params.frequency_penalty, -2, 2),
        ("repetition_penalty", params.repetition_penalty, 0.01, 10),
        ("top_k", params.top_k, 0, 1 << 30),
        ("max_tokens", params.max_tokens if params.max_tokens is not None else 1, 1, 1 << 30),
        ("logprobs", params.logprobs if params.logprobs is not None else 0, 0, 20),
    ):
        if not low <= value <= high:  # NaN fails too
            raise RequestError(f"{name} is {value}", f"{name} must be from {low} to {high}")
    if params.top_p == 0:
        raise RequestError("top_p is 0, which keeps no token", "top_p must be above 0")
