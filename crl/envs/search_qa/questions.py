"""Questions, the topics that group them, and the documents that answer them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """Document of the corpus."""

    title: str
    text: str
    """Text without the title."""
    short: str = ""
    """Text for tiny models. Empty for documents that are not generated."""

    @property
    def contents(self) -> str:
        """Title and text, which are searched."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True, slots=True)
class Question:
    """Question with its answers."""

    text: str
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    wanted: str = ""
    """Name of the wanted fact, for tiny models. Empty for questions that are not generated."""


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that share what is worth knowing about them. A topic is a place of the task."""

    goal: str
    """Goal of the episodes about the topic."""
    questions: tuple[Question, ...]
    key: str = ""
    """Answer of the first question, and title of the document that answers the others.

    In lower case. Empty for questions that are not generated.
    """
    distractors: tuple[str, ...] = ()
    """Titles of other documents that a reader may take for the key, in lower case."""
