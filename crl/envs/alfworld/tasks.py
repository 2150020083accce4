"""Tasks of ALFWorld: its games in shuffled rounds, and small houses that persist over visits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from crl.envs.alfworld import small
from crl.envs.alfworld.games import (
    VARIABLE,
    data_folder,
    official_chore,
    official_games,
    playable_games,
)
from crl.envs.alfworld.house import phrase
from crl.envs.base import Data, EnvTasks, StreamSettings
from crl.envs.places import (
    DEMONSTRATION_LAYOUTS,
    PROBE_LAYOUTS,
    UNSEEN_LAYOUTS,
    PlaceStream,
    fixed_tasks,
    revisited,
    seen_tasks,
)
from crl.envs.rounds import RoundStream
from crl.types import SPLIT_DRAW_NAMES, Split, Task

NAME = "alfworld"
SMALL = "alfworld_small"

GAMES: dict[Split, int] = {"train": 1466, "seen": 140, "unseen": 134}
"""Number of games per split.

1,466 and 134 are the paper's numbers (CRL C.1). The seen split has 140 more games, in floor plans
that are trained on.
"""
_FOLDERS: dict[Split, str] = {"train": "train", "seen": "valid_seen", "unseen": "valid_unseen"}


def train_stream(seed: int, settings: StreamSettings) -> RoundStream:
    """Return the stream of all train games, in shuffled rounds, of a run with `seed`."""
    return RoundStream(NAME, seed, len(_games("train")), partial(_task, "train"))


def eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """Return the first n games of a split, the same in every run.

    The seen split uses floor plans that are trained on, the unseen split uses others. Raise
    `ValueError` for any other split, or if the split has fewer than n games.
    """
    if split not in ("seen", "unseen"):
        raise ValueError(f"an eval split must be seen or unseen, not {split!r}")
    available = len(_games(split))
    if n > available:
        raise ValueError(f"{n} games were requested, but there are only {available}")
    return tuple(_task(split, number) for number in range(n))


def _games(split: Split) -> Sequence[str | int]:
    """Return the paths of ALFWorld's own games, or else the numbers of generated games."""
    folder = data_folder()
    return official_games(folder, _FOLDERS[split], GAMES[split]) if folder else range(GAMES[split])


def split_sizes() -> dict[Split, int]:
    """Return the numbers of games of the seen and the unseen split."""
    return {split: len(_games(split)) for split in ("seen", "unseen")}


def data() -> Data:
    """Return the description of the data in use.

    Raise `ConfigError` if the folder of ALFWorld's own games has no playable games.
    """
    folder = data_folder()
    if folder:
        for split in _FOLDERS.values():
            next(playable_games(folder, split))  # raises ConfigError if there are none
        return Data(f"the official games in {folder}", official=True)
    return Data(
        "generated games of the same domain",
        official=False,
        hint=f"the official ones are played when {VARIABLE} names their folder",
    )


def small_data() -> Data:
    return Data("generated houses of six receptacles", official=False)


def _task(split: Split, number: int) -> Task:
    game, use = _games(split)[number], SPLIT_DRAW_NAMES[split]
    variation = f"{use} {number}"  # games with the same chore differ in their rooms
    if isinstance(game, str):
        chore = official_chore(game)
        assert chore is not None
        params = {"game": game, "variation": variation}
        return Task(NAME, number, split, _sentence(phrase(chore)), params)
    from crl.envs.alfworld import floorplans

    return Task(
        NAME,
        number,
        split,
        _sentence(phrase(floorplans.house(use, number).chore)),
        {"use": use, "number": number, "variation": variation},
    )


def _sentence(words: str) -> str:
    return f"Your task is to: {words}."


# ── small houses ──────────────────────────────────────────────────────────────────────────────────


class SmallStream(PlaceStream):
    """Train stream of small houses, of a run with `seed`."""

    def __init__(self, seed: int, settings: StreamSettings) -> None:
        super().__init__(SMALL, "{place}", seed, settings)

    def task_at(self, k: int) -> Task:
        return _with_chore(super().task_at(k))


def small_eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """Return the first n tasks of a split.

    The seen split depends on the run's seed and settings. The unseen split is the same in every
    run. Raise `ValueError` for any other split.
    """
    if split == "seen":
        return tuple(map(_with_chore, seen_tasks(SMALL, "{place}", n, seed, settings)))
    if split == "unseen":
        return _fixed_small_tasks(UNSEEN_LAYOUTS, n)
    raise ValueError(f"an eval split must be seen or unseen, not {split!r}")


def demonstration_tasks(n: int) -> tuple[Task, ...]:
    """Return n small houses for warm-start demonstrations.

    No run trains on them or is evaluated on them.
    """
    return _fixed_small_tasks(DEMONSTRATION_LAYOUTS, n)


def probe_tasks(n: int) -> tuple[Task, ...]:
    """Return n small houses for the advice probe. They have no other use."""
    return _fixed_small_tasks(PROBE_LAYOUTS, n)


def _fixed_small_tasks(layouts: range, n: int) -> tuple[Task, ...]:
    return tuple(map(_with_chore, fixed_tasks(SMALL, "{place}", layouts, n)))


def _with_chore(task: Task) -> Task:
    """Return the task with its chore in the goal, after the name of the place.

    Neither of them changes while the place exists.
    """
    chore = small.house(int(task.params["lgen"]), int(task.params["core"])).chore
    return replace(task, goal=f"{task.goal}: {phrase(chore)}.")


TASKS = EnvTasks(train_stream, eval_tasks, data=data, split_sizes=split_sizes)
SMALL_TASKS = EnvTasks(SmallStream, small_eval_tasks, partial(revisited, SMALL), data=small_data)
