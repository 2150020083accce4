"""Scripted chores in small houses: good and bad play for the actor, episodes for the extractor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from crl.envs.alfworld.house import read_chore
from crl.envs.alfworld.lessons import (
    LESSONS,
    first_sightings,
    from_here,
    lesson,
    read,
    receptacle_names,
    true_receptacles,
)
from crl.envs.alfworld.small import HOLDS
from crl.envs.alfworld.tasks import SMALL, demonstration_tasks
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills.alfworld.houses import SmallHouse
from crl.tiny.drills.alfworld.personas import (
    ClosedFirstSearcher,
    ForgetfulSearcher,
    IdleLooker,
    RandomVisitor,
    SearchingPlayer,
    TreatmentSkipper,
)
from crl.tiny.drills.drill import OFFER, Episode, as_hit, asking_turn, weighted_choice
from crl.types import Observation, Segment, Task

TURNS = 14
"""Turn limit, as in tasks/alfworld.toml."""

CONTEXT = ChatContext({SMALL: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "where"]
THINGS = sorted({thing.lower() for things in HOLDS.values() for thing in things.split()})
REPLIES = (("right", 0.45), ("random", 0.15), ("lesson", 0.20), ("nothing", 0.20))
"""Shares of the replies to a question."""

PersonaFactory = Callable[[random.Random, str], SearchingPlayer]
"""Maker of a demonstrator, from a random generator and the receptacle in the advice."""


@dataclass(frozen=True)
class Chores:
    """Episodes of small houses."""

    personas: tuple[tuple[PersonaFactory, float], ...]
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
    """True if the agent may ask; see `asking_turn` and `question_reply`."""

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, demonstration_tasks(n)))

    def episodes(self, rng: random.Random, tasks: Sequence[Task]) -> Iterator[Episode]:
        return (self._episode(task, rng) for task in tasks)

    def _episode(self, task: Task, rng: random.Random) -> Episode:
        house, advice = SmallHouse(), self._draw_advice(task, rng)
        hint = as_hit(advice, task) if advice else None
        *head, first = CONTEXT.opening(task, Observation(house.reset(task)), [hint] if hint else [])
        segments = [*head, *([OFFER] if self.offer else []), first]
        persona = self._persona(task, advice, rng)
        persona.begin(task.goal, first.text)
        asks = asking_turn(rng, advised=advice is not None) if self.offer else None
        for turn in range(TURNS):
            if turn == asks and read_chore(task.goal).thing not in first_sightings(segments):
                reply, place = question_reply(task, rng)
                segments += [
                    Segment("assistant", COMPACT_CALL, "tool_call"),
                    Segment("user", reply, "tool_result"),
                ]
                persona.advised_place = place or persona.advised_place
            command = persona.slip() if rng.random() < self.slip else persona.act()
            result = house.step(command)
            segments += [Segment("assistant", command, "policy"), *CONTEXT.feedback(result)]
            if result.done:
                return Episode(task, hint, tuple(segments), success=True)
            persona.observe(result.text)
        return Episode(task, hint, tuple(segments), success=False)

    def _draw_advice(self, task: Task, rng: random.Random) -> str | None:
        """Return the lesson at the start, or None."""
        kind, wanted = weighted_choice(self.advice, rng), read_chore(task.goal).thing
        if kind == "none":
            return None
        if kind == "other":
            return random_lesson(rng.choice(OTHER_KINDS), task, rng)
        return lesson(
            "where",
            wanted,
            rng.choice(true_receptacles(task) if kind == "right" else receptacle_names(task)),
        )

    def _persona(self, task: Task, advice: str | None, rng: random.Random) -> SearchingPlayer:
        default = weighted_choice(self.personas, rng)
        if advice is None:
            return default(rng, "")
        kind, _ = read(advice, read_chore(task.goal))
        follows = kind == "where" or rng.random() < self.fidelity
        return (_FOLLOWERS.get(kind, default) if follows else default)(
            rng, lesson_place(advice, task) if follows else ""
        )


_FOLLOWERS: Mapping[str, PersonaFactory] = {"open": ClosedFirstSearcher, "look": IdleLooker}
"""Personas that follow lessons on the way of playing, by kind of lesson."""


def random_lesson(kind: str, task: Task, rng: random.Random) -> str:
    """Return a lesson of this kind on the task's place. The lesson may be false."""
    wanted = read_chore(task.goal).thing
    thing = (
        wanted if kind == "where" else rng.choice([thing for thing in THINGS if thing != wanted])
    )
    return lesson(kind, thing, rng.choice(receptacle_names(task)))


def lesson_place(text: str, task: Task) -> str:
    """Return the receptacle to which a lesson sends an agent, or "" if there is none."""
    kind, place = read(text, read_chore(task.goal))
    return place if kind in ("where", "first") else ""


def question_reply(task: Task, rng: random.Random) -> tuple[str, str]:
    """Return the reply to a question and the receptacle to which it sends the agent.

    The receptacle is "" if the agent continues as before.
    """
    kind = weighted_choice(REPLIES, rng)
    if kind == "nothing":
        return COMPACT_NO_RESULT, ""
    if kind == "lesson":
        text = random_lesson(rng.choice(list(LESSONS)), task, rng)
        return text, lesson_place(text, task)
    place = rng.choice(true_receptacles(task) if kind == "right" else receptacle_names(task))
    return from_here(place), place


PERSONAS: tuple[tuple[PersonaFactory, float], ...] = (
    (SearchingPlayer, 0.10),
    (ClosedFirstSearcher, 0.05),
    (ForgetfulSearcher, 0.15),
    (RandomVisitor, 0.35),
    (TreatmentSkipper, 0.10),
    (IdleLooker, 0.25),
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
