"""The risk: a call that Windows doesn't have. Our code runs here with everything POSIX-only taken away."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "crypt", "nis", "spwd")
_OS = """
fork forkpty getuid geteuid getgid getegid setuid setsid setpgid getpgid killpg uname statvfs fstatvfs nice chown lchown
fchown fchmod mkfifo mknod openpty sched_getaffinity sched_setaffinity sched_yield getloadavg sysconf wait wait3 wait4
pread pwrite posix_fadvise posix_fallocate sendfile sync setpriority getpriority register_at_fork O_NOFOLLOW O_DIRECTORY
O_CLOEXEC WNOHANG
"""
_SIGNAL = "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD SIGQUIT alarm setitimer pause sigwait pthread_kill"
OS, SIGNAL = _OS.split(), _SIGNAL.split()
KEPT = ("WNOHANG", "SIGKILL")  # which Python's own subprocess looks up on Linux; no source of ours may name them
PLATFORM_ONLY = "engine/platform/"

PRELUDE = f"""
import asyncio, concurrent.futures, importlib.metadata, multiprocessing, socket, subprocess, tempfile
import fastapi, gguf, jinja2, numpy, platformdirs, psutil, prometheus_client, rich.console, rich.progress, safetensors
import tokenizers, torch, typer, uvicorn, yaml
import os, signal, sys, platform
for name in {sorted(set(OS) - set(KEPT))!r}:
    os.__dict__.pop(name, None)
for name in {sorted(set(SIGNAL) - set(KEPT))!r}:
    signal.__dict__.pop(name, None)
for name in {MODULES!r}:
    sys.modules[name] = None
os.__dict__.pop("symlink", None)
from kvring_cli.app import call
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process that has lost all of the above, once the libraries are imported (those know Windows)."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
    )


LINES = [
    ["--version"],
    ["--help"],
    ["inspect", "phantom"],
    ["doctor", "--model", "phantom", "--port", "1"],
    ["pick-engine", "phantom"],
    ["plan", "phantom", "--max-context", "4K"],
    ["run", "phantom", "Hello", "-n", "2", "--max-context", "512"],
]


def test_every_module_is_imported_and_every_command_runs():
    done = run(
        f"""
        import importlib, pkgutil, engine, gates, kvring_cli
        for package in (engine, gates, kvring_cli):
            for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not found.name.startswith(("gates.phantom.", "engine.ops.triton_")) and found.name != "gates.leash":
                    importlib.import_module(found.name)
        for line in {LINES!r}:
            print("#", line, call(line), flush=True)
        """
    )
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert ended == [f"# {line} 0" for line in LINES], done.stderr


def _names(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if node.attr in {"os": OS, "signal": SIGNAL}.get(owner, ()):
                yield node.lineno, f"{owner}.{node.attr}"


def test_no_posix_only_name_stands_outside_the_platform():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for package in ("engine", "gates", "kvring_cli")
        for path in (ROOT / package).rglob("*.py")
        if PLATFORM_ONLY not in path.as_posix()
        for line, name in _names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found
