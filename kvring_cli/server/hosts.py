"""By which names a server without a key may be called: a page of another site can let its own resolve to 127.0.0.1,
and would then read every answer.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can mean it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def stranger(header: bytes | None, allowed: tuple[str, ...] | None) -> str | None:
    """The name in a Host header, if it is neither loopback's nor one of `allowed` (None: any may come)."""
    if allowed is None or header is None:
        return None
    asked = header.decode("latin-1").strip().lower()
    name = asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]
    return None if is_loopback(name) or name in allowed else name
