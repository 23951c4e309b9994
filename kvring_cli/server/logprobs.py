"""Log-probabilities as OpenAI writes them."""

from __future__ import annotations

from typing import Any

from kvring_cli.server.ask import Answer


def chat_logprobs(answer: Answer) -> dict[str, Any]:
    """Of the tokens since the last call."""
    tokenizer = answer.service.engine.model.tokenizer

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.decode([id], specials=True)
        whole = "\ufffd" not in text  # else a part of a character, whose bytes the text doesn't hold
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(id, value) for id, value in token.top]}
        for token in answer.take_tokens()
    ]
    return {"content": content, "refusal": None}


def text_logprobs(answer: Answer, offset: int) -> dict[str, Any]:
    """The form of plain completions; `offset` is where the first token's text begins."""
    tokenizer = answer.service.engine.model.tokenizer
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in answer.take_tokens():
        text = tokenizer.decode([token.id], specials=True)
        out["tokens"].append(text)
        out["token_logprobs"].append(token.logprob)
        out["top_logprobs"].append({tokenizer.decode([id], specials=True): value for id, value in token.top})
        out["text_offset"].append(offset)
        offset += len(text)
    return out
