"""One conversation, prefilled once, under pools of several sizes: every arm starts from the same pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import RecallParams, SamplingParams
from engine.engine import Engine
from engine.examine import adopt
from engine.result import Result
from gates.arms import ANSWER, ArmSpec, Exam, run_arm
from gates.context import Context
from gates.verdict import Arm, Check

Arms = dict[tuple[str, str], Arm]
"""By task and name; seeds add up."""


class Frozen:
    """`with Frozen(...) as frozen`: `main` prefills the document; other engines adopt its pages when first used."""

    def __init__(self, context: Context, exam: Exam, pools: dict[str, int], room: int = 1024, **others: int) -> None:
        """`pools`: tokens by name, the first is the one that prefills; `room`: tokens for questions and answers beside
        the document; `others`: engine settings of every pool but the first.
        """
        self._context, self._exam, self._pools, self._others = context, exam, pools, others
        self._size = exam.tokens + room
        self._opening = RecallParams(prefill=context.prefill)
        first = next(iter(pools))
        self.main = context.engine(max_context=self._size, kv_capacity=pools[first])
        self._engines = {first: self.main}

    def __enter__(self) -> Frozen:
        try:
            self.main.complete(self._prepared(SamplingParams(max_tokens=1)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()

    def engine(self, where: str) -> Engine:
        """The engine of that pool, with the document's pages in its store."""
        if where not in self._engines:
            capacity = min(self._pools[where], -(-self._size // 64) * 64)
            engine = self._context.engine(max_context=self._size, kv_capacity=capacity, **self._others)
            self._engines[where] = engine
            adopt(engine, self.main, self._prepared(None))
        return self._engines[where]

    def run(
        self, specs: Sequence[ArmSpec], arms: Arms, say: Callable[[str, float], None], answer: int = ANSWER
    ) -> None:
        """Every arm that asks this exam's task, added to `arms`."""
        first = self._exam.trials()[0][0]
        for index, spec in enumerate(specs):
            say(f"{self._exam.task}: {spec.name}", (1 + index) / (1 + len(specs)))
            key = (self._exam.task, spec.name)
            arm = arms.get(key) or arms.setdefault(key, spec.new_arm(self._exam.task, first))
            results = run_arm(self.engine(spec.where), self._exam, spec, arm, answer)
            if spec.warns:
                silent = sum(result.recall.hidden_pages > 0 and not _warned(result) for result in results)
                arm.note = f"{silent} answers without a warning" if silent else arm.note

    def _prepared(self, sampling: SamplingParams | None):
        return self.main.prepare(self._exam.messages(self._exam.trials()[0][0]), sampling, self._opening)


def _warned(result: Result) -> bool:
    return any("recall was off" in warning for warning in result.warnings)


def warnings_checked(arms: Arms) -> list[Check]:
    """Where recall was off on purpose, every answer over the pool said so."""
    return [
        Check(f"{arm.label}: every answer says so", not arm.note, arm.note or f"{arm.trials} of {arm.trials} warned")
        for arm in arms.values()
        if arm.name == "recall off"
    ]
