"""What a gate found, and what that makes of the claim. A control that stays green blinds the gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from gates.interval import clopper_pearson, fisher, sign_test

SCHEMA = "kvring.gate/2"
EXIT = {"PASS": 0, "FAIL": 1, "BLIND": 3, "WEAK MODEL": 4, "INCONCLUSIVE": 5}
WORST_FIRST = ("FAIL", "BLIND", "WEAK MODEL", "INCONCLUSIVE", "PASS")


def worst(reports: Sequence[Report]) -> str:
    """The verdict over several gates: the one that should worry most."""
    return min((report.verdict for report in reports), key=WORST_FIRST.index)


def to_json(reports: Sequence[Report], command: str) -> dict[str, object]:
    """Several gates in one object; `command` is what repeats the run."""
    verdict = worst(reports)
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "exit_code": EXIT[verdict],
        "command": command,
        "reports": [report.to_json() for report in reports],
    }


class Question(Protocol):
    """What a gate asks: `answered(text)` says whether the answer holds every expected value."""

    @property
    def expected(self) -> str: ...

    def answered(self, text: str) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """One answered question."""

    seed: int
    tokens: int  # of the prompt
    turn: int
    depth: float  # 0..1: where the fact stands
    expected: str
    said: str
    hit: bool
    cut: bool = False  # a miss that was empty or ended by its length
    strip: str = ""  # of a positive arm's miss: a letter a page (Engine's explain)
    pages: tuple[int, ...] = ()  # those of the fact itself, where known


@dataclass
class Arm:
    """One way of running the trials: positive (must be green), dense (the model's ceiling) or control (must be red)."""

    name: str
    task: str
    kind: str
    outcomes: list[Outcome] = field(default_factory=list)  # in the order of asking
    hidden_pages: int = 0  # the fewest that a trial's last step did not see
    pages_selected: int = 0
    bytes_fetched: int = 0
    seconds: float = 0.0
    twin: str = ""  # the arm that differs in one setting only and must be green for this control to count
    red_share: float = 0.0  # controls: hits up to this share of the trials are red
    settings: str = ""  # what was asked of the engine for this arm
    note: str = ""

    @property
    def hits(self) -> int:
        return sum(outcome.hit for outcome in self.outcomes)

    @property
    def trials(self) -> int:
        return len(self.outcomes)

    @property
    def inconclusive(self) -> int:
        return sum(outcome.cut for outcome in self.outcomes)

    @property
    def silent_wrong(self) -> int:
        """Completed, non-empty answers without the expected value."""
        return sum(not outcome.hit and not outcome.cut for outcome in self.outcomes)

    @property
    def red_at_most(self) -> int:
        return int(self.trials * self.red_share)

    @property
    def green(self) -> bool:
        return self.hits == self.trials > 0

    @property
    def red(self) -> bool:
        return self.hits <= self.red_at_most and self.trials > 0

    @property
    def interval(self) -> tuple[float, float]:
        """Exact, 95 %."""
        return clopper_pearson(self.hits, self.trials)

    def against(self, other: Arm) -> tuple[int, int]:
        """(lost, won): trials that `other` answered and this arm did not, and the reverse."""
        pairs = [(a.hit, b.hit) for a, b in zip(other.outcomes, self.outcomes, strict=True)]
        return pairs.count((True, False)), pairs.count((False, True))

    def worse(self, other: Arm) -> float:
        """One-sided p that so much was lost where both are equally good: in pairs where both were asked the same."""
        if [outcome.expected for outcome in self.outcomes] == [outcome.expected for outcome in other.outcomes]:
            return sign_test(*self.against(other))
        return fisher(self.hits, self.trials, other.hits, other.trials)

    @property
    def label(self) -> str:
        return f"{self.task} {self.name}".strip()

    def to_json(self) -> dict[str, object]:
        derived = ("hits", "trials", "silent_wrong", "inconclusive", "red_at_most", "interval")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Check:
    """Something about the instrument or an exact comparison."""

    name: str
    ok: bool
    detail: str
    control: bool = False  # a comparison that had to differ: not ok makes the gate blind


@dataclass
class Report:
    """A gate's whole outcome; `judge` fills in the verdict."""

    gate: str
    arms: list[Arm] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    environment: dict[str, object] = field(default_factory=dict)
    blinding_switches: list[str] = field(default_factory=list)  # settings of the user's that no positive arm survives
    not_run: list[str] = field(default_factory=list)  # arms that need what this run doesn't have
    notes: list[str] = field(default_factory=list)  # what a reader must know; judges nothing
    seconds: float = 0.0
    verdict: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    def answered(self, name: str, question: Question, said: str, ceiling: Callable[[], str]) -> None:
        """A check that `said` is right. Where it isn't, `ceiling` says what the model answers seeing everything: if it
        can't do it itself, that is a note and no check.
        """
        right, detail = question.answered(said), f"'{said}' for {question.expected}"
        if not right:
            seeing = ceiling()
            detail += f", seeing everything '{seeing}'"
            if not question.answered(seeing):
                self.notes.append(f"{name}: not counted, the model itself can't: {detail}")
                return
        self.checks.append(Check(name, right, detail))

    def judge(self) -> Report:
        """WEAK MODEL before BLIND before FAIL before INCONCLUSIVE: each makes the later ones meaningless."""
        self.verdict, self.reasons = self._judge()
        return self

    def to_json(self) -> dict[str, object]:
        return {
            "gate": self.gate,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reasons": self.reasons,
            "seconds": round(self.seconds, 3),
            "arms": [arm.to_json() for arm in self.arms],
            "checks": [asdict(check) for check in self.checks],
            "not_run": self.not_run,
            "notes": self.notes,
            "environment": self.environment,
        }

    def _judge(self) -> tuple[str, list[str]]:
        if self.blinding_switches:
            return "FAIL", [f"{switch}: no positive arm can be green under it" for switch in self.blinding_switches]
        weak = [arm for arm in self.arms if arm.kind == "dense" and not arm.green]
        if weak:
            return "WEAK MODEL", [
                f"{arm.label}: the model itself, seeing everything, finds {arm.hits} of {arm.trials}" for arm in weak
            ]
        blind = [f"{check.name}: {check.detail}" for check in self.checks if check.control and not check.ok]
        blind += [
            f"{arm.label}: stayed green, {arm.hits} of {arm.trials} (red is at most {arm.red_at_most})"
            for arm in self.arms
            if arm.kind == "control" and not arm.red
        ]
        if blind:
            return "BLIND", blind
        positive = [arm for arm in self.arms if arm.kind == "positive"]
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]
        failed += [
            f"{arm.label}: {arm.hits} of {arm.trials}, silent wrong {arm.silent_wrong}"
            for arm in positive
            if arm.silent_wrong
        ]
        # A control beside a twin that is not green shows nothing; an answer that was only cut leaves it open (below).
        whole = {
            arm.label for arm in self.arms if arm.kind != "control" and arm.hits + arm.inconclusive == arm.trials > 0
        }
        for arm in self.arms:
            if arm.kind == "control" and arm.twin and f"{arm.task} {arm.twin}".strip() not in whole:
                failed.append(f"{arm.label}: its green twin '{arm.twin}' is not green")
        if failed:
            return "FAIL", failed
        unclear = [
            f"{arm.label}: {arm.inconclusive} of {arm.trials} answers empty or cut"
            for arm in positive
            if arm.inconclusive
        ]
        if unclear:
            return "INCONCLUSIVE", unclear
        if not positive and not self.checks:
            return "INCONCLUSIVE", ["nothing was run"]
        return "PASS", []
