"""How fast the ring prefills, decodes and resumes over context lengths, beside the floors of the same run.

A floor is the bytes that a step must move over the rate at which this device moves them, or the operations that a
chunk must do over the rate of its matrix product. Documents are one token a byte for `random:` models; for others the
length that was really reached is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model.load import LoadedModel
from engine.pauses import exempt_loaded, let_go
from gates.floors import Floors

Say = Callable[[str], None]
WORDS = "a river under the old bridge carries what the keeper of the mill has lost to the sea beyond "
WARM = 8
"""Tokens before the decode that is timed: kernels are compiled and the graph is captured in them."""
WARM_PROMPT = 24_576
DRAWN = {"temperature": 0.7, "top_p": 0.9}
"""How the part `drawn` draws its tokens, as most clients ask; all others take the likeliest."""


@dataclass(frozen=True)
class Row:
    """One measurement; None where it does not apply. `floor` is the share of the floor's speed that was reached."""

    what: str
    context: int
    tokens_per_second: float
    milliseconds: float  # a decoded token, or to the first token
    floor: float | None = None
    bytes_per_second: float | None = None
    flops: float | None = None
    fetched: float | None = None  # layer pages a step
    peak_bytes: int | None = None  # device memory, weights included
    beside_bytes: int | None = None  # of them, beside the weights
    steps_by: str = ""
    setting: str = ""  # the value of a sweep


