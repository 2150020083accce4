"""Lessons about a topic for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence. Diagnostics compare lessons with the ground truth. All questions of a
topic are about its key, whose name only a document tells. A useful lesson therefore names the key:
it is the answer of one question, and one search for it finds the answers of the others. The other
kinds are true, useless or misleading.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crl.envs.curriculum import LessonVerdict
from crl.envs.search_qa.player import facts, read_topic
from crl.envs.search_qa.text import RENDERERS
from crl.envs.search_qa.world import WANT_KEY
from crl.types import Segment, Task, task_text

if TYPE_CHECKING:
    from crl.envs.search_qa.library import Topics
    from crl.envs.search_qa.questions import Topic

LESSONS = {
    "search": "search {name}.",
    "skip": "do not search {name}.",
    "twice": "search twice.",
    "read": "look at the whole text.",
    "first": "answer with the first name.",
    "careful": "be careful.",
}
"""Kinds of lesson → their wording."""

_PATTERNS = {
    kind: re.compile(re.escape(text).replace(r"\{name\}", "([a-z]+)"))
    for kind, text in LESSONS.items()
}


def lesson(kind: str, name: str = "") -> str:
    """Return the lesson of this kind."""
    return LESSONS[kind].format(name=name)


def read(text: str) -> tuple[str, str | None]:
    """Return (kind, name) of a lesson. The name is None if the lesson has none.

    The kind is "other" if the text is not one of `LESSONS`.
    """
    for kind in ("twice", *(kind for kind in LESSONS if kind != "twice")):
        if match := _PATTERNS[kind].fullmatch(text):
            return kind, match[1] if match.groups() else None
    return "other", None


# ── episode digests ───────────────────────────────────────────────────────────────────────────────


def digest(segments: Sequence[Segment]) -> str:
    """Summarise a compact episode, from its texts alone.

    The digest holds the searched names that lead nowhere, the key of the topic, and the answer:

        wrong norda velto                     (or: wrong none)
        key savo                              (or: key unknown)
        answer rilo, right                    (or: answer nothing)
    """
    episode = _read_episode(segments)
    answer = (
        f"{episode.answer}, {'right' if episode.right else 'wrong'}"
        if episode.answer
        else "nothing"
    )
    wrong = " ".join(wrong_names(segments)) or "none"
    return f"wrong {wrong}\nkey {episode.key or 'unknown'}\nanswer {answer}"


def key_name(segments: Sequence[Segment]) -> str | None:
    """Return the key of the topic, or None if the episode's texts do not show it."""
    return _read_episode(segments).key


def wrong_names(segments: Sequence[Segment]) -> list[str]:
    """Return the searched names that are neither the subject of the topic nor its key."""
    episode = _read_episode(segments)
    useful = (episode.subject, episode.key)
    return [name for name in dict.fromkeys(episode.searched) if name not in useful]


@dataclass
class _Episode:
    """Result of an episode, according to its texts."""

    subject: str = ""
    key: str | None = None
    """Key of the topic.

    The subject's document names it. Without this document, it is the entity whose wanted fact was
    the right answer.
    """
    searched: list[str] = field(default_factory=list)
    """Texts of the searches that are single words, in order."""
    answer: str = ""
    right: bool = False


def _read_episode(segments: Sequence[Segment]) -> _Episode:
    subject, relation = read_topic(task_text(segments)) or ("", "")
    episode, wanted = _Episode(subject), ""
    found: dict[tuple[str, str], str] = {}
    for action, text in _turns(segments):
        if action is None:
            wanted = text.removeprefix("want ")
        elif action[0] == "search":
            if action[1].isalnum():
                episode.searched.append(action[1].lower())
            for entity, name, value in facts(text):
                found[name, value] = entity
                if (entity, name) == (subject, relation):
                    episode.key = value
        else:
            episode.answer, episode.right = action[1].lower(), text == "right."
            if episode.right and wanted == WANT_KEY:
                episode.key = episode.answer
            elif episode.right and not episode.key:
                episode.key = found.get((wanted, episode.answer))
    return episode


def _turns(segments: Sequence[Segment]) -> Iterator[tuple[tuple[str, str] | None, str]]:
    """Yield each observation with the action before it; None for the first observation.

    Invalid actions are left out.
    """
    action, first = None, True
    for segment in segments:
        if segment.origin == "policy":
            action = RENDERERS["compact"].parse(segment.text)
        elif segment.origin == "env":
            if first or action:
                yield action, segment.text
            first = False


# ── ground truth, for diagnostics only ────────────────────────────────────────────────────────────


class TopicAdvisor:
    """`Advisor` of topics. Right advice names the key.

    `topics`: function that returns the topics of the world.
    """

    def __init__(self, topics: Callable[[], Topics]) -> None:
        self._topics = topics

    def right(self, task: Task) -> str:
        return lesson("search", self._topic(task).key)

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Return the advice to search an entity that the subject's document also names."""
        return lesson("search", rng.choice(self._topic(task).distractors))

    def judge(self, task: Task, text: str) -> LessonVerdict:
        kind, name = read(text)
        correct = kind == "search" and name == self._topic(task).key
        return LessonVerdict("wrong search" if kind == "search" and not correct else kind, correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return key_name(segments) is not None

    def _topic(self, task: Task) -> Topic:
        return self._topics().topic(int(task.params["lgen"]))
