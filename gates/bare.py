"""Asking a model that was never taught to chat: it is given a fact's own beginning to go on from.

Where that would give away what the question must not name (task `disjoint`), and where there is no single fact, it is
asked as texts that it has read do it: the question, and `Answer:`.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.load import LoadedModel
from engine.text.chat import ChatTemplate
from gates.haystack import Counter, Document, Fact

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %} {{ message['content'] }}\n\n{% else %}{{ message['content'] }}"
    "{{ '\\nAnswer:' if message['content'].endswith('?') }}{% endif %}{% endfor %}"
)
STOPS = ("\n", ".")
"""Where an answer ends: nothing else would end it."""
_NAMED = ("keyed", "lines", "codes")
"""Tasks whose question names the key anyway."""


def with_template(model: LoadedModel) -> LoadedModel:
    """The model itself, or one that is asked in plain text where it has no template of its own."""
    if model.chat is not None:
        return model
    tokenizer = model.tokenizer
    bos = tokenizer.token(tokenizer.bos) if tokenizer.adds_bos else ""
    return replace(model, chat=ChatTemplate(TEMPLATE, bos=bos))


def is_bare(model: LoadedModel) -> bool:
    """Whether it is asked in plain text."""
    return model.chat is not None and model.chat.source == TEMPLATE


def stops(model: LoadedModel) -> tuple[str, ...]:
    """Strings that end its answers."""
    return STOPS if is_bare(model) else ()


def to_go_on_from(document: Document, count: Counter) -> Document:
    """The document with each question turned into the beginning of its fact, up to the value."""

    def begun(fact: Fact) -> Fact:
        if fact.task not in _NAMED:
            return fact
        return replace(fact, question=fact.text[: fact.text.index(fact.expected)].rstrip())

    placed = tuple(replace(one, fact=begun(one.fact)) for one in document.placed)
    changed = replace(document, placed=placed, asked=tuple(map(begun, document.asked)))
    return replace(changed, tokens=count.prompt(changed.messages(changed.asked[0])))
