"""Bytes and token counts as people write and read them."""

from __future__ import annotations

import re

from engine.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SCALE = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bytes(text: str) -> int:
    """`12GiB`, `512m` and `8G` are powers of two; `12GB` is decimal; a bare number is bytes."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b?)\s*", str(text).lower())
    if not match:
        raise ConfigError(f"'{text}' is not an amount of memory", "write it like 12GiB, 512MiB or 8G")
    number, prefix, tail = match.groups()
    scale = _DECIMAL[prefix] if prefix and tail == "b" else _SCALE[prefix]
    return int(float(number) * scale)


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit, size in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{int(count)} B"


def parse_tokens(text: str | int) -> int:
    """`4032`, `4,032` and `256K` (x 1024) as a number of tokens."""
    match = re.fullmatch(r"\s*([0-9][0-9,_]*)\s*([km]?)\s*", str(text).lower())
    if not match:
        raise ConfigError(f"'{text}' is not a number of tokens", "write it like 4032 or 256K")
    number, prefix = match.groups()
    return int(number.replace(",", "").replace("_", "")) * _SCALE[prefix]
