"""Tasks of ScienceWorld: variations of EMPO²'s tasks, and those for tiny models.

A variation fixes everything in a game. The goals are stored in files (see `collect`), because the
train stream makes tasks where no Java runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from typing import Any, Literal

from crl.envs.base import EnvTasks, StreamSettings
from crl.envs.rounds import RoundStream
from crl.types import Split, Task

NAME = "scienceworld"
SMALL = "scienceworld_small"

SmallUse = Literal["train", "unseen", "demonstration", "probe"]

_PLACE_NAMES = {
    "find-animal": "animal",
    "find-non-living-thing": "thing",
    "lifespan-longest-lived": "life",
}
"""Task for tiny models → first word of its goals, which end with the number of the variation."""


@cache
def _stored(name: str) -> Mapping[str, Any]:
    file = resources.files("crl.envs.scienceworld").joinpath(f"{name}.json")
    return json.loads(file.read_text("utf-8"))


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks."""
    return tuple(_stored("variations"))


def variations_with_goal(goal: str) -> list[tuple[str, int]]:
    """Return (task, variation) of all games with this goal."""
    return [
        (task, int(variation))
        for task, splits in _stored("variations").items()
        for goals in splits.values()
        for variation, stored in goals.items()
        if stored == goal
    ]


def tasks_of(names: Sequence[str], env: str = NAME) -> EnvTasks:
    """Return the tasks of an environment that plays the tasks with these names."""
    return EnvTasks(
        partial(_train_stream, env, names),
        partial(_eval_tasks, env, names),
        _revisited,
        split_sizes=partial(_split_sizes, env, names),
        query_with_observation=True,
    )


def _train_stream(
    env: str, names: Sequence[str], seed: int, settings: StreamSettings
) -> RoundStream:
    games = _games(env, names, "train")
    return RoundStream(env, seed, len(games), games.__getitem__)


def _eval_tasks(
    env: str, names: Sequence[str], split: Split, n: int, seed: int, settings: StreamSettings
) -> tuple[Task, ...]:
    """Return the first n games of a split, in turn over the tasks.

    The seen split has the variations that are trained on. Raise `ValueError` for another split, or
    if the split has fewer than n games.
    """
    games = _games(env, names, _checked(split))
    if n > len(games):
        raise ValueError(f"{n} games were requested, but there are only {len(games)}")
    return games[:n]


def _split_sizes(env: str, names: Sequence[str]) -> dict[Split, int]:
    return {split: len(_games(env, names, split)) for split in ("seen", "unseen")}


@cache
def _games(env: str, names: Sequence[str], split: Split) -> tuple[Task, ...]:
    stored = _stored("variations")
    return _in_turn(
        [
            [
                _task(env, split, goal, name, int(variation))
                for variation, goal in stored[name]["train" if split == "seen" else split].items()
            ]
            for name in names
        ]
    )


def _checked(split: Split) -> Split:
    if split not in ("seen", "unseen"):
        raise ValueError(f"an eval split must be seen or unseen, not {split!r}")
    return split


def _in_turn(lists: Sequence[Sequence[Task]]) -> tuple[Task, ...]:
    """Return the tasks of all lists: the first of each, then the second of each, and so on."""
    longest = max(map(len, lists))
    return tuple(tasks[i] for i in range(longest) for tasks in lists if i < len(tasks))


def _task(env: str, split: Split, goal: str, name: str, variation: int) -> Task:
    return Task(env, variation, split, goal, {"task": name, "variation": variation})


def _revisited(task: Task, visit: int) -> Task:
    """Return the same game: nothing is drawn anew between the visits of a variation."""
    return replace(task, seed=visit)


# ── tiny models ───────────────────────────────────────────────────────────────────────────────────


def small_train_stream(seed: int, settings: StreamSettings) -> RoundStream:
    games = _small_games("train", "train")
    return RoundStream(SMALL, seed, len(games), games.__getitem__)


def small_eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """Return n games of a split. They repeat after the last variation.

    The seen split has the variations that are trained on. Raise `ValueError` for another split.
    """
    use = "train" if _checked(split) == "seen" else "unseen"
    return _cycled(_small_games(use, split), n)


def demonstration_tasks(n: int) -> tuple[Task, ...]:
    """Return n games for warm-start demonstrations.

    No run trains on their variations or is evaluated on them.
    """
    return _cycled(_small_games("demonstration", "unseen"), n)


def probe_tasks(n: int) -> tuple[Task, ...]:
    """Return n games for the advice probe. Their variations have no other use."""
    return _cycled(_small_games("probe", "unseen"), n)


def animals(task: Task) -> tuple[str, ...]:
    """Return the animals outside in a game for tiny models.

    The longest-lived one comes first if the task asks for it.
    """
    name, variation = str(task.params["task"]), str(task.params["variation"])
    uses = _stored("small")[name].values()
    return tuple(next(games[variation]["animals"] for games in uses if variation in games))


@cache
def _small_games(use: SmallUse, split: Split) -> tuple[Task, ...]:
    return _in_turn(
        [
            [
                _task(
                    SMALL,
                    split,
                    f"{_PLACE_NAMES[name]} {variation}: {game['goal']}.",
                    name,
                    int(variation),
                )
                for variation, game in uses[use].items()
            ]
            for name, uses in _stored("small").items()
        ]
    )


def _cycled(games: Sequence[Task], n: int) -> tuple[Task, ...]:
    return tuple(games[i % len(games)] for i in range(n))


TASKS = tasks_of(task_names())
SMALL_TASKS = EnvTasks(small_train_stream, small_eval_tasks, _revisited)
