"""Measures a phantom with everything visible: task x filler x length x seed, hits of 12 (6 in turn 1, 6 in turn 2).

    python -m gates.phantom.evaluate --model gates/phantom --out eval.json

A hit is the model's own greedy answer being exactly the value and then the end of the message. It is found without
decoding: with the value itself fed, every token of it must be the argmax at its place. The document is prefilled once,
the twelve continuations run as one batch. `--windowed` prefills the document through the window instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gates.filler import FILLERS, HELD_OUT
from gates.haystack import GATE_TOKENS, TASKS, Fact, build, chat_counter
from gates.phantom.model import Phantom, attend, load, rope

LENGTHS = (600, 2_000, 12_000, GATE_TOKENS, 94_698)
LONG = (200_000, 260_000)
VARIANTS = {
    "": "",
    "aside": ", 800 tokens between question and answer",
    "before": ", 800 tokens before the question",
    "seam": ", values across page seams",
}
_tokenizer: Tokenizer | None = None

Cache = list[tuple[Tensor, Tensor]]  # k and v of each layer
Case = tuple[str, str, int, int, str]  # task, filler, tokens, seed, variant: a key of VARIANTS


def encode(text: str) -> list[int]:
    return _tokenizer.encode(text, add_special_tokens=False).ids


def _start(path: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(path)


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def prompts(case: Case) -> tuple[Case, list[int], list[list[int]], list[list[int]]]:
    """The document's tokens, twelve continuations up to the answer, and the twelve answers."""
    task, filler, tokens, seed, variant = case
    seam = 64 if variant == "seam" else None
    document = build(
        task, tokens - (1_000 if variant == "aside" else 0), chat_counter(encode), seed, filler=filler, seam=seam
    )
    before = aside(filler, 800) + "\n\n" if variant == "before" else ""
    between = "\n\n" + aside(filler, 800) if variant == "aside" else ""
    continuations, answers = [], []
    first = document.turn(1)
    for index, fact in enumerate(document.asked):
        earlier = [] if index < 6 else [first[index - 6]]
        continuations.append(encode(_continuation(fact, earlier, before, between)))
        answers.append(encode(fact.expected) + encode("<|im_end|>"))
    return case, encode(f"<|im_start|>user\n{document.text}"), continuations, answers


def aside(filler: str, tokens: int) -> str:
    """Text of a kind, of `tokens` tokens, about."""
    stream, units = FILLERS[filler].stream(Random("aside")), []
    while not units or len(encode(FILLERS[filler].joiner.join(units))) < tokens:
        units.append(next(stream))
    return FILLERS[filler].joiner.join(units)


def _continuation(fact: Fact, earlier: Sequence[Fact], before: str, between: str) -> str:
    text = "\n\n"
    for past in earlier:
        text += f"{past.question}<|im_end|>\n" + _turn("assistant", past.expected) + "<|im_start|>user\n"
    return text + f"{before}{fact.question}{between}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def prefill(model: Phantom, ids: list[int], windowed: bool) -> Cache:
    """k and v of each layer, [1, kv head, token, head_dim]."""
    device = model.norm.weight.device
    cos, sin = rope(torch.arange(len(ids), device=device)[None], model.shape)
    x, cache = model.embed_tokens(torch.tensor([ids], device=device)), []
    for layer in model.layers:
        q, k, v = layer.project(x, cos, sin)
        cache.append((k, v))
        x = layer.finish(x, attend(q, layer.repeat(k), layer.repeat(v), 1 if windowed else None))
    return cache


