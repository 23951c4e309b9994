"""A card that draws a screen is reset when a kernel keeps it for two seconds: prefill chunks stay well below that.

What is bounded: the matrix products of a whole chunk, which a driver may submit in one go, and the attention of a chunk
over one staged segment, which is one kernel. Both at the rate that was measured on this card.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.config import PAGE
from engine.device import card_of
from engine.device_profile import Found
from engine.model.config import ModelConfig
from engine.ops.geometry import STAGED_PAGES
from engine.platform import Gpu, Platform
from engine.routes import pick
from engine.trials import median_seconds

SECONDS = 2.0
"""TdrDelay of Windows, where nobody changed the registry."""
SHARE = 0.5
"""Of those seconds: clocks fall when a card gets warm, and the screen wants its turn."""
_WIDTH = 4096


def largest_chunk(config: ModelConfig, flops_per_second: float) -> int:
    """Tokens of a chunk, whole pages and at least one, whose kernels end in time."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    products = 2 * config.layers * config.hidden * (2 * q + 2 * kv + 3 * config.ffn)
    segment = 4 * q * STAGED_PAGES * PAGE
    return max(1, int(SECONDS * SHARE * flops_per_second / max(products, segment)) // PAGE) * PAGE


def bounded_chunk(asked: int, config: ModelConfig, card: Gpu | None, rate: Callable[[], float]) -> tuple[int, str]:
    """Tokens of a prefill chunk, and why they are fewer than `asked`: empty where they aren't.

    card: what the driver says of the one that computes, None on a CPU. rate: FLOP a second of its matrix products,
    asked for only where a screen is at stake.
    """
    if card is None or not card.desktop_bytes:
        return asked, ""
    flops = rate()
    most = largest_chunk(config, flops)
    if asked <= most:
        return asked, ""
    return most, (
        f"prefill chunks of {most:,} tokens instead of {asked:,}: a desktop runs on this card, and more would come "
        f"near the {SECONDS:.0f} s after which a display driver resets it (measured: {flops / 1e12:.3g} TFLOP/s)"
    )


def chunk_for(
    asked: int, config: ModelConfig, device: torch.device, dtype: torch.dtype, profile: Found, platform: Platform
) -> tuple[int, str]:
    """`bounded_chunk` on this device."""
    card = card_of(device, platform) if device.type == "cuda" else None
    return bounded_chunk(asked, config, card, lambda: product_rate(device, dtype, profile))


def product_rate(device: torch.device, dtype: torch.dtype, profile: Found) -> float:
    """FLOP a second of a large matrix product: as `calibrate` measured it, else tried now, in milliseconds."""
    rates = profile.profile.rates if profile.profile else {}
    key = f"matmul/{str(dtype).removeprefix('torch.')}"
    if key in rates:
        return pick(rates[key], _WIDTH)
    a, b = (torch.randn(_WIDTH, _WIDTH, device=device, dtype=dtype) for _ in range(2))
    return 2 * _WIDTH**3 / median_seconds(lambda: a @ b, device, 3)
