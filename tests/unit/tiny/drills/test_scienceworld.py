"""Drills of ScienceWorld's tasks for tiny models."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from crl.envs.scienceworld import SMALL_SPEC
from crl.envs.scienceworld.lessons import lesson, read, right_things
from crl.envs.scienceworld.tasks import demonstration_tasks
from crl.tiny.drills import scienceworld as drills
from crl.tiny.drills.drill import Episode, as_hit
from crl.tiny.drills.scienceworld_experiments import (
    ACTOR_EXPERIMENTS,
    ASKING_EXPERIMENTS,
    RepeatedGame,
    random_thing,
    shorten,
)
from crl.types import Segment
from support.simulator import simulated


def episode(*texts: str, hint: str = "") -> Episode:
    (task,) = demonstration_tasks(1)
    segments = tuple(
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    )
    return Episode(task, as_hit(hint, task) if hint else None, segments, success=False)


def test_actions_are_short() -> None:
    assert shorten("teleport to living room") == "go living room"
    assert shorten("focus on dove egg") == "focus dove egg"
    assert shorten("pick up dove egg") == "take dove egg"
    assert shorten("move dove egg to red box") == "put dove egg in red box"
    assert shorten("look around") == "look around"


def test_lessons_are_true_of_their_episodes() -> None:
    found = ("outside: axe, dove egg", "focus dove egg", "focus on dove egg")
    failed = ("outside: axe, dove egg", "focus axe", "failed.")
    assert '"add","text":"focus dove egg in outside."' in drills.answer("focus", episode(*found))
    assert '"add","text":"never focus axe."' in drills.answer("never", episode(*failed))
    assert drills.answer("never", episode(*found)) == '[{"op":"return"}]'
    assert drills.answer("focus", episode(*failed)) == '[{"op":"return"}]'
    wrong = lesson("focus", "axe", "outside")
    assert drills.answer("focus", episode(*found, hint=wrong)).startswith('[{"op":"update"')


def test_verdicts_and_merges_need_no_simulator() -> None:
    rng = random.Random(0)
    assert len(list(drills.verdicts(rng, 20))) == 20
    for conversation in drills.merges(rng, 20):
        assert {op["op"] for op in json.loads(conversation[-1].text)} <= {"merge", "discard"}
    for task in demonstration_tasks(30):
        assert random_thing(task, rng)


@simulated
def test_advice_changes_success() -> None:
    def success(advice: str) -> float:
        played = replace(ACTOR_EXPERIMENTS, advice=((advice, 1.0),), slip=0.0)
        episodes = list(played.episodes(random.Random(1), 30))
        return sum(episode.success for episode in episodes) / len(episodes)

    assert success("right") == 1.0
    assert success("random") < 0.8


@simulated
def test_episodes_ask_and_end_within_their_turns() -> None:
    asked = Counter[bool]()
    for played in ASKING_EXPERIMENTS.episodes(random.Random(2), 30):
        actions = [segment for segment in played.segments if segment.origin == "policy"]
        assert len(actions) <= SMALL_SPEC.turns
        asked[any(segment.origin == "tool_call" for segment in played.segments)] += 1
    assert min(asked[True], asked[False]) > 5


@simulated
def test_lessons_of_simulated_episodes() -> None:
    kinds = Counter[str]()
    for conversation in drills.lessons(random.Random(3), 40):
        (op,) = json.loads(conversation[-1].text)
        kinds[read(op["text"])[0] if "text" in op else op["op"]] += 1
    assert {"focus", "visit", "look", "return"} <= {*kinds}
    assert "other" not in kinds


@simulated
def test_repeated_games_give_the_texts_of_the_simulator() -> None:
    def play(game, task) -> Iterator[object]:
        yield game.reset(task)
        rng = random.Random(task.seed)
        thing = rng.choice(right_things(task))
        for action in ("go outside", rng.choice(["look around", f"focus {thing}"]), "inventory"):
            result = game.step(action)
            yield result
            if result.done:
                return

    real = SMALL_SPEC.make_game("compact")
    with closing(RepeatedGame()) as repeated:
        for task in (*demonstration_tasks(6), *demonstration_tasks(3)):
            assert list(play(repeated, task)) == list(play(real, task))
    real.close()
