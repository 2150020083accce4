"""Streams of named places whose layout persists over visits, for environments that are fixed by a layout and a dynamics
seed (the MiniHack tasks).

A run has `places` places. They are visited in shuffled rounds; the `permanent` ones stay for the whole run, each of the
others is replaced by a new place, with a name and a layout of its own, after `visits` visits, staggered so that they do not
all change at once. Dynamics are new on every visit.

Every draw is addressed by (run seed, name, place, number), so task k of a stream is a pure function of k: the stream's
state is one cursor, and evals, which use other names, cannot disturb it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crl.envs.base import StreamSettings
from crl.protocols import State
from crl.seeds import derive_seed, generator
from crl.types import Split, Task, Trajectory

# Layout seeds (NetHack's `lgen`): disjoint by use. A layout of one range is never drawn for another use.
NEW_LAYOUTS = range(100_000, 200_000)
"""The `new` eval: places never trained on."""
DEMONSTRATION_LAYOUTS = range(200_000, 300_000)
"""Warm-start demonstrations of the bundled models."""
PROBE_LAYOUTS = range(300_000, 400_000)
"""The advice probe, and reserve."""
TRAIN_LAYOUTS = range(1_000_000_000, 2_000_000_000)
"""Places of train streams, the permanent ones (`known`) included."""

# Dynamics seeds (NetHack's `core`): what varies between visits of a place.
TRAIN_DYNAMICS = range(0, 1 << 30)
HELD_OUT_DYNAMICS = range(1 << 30, 1 << 31)
"""Every eval, probe and demonstration."""

_ADJECTIVES = """amber azure black brass broken bright cold copper coral cracked crimson damp deep dusty empty frozen golden green
    hollow iron ivory jade lost narrow old olive pale pearl quiet red ruined rusty sandy silver small stone tall violet white
    wooden""".split()  # noqa: SIM905
_NOUNS = """arch attic barn bath bunker cabin camp cave cell cellar chapel court crypt den dome forge gate grotto hall hut keep
    lodge loft mill mine nook oven pit porch shed shop shrine stable stall store tower tunnel vault well yard""".split()  # noqa: SIM905
_NAMES = [
    (i + j, f"{adjective} {noun}")
    for i, adjective in enumerate(_ADJECTIVES)
    for j, noun in enumerate(_NOUNS)
]
PLACE_NAMES = tuple(name for number, name in _NAMES if number % 4)
"""Names of places in train streams."""
FIXED_NAMES = tuple(name for number, name in _NAMES if number % 4 == 0)
"""Names of all other places: what a bank learnt in a run is never about them."""


class PlaceStream:
    """A `TaskSource` of the places of one environment. `goal` is a template with a `{place}`.

    The params of its tasks are `lgen` (the layout), `core` (the dynamics) and `place` (the name).
    """

    def __init__(self, env: str, goal: str, seed: int, settings: StreamSettings) -> None:
        self._env, self._goal, self._seed, self._settings = env, goal, seed, settings
        self._names, self._ages = _place_names(env, seed), _ages(env, seed, settings)
        self._drawn = 0
        self._round: tuple[int, list[int]] = (-1, [])

    def draw(self, n: int) -> Sequence[Task]:
        """The next n tasks of the stream, one for each group."""
        tasks = [self.task_at(self._drawn + i) for i in range(n)]
        self._drawn += n
        return tasks

    def task_at(self, k: int) -> Task:
        """Task k of the stream (from 0), without drawing it."""
        number, position = divmod(k, self._settings.places)
        place = self._order(number)[position]
        # every place is visited once a round, so its past follows from the round's number
        layout = (
            (self._ages[place] + number) // self._settings.visits
            if place >= self._settings.permanent
            else 0
        )
        lgen = _layout(self._env, self._seed, place, layout)
        core = _pick(TRAIN_DYNAMICS, self._seed, f"{self._env}/dynamics", k)
        return _task(
            self._env,
            self._goal,
            "train",
            _place_name(self._names, self._settings, place, layout),
            lgen,
            core,
        )

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """The stream does not depend on what came of its tasks."""

    def state(self) -> State:
        return {"drawn": self._drawn}

    def load_state(self, state: State) -> None:
        self._drawn = int(state["drawn"])

    def _order(self, number: int) -> list[int]:
        if self._round[0] != number:
            order = list(range(self._settings.places))
            generator(self._seed, f"{self._env}/round", number).shuffle(order)
            self._round = (number, order)
        return self._round[1]


def known_tasks(
    env: str, goal: str, n: int, seed: int, settings: StreamSettings
) -> tuple[Task, ...]:
    """n tasks in the permanent places of the run with `seed`, in turn, each under held-out dynamics of its own."""
    if settings.permanent == 0 and n > 0:
        raise ValueError(
            "without permanent places there is no `known` eval: set permanent to 1 or more"
        )
    names, tasks = _place_names(env, seed), []
    for i in range(n):
        place = i % settings.permanent
        core = _pick(HELD_OUT_DYNAMICS, seed, f"{env}/known", i)
        name = _place_name(names, settings, place, 0)
        tasks.append(_task(env, goal, "known", name, _layout(env, seed, place, 0), core))
    return tuple(tasks)


def fixed_tasks(
    env: str, goal: str, layouts: range, n: int, split: Split = "new"
) -> tuple[Task, ...]:
    """n tasks in the first n layouts of a range, the same in every run: the `new` eval, demonstrations, the probe."""
    if n > len(layouts):
        raise ValueError(f"there are {len(layouts):,} places, not {n:,}")
    tasks = []
    for i, lgen in enumerate(layouts[:n]):
        name = FIXED_NAMES[(i * 7) % len(FIXED_NAMES)]  # neighbours share no word
        tasks.append(
            _task(env, goal, split, name, lgen, _pick(HELD_OUT_DYNAMICS, 0, f"{env}/fixed", lgen))
        )
    return tuple(tasks)


def revisited(env: str, task: Task, visit: int) -> Task:
    """The task's place under the held-out dynamics of its visit number `visit` (from 0)."""
    core = _pick(HELD_OUT_DYNAMICS, 0, f"{env}/visit", int(task.params["lgen"]), visit)
    return replace(task, seed=core, params={**task.params, "core": core})


