"""Scripted experiments for tiny models: good and bad play for the actor and the extractor.

A *persona* is one way of playing a whole episode. Personas see only texts. They differ in many
respects, but all of them follow advice on the thing to focus on. This makes advice worth having.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from crl.envs.base import Game
from crl.envs.scienceworld import SMALL_SPEC
from crl.envs.scienceworld.lessons import LESSONS, lesson, read, right_things, wrong_things
from crl.envs.scienceworld.player import LOCATIONS, SmallPlayer, is_animal
from crl.envs.scienceworld.tasks import SMALL, demonstration_tasks
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills.drill import OFFER, Episode, as_hit, asking_turn, weighted_choice
from crl.types import Observation, Segment, StepResult, Task

TURNS = SMALL_SPEC.turns
CONTEXT = ChatContext({SMALL: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "focus"]
REPLIES = (("right", 0.55), ("random", 0.15), ("other", 0.10), ("nothing", 0.20))
"""Shares of the replies to a question."""


# ── personas ──────────────────────────────────────────────────────────────────────────────────────


class Experimenter(SmallPlayer):
    """Persona that knows where things are, and guesses which of them is the right one.

    `advised` is the thing to focus on and its room, `excluded` is a thing that must not be focused
    on. They are empty without such advice.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.advised: tuple[str, str] = "", ""
        self.excluded = ""

    def act(self) -> str:
        return shorten(super().act())

    def slip(self) -> str:
        """Return a random action instead of the intended one."""
        return self._rng.choice(["look around", "inventory", f"go {self._rng.choice(LOCATIONS)}"])

    def follow(self, text: str) -> None:
        """Follow a lesson, as far as it concerns this player."""
        kind, thing, place = read(text)
        if kind == "focus":
            self.advised = thing, place
        elif kind == "never":
            self.excluded = thing
        elif kind == "visit":
            self.advised = "", place

    def _search(self) -> str:
        thing, place = self.advised
        if place and self.location != place and place not in self.seen:
            return f"teleport to {place}"
        if thing in self.seen.get(self.location, []):
            return f"focus on {thing}"
        return self._explore()

    def _explore(self) -> str:
        return super()._search()

    def _choice(self, things: list[str]) -> str:
        suitable = [thing for thing in things if thing != self.excluded]
        if self._kind == "non-living thing":
            return super()._choice(things)
        animals = [thing for thing in suitable if is_animal(thing)]
        return self._rng.choice(animals or things)


class Expert(Experimenter):
    """Persona that knows the right things."""

    def _choice(self, things: list[str]) -> str:
        return SmallPlayer._choice(self, things)


class Guesser(Experimenter):
    """Persona that focuses on anything outside."""

    def _choice(self, things: list[str]) -> str:
        return self._rng.choice([thing for thing in things if thing != self.excluded])


class Wanderer(Experimenter):
    """Persona that visits rooms at random until it is outside."""

    def _explore(self) -> str:
        if self.location == "outside":
            return super()._explore()
        others = [name for name in LOCATIONS if name != self.location]
        return f"teleport to {self._rng.choice(others)}"


def shorten(action: str) -> str:
    """Return an action in the words of the compact rendering."""
    for long, short in (("teleport to ", "go "), ("focus on ", "focus "), ("pick up ", "take ")):
        if action.startswith(long):
            return short + action.removeprefix(long)
    if action.startswith("move "):
        thing, _, box = action.removeprefix("move ").partition(" to ")
        return f"put {thing} in {box}"
    return action


# ── episodes ──────────────────────────────────────────────────────────────────────────────────────

PersonaFactory = Callable[[random.Random], Experimenter]


