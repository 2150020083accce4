"""Tasks of ALFWorld, and episodes with random actions."""

from __future__ import annotations

import random

from crl.envs import alfworld
from crl.envs.alfworld.tasks import SmallStream, eval_tasks, small_eval_tasks
from crl.envs.base import StreamSettings
from crl.types import Task

SETTINGS = StreamSettings()
SMALL_UNSEEN = small_eval_tasks("unseen", 128, 0, SETTINGS)


def admissible(game: alfworld.Game) -> tuple[str, ...]:
    return game.admissible  # type: ignore[attr-defined]


def transcript(game: alfworld.Game, task: Task, turns: int = 12) -> list[str]:
    """Return the texts of an episode. The commands depend on the task alone."""
    rng = random.Random(task.seed)
    texts = [game.reset(task)]
    for _ in range(turns):
        result = game.step(rng.choice(admissible(game)))
        texts.append(f"{result.text} {result.reward} {result.done}")
        if result.done:
            break
    return texts


def some_tasks() -> list[Task]:
    return [
        *SMALL_UNSEEN[:4],
        *eval_tasks("unseen", 2, 0, SETTINGS),
        *SmallStream(1, SETTINGS).draw(2),
    ]
