"""What was measured on a kind of hardware, as rows in a YAML file: routes, and rates that predictions are made of.

Look-up: the user's file, then the rows that come with kvring. A file that is damaged, half-written or of another
schema is named and passed over, never fatal and never overwritten by a row that it could have held.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.files import cache_folder, check_folder, write_whole
from engine.routes import SETTINGS, Bands

VERSION = 1
SCHEMA = f"kvring.device-profiles/{VERSION}"
FILE = f"device-profiles-{VERSION}.yaml"  # the version is part of the name: no build overwrites another's
SWITCH = "NINFER_DEVICE_PROFILES"


@dataclass(frozen=True)
class DeviceProfile:
    """One row. `multiprocessors` 0 matches any number; on a CPU it counts processors. Rates are per second."""

    hardware_class: str
    multiprocessors: int
    origin: str
    routes: Mapping[str, Bands] = field(default_factory=dict)
    rates: Mapping[str, Bands] = field(default_factory=dict)

    def matches(self, hardware_class: str, multiprocessors: int) -> bool:
        return self.hardware_class == hardware_class and self.multiprocessors in (0, multiprocessors)

    def as_yaml(self) -> dict[str, Any]:
        def plain(bands: Mapping[str, Bands]) -> dict[str, Any]:
            return {key: [list(band) for band in bands[key]] for key in sorted(bands)}

        return {**vars(self), "routes": plain(self.routes), "rates": plain(self.rates)}


@dataclass(frozen=True)
class Found:
    """`source`: user, built-in, or none. `troubles`: files that were passed over, and why."""

    profile: DeviceProfile | None
    source: str
    troubles: tuple[str, ...] = ()


def user_file(environ: Mapping[str, str] | None = None, path: str | None = None) -> Path:
    """Where this user's rows lie: `path`, the switch (a file, or a folder), else the platform's cache folder."""
    text = path or (os.environ if environ is None else environ).get(SWITCH, "").strip(" \t\r\n\"'")
    if not text:
        return cache_folder() / FILE
    chosen = Path(os.path.expanduser(text))
    return chosen if chosen.suffix.lower() in (".yaml", ".yml") else chosen / FILE


def look_up(hardware_class: str, multiprocessors: int, user: Path) -> Found:
    """The row for this hardware: the user's, else the one that comes with kvring."""
    troubles: list[str] = []
    for source, text in (("user", _text(user, troubles)), ("built-in", _built_in())):
        if text is None:
            continue
        try:
            rows = parse(text)
        except ConfigError as error:
            troubles.append(f"{user if source == 'user' else 'profiles/devices.yaml'}: {error.message}")
            continue
        for row in rows:
            if row.matches(hardware_class, multiprocessors):
                return Found(row, source, tuple(troubles))
    return Found(None, "none", tuple(troubles))


def built_in() -> list[DeviceProfile]:
    """The rows that come with kvring."""
    return parse(_built_in())


def parse(text: str) -> list[DeviceProfile]:
    """ConfigError for what is not a whole file of this schema."""
    import yaml

    try:
        raw = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"it is damaged: {' '.join(str(error).split())[:120]}", "kvring calibrate") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"its schema is {str(schema)[:80]!r}, this kvring reads {SCHEMA}", "kvring calibrate")
    try:
        return [_row(row) for row in raw["profiles"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"it is damaged: {type(error).__name__}: {error}", "kvring calibrate") from None


def check_kept(path: Path) -> None:
    """ConfigError where `save` could not write: a start that can't keep what it measures would measure every time."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder with a file's name", f"{SWITCH}=another file")
    text = _text(path, [])
    if text is not None and f"schema: {SCHEMA}\n" not in text and "kvring.device-profiles/" in text:
        raise ConfigError(f"{path} is another kvring's", f"{SWITCH}=another file")
    check_folder(path.parent, f"{SWITCH}=a folder")


def save(profile: DeviceProfile, path: Path) -> None:
    """Put the row into the user's file in one step, in place of one for the same hardware.

    ConfigError where the file can't be written, or belongs to another schema. A damaged one is kept beside it.
    """
    import yaml

    rows: list[DeviceProfile] = []
    text = _text(path, [])
    if text is not None:
        try:
            rows = parse(text)
        except ConfigError as error:
            if "schema" in error.message and "damaged" not in error.message and "kvring.device-profiles/" in text:
                raise ConfigError(f"{path} is another kvring's: {error.message}", f"{SWITCH}=another file") from None
            text = None
    if text is None and path.is_file():  # damaged, or no UTF-8
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(path.name + ".damaged"))
    same = (profile.hardware_class, profile.multiprocessors)
    before = next((row for row in rows if (row.hardware_class, row.multiprocessors) == same), None)
    if before is not None and not profile.rates:  # only routes were measured anew
        profile = replace(profile, rates=before.rates)
    rows = [profile, *(row for row in rows if (row.hardware_class, row.multiprocessors) != same)]
    body = {"schema": SCHEMA, "profiles": [row.as_yaml() for row in rows]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, yaml.safe_dump(body, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110))
    except OSError as error:
        raise ConfigError(
            f"the profile can't be written to {path}: {error.strerror or error}",
            f"{SWITCH}=a folder that can be written",
        ) from None


def _text(path: Path, troubles: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        troubles.append(f"{path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")
        return None


def _built_in() -> str:
    return (resources.files("profiles") / "devices.yaml").read_text(encoding="utf-8")


def _row(raw: Any) -> DeviceProfile:
    name, count = raw["hardware_class"], raw["multiprocessors"]
    if not isinstance(name, str) or not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"a row's class is {name!r} and its multiprocessors are {count!r}")
    routes = {key: _bands(key, value) for key, value in raw["routes"].items()}
    rates = {key: _bands(key, value) for key, value in (raw.get("rates") or {}).items()}
    for key, bands in rates.items():
        if not all(isinstance(rate, int | float) and 0 < rate < float("inf") for _, rate in bands):
            raise ValueError(f"{key} has a rate that is no positive number")
    for key in SETTINGS:
        most = count if key == "threads" and count else float("inf")
        if not all(type(value) is int and 0 < value <= most for _, value in routes.get(key, ())):
            raise ValueError(f"{key} has a value that no machine of this row could take")
    return DeviceProfile(name, count, str(raw["origin"]), routes, rates)


def _bands(key: str, raw: Any) -> Bands:
    if not isinstance(key, str):
        raise ValueError(f"{key!r} is no name")
    bands = tuple((last, schedule) for last, schedule in raw)
    lasts = [last for last, _ in bands]
    if not bands or not all(isinstance(last, int) and not isinstance(last, bool) and last > 0 for last in lasts):
        raise ValueError(f"{key} has a band that does not end at a length")
    if any(later <= earlier for earlier, later in pairwise(lasts)):
        raise ValueError(f"the bands of {key} do not increase")
    return bands
