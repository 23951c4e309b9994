"""Asking a model that was never taught to chat: document, question, `Answer:`, as texts that it has read do it."""

from __future__ import annotations

from dataclasses import replace

from engine.model.load import LoadedModel
from engine.text.chat import ChatTemplate

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %} {{ message['content'] }}\n\n{% else %}{{ message['content'] }}\n"
    "{% if message['role'] == 'user' %}Answer:{% endif %}{% endif %}{% endfor %}"
)


def with_template(model: LoadedModel) -> LoadedModel:
    """The model itself, or one that asks in plain text where it has no template of its own."""
    if model.chat is not None:
        return model
    tokenizer = model.tokenizer
    bos = tokenizer.token(tokenizer.bos) if tokenizer.adds_bos else ""
    return replace(model, chat=ChatTemplate(TEMPLATE, bos=bos))


def is_bare(model: LoadedModel) -> bool:
    """Whether it is asked in plain text."""
    return model.chat is not None and model.chat.source == TEMPLATE


def stops(model: LoadedModel) -> tuple[str, ...]:
    """Where its answer ends: nothing else would end it."""
    return ("\n",) if is_bare(model) else ()
