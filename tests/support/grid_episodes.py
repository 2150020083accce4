"""MiniHack games, Sokoban, and episodes in them with random actions."""

from __future__ import annotations

import random
from functools import cache

from crl.envs.base import Game, Rendering, StreamSettings
from crl.envs.registry import get_spec
from crl.types import Task

TASKS = ("maze", "keyroom", "river", "sokoban")
NAMES = (*TASKS, "maze_small", "river_small")
ALL = ("room", *NAMES)
"""All environments with grids."""
SETTINGS = StreamSettings()
RENDERINGS: tuple[Rendering, ...] = ("full", "compact")
JUNK = [
    "",
    " ",
    "<answer>",
    "<answer>up</answer>",
    "north south",
    "\x00",
    "é" * 500,
    "go north",
    "9" * 100,
    "<answer></answer>\n",
    "\ud800",
]


@cache
def game(name: str, rendering: Rendering, number: int = 0) -> Game:
    """Return a cached game. Tests may share it, because they play one episode at a time."""
    return get_spec(name).make_game(rendering)


def unseen(name: str, n: int) -> tuple[Task, ...]:
    return get_spec(name).tasks.eval_tasks("unseen", n, 0, SETTINGS)


def transcript(
    played: Game, task: Task, actions: tuple[str, ...], turns: int = 12, junk: float = 0.0
) -> list[str]:
    """Return the texts of an episode whose actions depend on the task alone.

    Invalid actions are inserted with probability `junk`. Their texts are not returned.
    """
    rng, noise = random.Random(task.seed), random.Random(0)
    texts = [played.reset(task)]
    for _ in range(turns):
        while noise.random() < junk:
            result = played.step(noise.choice(JUNK))
            assert not result.valid
            assert (result.reward, result.done) == (0.0, False)
        result = played.step(rng.choice(actions))
        assert result.valid
        texts.append(f"{result.text} {result.reward} {result.done}")
        if result.done:
            break
    return texts


def all_transcripts() -> dict[str, list[list[str]]]:
    """Return the transcripts of the first tasks of every use, for all games and renderings."""
    return {
        f"{name} {rendering}": first_transcripts(name, rendering)
        for name in ALL
        for rendering in RENDERINGS
    }


def first_transcripts(name: str, rendering: Rendering) -> list[list[str]]:
    spec = get_spec(name)
    tasks = [
        *unseen(name, 2),
        *spec.tasks.eval_tasks("seen", 2, 7, SETTINGS),
        *spec.tasks.train_stream(7, SETTINGS).draw(2),
    ]
    return [transcript(game(name, rendering), task, spec.actions.choices) for task in tasks]
