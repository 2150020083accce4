"""Library that all games of a process share: topics by use, and the retriever of the documents.

A task's `lgen` and `core`, drawn by `crl.envs.places`, determine the question of an episode: `lgen`
fixes the topic, and `core` fixes the question. Topics are divided by use before anything is drawn.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from crl.config.schema import SearchSection
from crl.envs.base import OpenEmbed
from crl.envs.places import PROBE_LAYOUTS, UNSEEN_LAYOUTS
from crl.envs.search_qa import data
from crl.envs.search_qa.http import HttpRetriever
from crl.envs.search_qa.questions import Document, Question, Topic
from crl.envs.search_qa.world import Land, generate
from crl.seeds import derive_seed, generator

if TYPE_CHECKING:
    from crl.envs.search_qa.retrieval import Retriever

logger = logging.getLogger(__name__)

SHARES: Mapping[range, float] = {UNSEEN_LAYOUTS: 0.2, PROBE_LAYOUTS: 0.1}
"""Shares of the lands that are reserved for these uses. Train streams use the other lands.

Demonstrations need no share, because they are played in separate worlds.
"""


@dataclass(frozen=True)
class Topics:
    """Topics by use."""

    train: Sequence[Topic]
    """Topics of train streams."""
    reserved: Mapping[range, Sequence[Topic]]
    """Layouts → the topics of their use."""
    official_tests: int = 0
    """Number of official test questions; 0 for generated questions."""

    def topic(self, lgen: int) -> Topic:
        """Return the topic of a layout.

        In a range of reserved layouts, every topic occurs once before any topic occurs again. Other
        layouts draw a topic with equal probabilities.
        """
        for layouts, topics in self.reserved.items():
            if lgen in layouts:
                return topics[(lgen - layouts.start) % len(topics)]
        return self.train[derive_seed(0, "search_qa/topic", lgen) % len(self.train)]

    def question(self, lgen: int, core: int) -> Question:
        """Return the question of a layout and its dynamics."""
        questions = self.topic(lgen).questions
        return questions[core % len(questions)]


def generated_topics(lands: Sequence[Land], shares: Mapping[range, float] = SHARES) -> Topics:
    """Return the topics of a world, divided by land."""
    rng, remaining = generator(0, "search_qa/split"), list(lands)
    rng.shuffle(remaining)
    reserved: dict[range, Sequence[Topic]] = {}
    for layouts, share in shares.items():
        count = round(share * len(lands))
        chosen, remaining = remaining[:count], remaining[count:]
        topics = _topics(chosen)
        rng.shuffle(topics)
        reserved[layouts] = topics
    return Topics(_topics(remaining), reserved)


def _topics(lands: Sequence[Land]) -> list[Topic]:
    return list(chain.from_iterable(land.topics for land in lands))


def single_questions(topics: Topics) -> Topics:
    """Return a topic for every question. Its goal is the text of the question."""

    def divided(several: Sequence[Topic]) -> list[Topic]:
        return [Topic(q.text, (q,)) for topic in several for q in topic.questions]

    reserved: dict[range, Sequence[Topic]] = {}
    for layouts, several in topics.reserved.items():
        questions = divided(several)
        generator(0, "search_qa/questions", layouts.start).shuffle(questions)
        reserved[layouts] = questions
    return Topics(divided(topics.train), reserved)


@dataclass(frozen=True)
class Library:
    """Topics and retriever of an environment with one set of settings."""

    topics: Topics
    retriever: Retriever


_lock = threading.Lock()
_opened: dict[tuple[str, bool, str], Library] = {}
"""Libraries of the process, by folder of the official data, environment and settings."""


@dataclass(frozen=True)
class Libraries:
    """Source of the library of an environment.

    A library is opened at its first use. Environments with equal settings share it.
    """

    section: SearchSection
    """Settings of the task."""
    open_embed: OpenEmbed
    """Opener of the embedder of dense retrieval."""
    official: bool
    """True if the official data is used when the user has set its folder."""

    def open(self) -> Library:
        """Return the library of the data in use. Raise `ConfigError` for invalid data."""
        folder = os.environ.get(data.VARIABLE, "") if self.official else ""
        key = (folder, self.official, self.section.model_dump_json())
        with _lock:
            if key not in _opened:
                _opened[key] = self._read(folder)
            return _opened[key]

    def _read(self, folder: str) -> Library:
        if folder:
            topics = official_topics(Path(folder), self.section.train_sets, self.section.test_sets)
            return Library(topics, self._retriever(Path(folder)))
        topics = generated_topics(generated_world())
        if self.official:
            logger.info(
                "search_qa uses a generated world, because %s is not set. "
                "Metrics are not comparable with published results",
                data.VARIABLE,
            )
            topics = single_questions(topics)
        return Library(topics, self._retriever(None))

    def _retriever(self, folder: Path | None) -> Retriever:
        section = self.section
        if section.retriever == "http":
            return HttpRetriever(section.url, section.timeout)
        if section.retriever == "bm25" and folder is None:
            return _generated_bm25()
        from crl.envs.search_qa.retrieval import BM25Retriever, DenseRetriever  # needs numpy

        documents = data.read_corpus(folder) if folder else generated_documents()
        if section.retriever == "bm25":
            return BM25Retriever(documents)
        return DenseRetriever(
            documents,
            self.open_embed(section.embedder),
            query_prefix=section.query_prefix,
            document_prefix=section.document_prefix,
        )


def official_topics(folder: Path, train_sets: Sequence[str], test_sets: Sequence[str]) -> Topics:
    """Return a topic for every question of the official data.

    Training questions do not repeat a test question of any set in the folder. Raise `ConfigError`
    for invalid data.
    """
    data.check_folder(folder)
    tests = data.evaluation_questions(folder, test_sets)
    train = data.training_questions(folder, train_sets, data.evaluation_texts(folder))
    return Topics(
        [Topic(question.text, (question,)) for question in train],
        {UNSEEN_LAYOUTS: [Topic(question.text, (question,)) for question in tests]},
        len(tests),
    )


@cache
def generated_world() -> tuple[Land, ...]:
    return generate()


@cache
def generated_documents() -> tuple[Document, ...]:
    return tuple(chain.from_iterable(land.documents() for land in generated_world()))


@cache
def _generated_bm25() -> Retriever:
    """Return the index of the generated documents, which several libraries share."""
    from crl.envs.search_qa.retrieval import BM25Retriever

    return BM25Retriever(generated_documents())
