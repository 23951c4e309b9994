"""The guide: pages in Markdown, in English and Chinese, and what fills their blanks from this build's own tables.

A blank, `{{settings}}` or `{{plan}}`, is worked out when the page is read, so that no figure in it can grow old.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from kvring_cli.names import did_you_mean

if TYPE_CHECKING:
    from kvring_cli.shapes import Shape

LANGUAGES = ("en", "zh")
CARDS = ("8gb", "10gb", "12gb", "16gb", "24gb")
TOPICS = ("quickstart", "cards", *CARDS, "tuning", "trouble", "switches", "agents")
RAM_GIB = (16, 32, 64)
TIMED_CONTEXT = 32_768
"""Tokens of the prompt that times are predicted for: every published model was trained for as many."""
_WORDS = {
    "en": {
        "setting": "{values}, default {default}: {meaning}",
        "plan": ("model", "weights", "pool", *(f"context, {ram} GiB RAM" for ram in RAM_GIB)),
        "times": ("model", "weights", "context", "prefill, tokens/s", "decode, tokens/s", "second turn"),
        "no": "does not fit",
        "unknown": "unknown",
        "bits": "{bits} bits",
        "preset": "a window of {window:,} tokens, a prefill chunk of {chunk:,} and at most {limit} of the card",
    },
    "zh": {
        "setting": "{values}，默认 {default}：{meaning}",
        "plan": ("模型", "权重", "池", *(f"上下文，内存 {ram} GiB" for ram in RAM_GIB)),
        "times": ("模型", "权重", "上下文", "预填充，token/s", "解码，token/s", "第二轮"),
        "no": "放不下",
        "unknown": "未知",
        "bits": "{bits} 位",
        "preset": "窗口 {window:,} 个 token，预填充块 {chunk:,}，最多用 {limit} 显存",
    },
}


def page(topic: str, language: str = "en") -> str:
    """A topic's Markdown. ConfigError for one that there isn't."""
    topic = topic.lower()
    if topic not in TOPICS:
        raise ConfigError(
            f"the guide has no topic '{topic[:60]}'", f"{did_you_mean(topic, TOPICS)}topics: {', '.join(TOPICS)}"
        )
    between = r"(?<=[^\x00-\x7f])\n(?=[^\x00-\x7f])"  # Chinese has no space where a line ended
    return _filled(re.sub(between, "", _source(topic, language)), topic, language)


def title(topic: str, language: str = "en") -> str:
    """A topic's first heading; nothing of the rest is worked out."""
    return _filled(_source(topic, language).splitlines()[0], topic, language).lstrip("# ")


def _source(topic: str, language: str) -> str:
    return read(language, "card.md" if topic in CARDS else f"{topic}.md")


def _filled(text: str, topic: str, language: str) -> str:
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
        "context": lambda: f"{TIMED_CONTEXT // 1024}K",
        "times": lambda: _times(card, words),
        "origin": lambda: _origin(card),
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
            held = f"{format_bytes(plans[0].weight_bytes)}, {_kind(weights, shape, words)}"
            rows.append((shape.name, held, pools[-1] if pools else "", *longest))
    return _table(words["plan"], rows)


def _times(card: str, words: dict[str, Any]) -> str:
    """What `kvring plan MODEL --card CARD` predicts for each published model, in 4 bits or its own."""
    from kvring_cli.planning import PLAIN_BITS, plan_for
    from kvring_cli.shapes import PUBLISHED

    rows = []
    for name, shape in PUBLISHED.items():
        weights = "q4_k" if shape.weight_bits == PLAIN_BITS else "auto"

        def planned(tokens: int, name: str = name, weights: str = weights) -> Any:
            return plan_for(name, card, None, None, flags={"max_context": str(tokens), "weights": weights}, environ={})

        plan, _, forecast = planned(TIMED_CONTEXT)
        if plan.capacity is None and plan.largest:
            plan, _, forecast = planned(plan.largest)
        found, missing = forecast.prediction, words["unknown" if plan.capacity else "no"]
        times = (missing,) * 3
        if found:
            turn = f"{found.second_turn_seconds:,.3g} s"
            times = (f"{found.prefill_rate:,.0f}", f"{found.decode_rate:,.3g}", turn)
        context = f"{plan.capacity.context:,}" if plan.capacity else ""
        rows.append((name, _kind(weights, shape, words), context, *times))
    return _table(words["times"], rows)


def _origin(card: str) -> str:
    """Where the rates behind `_times` are from, in `plan`'s own words."""
    from kvring_cli.cards import find_card
    from kvring_cli.forecast import rates_of_card

    return rates_of_card(find_card(card))[1]


def _kind(weights: str, shape: Shape, words: dict[str, Any]) -> str:
    return weights.upper() if weights != "auto" else words["bits"].format(bits=f"{shape.weight_bits:g}")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _yaml(language: str, name: str) -> dict[str, str]:
    import yaml

    return yaml.safe_load(read(language, name))
