"""The commonest finding: fine, or a warning with its fix."""

from __future__ import annotations

from kvring_cli.install import Finding


def judge(name: str, bad: bool, detail: str, fix: str) -> Finding:
    """ok, or warn and the fix where it is `bad`."""
    return Finding(name, "warn", detail, fix) if bad else Finding(name, "ok", detail)
