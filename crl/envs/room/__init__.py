"""`room`: find the stairs down in a dark 5×5 room with a monster and a trap (MiniHack-Room-Ultimate-5x5).

This module declares the environment and imports no NetHack; `game` does, and is imported when the first game is made.
At the paper's 30 turns knowing a layout is worth nothing here; at 4 turns it is worth much, and the rooms of the train
stream persist over visits so that there is something to know.
"""

from __future__ import annotations

from functools import partial

from crl.envs.actions import COMPASS
from crl.envs.base import EnvSpec, Game, Rendering, StreamSettings
from crl.envs.places import DEMONSTRATION_LAYOUTS, NEW_LAYOUTS, PROBE_LAYOUTS, PlaceStream, fixed_tasks, known_tasks, revisited
from crl.envs.room.lessons import RoomAdvisor, digest
from crl.envs.room.player import RoomPlayer
from crl.types import Split, Task

NAME = "room"
GOAL = "Room: the {place}. Reach the stairs down (>)."
ACTIONS = tuple(COMPASS)


class RoomStream(PlaceStream):
    """The train stream of a run with `seed`: named rooms that persist over visits (see `crl.envs.places`)."""

    def __init__(self, seed: int, settings: StreamSettings) -> None:
        super().__init__(NAME, GOAL, seed, settings)


def eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """The first n `known` tasks of the run with `seed`, or the first n `new` ones (the same in every run)."""
    if split == "known":
        return known_tasks(NAME, GOAL, n, seed, settings)
    if split == "new":
        return fixed_tasks(NAME, GOAL, NEW_LAYOUTS, n)
    raise ValueError(f"an eval split is known or new, not {split!r}")


def demonstration_tasks(n: int) -> tuple[Task, ...]:
    """n rooms for warm-start demonstrations, which no run trains or is evaluated on."""
    return fixed_tasks(NAME, GOAL, DEMONSTRATION_LAYOUTS, n)


def probe_tasks(n: int) -> tuple[Task, ...]:
    """n rooms for the advice probe, apart from every other use."""
    return fixed_tasks(NAME, GOAL, PROBE_LAYOUTS, n)


def make_game(rendering: Rendering) -> Game:
    from crl.envs.room.game import RoomGame

    return RoomGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    hosting="threads",
    turns=30,
    reward_range=(0.0, 1.0),
    actions=ACTIONS,
    action_format=f"{', '.join(ACTIONS)} (one step that way, or an attack on what stands there)",
    query_with_observation=False,
    make_game=make_game,
    task_source=RoomStream,
    eval_tasks=eval_tasks,
    scripted_player=RoomPlayer,
    revisit=partial(revisited, NAME),
    digest=digest,
    advisor=RoomAdvisor(),
    probe_tasks=probe_tasks,
)
