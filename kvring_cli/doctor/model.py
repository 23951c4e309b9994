"""One model: is it whole, does every tensor have a place, and what of it fits on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import KVRingError
from engine.platform import Facts
from engine.units import format_bytes
from kvring_cli.install import Finding


def check(name: str, facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        from kvring_cli import models
        from kvring_cli.commands.inspect import describe

        path = Path(models.resolve(name))
        report = describe(path)
    except KVRingError as error:
        yield Finding("model", "fail", error.message, error.fix)
        return
    except (ImportError, OSError) as error:
        yield Finding("model", "unknown", f"it could not be read: {type(error).__name__}: {error}", "see `torch`")
        return
    size = format_bytes(report["weight_bytes"])
    yield Finding("model", "ok", f"{path}: {report['container']}, {report['architecture']}, {size}, complete")
    yield _hash(name, path, report["digest"])
    yield Finding("model tensors", "ok", "every tensor of the file has its place, and none is missing")
    yield _fits(path, facts, environ, flags)


def _hash(name: str, path: Path, digest: str) -> Finding:
    from kvring_cli.models import CATALOGUE, sha256

    published = CATALOGUE.get(name)
    if published is None:
        return Finding("model hash", "ok", f"{digest} (nothing is published to hold it against)")
    found = sha256(path)
    if found == published.sha256:
        return Finding("model hash", "ok", f"SHA-256 {found}, as published")
    return Finding(
        "model hash",
        "fail",
        f"SHA-256 {found}, published is {published.sha256}",
        f"delete {path}, then kvring pull {name}",
    )


def _fits(path: Path, facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Finding:
    from kvring_cli.planning import plan_here

    try:
        plan = plan_here(str(path), facts, environ, flags)
    except KVRingError as error:
        return Finding("model fits", "fail", error.message, error.fix)
    return Finding("model fits", "ok", plan.summary())
