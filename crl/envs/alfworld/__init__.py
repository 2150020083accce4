"""`alfworld` and `alfworld_small`: household chores in text (ALFWorld on TextWorld's engine, with ALFRED's domain).

`alfworld` plays the paper's way: 1,466 games to train on, 134 in rooms never seen, in turn and without places that recur by name; they
are ALFWorld's own where its users have them, else generated after ALFRED's floor plans (see `games`). `alfworld_small` is for tiny
models: rooms of six receptacles with a name each, which persist over visits as the MiniHack room's do (see `small`).

This module declares the environments and imports neither TextWorld nor ALFWorld; `game` does, in worker processes.
"""

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
from crl.envs.alfworld.lessons import HouseAdvisor, digest
from crl.envs.alfworld.player import AlfworldPlayer
from crl.envs.base import Data, EnvSpec, Game, Rendering, StreamSettings
from crl.envs.places import (
    DEMONSTRATION_LAYOUTS,
    NEW_LAYOUTS,
    PROBE_LAYOUTS,
    PlaceStream,
    fixed_tasks,
    known_tasks,
    revisited,
)
from crl.protocols import State
from crl.seeds import generator
from crl.types import Split, Task, Trajectory

NAME = "alfworld"
SMALL = "alfworld_small"

GAMES: dict[Split, int] = {"train": 1466, "known": 140, "new": 134}
"""Games of each use: the paper's 1,466 and 134 (CRL C.1), and 140 more in rooms seen in training."""
_FOLDERS: dict[Split, str] = {"train": "train", "known": "valid_seen", "new": "valid_unseen"}

COMMANDS = "go to X, open X, close X, take A from X, move A to X, clean A with X, heat A with X, cool A with X, use A, examine X, look, inventory"


class AlfworldStream:
    """A `TaskSource` of all train games, in shuffled rounds."""

    def __init__(self, seed: int, settings: StreamSettings) -> None:
        self._seed, self._games = seed, _games("train")
        self._drawn = 0

    def draw(self, n: int) -> Sequence[Task]:
        tasks = [self._task_at(self._drawn + i) for i in range(n)]
        self._drawn += n
        return tasks

    def _task_at(self, k: int) -> Task:
        number, position = divmod(k, len(self._games))
        order = list(range(len(self._games)))
        generator(self._seed, f"{NAME}/round", number).shuffle(order)
        return _task("train", order[position])

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """The stream does not depend on what came of its tasks."""

    def state(self) -> State:
        return {"drawn": self._drawn}

    def load_state(self, state: State) -> None:
        self._drawn = int(state["drawn"])


def eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """The first n games of a split, the same in every run: `known` in rooms that are trained in, `new` in others."""
    if split not in ("known", "new"):
        raise ValueError(f"an eval split is known or new, not {split!r}")
    there = len(_games(split))
    if n > there:
        raise ValueError(f"there are {there} games, not {n}")
    return tuple(_task(split, number) for number in range(n))


def _games(split: Split) -> Sequence[str | int]:
    """ALFWorld's own games by path, or numbers of generated ones."""
    folder = data_folder()
    return official_games(folder, _FOLDERS[split], GAMES[split]) if folder else range(GAMES[split])


def data() -> Data:
    folder = data_folder()
    if folder:
        for split in _FOLDERS.values():
            next(playable_games(folder, split))  # or a ConfigError
        return Data(f"the official games in {folder}", official=True)
    return Data(
        "generated games of the same domain",
        official=False,
        hint=f"the official ones are played when {VARIABLE} names their folder",
    )


def small_data() -> Data:
    return Data("generated houses of six receptacles", official=False)


def _task(split: Split, number: int) -> Task:
    game = _games(split)[number]
    if isinstance(game, str):
        chore = official_chore(game)
        assert chore is not None
        return Task(NAME, number, split, _sentence(phrase(chore)), {"game": game})
    from crl.envs.alfworld import floorplans

    return Task(
        NAME,
        number,
        split,
        _sentence(phrase(floorplans.house(split, number).chore)),
        {"use": split, "number": number},
    )


def _sentence(words: str) -> str:
    return f"Your task is to: {words}."


# ── small houses ────────────────────────────────────────────────────────────────────────────────────────────────────


class SmallStream(PlaceStream):
    """The train stream of small houses of a run with `seed`."""

    def __init__(self, seed: int, settings: StreamSettings) -> None:
        super().__init__(SMALL, "{place}", seed, settings)

    def task_at(self, k: int) -> Task:
        return _with_chore(super().task_at(k))


def small_eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """The first n `known` tasks of the run with `seed`, or the first n `new` ones (the same in every run)."""
    if split == "known":
        return tuple(map(_with_chore, known_tasks(SMALL, "{place}", n, seed, settings)))
    if split == "new":
        return _fixed_small_tasks(NEW_LAYOUTS, n)
    raise ValueError(f"an eval split is known or new, not {split!r}")


def demonstration_tasks(n: int) -> tuple[Task, ...]:
    """n small houses for warm-start demonstrations, which no run trains or is evaluated on."""
    return _fixed_small_tasks(DEMONSTRATION_LAYOUTS, n)


def probe_tasks(n: int) -> tuple[Task, ...]:
    """n small houses for the advice probe, apart from every other use."""
    return _fixed_small_tasks(PROBE_LAYOUTS, n)


def _fixed_small_tasks(layouts: range, n: int) -> tuple[Task, ...]:
    return tuple(map(_with_chore, fixed_tasks(SMALL, "{place}", layouts, n)))


def _with_chore(task: Task) -> Task:
    """The goal names the place and its chore: neither changes while the place is there."""
    chore = small.house(int(task.params["lgen"]), int(task.params["core"])).chore
    return replace(task, goal=f"{task.goal}: {phrase(chore)}.")


def make_game(rendering: Rendering) -> Game:
    from crl.envs.alfworld.game import AlfworldGame

    return AlfworldGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    hosting="processes",
    turns=40,
    reward_range=(-1.0, 1.0),
    actions=(),
    action_format=f"{COMMANDS} (X a receptacle and A a thing as they are called, for example: take mug 1 from shelf 2)",
    query_with_observation=False,
    make_game=make_game,
    task_source=AlfworldStream,
    eval_tasks=eval_tasks,
    scripted_player=AlfworldPlayer,
    extra="alfworld",
    data=data,
    affinity=True,  # the planner's translation of a game takes most of a reset
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    turns=30,
    task_source=SmallStream,
    eval_tasks=small_eval_tasks,
    revisit=partial(revisited, SMALL),
    digest=digest,
    advisor=HouseAdvisor(),
    probe_tasks=probe_tasks,
    data=small_data,
)
