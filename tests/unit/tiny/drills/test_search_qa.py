"""Drills of question answering."""

from __future__ import annotations

import random

import pytest

from crl.config.load import load
from crl.envs.search_qa.lessons import LESSONS, key_name, read
from crl.envs.search_qa.library import generated_topics, generated_world
from crl.manager.distillation.ops import parse_ops
from crl.tiny.drills import drills_of, search_qa
from crl.tiny.drills.drill import Episode
from crl.tiny.drills.search_qa_episodes import (
    ACTOR_EPISODES,
    ASKING_EPISODES,
    CHOICE_EPISODES,
    EXTRACTOR_EPISODES,
    TOP_K,
    TURNS,
    WORLD_SEEDS,
    demonstration_libraries,
)

TASK = load(["search_qa"]).tasks["search_qa"]


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return list(ACTOR_EPISODES.episodes(random.Random(0), 1500))


def actions(episode: Episode) -> list[str]:
    return [segment.text for segment in episode.segments if segment.origin == "policy"]


def rate(episodes: list[Episode]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def key_of(episode: Episode) -> str:
    (topic,) = (
        topic
        for library in demonstration_libraries(WORLD_SEEDS)
        if (topic := library.topics.topic(int(episode.task.params["lgen"]))).goal
        == episode.task.goal
    )
    return topic.key


def test_the_drills_are_those_of_the_task() -> None:
    parts = ("episode", "ask", "critic", "merge")
    assert drills_of("actor", ["search_qa_small"], parts) == [*search_qa.ACTOR_DRILLS]
    assert drills_of("extractor", ["search_qa_small"], parts) == [*search_qa.EXTRACTOR_DRILLS]


def test_the_settings_are_those_of_the_task() -> None:
    assert (TASK.max_turns, TASK.search.top_k) == (TURNS, TOP_K)


def test_success_of_episodes_by_advice(episodes: list[Episode]) -> None:
    """Check that play without advice leaves something to learn for RL.

    Right advice wins and wrong advice loses.
    """
    advised = [e for e in episodes if e.hint and read(e.hint.text)[0] == "search"]
    right = [e for e in advised if e.hint and read(e.hint.text)[1] == key_of(e)]
    wrong = [e for e in advised if e not in right]
    assert 0.3 <= rate([e for e in episodes if e.hint is None]) <= 0.5
    assert rate(right) == 1.0
    assert rate(wrong) <= 0.05
    assert len(wrong) > 50
    twice = [e for e in episodes if e.hint and e.hint.text == "search twice."]
    assert rate(twice) > 0.8


def test_episodes_are_short_and_valid(episodes: list[Episode]) -> None:
    for episode in [*episodes, *CHOICE_EPISODES.episodes(random.Random(1), 200)]:
        assert 1 <= len(actions(episode)) <= TURNS
        assert all(text.startswith(("search[ ", "answer[ ")) for text in actions(episode))
        assert not any("unknown action" in segment.text for segment in episode.segments)
        assert episode.success == (episode.segments[-1].text == "right.")
    assert all(len(actions(e)) <= 2 for e in CHOICE_EPISODES.episodes(random.Random(1), 200))


def test_an_advised_name_is_used_first(episodes: list[Episode]) -> None:
    for episode in episodes:
        if episode.hint and (named := read(episode.hint.text))[0] == "search":
            assert actions(episode)[0] in (f"search[ {named[1]}]", f"answer[ {named[1]}]")


def test_the_facts_of_demonstrations_are_not_those_of_runs() -> None:
    """Check that worlds share names, but not what is true of them."""
    trained = {topic.goal: topic.key for topic in generated_topics(generated_world(), {}).train}
    shared = [
        topic.key == trained[topic.goal]
        for library in demonstration_libraries(WORLD_SEEDS)
        for topic in library.topics.train
        if topic.goal in trained
    ]
    assert len(shared) > 1000
    assert sum(shared) < 0.01 * len(shared)


def test_agents_ask_at_the_start() -> None:
    asked = [
        episode
        for episode in ASKING_EPISODES.episodes(random.Random(4), 200)
        if any(segment.origin == "tool_call" for segment in episode.segments)
    ]
    assert 60 < len(asked) < 140
    for episode in asked:
        origins = [segment.origin for segment in episode.segments]
        assert origins.index("tool_call") < origins.index("policy")


def test_extractors_tell_the_truth() -> None:
    """Check that a lesson with a name is true of its episode, and that all kinds are written."""
    kinds = set()
    for episode in EXTRACTOR_EPISODES.episodes(random.Random(3), 400):
        for kind in LESSONS:
            (op,) = parse_ops(search_qa.answer(kind, episode), 1 if episode.hint else 0).ops
            if op.kind == "return":
                continue
            written, name = read(op.text)
            kinds.add(written)
            if written == "search":
                assert name == key_name(episode.segments) == key_of(episode)
            if written == "skip":
                assert name != key_of(episode) or not key_name(episode.segments)
    assert kinds == {*LESSONS}
