"""Tasks of WebShop, and visits with random actions."""

from __future__ import annotations

import random
import re

from crl.envs.base import StreamSettings
from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.tasks import eval_tasks
from crl.types import Task

PAPER = StreamSettings(places=32, permanent=0, visits=1)
"""Stream of the paper: each group has its own goal."""
UNSEEN = eval_tasks("unseen", 150, 0, PAPER)


def transcript(game: WebShopGame, task: Task, turns: int = 15) -> list[str]:
    """Return the texts of a visit whose actions depend only on the task."""
    rng = random.Random(task.seed)
    texts = [game.reset(task)]
    for _ in range(turns):
        result = game.step(any_action(rng, texts[-1], task))
        texts.append(f"{result.text} {result.reward} {result.score} {result.done} {result.valid}")
        if result.done:
            break
    return texts


def any_action(rng: random.Random, page: str, task: Task) -> str:
    """Return a random search or click. Only some of them are valid, and purchases are rare."""
    words = re.findall(r"[\w<>]+", page) + task.goal.split()
    buttons = [
        "Back to Search",
        "< Prev",
        "Next >",
        "Features",
        "description",
        *(["Buy Now"] if rng.random() < 0.2 else []),
    ]
    return rng.choice(
        [
            f"search[{rng.choice(words)}]",
            f"click[{rng.choice(words)}]",
            f"click[{rng.choice(buttons)}]",
        ]
    )
