"""`kvring guide`: how to use it, on this machine, without a network."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from kvring_cli import console, offers


def guide(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", help="Left out: the list of topics.", autocompletion=offers.TOPICS),
    ] = None,
    *,
    lang: Annotated[
        Literal["en", "zh"] | None,
        typer.Option("--lang", help="Left out: Chinese where the locale is, else English.", show_default=False),
    ] = None,
) -> None:
    """Read the guide: quickstart, cards, 8gb to 24gb, tuning, trouble, switches, agents. English and Chinese."""
    from kvring_cli.guide import TOPICS, page, title

    language = lang or _locale()
    if topic is None:
        for name in TOPICS:
            console.write(f"{f'kvring guide {name}':<24} {title(name, language)}\n")
        return
    text = page(topic, language)
    if not sys.stdout.isatty():
        console.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _locale() -> str:
    """By the variables that a terminal sets, in their order."""
    named = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if named.lower().startswith("zh") else "en"
