"""What the bundled models are taught before RL: an extensible list of drills for each, a drill being a kind of demonstration.

The actor sees scripted walks through rooms, three quarters of them under advice. The extractor sees what such walks come to, and
answers with one lesson of a kind drawn at random: which kinds help is left to RL, but what a lesson says of its episode is true.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks
from crl.envs.room.game import RoomGame
from crl.envs.room.lessons import LESSONS, digest, lesson, read, stairs_direction, true_bearing
from crl.manager import DistilRequest
from crl.methods.parts.distilling import CompactDistilPrompt
from crl.methods.parts.rollouts import ChatContext
from crl.models.personas import Explorer, Pacer, Persona, Walker, adherent
from crl.models.warm_start import Demonstration
from crl.protocols import Hit
from crl.types import ExperienceUse, Observation, Segment, Task

T = TypeVar("T")

SCORED_TURNS = 4
"""Turns within which the stairs must be reached, as in tasks/room.toml."""

CONTEXT = ChatContext({NAME: ""})
DISTIL_PROMPT = CompactDistilPrompt({NAME: digest})


@dataclass(frozen=True)
class Drill:
    """A kind of demonstration: `make(rng, n)` yields n of them; the recipe takes `count`."""

    name: str
    count: int
    make: Callable[[random.Random, int], Iterator[Demonstration]]


@dataclass(frozen=True)
class Episode:
    """A walk as the actor's conversation would record it. success: the stairs were reached within the scored turns."""

    task: Task
    hint: Hit | None
    segments: tuple[Segment, ...]
    success: bool


@dataclass(frozen=True)
class RoomWalks:
    """Episodes of the compact room.

    personas: shares of those who were not told what to do; advice: shares of what is said at the start: nothing ("none"), the
    direction of the stairs ("right"), any direction ("random") or a lesson of another kind ("other"). A direction is always
    followed, another lesson with chance `fidelity`. slip: chance of a random action; turns: at most so many.
    """

    personas: tuple[tuple[Callable[[], Persona], float], ...]
    advice: tuple[tuple[str, float], ...] = (("none", 1.0),)
    fidelity: float = 0.85
    slip: float = 0.03
    turns: int = 8

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, demonstration_tasks(n)))

    def episodes(self, rng: random.Random, tasks: Sequence[Task]) -> Iterator[Episode]:
        game = RoomGame("compact")
        try:
            for task in tasks:
                yield self._episode(game, task, rng)
        finally:
            game.close()

    def _episode(self, game: RoomGame, task: Task, rng: random.Random) -> Episode:
        told = self._told(task, rng)
        hint = Hit(lesson(*told), ExperienceUse("told", 1, "told", "start")) if told else None
        persona = self._persona(told, rng)
        segments = [*CONTEXT.opening(task, Observation(game.reset(task)), hint)]
        success = False
        for turn in range(self.turns):
            action = rng.choice(list(COMPASS)) if rng.random() < self.slip else persona.act(game, rng)
            result = game.step(action)
            segments += [Segment("assistant", action, "policy"), *CONTEXT.following(result)]
            if result.done:
                success = result.success and turn < SCORED_TURNS
                break
        return Episode(task, hint, tuple(segments), success)

    def _told(self, task: Task, rng: random.Random) -> tuple[str, str] | None:
        """Kind and direction of the lesson at the start."""
        said, any_direction = _draw(self.advice, rng), rng.choice(list(COMPASS))
        if said == "none":
            return None
        if said == "other":
            return rng.choice([kind for kind in LESSONS if kind != "exit"]), any_direction
        right = true_bearing(int(task.params["lgen"])) if said == "right" else None
        return "exit", right or any_direction

    def _persona(self, told: tuple[str, str] | None, rng: random.Random) -> Persona:
        own = _draw(self.personas, rng)()
        if told is None or (told[0] != "exit" and rng.random() >= self.fidelity):
            return own
        return adherent(*told) or own


@dataclass(frozen=True)
class RoomLessons:
    """Answers of an extractor to finished walks: one op, of a kind drawn uniformly."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for number, episode in enumerate(self.walks.episodes(rng, demonstration_tasks(n))):
            yield [*distil_prompt(episode, number), Segment("assistant", answer(rng.choice(list(LESSONS)), episode), "policy")]


def distil_prompt(episode: Episode, number: int = 0) -> Sequence[Segment]:
    """What an extractor is told of the episode in a run."""
    shown = (episode.hint,) if episode.hint else ()
    return DISTIL_PROMPT(DistilRequest("drill", 0, 0, number, episode.task, episode.segments, episode.success, False, shown))


def answer(kind: str, episode: Episode) -> str:
    """The lesson of this kind that the episode teaches, as an op in its one spelling.

    The exit's direction is what the episode shows, and corrects a hint that said another; where it shows none, nothing is learnt.
    """
    if kind == "exit":
        seen = stairs_direction(episode.segments)
        if seen is None:
            return _op("return")
        text = lesson("exit", seen)
        if episode.hint and read(episode.hint.text)[0] == "exit" and episode.hint.text != text:
            return _op("update", target=1, text=text)
        return _op("add", text=text)
    last_move = next(segment.text for segment in reversed(episode.segments) if segment.origin == "policy")
    return _op("add", text=lesson(kind, last_move))


def _op(kind: str, **fields: int | str) -> str:
    return json.dumps([{"op": kind, **fields}], separators=(",", ":"))


def _draw(shares: Sequence[tuple[T, float]], rng: random.Random) -> T:
    values, weights = zip(*shares, strict=True)
    return rng.choices(values, weights)[0]


ACTOR_WALKS = RoomWalks(
    personas=((Explorer, 0.50), (Walker, 0.30), (Pacer, 0.20)),
    advice=(("none", 0.25), ("right", 0.37), ("random", 0.12), ("other", 0.26)),
)
EXTRACTOR_WALKS = RoomWalks(
    personas=((Explorer, 0.50), (Walker, 0.30), (Pacer, 0.20)),
    advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15)),
    slip=0.15,
)

ACTOR_DRILLS = (Drill("room walks", 12_000, ACTOR_WALKS.make),)
EXTRACTOR_DRILLS = (Drill("room lessons", 16_000, RoomLessons(EXTRACTOR_WALKS).make),)
