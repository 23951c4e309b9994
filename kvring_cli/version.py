"""Which kvring this is, and what it stands on. Nothing heavy is imported: a torch that can't be has a version, too."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRITON = ("triton", "triton-windows", "pytorch-triton")


def lines() -> list[str]:
    """As `--version` prints them, kvring's own first."""
    triton = next((f"{name} {version}" for name in TRITON if (version := installed(name))), "triton not installed")
    torch = f"torch {installed('torch') or 'not installed'}, CUDA {cuda_of_torch() or 'none'}"
    return [
        f"kvring {installed('kvring') or 'not installed'}, {origin()}",
        f"python {platform.python_version()}",
        torch,
        triton,
    ]


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built for, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None


def origin() -> str:
    """The commit of a checkout or of an install from one; else the wheel's RECORD, which names its every byte."""
    if (ROOT / ".git").exists():
        return f"commit {_git() or 'unknown'}"
    from kvring_cli.install import owner

    wheel = owner(ROOT / "kvring_cli")
    if wheel is None:
        return "commit unknown"
    try:
        return f"commit {json.loads(wheel.read_text('direct_url.json') or '{}')['vcs_info']['commit_id'][:12]}"
    except (KeyError, TypeError, ValueError):
        record = sorted(line for line in (wheel.read_text("RECORD") or "").splitlines() if _of_wheel(line))
        return f"wheel {hashlib.sha256(chr(10).join(record).encode()).hexdigest()[:12]}"


def _of_wheel(line: str) -> bool:
    """What the wheel brought: the same wherever it is installed, unlike the command, bytecode and pip's own notes."""
    return not re.match(r"\.\.|[^,]*(\.pyc|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)),", line)


def _git() -> str | None:
    """The commit that is checked out, from git's own files: git itself may not be here."""
    folder = ROOT / ".git"
    try:
        if folder.is_file():  # of a worktree: where its own files are
            folder = ROOT / folder.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:12]
        name = head.removeprefix("ref: ")
        shared = folder / "commondir"
        common = folder / shared.read_text(encoding="utf-8").strip() if shared.exists() else folder
        loose = common / name
        if loose.exists():
            return loose.read_text(encoding="utf-8")[:12]
        packed = (common / "packed-refs").read_text(encoding="utf-8")
        return next((line[:12] for line in packed.splitlines() if line.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None
