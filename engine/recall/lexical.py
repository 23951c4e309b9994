"""Lexical recall: which pages share rare token runs with the question. On the CPU, once per question.

Runs of one, two and three token ids count, each with its inverse document frequency over the pages, so that a key split
into single digits still tells `line 237` from `line 732`. It finds what shares words and nothing else.
"""

from __future__ import annotations

import numpy as np

from engine.config import PAGE

_RUNS = (1, 2, 3)
_MIX = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)


def _runs(tokens: np.ndarray, length: int) -> np.ndarray:
    """Hashes of the runs of `length` tokens that start at each place: uint64 [len - length + 1]."""
    count = len(tokens) - length + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    hashed = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for k in range(length):
            hashed += (tokens[k : k + count].astype(np.uint64) + np.uint64(1)) * (_MIX[k] * np.uint64(length))
            hashed ^= hashed >> np.uint64(29)
    return hashed


def _maybe_in(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Where `found` may hold one of `wanted`: a table of the lowest bits leaves few to search for."""
    table = np.zeros(1 << 16, dtype=bool)
    table[wanted.astype(np.uint16)] = True
    return np.flatnonzero(table[found.astype(np.uint16)])


def lexical_scores(tokens: np.ndarray, query: np.ndarray) -> np.ndarray:
    """float64 [pages]: summed IDF of the query's distinct token runs in each full page of `tokens` (int [n])."""
    pages = len(tokens) // PAGE
    scores = np.zeros(pages)
    for length in _RUNS:
        wanted = np.unique(_runs(query, length))
        found = _runs(tokens[: pages * PAGE + length - 1], length)[: pages * PAGE]
        at = _maybe_in(wanted, found)
        place = np.searchsorted(wanted, found[at]).clip(max=max(0, len(wanted) - 1))
        hit = wanted[place] == found[at]
        seen = np.zeros((pages, max(1, len(wanted))), dtype=bool)
        seen[at[hit] // PAGE, place[hit]] = True
        frequency = seen.sum(0)
        # Okapi's IDF, floored at 0: a run on most pages says nothing.
        idf = np.maximum(0.0, np.log((pages - frequency + 0.5) / (frequency + 0.5)))
        scores += seen @ idf
    return scores
