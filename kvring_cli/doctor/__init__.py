"""What is right and wrong here, a line a check, each with its fix. A check that couldn't run is `unknown`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.platform import Facts
from kvring_cli.doctor import hardware, model, settings, software, surroundings
from kvring_cli.install import Finding


def examine(
    facts: Facts,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    port: int = 8000,
    trials: Callable[[], Any] | None = None,
) -> list[Finding]:
    """Every check, in the order in which a person would look. `trials` tries the card (engine.trials); None: don't."""
    tried = hardware.attempt(facts, trials)
    groups: list[Callable[[], Iterable[Finding]]] = [
        lambda: software.check(facts),
        lambda: hardware.check(facts, tried),
        lambda: surroundings.check(facts, port),
        lambda: settings.check(facts, environ, dict(flags or {})),
    ]
    if model_name is not None:
        groups.append(lambda: model.check(model_name, facts, environ, dict(flags or {})))
    return [finding for group in groups for finding in group()]


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if any check failed."""
    return int(any(finding.status == "fail" for finding in findings))
