"""Pauses of Python's garbage collector: with a model's vocabulary loaded, a full one takes longer than ten tokens."""

from __future__ import annotations

import gc


def exempt_loaded() -> None:
    """Take what stands now out of all later collections. For a process that has just loaded what it will serve.

    A full collection in the middle of an answer took 115 to 170 ms (Qwen3's vocabulary, the host of an H200).
    """
    let_go()
    gc.freeze()


def let_go() -> None:
    """Free what is not used any more, also of what was exempt and has become part of a cycle."""
    gc.unfreeze()
    gc.collect()
