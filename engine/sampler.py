"""From logits to a token: penalties, then temperature, then top-k, top-p, min-p, in that order; greedy at 0.

All on the device where the logits lie, until one small copy tells the token: a sorted vocabulary of 150,000 costs a CPU
more than the step costs a card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SamplingParams
from engine.errors import EngineError
from engine.limits import check_sampling

COLDEST = 1e-6
"""Below that only the likeliest token has a chance, and a division by it may be one by 0 in float32."""
BELOW_ONE = 1 - 2**-52
"""What a number below 1 is multiplied by, so that its share of a sum stays below the sum when it is rounded."""


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: float | None = None  # of the chosen token, when asked for
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one request; owns its random state and the counts that penalties need."""

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        check_sampling(params)
        self.params = params
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed % (1 << 63))
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
        self._penalties = _Penalties(params, prompt) if any(penalties) else None

    def draw(self, logits: Tensor, forced: int | None = None) -> Sampled:
        """logits [vocab] float32, on any device; EngineError if they are not finite. `forced` is taken instead."""
        if forced is None or self.params.logprobs is not None:
            chosen = self._chosen(logits) if forced is None else torch.tensor(forced, device=logits.device)
            token, total = torch.stack([chosen.double(), logits.sum().double()]).tolist()
            token = int(token)
            if not math.isfinite(total):
                raise EngineError(
                    "the model gave logits that are not numbers", "try --dtype float32; check the model file"
                )
        else:
            token = forced
        if self._penalties is not None:
            self._penalties.count(token)
        if self.params.logprobs is None:
            return Sampled(token)
        logprobs = torch.log_softmax(logits, -1)
        values, ids = logprobs.topk(min(self.params.logprobs, len(logprobs)))
        return Sampled(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _chosen(self, logits: Tensor) -> Tensor:
        """int64 []: the next token."""
        if self._penalties is not None:
            logits = self._penalties.applied(logits)
        if self.params.temperature < COLDEST:
            return logits.argmax()
        shares, ids = candidates(logits, self.params)
        until = shares.cumsum(0, dtype=torch.float64)
        number = float(torch.rand(1, generator=self._random, dtype=torch.float64)) * BELOW_ONE
        place = torch.searchsorted(until, number * until[-1:], right=True).clamp(max=len(until) - 1)
        return (place if ids is None else ids[place])[0]


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Shares float32 [n] of the tokens that may be drawn, not normalised, 0 of some; and their ids int64 [n].

    ids None: every token, in its place.
    """
    ids = None
    if params.top_k:
        logits, ids = logits.topk(min(params.top_k, len(logits)))
    shares = torch.softmax((logits - logits.max()) / params.temperature, -1)  # at most 0: no temperature overflows
    if params.top_p < 1:
        if ids is None:
            shares, ids = _falling(shares, (1 - params.top_p) / (2 * len(shares)))
        behind = shares.cumsum(-1) - shares >= params.top_p
        behind[0] = False  # a top_p that is 0 in float32 drops all else
        shares = shares.masked_fill(behind, 0)
    if params.min_p > 0:
        shares = shares.masked_fill(shares < params.min_p * shares.max(), 0)
    return shares, ids


def _falling(shares: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Sorted, the largest first, and where they stood; a CPU leaves out those below `least`, all of which don't count.

    A GPU would have to wait for their number.
    """
    if shares.is_cuda:
        return shares.sort(descending=True, stable=True)
    kept = (~(shares < least)).nonzero()[:, 0]
    shares, order = shares[kept].sort(descending=True, stable=True)
    return shares, kept[order]


class _Penalties:
    """What was said before, of every token, on the device of the logits."""

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self._params, self._prompt = params, prompt
        self._said: list[int] = []  # and not counted yet
        self._counts: Tensor | None = None  # float32 [vocab]: how often it was drawn
        self._seen: Tensor | None = None  # bool [vocab]: drawn, or in the prompt

    def count(self, token: int) -> None:
        self._said.append(token)

    def applied(self, logits: Tensor) -> Tensor:
        params = self._params
        if self._counts is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt, dtype=torch.int64).to(logits.device)] = True
        said = torch.tensor(self._said, dtype=torch.int64).to(logits.device)
        self._said = []
        self._counts.index_add_(0, said, torch.ones_like(said, dtype=torch.float32))
        self._seen[said] = True
        repeated = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(self._seen, repeated, logits)
        return logits - params.presence_penalty * (self._counts > 0) - params.frequency_penalty * self._counts
