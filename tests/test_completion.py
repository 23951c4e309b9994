"""The risk: a Tab that offers nothing where there are few words, offers what doesn't exist, or makes a shell wait."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model.sizes import PUBLISHED
from engine.switches import SETTINGS
from gates.registry import GATES
from kvring_cli.cards import cards, presets
from kvring_cli.guide import TOPICS

ROOT = Path(__file__).parent.parent
KVRING = [sys.executable, "-X", "importtime", "-m", "kvring_cli.app"]
MODELS = ["phantom", "smollm2-135m", "gemma3-270m"]
SLOW = ("torch", "numpy", "transformers", "tokenizers", "fastapi", "uvicorn")


def ask(variables):
    """What a shell gets that asks with these variables; nothing of it may need a slow module."""
    home = {name: value for name, value in os.environ.items() if not name.startswith(("COMP_", "_TYPER"))}
    done = subprocess.run(KVRING, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", env={**home, **variables})
    times, said = [], []
    for line in done.stderr.splitlines():
        (times if line.startswith("import time:") else said).append(line)
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert done.returncode == 0 and times and not said, done.stderr[-500:]
    assert not imported & set(SLOW)
    return done.stdout.split("\n")


def bash(line):
    """Words that bash would offer at the end of `line`; the word that is being typed may be empty."""
    words = line.split(" ")
    asked = {"_KVRING_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return [word for word in ask(asked) if word]


OFFERED = {
    "kvring se": ["serve"],
    "kvring bench ra": ["rates"],
    "kvring gate ": [*GATES, "all"],
    "kvring gate fits los": ["lossless"],
    "kvring guide ": list(TOPICS),
    "kvring plan --card ": [*presets(), *cards()],
    "kvring plan qwen3-8b --card 30": [card for card in cards() if card.startswith("30")],
    "kvring serve phantom --profile 1": ["10gb", "12gb", "16gb"],
    "kvring launch --profile 2": ["24gb"],
    "kvring plan 27": ["27b-2.1bit"],
    "kvring plan qwen3": [name for name in ("qwen3-4b", "qwen3-8b") if name in PUBLISHED],
    "kvring pull ": MODELS[1:],
    "kvring run ./models/ph": [],  # the shell offers files
}


@pytest.mark.parametrize(("line", "words"), OFFERED.items(), ids=list(OFFERED))
def test_bash_is_offered_what_there_is_without_waiting_for_torch(line, words):
    assert bash(line) == words


@pytest.mark.parametrize(
    "line",
    ["run", "chat", "serve", "inspect", "launch", "smoke", "pick-engine", "doctor -m", "gate -m", "bench rates -m"],
)
def test_every_command_that_takes_a_model_offers_those_that_it_knows(line):
    assert bash(f"kvring {line} ") == MODELS


def test_flags_are_offered():
    found = bash("kvring serve --kv")
    assert {"--kv-window", "--kv-capacity", "--kv-dtype"} <= set(found) and all(
        flag.startswith("--kv") for flag in found
    )


def test_a_setting_that_takes_a_few_words_offers_those_that_it_then_takes():
    """By the table itself; one of them through the shell."""
    few = {setting.flag: setting for setting in SETTINGS if setting.words}
    assert {"--ring", "--kv-dtype", "--weights", "--scorer", "--prefill", "--decode", "--dtype"} <= set(few)
    for setting in few.values():
        assert [setting.read(word, setting.flag) for word in setting.words] == list(setting.words)
    assert bash("kvring serve phantom --ring ") == ["auto", "on", "off"]
    assert not next(setting for setting in SETTINGS if setting.flag == "--max-context").words


SHELLS = {
    "zsh": {"_TYPER_COMPLETE_ARGS": "kvring guide tr"},
    "fish": {"_TYPER_COMPLETE_ARGS": "kvring guide tr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    "powershell": {"_TYPER_COMPLETE_ARGS": "kvring guide tr", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "tr"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_other_shells_are_answered_too(shell):
    said = "\n".join(ask({"_KVRING_COMPLETE": f"complete_{shell}", **SHELLS[shell]}))
    assert set(re.findall(r"[a-z0-9]+", said)) & set(TOPICS) == {"trouble"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_bash_that_has_installed_it_completes(tmp_path):
    """Installed by the command itself, from a bash, into a home with a space; then a new bash reads it."""
    home = tmp_path / "a home 家"
    home.mkdir()
    program = tmp_path / "kvring"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvring_cli.app "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(script):
        command = ["bash", "--norc", "-c", script]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")

    installed = run("kvring --install-completion; exit $?")
    assert installed.returncode == 0 and str(home) in installed.stdout, installed
    completed = run(
        'source "$HOME/.bashrc"; COMP_WORDS=(kvring plan --card 306); COMP_CWORD=3; _kvring_completion kvring;'
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p kvring'
    )
    *words, rule = completed.stdout.splitlines()
    assert words == ["3060ti-8gb", "3060-12gb"]
    assert "-F _kvring_completion kvring" in rule
