"""The engine with pages of another size, in a process of its own: `python -m gates.page_size TOKENS < settings.json`.

A page's size is a constant of the engine. Here it is another one from the first import on, so that what is measured
(how fast pages are gathered, what is found, what is fetched) is the engine's own work and no estimate. Only the bytes
of tables, which grow with the context, are computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from engine.errors import EngineError

SIZES = (16, 32, 64, 128)
CONTEXT = 262_144
"""Tokens for which the tables are computed."""
WORD = 4  # bytes of an entry


@dataclass(frozen=True)
class Row:
    """`gather`: bytes a second, 4,096 tokens of a layer at a time; `fetched`: bytes a question under recall."""

    page: int  # tokens
    layer_page_bytes: int
    gather: float
    gather_floor: float  # the share of it that was reached
    table_bytes: int  # computed for CONTEXT tokens: where each page lies, what each slot holds, and when it was used
    hits: dict[str, int]  # by task
    dense_hits: dict[str, int]
    trials: int
    fetched: float
    audited: bool


def table_bytes(layers: int, page: int, context: int, pool: int) -> int:
    """Entries of four bytes: slot of a page in each layer; page in a slot and its last use in each layer."""
    return WORD * layers * (-(-context // page) + 2 * (pool // page))


def measure(
    settings: dict, sizes: Sequence[int], say: Callable[[str, float], None], child: Sequence[str] | None = None
) -> Iterator[Row]:
    """A row a size. settings: fields of EngineConfig, and `tokens`, `budget` (tokens), `tasks`, `questions`."""
    for number, size in enumerate(sizes):
        say(f"pages of {size} tokens", number / len(sizes))
        command = child or [sys.executable, "-m", "gates.page_size"]
        done = subprocess.run(
            [*command, str(size)], input=json.dumps(settings), capture_output=True, text=True, encoding="utf-8"
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise EngineError(
                f"the engine with pages of {size} tokens failed: {said[-1][:300] if said else 'silently'}"
            )
        yield Row(**json.loads(done.stdout.splitlines()[-1]))


def main(page: int, settings: dict) -> None:
    import engine.config

    engine.config.PAGE = page
    print(json.dumps(asdict(_row(page, settings))))


def _row(page: int, settings: dict) -> Row:
    """Imported from here on, everything has the page's size."""
    from engine.config import PAGE, EngineConfig
    from gates.arms import ArmSpec, plain
    from gates.context import load_context
    from gates.floors import measure_floors
    from gates.frozen import Arms, Frozen
    from gates.kernels import Scene, gather
    from gates.options import GateOptions

    asked = {name: settings.pop(name) for name in ("tokens", "budget", "tasks", "questions")}
    context = load_context(EngineConfig(**settings), GateOptions(), lambda what, share: None)
    transformer = context.model.transformer
    scene = Scene.of(context.model.config, transformer.device, transformer.dtype, max(2, 4096 // PAGE))
    rate = gather(scene, measure_floors(transformer.device, transformer.dtype), count=4096 // PAGE)
    arms: Arms = {}
    recall = plain(context.prefill, budget_pages=max(1, asked["budget"] // PAGE))
    specs = [ArmSpec("dense", "dense", plain(context.prefill, decode="exact")), ArmSpec("recall", "positive", recall)]
    audited = True
    for task in asked["tasks"]:
        document = context.document(task, asked["tokens"], 1, asked=asked["questions"])
        with Frozen(context, document, {"pool": context.config.kv_capacity}) as frozen:
            frozen.run(specs, arms, lambda what, share: None)
            audited &= bool(frozen.main.audit(deep=True))
    found = {name: {task: arms[task, name].hits for task in asked["tasks"]} for name in ("dense", "recall")}
    recalled = [arms[task, "recall"] for task in asked["tasks"]]
    return Row(
        page,
        scene.shape.layer_page_bytes,
        rate.bytes_per_second,
        rate.floor,
        table_bytes(context.model.config.layers, page, CONTEXT, context.config.kv_capacity),
        found["recall"],
        found["dense"],
        recalled[0].trials,
        sum(arm.bytes_fetched for arm in recalled) / sum(arm.trials for arm in recalled),
        audited,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
