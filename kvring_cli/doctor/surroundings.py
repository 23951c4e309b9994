"""Console, paths, links and the port: what trips programs on machines that aren't the author's."""

from __future__ import annotations

import codecs
import socket
from collections.abc import Iterator
from pathlib import Path

from engine.platform import Facts
from kvring_cli.install import Finding, check_phantom


def check(facts: Facts, port: int) -> Iterator[Finding]:
    yield _console(facts)
    yield _paths(facts)
    if facts.symlinks is None:
        yield Finding("symlinks", "unknown", "it could not be tried", "nothing needs them")
    elif not facts.symlinks:
        yield Finding("symlinks", "ok", "not allowed here; kvring needs none")
    else:
        yield Finding("symlinks", "ok", "allowed")
    yield _port(port)
    yield check_phantom(Path(__file__).resolve().parents[2] / "gates" / "phantom")


def _console(facts: Facts) -> Finding:
    encoding = facts.console.encoding
    if encoding is None:
        return Finding("console", "unknown", "there is no stdout, or it does not say its encoding", "PYTHONUTF8=1")
    try:
        utf8 = codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        utf8 = False
    page = f", code page {facts.console.code_page}" if facts.console.code_page else ""
    if utf8 and facts.console.code_page in (None, 65001):
        return Finding("console", "ok", f"{encoding}{page}")
    fix = "chcp 65001, then set PYTHONUTF8=1" if facts.system == "windows" else "PYTHONUTF8=1, and a UTF-8 locale"
    return Finding("console", "warn", f"{encoding}{page}: characters it lacks are shown as ?", fix)


def _paths(facts: Facts) -> Finding:
    odd = [path for path in (facts.home, facts.executable) if not path.isascii()]
    spaces = [path for path in (facts.home, facts.executable) if " " in path]
    if odd and facts.system == "windows":
        detail = f"{odd[0]} has characters beyond ASCII: kvring copes, Triton's compiler may not"
        return Finding(
            "path", "warn", detail, r"set TRITON_CACHE_DIR=C:\kvring-cache and TEMP=C:\Temp if a kernel fails to build"
        )
    if odd or spaces:
        return Finding("path", "ok", f"{(odd or spaces)[0]}: spaces and other characters are no trouble here")
    return Finding("path", "ok", facts.home)


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return Finding(
                "port", "warn", f"{port} is in use on 127.0.0.1", "kvring serve MODEL --port 0 takes a free one"
            )
    return Finding("port", "ok", f"{port} is free")