@dataclass(frozen=True)
class Experiments:
    """Episodes of the tasks for tiny models."""

    personas: tuple[tuple[PersonaFactory, float], ...]
    """Shares of the personas."""
    advice: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """Shares of the advice at the start.

    The kinds are no advice ("none"), a right thing ("right"), any thing ("random"), or a lesson of
    another kind ("other").
    """
    slip: float = 0.03
    """Probability of a useless action."""
    offer: bool = False
    """True if the agent may ask; see `asking_turn`."""

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, n))

    def episodes(self, rng: random.Random, n: int) -> Iterator[Episode]:
        with closing(RepeatedGame()) as game:
            for task in demonstration_tasks(n):
                yield self._episode(game, task, rng)

    def _episode(self, game: RepeatedGame, task: Task, rng: random.Random) -> Episode:
        advice = draw_lesson(weighted_choice(self.advice, rng), task, rng)
        hint = as_hit(advice, task) if advice else None
        *head, first = CONTEXT.opening(task, Observation(game.reset(task)), [hint] if hint else [])
        segments = [*head, *([OFFER] if self.offer else []), first]
        persona = weighted_choice(self.personas, rng)(rng)
        persona.begin(task.goal, first.text)
        persona.follow(advice)
        asks = asking_turn(rng, advised=hint is not None) if self.offer else None
        for turn in range(TURNS):
            if turn == asks and not persona.focused:
                reply = draw_lesson(weighted_choice(REPLIES, rng), task, rng)
                segments += [
                    Segment("assistant", COMPACT_CALL, "tool_call"),
                    Segment("user", reply or COMPACT_NO_RESULT, "tool_result"),
                ]
                persona.follow(reply)
            action = persona.slip() if rng.random() < self.slip else persona.act()
            result = game.step(action)
            segments += [Segment("assistant", action, "policy"), *CONTEXT.feedback(result)]
            if result.done:
                return Episode(task, hint, tuple(segments), result.success)
            persona.observe(result.text)
        return Episode(task, hint, tuple(segments), success=False)


def draw_lesson(kind: str, task: Task, rng: random.Random) -> str:
    """Return a lesson of a kind of advice or of reply. It is empty for "none" and "nothing"."""
    match kind:
        case "right":
            return lesson("focus", rng.choice(right_things(task)), "outside")
        case "random":
            return lesson("focus", random_thing(task, rng), "outside")
        case "other":
            return random_lesson(rng.choice(OTHER_KINDS), task, rng)
    return ""


def random_lesson(kind: str, task: Task, rng: random.Random) -> str:
    """Return a lesson of this kind on the task. The lesson may be false."""
    return lesson(kind, random_thing(task, rng), rng.choice(LOCATIONS))


def random_thing(task: Task, rng: random.Random) -> str:
    """Return a thing that is outside in the task's game."""
    return rng.choice((*right_things(task), *wrong_things(task)))


class RepeatedGame:
    """Compact games of which every sequence of actions is simulated once.

    The simulator is deterministic, and demonstrators repeat each other. A known sequence is
    answered from memory; the simulator catches up when it is needed.
    """

    def __init__(self) -> None:
        self._game: Game = SMALL_SPEC.make_game("compact")
        self._known: dict[tuple[str, ...], str | StepResult] = {}
        self._task: Task | None = None
        self._played: tuple[str, ...] = ()
        self._simulated: tuple[str, ...] = ()

    def reset(self, task: Task) -> str:
        self._task, self._played = task, (task.goal,)
        if self._played not in self._known:
            self._catch_up()
        return self._known[self._played]  # type: ignore[return-value]

    def step(self, action: str) -> StepResult:
        before, self._played = self._played, (*self._played, action)
        if self._played not in self._known:
            if self._simulated != before:
                played, self._played = self._played, before
                self._catch_up()
                self._played = played
            self._known[self._played] = self._game.step(action)
            self._simulated = self._played
        return self._known[self._played]  # type: ignore[return-value]

    def close(self) -> None:
        self._game.close()

    def _catch_up(self) -> None:
        """Bring the simulator to the state after the played actions."""
        assert self._task is not None
        goal, *actions = self._played
        self._known[goal,] = self._game.reset(self._task)
        for action in actions:
            self._game.step(action)
        self._simulated = self._played


PERSONAS: tuple[tuple[PersonaFactory, float], ...] = (
    (Experimenter, 0.45),
    (Expert, 0.10),
    (Guesser, 0.25),
    (Wanderer, 0.20),
)
ACTOR_EXPERIMENTS = Experiments(
    PERSONAS, advice=(("none", 0.30), ("right", 0.35), ("random", 0.12), ("other", 0.23))
)
ASKING_EXPERIMENTS = replace(
    ACTOR_EXPERIMENTS,
    advice=(("none", 0.50), ("right", 0.20), ("random", 0.10), ("other", 0.20)),
    offer=True,
)
EXTRACTOR_EXPERIMENTS = replace(
    ACTOR_EXPERIMENTS,
    advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15)),
)
