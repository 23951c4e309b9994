"""The guide: pages in Markdown, in English and Chinese, and what fills their blanks from this build's own tables.

A blank, `{{settings}}` or `{{plan}}`, is worked out when the page is read, so that no figure in it can grow old.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from engine.errors import ConfigError

LANGUAGES = ("en", "zh")
CARDS = ("8gb", "10gb", "12gb", "16gb", "24gb")
TOPICS = ("quickstart", "cards", *CARDS, "tuning", "trouble", "switches", "agents")
RAM_GIB = (16, 32, 64)
_WORDS = {
    "en": {
        "setting": "{values}, default {default}: {meaning}",
        "plan": ("model", "weights", "pool", *(f"context, {ram} GiB RAM" for ram in RAM_GIB)),
        "no": "does not fit",
        "bits": "{bits} bits",
        "preset": "a window of {window:,} tokens, a prefill chunk of {chunk:,} and at most {limit} of the card",
    },
    "zh": {
        "setting": "{values}，默认 {default}：{meaning}",
        "plan": ("模型", "权重", "池", *(f"上下文，内存 {ram} GiB" for ram in RAM_GIB)),
        "no": "放不下",
        "bits": "{bits} 位",
        "preset": "窗口 {window:,} 个 token，预填充块 {chunk:,}，最多用 {limit} 显存",
    },
}


def page(topic: str, language: str = "en") -> str:
    """A topic's Markdown. ConfigError for one that there isn't."""
    if topic not in TOPICS:
        import difflib

        near = difflib.get_close_matches(topic.lower(), TOPICS, 1, 0.4)
        known = f"topics: {', '.join(TOPICS)}"
        raise ConfigError(
            f"the guide has no topic '{topic[:60]}'", f"did you mean {near[0]}? {known}" if near else known
        )
    text = read(language, "card.md" if topic in CARDS else f"{topic}.md")
    text = re.sub(r"(?<=[^\x00-\x7f])\n(?=[^\x00-\x7f])", "", text)  # Chinese has no space where a line ended
    fill: dict[str, Callable[[], str]] = {"settings": lambda: _settings(language)}
    if topic in CARDS:
        fill |= _of_card(topic, language)
    return re.sub(r"\{\{(\w+)\}\}", lambda blank: fill[blank[1]](), text)


def read(language: str, name: str) -> str:
    """A file of the guide."""
    return (resources.files(__name__) / language / name).read_text(encoding="utf-8")


def _settings(language: str) -> str:
    """Every setting of the engine, from the table that the command line itself is made of."""
    from engine.switches import SETTINGS

    meanings = _yaml(language, "settings.yaml") if language != "en" else {}
    lines = []
    for setting in SETTINGS:
        flag = f"`{setting.flag}`" + (f", `--no-{setting.flag[2:]}`" if setting.boolean else "")
        switch = f", `{setting.switch}`" if setting.switch else ""
        facts = _WORDS[language]["setting"].format(
            default=setting.show(setting.default),
            values="" if setting.boolean else f" [{setting.values}]",
            meaning=meanings.get(setting.field, setting.help),
        )
        lines.append(f"- {flag}{switch}{facts}")
    return "\n".join(lines)


def _of_card(card: str, language: str) -> dict[str, Callable[[], str]]:
    from engine.units import format_bytes
    from kvring_cli.cards import find_card, find_preset

    preset, facts, words = find_preset(card), find_card(card), _WORDS[language]
    settings = preset.settings
    shown = words["preset"].format(
        window=settings["kv_window"],
        chunk=settings["prefill_chunk"],
        limit=format_bytes(settings["device_limit_bytes"]),
    )
    return {
        "card": lambda: card,
        "size": lambda: f"{card[:-2]} GB",
        "typical": lambda: f"{facts.gpu.name} (`{facts.key}`)",
        "about": lambda: _yaml(language, "about.yaml")[card].strip(),
        "preset": lambda: shown,
        "plan": lambda: _plans(card, words),
    }


def _plans(card: str, words: dict[str, Any]) -> str:
    """What fits on the preset's typical card, for each published model and size of RAM: in 4 bits, and plain if that
    fits too."""
    from engine.config import EngineConfig
    from engine.units import GIB, format_bytes
    from kvring_cli.cards import find_card, find_preset
    from kvring_cli.planning import PLAIN_BITS, card_place, make_plan
    from kvring_cli.shapes import PUBLISHED

    settings = find_preset(card).settings
    places = [card_place(find_card(card), ram * GIB) for ram in RAM_GIB]
    rows = []
    for shape in PUBLISHED.values():
        for weights in ("q4_k", "auto") if shape.weight_bits == PLAIN_BITS else ("auto",):
            config = EngineConfig(model="", weights=weights, **settings)
            plans = [make_plan(shape, place, config) for place in places]
            pools = [format_bytes(plan.capacity.pool_bytes) for plan in plans if plan.capacity]
            if not pools and weights == "auto" and shape.weight_bits == PLAIN_BITS:
                continue
            longest = [f"{plan.largest:,}" if plan.largest else words["no"] for plan in plans]
            held = f"{format_bytes(plans[0].weight_bytes)}, {weights.upper() if weights != 'auto' else words['bits']}"
            held = held.format(bits=f"{shape.weight_bits:g}")
            rows.append((shape.name, held, pools[-1] if pools else "", *longest))
    return _table(words["plan"], rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _yaml(language: str, name: str) -> dict[str, str]:
    import yaml

    return yaml.safe_load(read(language, name))
