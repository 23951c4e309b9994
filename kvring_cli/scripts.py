"""Start scripts to double-click: a command line for cmd, PowerShell or sh, with every word quoted for that shell.

They depend on nothing of the session that wrote them: absolute interpreter, settings as flags, own encoding. A window
stays open when the program failed, because otherwise nobody can read why.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError, KVRingError

MARK = "written by kvring launch"
KINDS = (".bat", ".cmd", ".ps1", ".sh")
ENVIRONMENT = {"PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"}
"""UTF-8 on every console, and no import from the folder that the script lies in."""

_BAT = """\
@echo off
rem {mark}; edit it as you like
chcp 65001 >nul
setlocal DisableDelayedExpansion
{environment}
title kvring
if exist {python} goto start
echo error: there is no {python}
echo fix: install kvring again, then kvring launch --write
pause
exit /b 1
:start
{command} %*
set "code=%errorlevel%"
if "%code%"=="0" exit /b 0
echo.
echo kvring ended with exit code %code%. What it said is above.
pause
exit /b %code%
"""

_PS1 = """\
# {mark}; edit it as you like
$OutputEncoding = [Console]::OutputEncoding = [Text.UTF8Encoding]::new()
{environment}
if (-not (Test-Path -LiteralPath {python})) {{
    Write-Host 'error: there is no' {python}
    Write-Host 'fix: install kvring again, then kvring launch --write'
    Read-Host 'Enter closes this window'
    exit 1
}}
& {command} @args
$code = $LASTEXITCODE
if ($code -ne 0) {{
    Write-Host "kvring ended with exit code $code. What it said is above."
    Read-Host 'Enter closes this window'
}}
exit $code
"""

_SH = """\
#!/bin/sh
# {mark}; edit it as you like
{environment}
if [ ! -x {python} ]; then
    echo 'error: there is no' {python} >&2
    echo 'fix: install kvring again, then kvring launch --write' >&2
    code=127
else
    {command} "$@"
    code=$?
fi
if [ "$code" -ne 0 ] && [ "$code" -ne 130 ] && [ -t 0 ]; then
    printf 'kvring ended with exit code %s. What it said is above. Enter closes this window. ' "$code"
    read -r _
fi
exit "$code"
"""


def render(kind: str, command: Sequence[str]) -> bytes:
    """The script that runs `command` (its first word: the absolute interpreter). ConfigError for a word that the shell
    can't be given."""
    for word in command:
        if re.search(r"[\0-\x1f\x7f]", word) or (kind != ".sh" and '"' in word):
            raise ConfigError(
                f"{word!r} can't be written into a {kind} script", 'a name without control characters and "'
            )
    if kind in (".bat", ".cmd"):
        environment = "\n".join(f'set "{name}={value}"' for name, value in ENVIRONMENT.items())
        words, template = [cmd_word(word) for word in command], _BAT
    elif kind == ".ps1":
        environment = "\n".join(f"$env:{name} = '{value}'" for name, value in ENVIRONMENT.items())
        words, template = [powershell_word(word) for word in command], _PS1
    else:
        environment = "\n".join(f"export {name}={value}" for name, value in ENVIRONMENT.items())
        words, template = [shlex.quote(word) for word in command], _SH
    text = template.format(mark=MARK, environment=environment, python=words[0], command=" ".join(words))
    if kind == ".sh":
        return text.encode()
    # cmd reads UTF-8 after chcp, but chokes on a BOM; PowerShell 5 takes a file without one for the system's code page.
    return text.replace("\n", "\r\n").encode("utf-8-sig" if kind == ".ps1" else "utf-8")


def cmd_word(word: str) -> str:
    """In double quotes, where only % is special; backslashes before the closing one are doubled for the program."""
    return '"' + re.sub(r"(\\+)$", r"\1\1", word).replace("%", "%%") + '"'


def powershell_word(word: str) -> str:
    """In single quotes, of which PowerShell knows five; the program gets what it would from cmd."""
    if re.search(r"\s", word):
        word = re.sub(r"(\\+)$", r"\1\1", word)
    return "'" + re.sub("(['‘’‚‛])", r"\1\1", word) + "'"


def to_paste(words: Sequence[str], windows: bool) -> str:
    """A line to paste: into sh, or into cmd and PowerShell alike, which have double quotes and no others in common."""
    return " ".join(map(_windows_word, words)) if windows else shlex.join(words)


def _windows_word(word: str) -> str:
    if re.fullmatch(r"[\w.:\\/=+-]+", word):
        return word
    return '"' + re.sub(r"(\\+)$", r"\1\1", re.sub(r'(\\*)"', r'\1\1\\"', word)) + '"'


def check(path: Path) -> None:
    """Before any work: ConfigError for an ending that is no shell's, a missing folder, or a file that isn't ours."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"'{path.name}' ends like no script that is known", f"one of {', '.join(KINDS)}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} is no folder that can be written to", "another folder")
    if path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()):
        raise ConfigError(f"{path} exists and is not a start script of kvring", "another name, or delete it")


def write(path: Path, command: Sequence[str]) -> None:
    """Whole or not at all. ConfigError as of `check` and `render`."""
    check(path)
    data = render(path.suffix.lower(), command)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        if path.suffix.lower() == ".sh":
            part.chmod(0o755)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise KVRingError(f"{path} can't be written: {error.strerror or error}", "another folder") from None
