"""Compiles every kernel for cards that aren't here: `python -m tests.compile_kernels 80 90 [--shapes NAME,...]`.

Engines are driven on the CPU with each launch compiled, for the target and exactly as it was asked for, instead of run.
What kernels would have written stays as it was, so only the launches count. Prints how many of each kernel as JSON;
ends with the first that doesn't compile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from engine.model import random
from engine.model.load import load_model
from engine.model.sizes import Sizes
from engine.ops.follow import LEAST_CAPABILITY
from engine.ops.packed_kernels import disagreement
from engine.triton_runner import TritonRunner
from engine.weights.quant import TYPES

SHAPES = {  # family, layers, hidden, ffn, heads, KV heads, head dim, vocabulary; and the dtype
    "128": (Sizes("qwen3", 2, 256, 512, 8, 2, 128, 320, 1e4, 1 << 20), torch.bfloat16),
    "80": (Sizes("llama", 1, 320, 512, 4, 4, 80, 320, 1e4, 1 << 20), torch.float16),
    "64": (Sizes("qwen2", 1, 256, 512, 14, 2, 64, 320, 1e4, 1 << 20, bias=True), torch.bfloat16),
    "256": (Sizes("qwen3", 1, 256, 512, 4, 1, 256, 320, 1e4, 1 << 20), torch.float32),
    "gemma": (Sizes("gemma3", 6, 256, 512, 4, 1, 256, 320, 1e4, 1 << 20, window=512), torch.bfloat16),
}
TYPES_AT_LEAST = ("Q4_K", "Q8_0")
compiled: Counter[str] = Counter()


class Card:
    """A driver of one card that can be compiled for and nothing else."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_instead(function: JITFunction, grid):
    """What `function[grid]` gives from now on."""

    def launch(*args, **kwargs):
        arch = triton.runtime.driver.active.get_current_target().arch
        if "FOLLOW" in kwargs and arch >= 10 * LEAST_CAPABILITY[0]:
            kwargs |= {"FOLLOW": True, "launch_pdl": True}
        try:
            function.run(*args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            constants = {name: value for name, value in kwargs.items() if isinstance(value, int | bool)}
            text = f"{type(error).__name__}: {str(error)[-1500:]}"
            sys.exit(f"{function.fn.__name__} does not compile for sm{arch} with {constants}: {text}")
        compiled[function.fn.__name__] += 1

    return launch


class Candidate:
    """Triton's runner, whatever it would compute."""

    name = "compiled"

    def __init__(self, runner) -> None:
        self.runner = runner

    def build(self) -> TritonRunner:
        self.runner.digests.packed = True
        self.built = TritonRunner(self.runner)
        return self.built

    def disagreement(self, built) -> str:
        return ""


WAYS = (("exact", "recall"), ("recall", "recall"), ("exact", "exact"), ("exact", "window"))
FORMS = ({"positions": "compact"}, {"kv_dtype": "k8v4"}, {"kv_dtype": "int4"}, {"kv_dtype": "fp8"})
"""Settings under which other kernels run than by default."""


def drive(shape: Sizes, dtype: torch.dtype, ways: tuple = WAYS, **settings: str) -> None:
    """Chunks that stream, a suffix that is recalled, single steps of each kind, one of them over a page's end."""
    random.SHAPES["compiled"] = shape
    model = load_model("random:compiled", torch.device("cpu"), dtype)
    more = {"sink": 64, "cuda_graph": "off", "device_profile": "off", **settings}
    config = EngineConfig(model="", max_context=1024, kv_capacity=640, prefill_chunk=128, **more)
    made: list[Candidate] = []
    engine = Engine(config, model, backends=[lambda runner: made.append(Candidate(runner)) or made[-1]])
    for prefill, decode in ways:
        text = ("word " * 200)[: 12 * 64 - 2 - len(decode)] + decode  # a token a byte: the third answered opens a page
        prepared = engine.prepare(
            text, SamplingParams(max_tokens=4, ignore_eos=True), RecallParams(prefill=prefill, decode=decode)
        )
        with contextlib.suppress(EngineError):  # in the end: no kernel gave the opened page a slot
            engine.complete(prepared)
    # What only a card is asked for.
    made[0].built._store_pages(torch.zeros(shape.layers, 1, dtype=torch.int64), [0])
    engine.close()


def multiply(names: Iterable[str]) -> None:
    """Products with quantised matrices, and their dequantisation."""
    from engine.ops.triton_packed import TENSOR_CORES, TRITON

    for name in names:
        for kernels, dtype in ((TRITON, torch.bfloat16), (TENSOR_CORES, torch.bfloat16), (TENSOR_CORES, torch.float16)):
            disagreement(name, kernels, torch.device("cpu"), dtype)


def main(arguments: list[str]) -> None:
    JITFunction.__getitem__ = compile_instead
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # nobody writes there: a number must stand in it
    parser = argparse.ArgumentParser()
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--shapes", type=lambda text: text.split(","))
    asked = parser.parse_args(arguments)
    for capability in asked.capabilities:
        triton.runtime.driver.set_active(Card(capability))
        for name in asked.shapes or ["128"]:
            drive(*SHAPES[name])
        if not asked.shapes:
            drive(*SHAPES["gemma"], ways=WAYS[:1])
        for settings in FORMS if asked.shapes else FORMS[:1]:
            drive(*SHAPES["128"], ways=WAYS[1:2], **settings)
        multiply(TYPES if asked.shapes else TYPES_AT_LEAST)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main(sys.argv[1:])
