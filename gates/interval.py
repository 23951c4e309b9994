"""Exact statistics of hits: the interval of a rate, and whether one arm really lost to another. Pure."""

from __future__ import annotations

from functools import cache
from math import comb, exp, fsum, lgamma, log

CONFIDENCE = 0.95


def _at_least(hits: int, trials: int, rate: float) -> float:
    """The chance of `hits` or more in `trials` at `rate`; by logarithms, since C(1,030, 515) is beyond a float."""
    if not 0.0 < rate < 1.0:
        return float(hits == 0 or rate >= 1.0)
    ways, yes, no = lgamma(trials + 1), log(rate), log(1.0 - rate)
    return fsum(
        exp(ways - lgamma(k + 1) - lgamma(trials - k + 1) + k * yes + (trials - k) * no)
        for k in range(hits, trials + 1)
    )


@cache
def clopper_pearson(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a rate (Clopper and Pearson 1934), by bisection; (0, 1) without trials."""
    if not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits of {trials} trials")
    tail = (1 - confidence) / 2

    def solve(above: int, chance: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _at_least(above, trials, middle) < chance else (low, middle)
        return (low + high) / 2

    return (solve(hits, tail) if hits else 0.0, solve(hits + 1, 1 - tail) if hits < trials else 1.0)


def sign_test(lost: int, won: int) -> float:
    """One-sided p that so many or more of the discordant pairs are lost where both arms are equally good."""
    return _at_least(lost, lost + won, 0.5)


def fisher(hits: int, trials: int, other_hits: int, other_trials: int) -> float:
    """One-sided p of so few hits beside the other's, where both are equally good (Fisher's exact test)."""
    found, ways = hits + other_hits, comb(trials + other_trials, trials)
    return sum(comb(found, k) * comb(trials + other_trials - found, trials - k) for k in range(hits + 1)) / ways
