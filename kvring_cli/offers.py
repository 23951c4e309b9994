"""What a shell offers for a value at a Tab. It waits for the answer at each, so nothing here imports torch.

Where nothing begins as what was typed, shells offer files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Offer = Callable[[str], list[str]]


def offer(words: Callable[[], Iterable[str]]) -> Offer:
    """Those of `words()` that begin as what was typed, in their order."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _models() -> Iterable[str]:
    from kvring_cli.models import NAMES

    return NAMES


def _pulled() -> Iterable[str]:
    from kvring_cli.models import CATALOGUE

    return CATALOGUE


def _planned() -> Iterable[str]:
    from kvring_cli.models import NAMES
    from kvring_cli.shapes import PUBLISHED

    return *NAMES, *PUBLISHED


def _profiles() -> Iterable[str]:
    from kvring_cli.cards import presets

    return presets()


def _cards() -> Iterable[str]:
    from kvring_cli.cards import cards, presets

    return *presets(), *cards()


def _topics() -> Iterable[str]:
    from kvring_cli.guide import TOPICS

    return TOPICS


def _gates() -> Iterable[str]:
    from gates.registry import ALL, GATES

    return *GATES, ALL


MODELS, PULLED, PLANNED = offer(_models), offer(_pulled), offer(_planned)
PROFILES, CARDS, TOPICS, GATES = offer(_profiles), offer(_cards), offer(_topics), offer(_gates)