def document(engine: Engine, tokens: int, salt: str) -> str:
    """A text of about `tokens` tokens that no other salt's text begins like."""
    words = f"{salt} {WORDS}"
    count = engine.count_tokens(words)
    return words * (tokens // count) if count < len(words) else (words * (tokens // count + 1))[:tokens]


class Bench:
    """One engine per pool size over one loaded model."""

    def __init__(self, config: EngineConfig, floors: Floors, say: Say, model: LoadedModel | None = None) -> None:
        """`model`: loaded before, under settings that hold weights alike."""
        self.config, self.floors, self.say, self.model = config, floors, say, model

    def engine(self, **settings: object) -> Engine:
        let_go()  # the engine before
        engine = Engine.load(replace(self.config, **settings), self.model)
        self.model = engine.model
        exempt_loaded()
        return engine

    def decode(self, contexts: list[int], mode: str, tokens: int, fill: str) -> Iterator[Row]:
        """Decode under `recall`, `exact`, `dense` (a pool that holds the whole context) or `drawn` (recall, see DRAWN).

        fill: how the document is computed before (`exact`, or `window`, which is faster and leaves the same pages).
        """
        dense, how = mode == "dense", DRAWN if mode == "drawn" else {}
        mode = "recall" if how else mode
        most = max(contexts) + tokens + 1024
        settings = {"kv_capacity": most, "max_context": most} if dense else {"max_context": most}
        engine = self.engine(**settings)
        for context in contexts:
            text = document(engine, context, f"{mode} {context}")
            recall = RecallParams(prefill=None if dense else fill, decode=None if dense else mode)
            for count in (WARM, tokens):
                self.say(f"decode, {mode}, {context:,} tokens")
                _reset_peak()
                params = SamplingParams(max_tokens=count, ignore_eos=True, **how)
                result = engine.complete(engine.prepare(text, params, recall))
            rate = result.timings.rates(result.usage)[1]
            token = engine.capacity.pool_bytes // (engine.capacity.pool_pages * PAGE)  # bytes of K and V
            weights = engine.model.transformer.weight_bytes - _embedding(engine)
            length = result.usage.prompt
            seen = length if mode != "recall" else min(length, engine.capacity.window.pool * PAGE)
            over_pcie = mode == "exact" and result.recall.over_pool
            moved = length * token if over_pcie else weights + seen * token
            floor = moved / (self.floors.to_device if over_pcie else self.floors.device)
            yield Row(
                f"decode, {mode}{', drawn' if how else ''}",
                length,
                rate,
                1e3 / rate,
                floor=floor * rate,
                bytes_per_second=moved * rate,
                fetched=result.recall.layer_pages_fetched / max(1, result.usage.generated),
                steps_by=_steps(engine),
                **_memory(engine),
            )
        engine.audit()
        engine.close()

    def prefill(self, contexts: list[int], mode: str) -> Iterator[Row]:
        """A cold prompt; with a floor of all its operations at the matrix product's rate."""
        engine = self.engine(max_context=max(contexts) + 1024)
        warm = document(engine, min([*contexts, WARM_PROMPT]), "warm")
        engine.complete(engine.prepare(warm, SamplingParams(max_tokens=1), RecallParams(prefill=mode)))
        for context in contexts:
            self.say(f"prefill, {mode}, {context:,} tokens")
            _reset_peak()
            text = document(engine, context, f"prefill {context}")
            result = engine.complete(engine.prepare(text, SamplingParams(max_tokens=1), RecallParams(prefill=mode)))
            flops = _prefill_flops(engine, result.usage.computed)
            rate, spent = result.usage.computed / result.timings.prefill, result.timings.prefill
            yield Row(
                f"prefill, {mode}",
                result.usage.prompt,
                rate,
                1e3 * result.timings.first_token,
                floor=flops / self.floors.matmul / spent if mode == "exact" else None,
                flops=flops / spent if mode == "exact" else None,
                steps_by=_steps(engine),
                **_memory(engine),
            )
        engine.close()

    def second_turn(self, contexts: list[int], fresh: int, fill: str) -> Iterator[Row]:
        """The first token after `fresh` new tokens over a conversation that is stored; the median of five turns."""
        engine = self.engine(max_context=max(contexts) + 8 * (fresh + 8) + 1024)
        for context in contexts:
            text = document(engine, context, f"turn {context}")
            firsts = []
            for turn in range(7):
                self.say(f"second turn, {context:,} tokens, turn {turn}")
                params = SamplingParams(max_tokens=1, ignore_eos=True)
                result = engine.complete(engine.prepare(text, params, RecallParams(prefill=fill)))
                firsts.append(1e3 * result.timings.first_token)
                text += document(engine, fresh, f"{turn}")[:fresh]
            firsts = sorted(firsts[2:])
            yield Row(
                f"second turn, {result.usage.computed} computed",
                result.usage.prompt,
                result.usage.computed / firsts[2] * 1e3,
                firsts[2],
                fetched=result.recall.layer_pages_fetched,
                steps_by=_steps(engine),
            )
        engine.close()


def transformers_rows(
    model: str, contexts: list[int], offloaded: bool, tokens: int, device: torch.device, dtype: torch.dtype, chunk: int
) -> Iterator[Row]:
    """Hugging Face transformers with random weights of the same shape, its cache on the device or offloaded."""
    from engine.model.random import PREFIX, shape_of

    if not model.startswith(PREFIX):
        raise ConfigError("the transformers peer runs random: models only", "-m random:qwen3-8b")
    try:
        import transformers
    except ImportError:
        raise ConfigError("transformers is not installed here", "pip install transformers") from None
    shape = shape_of(model)
    config = transformers.AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        rope_theta=shape.theta,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=shape.tied,
    )
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        finally:
            torch.set_default_dtype(before)
    where = "cache offloaded" if offloaded else "cache on the device"
    for context in contexts:
        _reset_peak()
        cache = transformers.DynamicCache(config=config, offloading=offloaded)
        ids = torch.randint(0, shape.vocab, (1, context), device=device)
        with torch.inference_mode():
            began = time.perf_counter()
            for start in range(0, context, chunk):
                out = peer(ids[:, start : start + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            _wait(device)
            filled = time.perf_counter() - began
            yield Row(f"transformers, {where}, prefill", context, context / filled, 1e3 * filled)
            for count in (2, tokens):
                began = time.perf_counter()
                for _ in range(count):
                    token = peer(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                _wait(device)
                spent = (time.perf_counter() - began) / count
        yield Row(f"transformers, {where}, decode", context, 1 / spent, 1e3 * spent, peak_bytes=_peak())
        del cache, out
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _prefill_flops(engine: Engine, tokens: int) -> float:
    """Two a weight and token, head left out, and four a channel for each pair of a query and a key it sees."""
    config = engine.model.config
    projections = config.hidden * (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    inner = config.layers * (projections + 3 * config.hidden * config.ffn)
    pairs = len(config.paged) * tokens * tokens / 2 + len(config.sliding) * tokens * min(config.window, tokens / 2)
    attention = 4 * config.heads * config.head_dim * pairs
    return 2 * inner * tokens + attention


def _embedding(engine: Engine) -> int:
    """Bytes of the embedding where it isn't the head too: a step reads one row of it."""
    weights = engine.model.transformer.weights
    return 0 if weights.embed is weights.head else weights.embed.nbytes


def _steps(engine: Engine) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(engine.stats()["steps_by"].items()))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _memory(engine: Engine) -> dict[str, int | None]:
    """Of a Row: the most that was allocated since `_reset_peak`, and what of it is beside the weights."""
    peak = _peak()
    return {"peak_bytes": peak, "beside_bytes": peak - engine.model.transformer.weight_bytes if peak else None}


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
