"""Trains the phantom, in stages of growing length, within a budget of seconds; then measures it.

    python -m gates.phantom.prepare --packages /tmp/corpus --fetch          # once, on any machine
    python -m gates.phantom.train --budget-seconds 800 --out out            # on one GPU

The copying circuit forms in the first stage, which therefore ends by its loss as well as by its time: before that no
longer stage is of use. Learning rates rise over 50 steps and fall linearly to a fifth in each stage. Weights are saved
after each stage.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gates.phantom.model import Layer, Phantom, Shape, load, save
from gates.phantom.sample import REPEAT, TEXT, VALUE, Mix, Sampler

ROWS = 8192  # most language-model rows, and most repeat rows, that one step's loss reads


@dataclass(frozen=True)
class Stage:
    share: float  # of the budget
    batch: int
    rate: float
    mix: Mix
    windowed: float = 0.0  # share of the steps in which the document is read through a window
    text_weight: float = 0.3
    steps: int | None = None  # instead of the share (tests)


STAGES = (
    Stage(0.13, 256, 2e-3, Mix(256, repeats=0.5), text_weight=1.0),
    Stage(0.15, 96, 1.5e-3, Mix(1024, repeats=0.12, skips=0.3), text_weight=1.0),
    Stage(0.17, 24, 1e-3, Mix(4096, repeats=0.02, skips=0.5)),
    Stage(0.17, 8, 6e-4, Mix(16384, skips=0.5), windowed=0.5),
    Stage(0.19, 2, 3e-4, Mix(65536, skips=0.5), windowed=0.6),
    Stage(0.11, 1, 1.5e-4, Mix(131072, skips=0.4), windowed=0.6),
    Stage(0.08, 1, 8e-5, Mix(262144), windowed=0.7),
)


class Batches(IterableDataset):
    """Endless batches; each worker draws from its own seed. Rows that the loss reads are chosen here, off the GPU."""

    def __init__(self, folder: Path, stage: Stage, seed: int) -> None:
        self.folder, self.stage, self.seed = folder, stage, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | int]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        sampler = Sampler(self.folder, self.seed * 1000 + (info.id if info else 0))
        while True:
            batch = sampler.batch(self.stage.mix, self.stage.batch)
            yield {**batch, **self._rows(batch, sampler.rng)}

    def _rows(self, batch: dict, rng: np.random.Generator) -> dict[str, torch.Tensor | int]:
        """Flat indices of the tokens to predict, values first, with weights that make each kind a mean."""
        flat = batch.pop("kinds").reshape(-1)
        flat[:: self.stage.mix.length] = 0
        rows, weights = [], []
        for kind, weight in ((VALUE, 1.0), (TEXT, self.stage.text_weight), (REPEAT, 1.0)):
            found = np.flatnonzero(flat == kind)
            if kind != VALUE and len(found) > ROWS:
                found = rng.choice(found, ROWS, replace=False)
            rows.append(found)
            weights.append(np.full(len(found), weight / max(1, len(found)), np.float32))
        out: dict[str, torch.Tensor | int] = {
            "rows": torch.from_numpy(np.concatenate(rows)),
            "weights": torch.from_numpy(np.concatenate(weights)),
            "values": len(rows[0]),
        }
        batch["ids"], batch["positions"] = torch.from_numpy(batch["ids"]), torch.from_numpy(batch["positions"])
        return out


def losses(model: Phantom, batch: dict, tail: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted loss and the mean over the values alone."""
    device = model.norm.weight.device
    ids, positions, rows, weights = (
        batch[name].to(device, non_blocking=True) for name in ("ids", "positions", "rows", "weights")
    )
    hidden = model(ids.long(), positions, tail).flatten(0, 1)
    logits = model.logits(hidden[rows - 1])
    each = F.cross_entropy(logits.float(), ids.flatten()[rows].long(), reduction="none")
    return (each * weights).sum(), each[: batch["values"]].detach().mean()


