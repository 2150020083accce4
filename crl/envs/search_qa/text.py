"""Texts of question answering, and the actions that an agent may write.

`full` is for language models: actions in the tags of Search-R1, and documents as they are.
`compact` is for tiny models: `search[name]` and `answer[name]`, and short documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crl.envs.actions import parse_call
from crl.envs.base import Rendering
from crl.envs.search_qa.questions import Document, Question

_TAGGED = re.compile(
    r"<(search|answer)>((?:(?!<(?:search|answer)>).)*?)</\1>", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True)
class Renderer:
    """Functions that turn an episode into text, and an agent's text into an action."""

    question: Callable[[Question], str]
    """First observation."""
    found: Callable[[Sequence[Document]], str]
    """Result of a search."""
    verdict: Callable[[bool], str]
    """Last observation: whether the answer is right."""
    parse: Callable[[str], tuple[str, str] | None]
    """Function that returns (search or answer, its text), or None for other texts."""
    invalid: str
    """Observation after a text that is not an action."""


def _full_found(documents: Sequence[Document]) -> str:
    blocks = [
        f"Doc {number} (Title: {document.title}) {document.text}"
        for number, document in enumerate(documents, start=1)
    ]
    return "\n".join(["<information>", *(blocks or ["No document was found."]), "</information>"])


def _full_parse(text: str) -> tuple[str, str] | None:
    """Return the last action in tags. Tags without text are not actions."""
    actions = [
        (match[1].lower(), " ".join(match[2].split()))
        for match in _TAGGED.finditer(text)
        if match[2].strip()
    ]
    return actions[-1] if actions else None


def _compact_found(documents: Sequence[Document]) -> str:
    return "\n".join(document.short or document.title for document in documents) or "nothing"


def _compact_parse(text: str) -> tuple[str, str] | None:
    return parse_call(text, {"search": None, "answer": None})


RENDERERS: dict[Rendering, Renderer] = {
    "full": Renderer(
        question=lambda question: f"Question: {question.text}",
        found=_full_found,
        verdict=lambda right: "The answer is right." if right else "The answer is wrong.",
        parse=_full_parse,
        invalid="That is no action, and nothing happened. Write <search>keywords</search> to "
        "search, or <answer>your answer</answer> to end with a short answer.",
    ),
    "compact": Renderer(
        question=lambda question: f"want {question.wanted or question.text}",
        found=_compact_found,
        verdict=lambda right: "right." if right else "wrong.",
        parse=_compact_parse,
        invalid="unknown action.",
    ),
}
