"""Makes what training carries to the GPU: the tokenizer, and the corpora and synthetic fillers as token arrays.

    python -m gates.phantom.prepare --packages /tmp/corpus --fetch --out .phantom-data

Byte-level BPE, digits split one by one. The common Chinese characters (level 1 of GB 2312) are strengthened until each
is one token, so that Chinese of any subject takes about one token a character.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gates import facts
from gates.filler import FILLERS, HELD_OUT
from gates.phantom.corpus import fetch, read_groups

VOCABULARY = 8192
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STREAMS, STREAM_TOKENS = 24, 6_000  # of each synthetic kind


def common_chinese() -> list[str]:
    """The 3,755 characters of level 1 of GB 2312."""
    rows = (bytes((row, cell)) for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF))
    return [pair.decode("gb2312") for pair in rows if not (pair[0] == 0xD7 and pair[1] > 0xF9)]


def task_texts(seed: int = 0) -> list[str]:
    """Every wording of the tasks, a few times over, so that their words are tokens."""
    rng = Random(seed)
    out = []
    for _ in range(200):
        for draw in facts.TASKS.values():
            out += [f"{fact.text}\n{fact.question}" for fact in draw(rng, 12, set())]
    return out


def train_tokenizer(groups: dict[str, list[str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    strengthened = ["\n".join(common_chinese())] * 400
    share = {"chinese": 1.0, "english": 1.0, "code": 0.4, "other": 0.15}
    texts = [text for name, group in groups.items() for text in group[: max(1, int(len(group) * share[name]))]]
    tokenizer.train_from_iterator(texts + strengthened + task_texts(), trainer)
    return tokenizer


def encode_groups(tokenizer: Tokenizer, groups: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """Group name -> all its texts in one array of uint16 ids."""
    arrays = {}
    for name, texts in groups.items():
        ids = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        arrays[name] = np.concatenate(ids)
    return arrays


def encode_synthetic(tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """`synthetic.<kind>` -> STREAMS rows of STREAM_TOKENS ids, one seed each; the held-out kinds are left out."""
    arrays = {}
    for name in sorted(set(FILLERS) - set(HELD_OUT)):
        rows = []
        for seed in range(STREAMS):
            stream, ids = FILLERS[name].stream(Random(f"training/{name}/{seed}")), []
            while len(ids) < STREAM_TOKENS:
                piece = FILLERS[name].joiner.join(next(stream) for _ in range(40)) + FILLERS[name].joiner
                ids += tokenizer.encode(piece, add_special_tokens=False).ids
            rows.append(ids[:STREAM_TOKENS])
        arrays[f"synthetic.{name}"] = np.array(rows, np.uint16)
    return arrays


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "model_max_length": 262144,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packages", type=Path, required=True, help="folder for the packages' text")
    parser.add_argument("--fetch", action="store_true", help="download and unpack the packages first")
    parser.add_argument("--out", type=Path, default=Path(".phantom-data"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.fetch:
        fetch(options.packages)
    groups = read_groups(options.packages)
    tokenizer = train_tokenizer(groups)
    write_tokenizer(tokenizer, options.out)
    arrays = encode_groups(tokenizer, groups) | encode_synthetic(tokenizer)
    np.savez_compressed(options.out / "corpus.npz", **arrays)
    for name, group in groups.items():
        print(
            f"{name}: {len(arrays[name]) / sum(map(len, group)):.3f} tokens a character, {len(arrays[name]):,} tokens"
        )


if __name__ == "__main__":
    main()
