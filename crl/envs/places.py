"""Task streams of named places whose layout persists over visits.

They serve environments whose episodes are fixed by a layout seed and a dynamics seed, such as the
MiniHack tasks.

A run has `places` places, which are visited in shuffled rounds. The `permanent` places stay for the
whole run. Each of the others is replaced after `visits` visits by a new place with another name and
another layout. The replacements are staggered, so that the places do not all change at the same
time. Dynamics are new on every visit.

Every draw is addressed by (run seed, name, place, number), so task k of a stream is a pure function
of k. The stream's state is one cursor. Evaluations use other names, so they cannot disturb the
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crl.envs.base import EnvTasks, StreamSettings
from crl.protocols import State
from crl.seeds import derive_seed, generator
from crl.types import SPLIT_DRAW_NAMES, Split, Task, Trajectory

# Layout seeds (NetHack's `lgen`). Each use draws layouts from its own range only.
UNSEEN_LAYOUTS = range(100_000, 200_000)
"""Layouts of the unseen split: places that are never trained on."""
DEMONSTRATION_LAYOUTS = range(200_000, 300_000)
"""Layouts of warm-start demonstrations of the bundled models."""
PROBE_LAYOUTS = range(300_000, 400_000)
"""Layouts of the advice probe, and a reserve."""
TRAIN_LAYOUTS = range(1_000_000_000, 2_000_000_000)
"""Layouts of train streams.

They include the permanent places, in which the seen split is evaluated.
"""

# Dynamics seeds (NetHack's `core`): they vary between the visits of a place.
TRAIN_DYNAMICS = range(0, 1 << 30)
HELD_OUT_DYNAMICS = range(1 << 30, 1 << 31)
"""Dynamics of all evaluations, probes and demonstrations."""

_ADJECTIVES = """
    amber azure black brass broken bright cold copper coral cracked crimson damp deep dusty
    empty frozen golden green hollow iron ivory jade lost narrow old olive pale pearl quiet red
    ruined rusty sandy silver small stone tall violet white wooden
""".split()  # noqa: SIM905
_NOUNS = """
    arch attic barn bath bunker cabin camp cave cell cellar chapel court crypt den dome forge
    gate grotto hall hut keep lodge loft mill mine nook oven pit porch shed shop shrine stable
    stall store tower tunnel vault well yard
""".split()  # noqa: SIM905
_NAMES = [
    (i + j, f"{adjective} {noun}")
    for i, adjective in enumerate(_ADJECTIVES)
    for j, noun in enumerate(_NOUNS)
]
PLACE_NAMES = tuple(name for number, name in _NAMES if number % 4)
"""Names of places in train streams."""
FIXED_NAMES = tuple(name for number, name in _NAMES if number % 4 == 0)
"""Names of all other places. Experience from a run never refers to these names."""


class PlaceStream:
    """`TaskSource` of the places of one environment. `goal` is a template with a `{place}`.

    The params of its tasks are `lgen` (the layout), `core` (the dynamics) and `place` (the name).
    """

    def __init__(self, env: str, goal: str, seed: int, settings: StreamSettings) -> None:
        self._env, self._goal, self._seed, self._settings = env, goal, seed, settings
        self._names, self._initial_visits = (
            _place_names(env, seed),
            _initial_visits(env, seed, settings),
        )
        self._drawn = 0
        self._cached_round: tuple[int, list[int]] = (-1, [])

    def draw(self, n: int) -> Sequence[Task]:
        """Return the next n tasks of the stream, one for each group."""
        tasks = [self.task_at(self._drawn + i) for i in range(n)]
        self._drawn += n
        return tasks

    def task_at(self, k: int) -> Task:
        """Return task k of the stream, counted from 0, without drawing it."""
        number, position = divmod(k, self._settings.places)
        place = self._round_order(number)[position]
        # every place is visited once per round, so the round's number gives its number of visits
        layout = (
            (self._initial_visits[place] + number) // self._settings.visits
            if place >= self._settings.permanent
            else 0
        )
        lgen = _layout(self._env, self._seed, place, layout)
        core = _draw_from(TRAIN_DYNAMICS, self._seed, f"{self._env}/dynamics", k)
        return _task(
            self._env,
            self._goal,
            "train",
            _place_name(self._names, self._settings, place, layout),
            lgen,
            core,
        )

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Ignore the trajectories. The stream does not depend on them."""

    def state(self) -> State:
        return {"drawn": self._drawn}

    def load_state(self, state: State) -> None:
        self._drawn = int(state["drawn"])

    def _round_order(self, number: int) -> list[int]:
        if self._cached_round[0] != number:
            order = list(range(self._settings.places))
            generator(self._seed, f"{self._env}/round", number).shuffle(order)
            self._cached_round = (number, order)
        return self._cached_round[1]