def compiled(model: Phantom, device: str) -> None:
    """Fuse what stands around attention; without a working compiler training is the same, only slower."""
    project, finish = Layer.project, Layer.finish
    try:
        Layer.project = torch.compile(project, dynamic=True)
        Layer.finish = torch.compile(finish, dynamic=True)
        ids = torch.zeros(4, 96, dtype=torch.long, device=device)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            model(ids, ids).sum().backward()
        model.zero_grad(set_to_none=True)
    except Exception as error:
        print(f"torch.compile failed, going on without: {str(error)[:300]}", flush=True)
        Layer.project, Layer.finish = project, finish


def run_stage(
    model: Phantom, optimizer: torch.optim.Optimizer, stage: Stage, seconds: float, options, seed: int
) -> None:
    """Train one stage for `seconds`; the very first one of a fresh model also by its loss. Saves the weights."""
    device, first = options.device, seed == options.seed and options.resume is None
    loader = DataLoader(
        Batches(options.data, stage, seed),
        batch_size=None,
        num_workers=options.workers,
        pin_memory=device != "cpu",
        prefetch_factor=4 if options.workers else None,
    )
    coin = np.random.default_rng(seed)
    start, step, smooth, waited = time.time(), 0, float("nan"), 0.0
    batches = iter(loader)
    while True:
        asked = time.time()
        batch = next(batches)
        waited += time.time() - asked
        progress = step / stage.steps if stage.steps else (time.time() - start) / seconds
        if progress >= 1 and not (first and not stage.steps and smooth > 0.5 and progress < 2):
            break
        if first and not stage.steps and progress > 0.4 and smooth < 0.05:
            break
        rate = stage.rate * min(1, (step + 1) / 50) * (1 - 0.8 * min(1, progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tail = batch["tail"] if coin.random() < stage.windowed else None
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            loss, value = losses(model, batch, tail)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            number = value.item()
            if not math.isnan(number):
                smooth = number if math.isnan(smooth) else 0.8 * smooth + 0.2 * number
        if step % options.report == 0:
            elapsed = time.time() - start
            rate_text = f"{step * stage.batch * stage.mix.length / elapsed / 1e6:.2f} Mtok/s, waited {waited:.0f} s"
            losses_text = f"value {smooth:.4f}  loss {loss.item():.3f}"
            print(f"{stage.mix.length:>7} step {step:>5} {elapsed:6.1f} s  {losses_text}  {rate_text}", flush=True)
    print(f"{stage.mix.length:>7} done: {step} steps, {time.time() - start:.1f} s, value {smooth:.4f}", flush=True)
    save(model, options.out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(".phantom-data"), help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-seconds", type=float, default=800)
    parser.add_argument("--resume", type=Path, help="folder of a saved model to go on from")
    parser.add_argument("--stages", type=json.loads, help="[[length, batch, rate, share, windowed], ...]")
    parser.add_argument("--between", type=float, help="share with text between questions and answers")
    parser.add_argument("--tasks", type=json.loads, help="weights of keyed, disjoint, lines, codes")
    parser.add_argument("--steps", type=int, help="steps a stage, instead of the budget")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    start = time.time()
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = (load(options.resume) if options.resume else Phantom(Shape())).to(options.device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=options.device != "cpu")
    if not options.no_compile:
        compiled(model, options.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, ready in {time.time() - start:.0f} s", flush=True)
    stages = STAGES
    if options.stages:
        stages = tuple(
            Stage(share, batch, rate, Mix(length, skips=0.4 if length < 200_000 else 0.0), windowed)
            for length, batch, rate, share, windowed in options.stages
        )
    for index, stage in enumerate(stages):
        stage = replace(stage, steps=options.steps)
        if options.tasks:
            stage = replace(stage, mix=replace(stage.mix, tasks=tuple(options.tasks)))
        if options.between is not None:
            stage = replace(stage, mix=replace(stage.mix, between=options.between))
        left = options.budget_seconds - (time.time() - start)
        seconds = left * stage.share / sum(later.share for later in stages[index:])
        run_stage(model, optimizer, stage, seconds, options, options.seed + index)
    print(f"trained in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