@dataclass(frozen=True, slots=True)
class Places:
    """The tasks of an environment of named places: what its `EnvSpec` declares of them. `goal` is a template with a `{place}`."""

    env: str
    goal: str

    def stream(self, seed: int, settings: StreamSettings) -> PlaceStream:
        """The train stream of a run with `seed`: named places that persist over visits."""
        return PlaceStream(self.env, self.goal, seed, settings)

    def eval_tasks(
        self, split: Split, n: int, seed: int, settings: StreamSettings
    ) -> tuple[Task, ...]:
        """The first n `known` tasks of the run with `seed`, or the first n `new` ones (the same in every run)."""
        if split == "known":
            return known_tasks(self.env, self.goal, n, seed, settings)
        if split == "new":
            return fixed_tasks(self.env, self.goal, NEW_LAYOUTS, n)
        raise ValueError(f"an eval split is known or new, not {split!r}")

    def demonstration_tasks(self, n: int) -> tuple[Task, ...]:
        """n places for warm-start demonstrations, which no run trains or is evaluated on."""
        return fixed_tasks(self.env, self.goal, DEMONSTRATION_LAYOUTS, n)

    def probe_tasks(self, n: int) -> tuple[Task, ...]:
        """n places for the advice probe, apart from every other use."""
        return fixed_tasks(self.env, self.goal, PROBE_LAYOUTS, n)

    def revisit(self, task: Task, visit: int) -> Task:
        return revisited(self.env, task, visit)


def _task(env: str, goal: str, split: Split, place: str, lgen: int, core: int) -> Task:
    return Task(
        env, core, split, goal.format(place=place), {"lgen": lgen, "core": core, "place": place}
    )


def _pick(values: range, seed: int, name: str, *key: int) -> int:
    return values[derive_seed(seed, name, *key) % len(values)]


def _layout(env: str, seed: int, place: int, number: int) -> int:
    return _pick(TRAIN_LAYOUTS, seed, f"{env}/layout", place, number)


def _place_name(names: Sequence[str], settings: StreamSettings, place: int, layout: int) -> str:
    """Every place of a run has a name of its own; when the names run out, they come again with a number."""
    changing = settings.places - settings.permanent
    index = (
        place
        if layout == 0
        else settings.places + (layout - 1) * changing + place - settings.permanent
    )
    again, index = divmod(index, len(names))
    return f"{names[index]} {again + 1}" if again else names[index]


def _place_names(env: str, seed: int) -> list[str]:
    names = list(PLACE_NAMES)
    generator(seed, f"{env}/names").shuffle(names)
    return names


def _ages(env: str, seed: int, settings: StreamSettings) -> list[int]:
    rng = generator(seed, f"{env}/ages")
    return [rng.randrange(settings.visits) for _ in range(settings.places)]
