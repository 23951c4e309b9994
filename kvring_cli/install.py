"""Whether the code that runs is the wheel's: every file of its RECORD as it was built, and no file beside them.

A copy that stopped half-way, a disk that flips a bit, two versions in one folder, or another package that brings a
folder `engine` of its own: each starts well enough and answers wrongly later.
"""

from __future__ import annotations

import base64
import csv
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvring_cli.models import sha256

FIX = "pip install --force-reinstall --no-deps kvring (or the wheel you have) puts every file back"
PACKAGES = ("engine", "gates", "kvring_cli", "profiles")
SHOWN = 5  # files that are named before the rest is only counted


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: status is ok, warn, fail or unknown."""

    name: str
    status: str
    detail: str
    fix: str = ""


def check_install() -> list[Finding]:
    """The files of the running code, and the phantom's hashes. A source tree has no RECORD: unknown, never ok."""
    running = Path(__file__).resolve().parent
    return [check_files(owner(running), running), check_phantom(running.parent / "gates" / "phantom")]


def owner(package: Path) -> importlib.metadata.Distribution | None:
    """The installed kvring whose files lie where `package` runs from; an editable install owns none."""
    for found in importlib.metadata.distributions(name="kvring"):
        if _record(found) is not None and Path(str(found.locate_file(package.name))).resolve() == package:
            return found
    return None


def check_files(distribution: importlib.metadata.Distribution | None, running: Path) -> Finding:
    """Hold a distribution's files against its RECORD, both ways."""
    if distribution is None:
        why = "the code runs from a source tree or an editable install, which has no RECORD"
        return Finding("install", "unknown", f"{why}: {running.parent}", "install the wheel to have it checked")
    root = Path(str(distribution.locate_file("")))
    try:
        recorded = {path: digest for path, digest, _ in csv.reader((_record(distribution) or "").splitlines())}
    except (ValueError, csv.Error):
        return Finding("install", "fail", "its RECORD is damaged: a line has not three fields", FIX)
    wrong = [*_changed(root, recorded), *_strangers(root, recorded)]
    if not wrong:
        return Finding("install", "ok", f"{len(recorded):,} files are as the wheel's RECORD says, and no others")
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return Finding("install", "fail", f"{', '.join(wrong[:SHOWN])}{more} in {root}", FIX)


def check_phantom(folder: Path) -> Finding:
    """The built-in model's files against the hashes that training wrote."""
    try:
        lines = (folder / "phantom.sha256").read_text(encoding="utf-8").split("\n")
        expected = dict(reversed(line.split()) for line in lines if line)
        wrong = [name for name, digest in expected.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        return Finding("phantom", "fail", f"its files can't be read: {error}", FIX)
    if wrong or "model.safetensors" not in expected:
        return Finding("phantom", "fail", f"not what was trained: {', '.join(wrong) or 'no hash of its weights'}", FIX)
    return Finding("phantom", "ok", f"{len(expected)} files, weights {expected['model.safetensors'][:12]}")


def _record(distribution: importlib.metadata.Distribution) -> str | None:
    """None where there is none, as in a source tree."""
    try:
        return distribution.read_text("RECORD")
    except ValueError:
        return "no text"  # which is no line of three fields either


def _changed(root: Path, recorded: dict[str, str]) -> Iterator[str]:
    """Recorded files that are missing or other than they were. Installers record bytecode and RECORD without a hash."""
    for path, digest in recorded.items():
        kind, _, value = digest.partition("=")
        try:
            if not digest:
                if not path.endswith(("/RECORD", ".pyc")):
                    yield f"{path} has no hash"
            elif kind != "sha256":
                yield f"{path} has an unknown hash ({kind})"
            elif base64.urlsafe_b64encode(bytes.fromhex(sha256(root / path))).rstrip(b"=").decode() != value:
                yield f"{path} is changed"
        except (OSError, ValueError):
            yield f"{path} is missing"


def _strangers(root: Path, recorded: dict[str, str]) -> Iterator[str]:
    """Files in the wheel's folders that it didn't bring; bytecode of its own sources is none."""
    for top in sorted({*PACKAGES, *(path.split("/")[0] for path in recorded if "/" in path)} - {".."}):
        for file in sorted((root / top).rglob("*")):
            path = file.relative_to(root).as_posix()
            source = file.parent.parent / f"{file.name.split('.')[0]}.py"
            cached = file.parent.name == "__pycache__" and source.relative_to(root).as_posix() in recorded
            if path not in recorded and not file.is_dir() and not cached:
                yield f"{path} is not the wheel's"
