"""What a person can set, as frozen values: the engine's once, a request's per request.

Defaults live here and nowhere else; the command line and the environment read them from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 64
"""Tokens a page: `gather` runs near the copy engine's rate from 64 tokens on, and a fact fits in one or two."""

SLACK = 8
"""Pages of an automatic pool beside its window and a chunk."""

MODES = ("exact", "recall", "window")
KV_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8", "int8", "k8v4", "int4")
KV_EXPERIMENTAL = ("fp8", "int4")
"""Those that lost facts or a tenth of perplexity in a gate: the README's table has the figures."""
KV_MARK = ", experimental: it failed a gate"
"""What is said of those wherever one is in use."""
WEIGHT_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "iq3_s", "tq1_0", "tq2_0"),
)
"""Quantised types of matrices that are computed with as they are."""
SCORERS = ("fused", "lexical", "mean", "bounds", "subpage", "token", "mass")


@dataclass(frozen=True)
class EngineConfig:
    """One engine: a model, a device, and how much of the context each tier holds. Token counts unless named bytes."""

    model: str
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    kv_dtype: str = "auto"  # of KV_DTYPES; auto = the model's own, or k8v4 where memory holds the context only so
    threads: int | None = None  # CPU threads; None = all that this process may use
    max_context: int | None = None  # None = the model's trained context, or what memory holds if that is less
    kv_capacity: int | None = None  # tokens of the device pool; None = sized from kv_window
    kv_window: int | None = None  # tokens of working set that size the automatic pool
    prefill_chunk: int = 1024
    ring: str = "auto"  # auto | on | off
    retrieve: str | int = "auto"  # auto | off | a budget in tokens
    retrieve_share: int = 50  # percent of the pool that the selection may fill
    neighbor_pages: int = 1  # pages each side of a selected page
    sink: int = 256
    query_tail: int = 64
    scorer: str = "fused"
    far_heads: str | int = "auto"  # auto | all | percent: of which KV head groups key codes are kept and scored
    prefill: str = "auto"  # auto | exact | recall | window
    decode: str = "auto"
    positions: str = "absolute"  # absolute | compact
    reuse: bool = True
    host_memory: str = "auto"  # auto | pinned | pageable
    host_kv_bytes: int | str | None = None  # None = what max_context needs; auto = several contexts, as RAM allows
    device_limit_bytes: int | None = None
    ram_limit_bytes: int | None = None
    verify_pages: bool = False
    cuda_graph: str = "on"  # on | off: whether a step of one token is captured and replayed
    weights: str = "auto"  # auto | packed | dense | one of WEIGHT_TYPES
    device_profile: str = "auto"  # auto | off | calibrate: whose measured routes are taken
    device_profile_path: str | None = None  # None = the user's cache folder


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy."""

    max_tokens: int | None = None  # None = what fits, at most 32,768
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; n = the n likeliest beside the chosen one


@dataclass(frozen=True)
class RecallParams:
    """How one request sees the pages; None takes the engine's setting.

    The last three are the gates' negative controls: they break one thing on purpose and stand in every report.
    """

    prefill: str | None = None
    decode: str | None = None
    scorer: str | None = None
    budget_pages: int | None = None  # pages of the selection, neighbours included
    neighbor_pages: int | None = None
    query_tail: int | None = None
    explain: bool = False  # keep per page where it was and why it was seen
    control: str | None = None  # "newest" | "random": what fills the selection's budget instead of scores
    exclude_tokens: tuple[tuple[int, int], ...] = ()  # token ranges whose pages are never selected
    seed: int = 0  # of the random control