@torch.no_grad()
def hits(
    model: Phantom, cache: list[tuple[Tensor, Tensor]], continuations: list[list[int]], answers: list[list[int]]
) -> list[bool]:
    """Which of the continuations are answered exactly."""
    device, length = model.norm.weight.device, cache[0][0].shape[2]
    rows = [a + b for a, b in zip(continuations, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    cos, sin = rope((length + torch.arange(width, device=device))[None].expand(len(rows), -1), model.shape)
    x = model.embed_tokens(ids)
    for layer, (old_k, old_v) in zip(model.layers, cache, strict=True):
        q, k, v = layer.project(x, cos, sin)
        k, v = (torch.cat((old.expand(len(rows), -1, -1, -1), new), 2) for old, new in ((old_k, k), (old_v, v)))
        x = layer.finish(x, attend(q, layer.repeat(k), layer.repeat(v)))
    best = model.logits(model.norm(x)).argmax(-1).cpu()
    out = []
    for row, (question, answer) in enumerate(zip(continuations, answers, strict=True)):
        said = best[row, len(question) - 1 : len(question) - 1 + len(answer)].tolist()
        out.append(said == answer)
    return out


def measure(model: Phantom, cases: list[Case], tokenizer: str, windowed: bool, workers: int) -> list[dict]:
    device = model.norm.weight.device.type
    results = []
    with Pool(workers, _start, (tokenizer,)) as pool:
        for case, document, continuations, answers in pool.imap(prompts, cases, chunksize=1):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                found = hits(model, prefill(model, document, windowed), continuations, answers)
            names = ("task", "filler", "tokens", "seed", "variant")
            line = dict(zip(names, case, strict=True))
            results.append({**line, "windowed": windowed, "turn1": sum(found[:6]), "turn2": sum(found[6:])})
    return results


def table(results: list[dict]) -> str:
    """Markdown: a line for each task and filler, a column for each length; hits of 12 by seed."""
    lengths = sorted({r["tokens"] for r in results})
    rows: dict[tuple, dict[int, list[int]]] = {}
    for r in results:
        note = (", windowed prefill" if r["windowed"] else "") + VARIANTS[r["variant"]]
        held = " (held out)" if r["filler"] in HELD_OUT else ""
        rows.setdefault((r["task"] + note, r["filler"] + held), {}).setdefault(r["tokens"], []).append(
            r["turn1"] + r["turn2"]
        )
    out = ["| task | filler | " + " | ".join(f"{n:,}" for n in lengths) + " |", "| --- " * (len(lengths) + 2) + "|"]
    for (task, filler), cells in rows.items():
        out.append(
            f"| {task} | {filler} | " + " | ".join(" ".join(map(str, cells.get(n, ["-"]))) for n in lengths) + " |"
        )
    return "\n".join(out)


def all_cases(seeds: Sequence[int], quick: bool) -> tuple[list[Case], list[Case]]:
    """What is measured with everything visible, and what is measured after windowed prefill too."""
    fillers = ("prose", "words16", *HELD_OUT) if quick else tuple(FILLERS)
    dense = [(t, f, n, s, "") for n, t, f, s in product(LENGTHS, TASKS, fillers, seeds)]
    dense += [(t, f, n, s, "") for n, t, f, s in product(LONG, TASKS, ("prose", "code"), seeds[:2])]
    dense += [(t, f, n, s, "aside") for n, t, f, s in product(LENGTHS[2:4], TASKS, ("prose", "code"), seeds)]
    dense += [(t, "prose", LENGTHS[2], s, v) for v, t, s in product(("before", "seam"), TASKS, seeds)]
    window = [(t, f, GATE_TOKENS, s, "") for t, f, s in product(TASKS, ("prose", "words16", "code", "table"), seeds)]
    return dense, window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with model.safetensors and config.json")
    parser.add_argument("--tokenizer", help="tokenizer.json, if it isn't in the model's folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--quick", action="store_true", help="four fillers instead of all")
    parser.add_argument("--most", type=int, default=10**9, help="leave out longer documents")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    start = time.time()
    tokenizer = options.tokenizer or str(options.model / "tokenizer.json")
    model = load(options.model).to(options.device).eval()
    results = []
    for cases, windowed in zip(all_cases(options.seeds, options.quick), (False, True), strict=True):
        cases = [case for case in cases if case[2] <= options.most]
        results += measure(model, cases, tokenizer, windowed, options.workers)
        options.out.write_text(json.dumps(results))
    print(table(results))
    total = sum(r["turn1"] + r["turn2"] for r in results)
    print(f"{total} of {12 * len(results)} in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
