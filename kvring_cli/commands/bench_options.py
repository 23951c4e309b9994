"""What the commands of `kvring bench` share: options, the lists that options take, and the head of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from engine.units import parse_tokens
from kvring_cli import offers

AnyModel = Annotated[
    str, typer.Option("--model", "-m", help="A model, or random:qwen3-8b and the like.", autocompletion=offers.MODELS)
]
Contexts = Annotated[str, typer.Option("--contexts", help="Lengths in tokens, with commas.")]
Decoded = Annotated[int, typer.Option("--tokens", min=2, help="Tokens decoded.")]
Rows = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Sweep = Annotated[
    str | None,
    typer.Option("--sweep", metavar="NAME=A,B,C", help="Each value of one setting in turn, like kv-capacity=4032,8K."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the rows; needs matplotlib.")]


def header(columns: tuple[str, ...], swept: bool) -> str:
    """A Markdown table's first two lines."""
    names = ["setting", *columns] if swept else list(columns)
    return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"


def length(text: str) -> int:
    """Tokens of one `--contexts` entry; bad usage where it is none."""
    try:
        tokens = parse_tokens(text)
    except ConfigError:
        tokens = 0
    if tokens < 256:
        raise typer.BadParameter(f"'{text}' is not a length of 256 tokens or more", param_hint="--contexts")
    return tokens


def known(text: str, names: tuple[str, ...], flag: str) -> list[str]:
    """The parts of a list with commas, one at least; bad usage where one is none of `names`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or [""]:
        if part not in names:
            raise typer.BadParameter(f"'{part}' is not one of {', '.join(names)}", param_hint=flag)
    return parts
