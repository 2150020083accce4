"""Training examples of the tiny models for maze, key room, river and Sokoban."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from crl.envs.base import play_episode
from crl.envs.keyroom import lessons as keyroom_lessons
from crl.envs.maze import lessons as maze_lessons
from crl.manager.distillation.ops import parse_ops
from crl.tiny.drills.drill import Episode
from crl.tiny.drills.grids import (
    GENERIC_LESSONS,
    KEYROOM,
    MAZE,
    RIVER,
    SOKOBAN,
    GridLessons,
    GridTask,
    makes_claim,
)

GRIDS = {grid.spec.name: grid for grid in (MAZE, KEYROOM, RIVER, SOKOBAN)}
each_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
with_lessons = pytest.mark.parametrize("grid", [MAZE, KEYROOM], ids=["maze_small", "keyroom"])


@cache
def walks(name: str) -> list[Episode]:
    grid = GRIDS[name]
    return list(grid.actor_walks.episodes(random.Random(1), grid.places.demonstration_tasks(120)))


def success(episodes: list[Episode]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def advice_kind(grid: GridTask, episode: Episode) -> str:
    if episode.hint is None:
        return "nothing"
    if not makes_claim(episode.hint.text):
        return "generic"
    advisor = grid.spec.curriculum.advisor
    assert advisor is not None
    return "right" if advisor.judge(episode.task, episode.hint.text).correct else "wrong"


@each_grid
def test_walks_are_the_actors_conversations(grid: GridTask) -> None:
    """Check the structure of walks, which are conversations of the actor.

    As in a run, a walk begins with the goal, the advice if there is any, and the first observation.
    Valid actions and their results follow.
    """
    for walk in walks(grid.spec.name):
        opening = [segment.origin for segment in walk.segments[: 3 if walk.hint else 2]]
        assert opening == ["task", *(["experience"] if walk.hint else []), "env"]
        turns = walk.segments[len(opening) :]
        assert [segment.origin for segment in turns] == ["policy", "env"] * (len(turns) // 2)
        assert {segment.text for segment in turns[::2]} <= set(grid.spec.actions.choices)
        assert len(turns) // 2 <= grid.turns
        assert walk.success == (
            turns[-1].text in ("stairs reached.", "solved.")
            and len(turns) // 2 <= grid.scored_turns
        )


@each_grid
def test_success_without_advice(grid: GridTask) -> None:
    free = [
        walk for walk in walks(grid.spec.name) if advice_kind(grid, walk) in ("nothing", "generic")
    ]
    assert 0.4 <= success(free) <= 0.9


@with_lessons
def test_shares_and_effects_of_advice(grid: GridTask) -> None:
    """Check that right advice is followed and helps. Wrong advice is followed and does not help."""
    by_advice: dict[str, list[Episode]] = {
        kind: [] for kind in ("nothing", "generic", "right", "wrong")
    }
    for walk in walks(grid.spec.name):
        by_advice[advice_kind(grid, walk)].append(walk)
    assert {kind: len(episodes) / 120 for kind, episodes in by_advice.items()} == pytest.approx(
        {"nothing": 0.30, "generic": 0.15, "right": 0.40, "wrong": 0.15}, abs=0.1
    )
    assert success(by_advice["right"]) >= 0.95
    assert (
        success(by_advice["right"])
        >= success(by_advice["nothing"] + by_advice["generic"] + by_advice["wrong"]) + 0.1
    )


def test_a_way_is_followed_step_by_step_until_it_leads_against_a_wall() -> None:
    for walk in walks(MAZE.spec.name):
        actions = [segment.text for segment in walk.segments if segment.origin == "policy"]
        kind = advice_kind(MAZE, walk)
        if kind in ("right", "wrong") and walk.hint:
            way = maze_lessons.read(walk.hint.text) or []
            assert actions[: len(way)] == way if kind == "right" else actions[0] == way[0]


def test_advised_places_are_reached_sooner() -> None:
    """Check that an agent with advice about key and door needs fewer turns.

    An agent without advice must look for them.
    """

    def turns(kind: str) -> float:
        lengths = [
            len(walk.segments) // 2
            for walk in walks(KEYROOM.spec.name)
            if advice_kind(KEYROOM, walk) == kind and walk.success
        ]
        return sum(lengths) / len(lengths)

    assert turns("right") <= turns("nothing") - 1.5
    assert any(
        walk.success for walk in walks(KEYROOM.spec.name) if advice_kind(KEYROOM, walk) == "wrong"
    ), "they look for themselves then"


@each_grid
def test_success_rates_of_personas(grid: GridTask) -> None:
    game, tasks = grid.spec.make_game("compact"), grid.places.demonstration_tasks(40)
    kinds = grid.players
    skilled, late, forgetful, idle = (
        sum(
            play_episode(game, task, kind(random.Random(i)), grid.scored_turns).success
            for i, task in enumerate(tasks)
        )
        for kind in kinds
    )
    game.close()
    assert skilled >= 35
    assert skilled > late > idle
    assert skilled >= forgetful > idle
    assert idle <= 8


@with_lessons
def test_lessons_are_true_of_their_episodes(grid: GridTask) -> None:
    """Check that one answer in four is the task's lesson, if the prompt shows its facts.

    The lesson is an update if the prompt shows another lesson, else an add. Without the facts, the
    answer is a return. All other answers are generic lessons.
    """
    kinds = Counter[str]()
    for prompt, answer in GridLessons(grid.extractor_walks).make(random.Random(2), 200):
        hint = (
            prompt.text.splitlines()[1].removeprefix("hint 1 ")
            if "\nhint 1 " in prompt.text
            else ""
        )
        (op,) = parse_ops(answer.text, num_shown=1 if hint else 0).ops
        kinds["generic" if op.text in GENERIC_LESSONS else op.kind] += 1
        if op.kind == "return":
            assert "not found" in prompt.text or "not seen" in prompt.text
        elif op.text not in GENERIC_LESSONS:
            assert op.kind == (
                "update" if hint and makes_claim(hint) and hint != op.text else "add"
            )
            if grid is MAZE:
                assert (
                    f"\nway {op.text.removeprefix('from the start go ').removesuffix('.')}\n"
                    in prompt.text
                )
            else:
                assert f"\n{op.text.removesuffix('.').replace(', ', chr(10))}\n" in prompt.text
    assert kinds["generic"] / 200 == pytest.approx(0.75, abs=0.08)
    assert min(kinds["return"], kinds["update"], kinds["add"]) > 0


def test_tasks_without_lessons_teach_only_generic_ones() -> None:
    answers = {
        answer.text for _, answer in GridLessons(SOKOBAN.extractor_walks).make(random.Random(2), 60)
    }
    assert answers == {
        '[{"op":"return"}]',
        *(f'[{{"op":"add","text":"{text}"}}]' for text in GENERIC_LESSONS),
    }


@with_lessons
def test_random_lessons_are_readable(grid: GridTask) -> None:
    assert grid.lessons is not None
    read = maze_lessons.read if grid is MAZE else keyroom_lessons.read
    texts = [grid.lessons.random_lesson(random.Random(i)) for i in range(30)]
    assert all(read(text) is not None for text in texts)
    assert len(set(texts)) > 20
