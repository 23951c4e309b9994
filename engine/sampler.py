"""From logits to a token: penalties, then temperature, then top-k, top-p, min-p, in that order; greedy at 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import SamplingParams
from engine.errors import EngineError
from engine.limits import check_sampling

COLDEST = 1e-6
"""Below that only the likeliest token has a chance, and a division by it may be one by 0 in float32."""


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
        self._prompt = set(prompt) if params.repetition_penalty != 1 else set()
        self._counts: dict[int, int] = {}

    def draw(self, logits: Tensor, forced: int | None = None) -> Sampled:
        """logits [vocab] float32, on any device; EngineError if they are not finite. `forced` is taken instead."""
        if forced is not None and self.params.logprobs is None:
            return self._drawn(forced, True)
        if logits.is_cuda and self._plain:
            token, finite = torch.stack([logits.argmax(), torch.isfinite(logits).all().long()]).tolist()
            return self._drawn(token, bool(finite))
        logits = logits.cpu()
        self._check(bool(torch.isfinite(logits).all()))
        adjusted = self._penalise(logits)
        if forced is not None:
            token = forced
        elif self.params.temperature < COLDEST:
            token = int(adjusted.argmax())
        else:
            token = int(torch.multinomial(self._probabilities(adjusted), 1, generator=self._random))
        if self.params.logprobs is None:
            return self._drawn(token, True)
        self._drawn(token, True)
        logprobs = torch.log_softmax(logits, -1)
        values, ids = logprobs.topk(min(self.params.logprobs, len(logprobs)))
        return Sampled(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    @property
    def _plain(self) -> bool:
        """Greedy, and nothing of the logits is needed but the largest: they need not leave the device."""
        params = self.params
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
        return params.temperature == 0 and params.logprobs is None and not any(penalties)

    def _drawn(self, token: int, finite: bool) -> Sampled:
        self._check(finite)
        self._counts[token] = self._counts.get(token, 0) + 1
        return Sampled(token)

    @staticmethod
    def _check(finite: bool) -> None:
        if not finite:
            raise EngineError("the model gave logits that are not numbers", "try --dtype float32; check the model file")

    def _penalise(self, logits: Tensor) -> Tensor:
        params = self.params
        if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
            return logits
        logits = logits.clone()
        seen = torch.tensor(sorted(self._prompt | set(self._counts)), dtype=torch.int64)
        if params.repetition_penalty != 1 and len(seen):
            value = logits[seen]
            logits[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
        for token, count in self._counts.items():
            logits[token] -= params.presence_penalty + params.frequency_penalty * count
        return logits

    def _probabilities(self, logits: Tensor) -> Tensor:
        params = self.params
        logits = (logits - logits.max()) / params.temperature  # at most 0: no temperature overflows
        if params.top_k:
            logits = logits.masked_fill(logits < logits.topk(min(params.top_k, len(logits))).values[-1], -torch.inf)
        probabilities = torch.softmax(logits, -1)
        if params.top_p < 1:
            ordered, index = probabilities.sort(descending=True)
            behind = ordered.cumsum(-1) - ordered >= params.top_p
            behind[0] = False  # a top_p that is 0 in float32 drops all else
            probabilities[index[behind]] = 0
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        return probabilities
