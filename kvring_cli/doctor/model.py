"""One model: is it whole, does every tensor have a place, and what of it fits on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import KVRingError
from engine.platform import Facts
from engine.units import format_bytes
from kvring_cli.install import Finding, check_phantom


def check(name: str, facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        from engine.model.random import PREFIX
        from kvring_cli import models
        from kvring_cli.commands.inspect import describe

        path = Path(models.resolve(name))
        if name.startswith(PREFIX):
            yield Finding("model", "ok", f"{name}: random weights of a published shape, no file to check")
            yield _fits(path, facts, environ, flags)
            return
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
    """Against the published file of that name; a path's against the one of as many bytes, which it must be if its own
    name is the published one too."""
    from kvring_cli.models import CATALOGUE, PHANTOM, sha256

    if name == PHANTOM:
        found = check_phantom(path)
        return Finding("model hash", found.status, f"{found.detail}, as `phantom` above", found.fix)
    size = path.stat().st_size if path.is_file() else None
    alike = [name] if name in CATALOGUE else [known for known, model in CATALOGUE.items() if model.size == size]
    for known in alike:
        published, found = CATALOGUE[known], sha256(path)
        if found == published.sha256:
            return Finding("model hash", "ok", f"SHA-256 {found}, as published for {known}")
        if known == name or path.name == published.file:
            detail = f"SHA-256 {found}, published for {known} is {published.sha256}"
            return Finding("model hash", "fail", detail, f"delete {path}, then kvring pull {known}")
    return Finding("model hash", "ok", f"{digest} (nothing is published to hold it against)")


def _fits(path: Path, facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Finding:
    from kvring_cli.planning import plan_here

    try:
        plan = plan_here(str(path), facts, environ, flags)
    except KVRingError as error:
        return Finding("model fits", "fail", error.message, error.fix)
    return Finding("model fits", "ok", plan.summary())
