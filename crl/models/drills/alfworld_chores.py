"""Scripted chores in small houses: good and bad play for the actor, episodes for the extractor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from crl.envs.alfworld import SMALL, demonstration_tasks
from crl.envs.alfworld.house import read_chore
from crl.envs.alfworld.lessons import LESSONS, from_here, lesson, places, read, sights, true_places
from crl.envs.alfworld.small import HOLDS
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NOTHING
from crl.methods.parts.rollouts import ChatContext
from crl.models.drills.alfworld_houses import SmallHouse
from crl.models.drills.alfworld_personas import (
    Dawdler,
    ForgetfulSearcher,
    Hasty,
    Opener,
    Passer,
    SearchingPlayer,
)
from crl.models.drills.drill import OFFER, Episode, asking_turn, draw, hit
from crl.models.warm_start import Demonstration
from crl.types import Observation, Segment, Task

TURNS = 14
"""Turn limit, as in tasks/alfworld.toml."""

CONTEXT = ChatContext({SMALL: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "where"]
THINGS = sorted({thing.lower() for things in HOLDS.values() for thing in things.split()})
REPLIES = (("right", 0.45), ("random", 0.15), ("lesson", 0.20), ("nothing", 0.20))
"""Shares of the replies to a question."""

Persona = Callable[[random.Random, str], SearchingPlayer]
"""Maker of a demonstrator, from a random generator and the receptacle in the advice."""


@dataclass(frozen=True)
class Chores:
    """Episodes of small houses."""

    personas: tuple[tuple[Persona, float], ...]
    """Shares of the personas that play without advice, or ignore it."""
    advice: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """Shares of the advice at the start.

    The kinds are no advice ("none"), the receptacle of the thing ("right"), any receptacle
    ("random"), or a lesson of another kind ("other").
    """
    fidelity: float = 0.85
    """Probability that advice of kind "other" is followed; the other kinds always are."""
    slip: float = 0.03
    """Probability of a useless command."""
    offer: bool = False
    """Whether the agent may ask; see `asking_turn` and `replied`."""

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, demonstration_tasks(n)))

    def episodes(self, rng: random.Random, tasks: Sequence[Task]) -> Iterator[Episode]:
        return (self._episode(task, rng) for task in tasks)

    def _episode(self, task: Task, rng: random.Random) -> Episode:
        house, told = SmallHouse(), self._told(task, rng)
        hint = hit(told, task) if told else None
        *head, seen = CONTEXT.opening(task, Observation(house.reset(task)), hint)
        segments = [*head, *([OFFER] if self.offer else []), seen]
        persona = self._persona(task, told, rng)
        persona.begin(task.goal, seen.text)
        asks = asking_turn(rng, advised=told is not None) if self.offer else None
        for turn in range(TURNS):
            if turn == asks and read_chore(task.goal).thing not in sights(segments):
                reply, going = replied(task, rng)
                segments += [
                    Segment("assistant", COMPACT_CALL, "tool_call"),
                    Segment("user", reply, "tool_result"),
                ]
                persona.told = going or persona.told
            command = persona.slip() if rng.random() < self.slip else persona.act()
            result = house.step(command)
            segments += [Segment("assistant", command, "policy"), *CONTEXT.following(result)]
            if result.done:
                return Episode(task, hint, tuple(segments), success=True)
            persona.observe(result.text)
        return Episode(task, hint, tuple(segments), success=False)

    def _told(self, task: Task, rng: random.Random) -> str | None:
        """Return the lesson at the start, or None."""
        said, wanted = draw(self.advice, rng), read_chore(task.goal).thing
        if said == "none":
            return None
        if said == "other":
            return some_lesson(rng.choice(OTHER_KINDS), task, rng)
        return lesson(
            "where", wanted, rng.choice(true_places(task) if said == "right" else places(task))
        )

    def _persona(self, task: Task, told: str | None, rng: random.Random) -> SearchingPlayer:
        own = draw(self.personas, rng)
        if told is None:
            return own(rng, "")
        kind, _ = read(told, read_chore(task.goal))
        follows = kind == "where" or rng.random() < self.fidelity
        return (_ADHERENTS.get(kind, own) if follows else own)(
            rng, heard(told, task) if follows else ""
        )


_ADHERENTS: Mapping[str, Persona] = {"open": Opener, "look": Dawdler}
"""Personas that follow lessons on the way of playing, by kind of lesson."""


def some_lesson(kind: str, task: Task, rng: random.Random) -> str:
    """Return a lesson of this kind on the task's place. The lesson may be false."""
    wanted = read_chore(task.goal).thing
    thing = (
        wanted if kind == "where" else rng.choice([thing for thing in THINGS if thing != wanted])
    )
    return lesson(kind, thing, rng.choice(places(task)))


def heard(text: str, task: Task) -> str:
    """Return the receptacle to which a lesson sends an agent, or "" if there is none."""
    kind, place = read(text, read_chore(task.goal))
    return place if kind in ("where", "first") else ""


def replied(task: Task, rng: random.Random) -> tuple[str, str]:
    """Return the reply to a question and the receptacle to which it sends the agent.

    The receptacle is "" if the agent continues as before.
    """
    said = draw(REPLIES, rng)
    if said == "nothing":
        return COMPACT_NOTHING, ""
    if said == "lesson":
        text = some_lesson(rng.choice(list(LESSONS)), task, rng)
        return text, heard(text, task)
    place = rng.choice(true_places(task) if said == "right" else places(task))
    return from_here(place), place


PERSONAS: tuple[tuple[Persona, float], ...] = (
    (SearchingPlayer, 0.10),
    (Opener, 0.05),
    (ForgetfulSearcher, 0.15),
    (Passer, 0.35),
    (Hasty, 0.10),
    (Dawdler, 0.25),
)
ACTOR_CHORES = Chores(
    PERSONAS, advice=(("none", 0.30), ("right", 0.35), ("random", 0.12), ("other", 0.23))
)
ASKING_CHORES = replace(
    ACTOR_CHORES,
    advice=(("none", 0.50), ("right", 0.20), ("random", 0.10), ("other", 0.20)),
    offer=True,
)
EXTRACTOR_CHORES = replace(
    ACTOR_CHORES, advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15))
)