def seen_tasks(
    env: str, goal: str, n: int, seed: int, settings: StreamSettings
) -> tuple[Task, ...]:
    """Return n tasks in the permanent places of the run with `seed`, in turn.

    Each task has separate held-out dynamics. Raise `ValueError` if n > 0 and there are no permanent
    places.
    """
    if settings.permanent == 0 and n > 0:
        raise ValueError("the seen split needs permanent places; set permanent to at least 1")
    names, tasks = _place_names(env, seed), []
    for i in range(n):
        place = i % settings.permanent
        core = _draw_from(HELD_OUT_DYNAMICS, seed, f"{env}/{SPLIT_DRAW_NAMES['seen']}", i)
        name = _place_name(names, settings, place, 0)
        tasks.append(_task(env, goal, "seen", name, _layout(env, seed, place, 0), core))
    return tuple(tasks)


def fixed_tasks(
    env: str, goal: str, layouts: range, n: int, split: Split = "unseen"
) -> tuple[Task, ...]:
    """Return n tasks in the first n layouts of a range, the same in every run.

    Used for the unseen split, demonstrations and the probe. Raise `ValueError` if the range has
    fewer than n layouts.
    """
    if n > len(layouts):
        raise ValueError(f"{n:,} places were requested, but there are only {len(layouts):,}")
    tasks = []
    for i, lgen in enumerate(layouts[:n]):
        name = FIXED_NAMES[(i * 7) % len(FIXED_NAMES)]  # names of consecutive tasks share no word
        tasks.append(
            _task(
                env, goal, split, name, lgen, _draw_from(HELD_OUT_DYNAMICS, 0, f"{env}/fixed", lgen)
            )
        )
    return tuple(tasks)


def revisited(env: str, task: Task, visit: int) -> Task:
    """Return the task's place under the held-out dynamics of visit `visit`, counted from 0."""
    core = _draw_from(HELD_OUT_DYNAMICS, 0, f"{env}/visit", int(task.params["lgen"]), visit)
    return replace(task, seed=core, params={**task.params, "core": core})


@dataclass(frozen=True, slots=True)
class Places:
    """Tasks of an environment with named places. `tasks` is the value for its `EnvSpec`."""

    env: str
    """Name of the environment."""
    goal: str
    """Template of the goal, with a `{place}`."""

    @property
    def tasks(self) -> EnvTasks:
        """Train stream, eval tasks and revisits of the places."""
        return EnvTasks(self.stream, self.eval_tasks, self.revisit)

    def stream(self, seed: int, settings: StreamSettings) -> PlaceStream:
        """Return the train stream of a run with `seed`: named places that persist over visits."""
        return PlaceStream(self.env, self.goal, seed, settings)

    def eval_tasks(
        self, split: Split, n: int, seed: int, settings: StreamSettings
    ) -> tuple[Task, ...]:
        """Return the first n tasks of a split.

        The seen split depends on the run's seed and settings. The unseen split is the same in every
        run. Raise `ValueError` for any other split.
        """
        if split == "seen":
            return seen_tasks(self.env, self.goal, n, seed, settings)
        if split == "unseen":
            return fixed_tasks(self.env, self.goal, UNSEEN_LAYOUTS, n)
        raise ValueError(f"an eval split must be seen or unseen, not {split!r}")

    def demonstration_tasks(self, n: int) -> tuple[Task, ...]:
        """Return n places for warm-start demonstrations.

        No run trains on them or is evaluated on them.
        """
        return fixed_tasks(self.env, self.goal, DEMONSTRATION_LAYOUTS, n)

    def probe_tasks(self, n: int) -> tuple[Task, ...]:
        """Return n places for the advice probe. They have no other use."""
        return fixed_tasks(self.env, self.goal, PROBE_LAYOUTS, n)

    def revisit(self, task: Task, visit: int) -> Task:
        """Return the task's place under the held-out dynamics of visit `visit`, counted from 0."""
        return revisited(self.env, task, visit)


def _task(env: str, goal: str, split: Split, place: str, lgen: int, core: int) -> Task:
    return Task(
        env, core, split, goal.format(place=place), {"lgen": lgen, "core": core, "place": place}
    )


def _draw_from(values: range, seed: int, name: str, *key: int) -> int:
    return values[derive_seed(seed, name, *key) % len(values)]


def _layout(env: str, seed: int, place: int, number: int) -> int:
    return _draw_from(TRAIN_LAYOUTS, seed, f"{env}/layout", place, number)


def _place_name(names: Sequence[str], settings: StreamSettings, place: int, layout: int) -> str:
    """Return the name of a place, which is unique in the run.

    When all names are used, they are reused with a number.
    """
    replaceable = settings.places - settings.permanent
    index = (
        place
        if layout == 0
        else settings.places + (layout - 1) * replaceable + place - settings.permanent
    )
    reuse, index = divmod(index, len(names))
    return f"{names[index]} {reuse + 1}" if reuse else names[index]


def _place_names(env: str, seed: int) -> list[str]:
    names = list(PLACE_NAMES)
    generator(seed, f"{env}/names").shuffle(names)
    return names


def _initial_visits(env: str, seed: int, settings: StreamSettings) -> list[int]:
    """Return each place's number of visits before the run. It staggers the replacements."""
    rng = generator(seed, f"{env}/ages")
    return [rng.randrange(settings.visits) for _ in range(settings.places)]
