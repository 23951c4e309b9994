"""What a generation says while it runs and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import KVRingError


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that are in the cache by now, of how many."""

    done: int
    total: int
    mode: str


@dataclass(frozen=True)
class Token:
    """One generated token. `text` may be empty while a character or a stop string is unfinished."""

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens. cached + computed = prompt; cached is what was really not computed."""

    prompt: int
    cached: int
    computed: int
    generated: int


@dataclass(frozen=True)
class RecallReport:
    """What recall did for one request. Fetches are counted per layer: one layer of one page."""

    over_pool: bool
    prefill_modes: tuple[str, ...]  # in the order in which they ran
    decode_mode: str
    scorer: str
    selections: int
    pages_selected: int
    hidden_pages: int  # past pages that the last step did not see
    layer_pages_fetched: int
    layer_pages_streamed: int
    bytes_fetched: int
    fetch_seconds: float
    lexical_matches: int
    prompt_hidden: int = 0  # past pages that the prompt's end did not see although recall read it, and selected none

    @property
    def blind(self) -> bool:
        """Pages were out of sight, and of them none was selected to the end, or for a prompt that recall read.

        Recall is off, or at fault.
        """
        return self.prompt_hidden > 0 or (self.over_pool and self.hidden_pages > 0 and not self.pages_selected)


@dataclass(frozen=True)
class Timings:
    """Seconds."""

    prefill: float
    first_token: float  # from the start of the request
    decode: float

    def rates(self, usage: Usage) -> tuple[float, float]:
        """Computed prompt tokens a second, and generated tokens a second after the first."""
        return (
            usage.computed / self.prefill if self.prefill else 0.0,
            (usage.generated - 1) / self.decode if self.decode and usage.generated > 1 else 0.0,
        )


@dataclass(frozen=True)
class PageView:
    """One logical page in the `--explain` strip."""

    resident: bool
    seen: bool
    fetched: bool
    steps: dict[str, int] = field(default_factory=dict)  # why it was selected -> how often, counted per layer and step

    @property
    def selected(self) -> int:
        """How often it was, for any reason."""
        return sum(self.steps.values())


@dataclass(frozen=True)
class Result:
    """The end of a request. `finish`: stop, or length; `warnings` say what a person must know of the answer."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    usage: Usage
    recall: RecallReport
    timings: Timings
    warnings: tuple[str, ...] = ()
    pages: tuple[PageView, ...] = field(default=(), repr=False)


class AuditError(KVRingError):
    """An invariant does not hold."""
