"""`kvring pull`: the only command that touches the network."""

from __future__ import annotations

from typing import Annotated

import typer

from kvring_cli import console, offers


def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A model that kvring knows.", autocompletion=offers.PULLED)
    ],
) -> None:
    """Fetch a model into the user's cache, checked against its hash; its name then serves as MODEL."""
    from kvring_cli import models

    console.write(f"{models.pull(name, console.say)}\n")
