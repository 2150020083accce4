"""Generated world of search_qa: names, documents, questions and splits."""

from __future__ import annotations

import hashlib
import time
from itertools import chain

import pytest
import Stemmer

from crl.envs.base import StreamSettings
from crl.envs.places import PROBE_LAYOUTS, TRAIN_LAYOUTS, UNSEEN_LAYOUTS
from crl.envs.search_qa import SMALL_SPEC, SPEC
from crl.envs.search_qa.library import (
    SHARES,
    generated_documents,
    generated_topics,
    generated_world,
    single_questions,
)
from crl.envs.search_qa.names import NAMES, draw_names
from crl.envs.search_qa.questions import Topic
from crl.envs.search_qa.world import Land, generate
from crl.seeds import generator

TOPICS = generated_topics(generated_world())


def entities_of(topic: Topic) -> set[str]:
    """Return all names of the world in a topic: in questions, answers, key and distractors."""
    names = {name for land in generated_world() for name in land.entities}
    texts = (f"{question.text} {' '.join(question.answers)}" for question in topic.questions)
    words = " ".join([topic.goal, topic.key, *topic.distractors, *texts]).lower()
    return {word.strip("?.,") for word in words.split()} & names


def test_the_world_has_5000_documents_with_names_of_their_own() -> None:
    documents = generated_documents()
    assert len(documents) == len({document.title for document in documents}) == 5000
    stems = {Stemmer.Stemmer("porter").stemWord(name) for name in NAMES}
    assert len(stems) == len(NAMES), "a stemmer takes no name for another"


def test_names_are_no_words() -> None:
    """Check the names against the words that a tokenizer of a language model knows."""
    wordllama = pytest.importorskip("wordllama")
    from pathlib import Path

    from tokenizers import Tokenizer

    from crl.embedders.wordllama import TOKENIZER

    tokenizer = Tokenizer.from_file(str(Path(wordllama.__path__[0]) / TOKENIZER))
    words = {token.lstrip("▁").lower() for token in tokenizer.get_vocab() if token.startswith("▁")}
    assert len(words) > 10_000
    assert not words & set(NAMES)


def test_more_names_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="Sample larger"):
        draw_names(len(NAMES) + 1, generator(0, "names"))


def test_a_world_is_determined_by_its_seed() -> None:
    start = time.monotonic()
    first = generate(3)
    assert time.monotonic() - start < 5
    assert first == generate(3)
    assert first != generate(4)
    text = "\n".join(document.contents for land in generate(0) for document in land.documents())
    assert hashlib.sha256(text.encode()).hexdigest().startswith("aa448e48d1136365"), (
        "the world of runs must stay the same on all machines and in all versions"
    )


@pytest.mark.parametrize("topics", [TOPICS, single_questions(TOPICS)], ids=["topics", "questions"])
def test_answers_are_in_documents_only(topics) -> None:
    """Check that no question contains its answer, and that a two-hop answer needs two documents."""
    document_of = {document.title: document for document in generated_documents()}
    for topic in chain(topics.train, *topics.reserved.values()):
        for question in topic.questions:
            (answer,) = question.answers
            assert answer.lower() not in question.text.lower()
            assert answer.lower() not in topic.goal.lower()
            subject = question.text.rstrip("?").split()
            named = [document_of[word] for word in subject if word in document_of]
            assert len(named) == 1, "a question names one entity"
            hops = 2 if question.wanted and question.wanted != "name" else 1
            if question.wanted:
                assert (f" {answer}." in named[0].text or f" {answer} " in named[0].text) == (
                    hops == 1
                )


def test_questions_have_one_answer() -> None:
    answers: dict[str, set[tuple[str, ...]]] = {}
    for topic in chain(TOPICS.train, *TOPICS.reserved.values()):
        for question in topic.questions:
            answers.setdefault(question.text, set()).add(question.answers)
    assert all(len(several) == 1 for several in answers.values())
    assert len(answers) > 40_000


def test_the_uses_share_no_entity() -> None:
    uses = {
        "train": set[str]().union(*map(entities_of, TOPICS.train)),
        "unseen": set[str]().union(*map(entities_of, TOPICS.reserved[UNSEEN_LAYOUTS])),
        "probe": set[str]().union(*map(entities_of, TOPICS.reserved[PROBE_LAYOUTS])),
    }
    assert [len(names) for names in uses.values()] == [3500, 1000, 500]
    assert len(set[str]().union(*uses.values())) == 5000


def test_lands_name_only_their_own_entities() -> None:
    for land in generated_world():
        for entity in land.entities.values():
            assert set(entity.facts.values()) <= set(land.entities)


def shares_nothing(spec) -> None:
    stream = StreamSettings(places=32, permanent=8, visits=5)
    trained = {task.goal for task in spec.tasks.train_stream(0, stream).draw(2000)}
    seen = {task.goal for task in spec.tasks.eval_tasks("seen", 64, 0, stream)}
    unseen = {task.goal for task in spec.tasks.eval_tasks("unseen", 2000, 0, stream)}
    assert seen <= trained
    assert not unseen & trained
    assert len(unseen) > 1900


@pytest.mark.parametrize("spec", [SPEC, SMALL_SPEC], ids=["full", "small"])
def test_unseen_questions_are_never_trained_on(spec, monkeypatch) -> None:
    monkeypatch.delenv("SEARCH_QA_DATA", raising=False)
    shares_nothing(spec)


def test_topics_of_layouts() -> None:
    assert sum(SHARES.values()) < 1
    first = UNSEEN_LAYOUTS.start
    reserved = TOPICS.reserved[UNSEEN_LAYOUTS]
    assert TOPICS.topic(first) is reserved[0]
    assert TOPICS.topic(first + len(reserved)) is reserved[0]
    drawn = {TOPICS.topic(lgen).goal for lgen in TRAIN_LAYOUTS[:500]}
    assert len(drawn) > 450


def test_visits_ask_different_questions_about_a_topic() -> None:
    topic = TOPICS.topic(UNSEEN_LAYOUTS.start)
    asked = {TOPICS.question(UNSEEN_LAYOUTS.start, core) for core in range(8)}
    assert asked == set(topic.questions)
    assert len(asked) > 1


def test_a_land_without_further_facts_has_no_topic_about_it() -> None:
    assert all(isinstance(land, Land) and len(land.entities) == 250 for land in generated_world())
    for topic in TOPICS.train:
        assert topic.key
        assert topic.key not in topic.distractors
        assert topic.distractors
