"""Training examples of the tiny models for maze, key room, river and Sokoban."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from crl.envs.base import play
from crl.envs.keyroom import lessons as keyroom_lessons
from crl.envs.maze import lessons as maze_lessons
from crl.manager.ops import parse_ops
from crl.models.drills.drill import Episode
from crl.models.drills.grid_players import players
from crl.models.drills.grids import (
    KEYROOM,
    MAZE,
    RIVER,
    SAYINGS,
    SOKOBAN,
    Grid,
    GridLessons,
    claims,
)

GRIDS = {grid.spec.name: grid for grid in (MAZE, KEYROOM, RIVER, SOKOBAN)}
each_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
with_lessons = pytest.mark.parametrize("grid", [MAZE, KEYROOM], ids=["maze_small", "keyroom"])


@cache
def walks(name: str) -> list[Episode]:
    grid = GRIDS[name]
    return list(grid.actor.episodes(random.Random(1), grid.places.demonstration_tasks(120)))


def success(episodes: list[Episode]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def told(grid: Grid, episode: Episode) -> str:
    if episode.hint is None:
        return "nothing"
    if not claims(episode.hint.text):
        return "a saying"
    assert grid.spec.advisor is not None
    return "right" if grid.spec.advisor.judge(episode.task, episode.hint.text).correct else "wrong"


@each_grid
def test_walks_are_the_actors_conversations(grid: Grid) -> None:
    """Check the structure of walks, which are conversations of the actor.

    As in a run, a walk begins with the goal, the advice if there is any, and the first observation.
    Valid actions and their results follow.
    """
    for walk in walks(grid.spec.name):
        opening = [segment.origin for segment in walk.segments[: 3 if walk.hint else 2]]
        assert opening == ["task", *(["experience"] if walk.hint else []), "env"]
        turns = walk.segments[len(opening) :]
        assert [segment.origin for segment in turns] == ["policy", "env"] * (len(turns) // 2)
        assert {segment.text for segment in turns[::2]} <= set(grid.spec.actions)
        assert len(turns) // 2 <= grid.turns
        assert walk.success == (
            turns[-1].text in ("stairs reached.", "solved.") and len(turns) // 2 <= grid.scored
        )


@each_grid
def test_some_win_and_some_lose(grid: Grid) -> None:
    free = [walk for walk in walks(grid.spec.name) if told(grid, walk) in ("nothing", "a saying")]
    assert 0.4 <= success(free) <= 0.9


@with_lessons
def test_what_is_told_and_what_comes_of_it(grid: Grid) -> None:
    """Check that right advice is followed and helps. Wrong advice is followed and does not help."""
    of: dict[str, list[Episode]] = {kind: [] for kind in ("nothing", "a saying", "right", "wrong")}
    for walk in walks(grid.spec.name):
        of[told(grid, walk)].append(walk)
    assert {kind: len(told) / 120 for kind, told in of.items()} == pytest.approx(
        {"nothing": 0.30, "a saying": 0.15, "right": 0.40, "wrong": 0.15}, abs=0.1
    )
    assert success(of["right"]) >= 0.95
    assert success(of["right"]) >= success(of["nothing"] + of["a saying"] + of["wrong"]) + 0.1


def test_a_way_is_followed_step_by_step_until_it_leads_against_a_wall() -> None:
    for walk in walks(MAZE.spec.name):
        actions = [segment.text for segment in walk.segments if segment.origin == "policy"]
        kind = told(MAZE, walk)
        if kind in ("right", "wrong") and walk.hint:
            way = maze_lessons.read(walk.hint.text) or []
            assert actions[: len(way)] == way if kind == "right" else actions[0] == way[0]


def test_places_are_walked_to_without_detours() -> None:
    """Check that an agent with advice about key and door needs fewer turns.

    An agent without advice must look for them.
    """

    def turns(kind: str) -> float:
        lengths = [
            len(walk.segments) // 2
            for walk in walks(KEYROOM.spec.name)
            if told(KEYROOM, walk) == kind and walk.success
        ]
        return sum(lengths) / len(lengths)

    assert turns("right") <= turns("nothing") - 1.5
    assert any(
        walk.success for walk in walks(KEYROOM.spec.name) if told(KEYROOM, walk) == "wrong"
    ), "they look for themselves then"


@each_grid
def test_personas_differ_as_they_should(grid: Grid) -> None:
    game, tasks = grid.spec.make_game("compact"), grid.places.demonstration_tasks(40)
    kinds = players(grid.spec.scripted_player, grid.spec.actions)
    skilled, late, forgetful, idle = (
        sum(
            play(game, task, kind(random.Random(i)), grid.scored).success
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
def test_what_the_extractor_says_is_true_of_the_episode(grid: Grid) -> None:
    """Check that one answer in four is the task's lesson, if the prompt shows its facts.

    The lesson is an update if the prompt shows another lesson, else an add. Without the facts, the
    answer is a return. All other answers are sayings.
    """
    kinds = Counter[str]()
    for prompt, said in GridLessons(grid.extractor).make(random.Random(2), 200):
        shown = (
            prompt.text.splitlines()[1].removeprefix("hint 1 ")
            if "\nhint 1 " in prompt.text
            else ""
        )
        (op,) = parse_ops(said.text, shown=1 if shown else 0).ops
        kinds["saying" if op.text in SAYINGS else op.kind] += 1
        if op.kind == "return":
            assert "not found" in prompt.text or "not seen" in prompt.text
        elif op.text not in SAYINGS:
            assert op.kind == ("update" if shown and claims(shown) and shown != op.text else "add")
            if grid is MAZE:
                assert (
                    f"\nway {op.text.removeprefix('from the start go ').removesuffix('.')}\n"
                    in prompt.text
                )
            else:
                assert f"\n{op.text.removesuffix('.').replace(', ', chr(10))}\n" in prompt.text
    assert kinds["saying"] / 200 == pytest.approx(0.75, abs=0.08)
    assert min(kinds["return"], kinds["update"], kinds["add"]) > 0


def test_without_lessons_nothing_is_learnt_but_sayings() -> None:
    answers = {said.text for _, said in GridLessons(SOKOBAN.extractor).make(random.Random(2), 60)}
    assert answers == {
        '[{"op":"return"}]',
        *(f'[{{"op":"add","text":"{text}"}}]' for text in SAYINGS),
    }


@with_lessons
def test_made_up_lessons_read_like_real_ones(grid: Grid) -> None:
    assert grid.lessons is not None
    read = maze_lessons.read if grid is MAZE else keyroom_lessons.read
    texts = [grid.lessons.some(random.Random(i)) for i in range(30)]
    assert all(read(text) is not None for text in texts)
    assert len(set(texts)) > 20
