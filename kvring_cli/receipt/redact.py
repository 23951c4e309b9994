"""What may be shown of a command line and of a text.

A value is shown because its flag takes a number or one of a few words, not because it looks harmless: a key may be a
number, and a question may be one word.
"""

from __future__ import annotations

import contextlib
import getpass
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from engine.errors import ConfigError
from engine.switches import SETTINGS, Setting
from kvring_cli.models import CATALOGUE, PHANTOM

HIDDEN = "<hidden>"
_WORD = r"[^\s'\"|,;:/\\]"
_PATH = re.compile(
    rf"(?<![\w/])(?:[A-Za-z]:[\\/]|\\\\|~?/(?![/\s]))[^\s'\"|,;]*(?:(?: {_WORD}+){{0,4}} {_WORD}*[/\\][^\s'\"|,;]*)*"
)
"""An absolute path of any system; further words belong to it as far as the next slash: folders may have spaces."""


def is_plain(setting: Setting) -> bool:
    """Whether it takes numbers and known words only: free text is none of them."""
    try:
        setting.read("a name/of mine", setting.flag)
    except ConfigError:
        return True
    return setting.boolean


def redact_argv(argv: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """`argv`, the command's name first, as `command` reads it."""
    known = dict(flags_of(command))
    shown, words = [argv[0]], iter(argv[1:])
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if word == "--":
            return [*shown, word, *(HIDDEN for _ in words)]
        if name not in known:
            shown.append(word if word in (PHANTOM, *CATALOGUE) else HIDDEN)
        elif known[name] == "switch":
            shown.append(name)
        else:
            value = value if equals else next(words, "")
            shown += [name, value if known[name] == "plain" else HIDDEN]
    return shown


def flags_of(command: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Each flag that a command takes, and what follows it: nothing (`switch`), a number or a known word, or `text`."""
    settings = {setting.flag for setting in SETTINGS if is_plain(setting)}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *more = get_args(parameter.annotation)
        for option in (one for one in more if isinstance(one, typer.models.OptionInfo)):
            kinds = {one for one in (kind, *get_args(kind)) if one is not type(None)}
            plain = bool(kinds & {int, float}) or get_origin(kind) is Literal
            declared = [option.default, *(option.param_decls or ())]  # under Annotated the first name is in `default`
            for name in "/".join(one for one in declared if isinstance(one, str)).split("/"):
                takes = "switch" if bool in kinds else "plain" if plain or name in settings else "text"
                yield name, takes


def scrub(text: str) -> str:
    """`text` without what names this person or machine, and without absolute paths. The last guard, not the first."""
    for name, instead in sorted(_names(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.IGNORECASE)
    return _PATH.sub("<path>", text)


def _names() -> Iterator[tuple[str, str]]:
    homes = {os.path.expanduser("~"), *(os.environ.get(name, "") for name in ("HOME", "USERPROFILE"))}
    places = {*homes, str(Path.cwd()), sys.prefix, str(Path(__file__).resolve().parents[2])}
    people = {Path(home).name for home in homes - {""}}
    people |= {os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")}
    with contextlib.suppress(Exception):  # no such user in the password file
        people.add(getpass.getuser())
    for place in places:
        if len(place) > 1:
            yield place, "<path>"
    for person in people:
        if len(person) > 1:
            yield person, "<user>"
    yield socket.gethostname() or "localhost", "<machine>"
