"""Switches in force, what contradicts what, and which measured profile serves this hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.device_profile import look_up, user_file
from engine.errors import ConfigError
from engine.platform import Facts
from engine.platform.facts import parse_capability
from engine.switches import SETTINGS, Resolved, resolve
from kvring_cli.engines import pretends
from kvring_cli.install import Finding


def check(facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        resolved = resolve("", flags, environ)
    except ConfigError as error:
        yield Finding("settings", "fail", error.message, error.fix)
        return
    yield Finding("settings", "ok", in_force(resolved) or "every setting is at its default")
    for warning in resolved.warnings:
        yield Finding("settings", "warn", warning, "unset one of them, or mend it")
    if pretended := pretends(environ):
        yield _pretended(pretended)
    yield _profile(facts, environ, resolved)


def in_force(resolved: Resolved) -> str:
    """Every value that is not the default, with its source."""
    return ", ".join(
        f"{setting.flag[2:]} {setting.show(effective.value)} ({effective.source})"
        for setting in SETTINGS
        if (effective := resolved.sources[setting.field]).source != "default"
    )


def _pretended(capability: str) -> Finding:
    if parse_capability(capability) is None:
        detail = f"NINFER_AGENT_CC is '{capability[:80]}', which is not like 8.9: pick-engine and plan refuse it"
        return Finding("settings", "fail", detail, "NINFER_AGENT_CC=8.6, say, or leave it out")
    detail = f"NINFER_AGENT_CC: pick-engine and plan take the card for one of capability {capability}"
    return Finding("settings", "ok", detail)


def _profile(facts: Facts, environ: Mapping[str, str], resolved: Resolved) -> Finding:
    if resolved.config.device_profile == "off":
        return Finding("device profile", "ok", "off: the compiled-in routes serve")
    gpu = facts.gpu if facts.torch.sees_card else None
    hardware = gpu.hardware_class if gpu else facts.cpu.hardware_class
    count = (gpu.multiprocessors or 0) if gpu else facts.cpu.processors
    if hardware is None:
        return Finding("device profile", "unknown", "the card's capability can't be read", "NINFER_AGENT_CC")
    try:
        file = user_file(environ, resolved.config.device_profile_path)
    except ConfigError as error:
        return Finding("device profile", "fail", error.message, error.fix)
    found = look_up(hardware, count, file)
    name = f"{hardware}, {count} {'SMs' if gpu else 'processors'}"
    if found.troubles:
        detail = f"{name}: {found.source}; passed over {'; '.join(found.troubles)}"
        return Finding("device profile", "warn", detail, f"kvring calibrate writes {file} anew, or says why it can't")
    if found.profile is None:
        detail = f"{name}: none, the compiled-in routes serve"
        return Finding("device profile", "warn", detail, "kvring calibrate measures one")
    return Finding("device profile", "ok", f"{name}: {found.source} ({found.profile.origin})")
