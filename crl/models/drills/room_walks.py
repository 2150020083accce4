"""Scripted walks through the compact room: good and bad play, and episodes for the extractor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks
from crl.envs.room.game import RoomGame
from crl.envs.room.lessons import LESSONS, from_here, lesson, true_bearing
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NOTHING
from crl.methods.parts.rollouts import ChatContext
from crl.models.drills.drill import OFFER, Episode, asking_turn, draw, hit
from crl.models.drills.room_personas import (
    STAIRS,
    Explorer,
    Pacer,
    Persona,
    Walker,
    adherent,
    showing,
)
from crl.models.warm_start import Demonstration
from crl.types import Observation, Segment, Task

SCORED_TURNS = 4
"""Turns within which the stairs must be reached, as in tasks/room.toml."""

CONTEXT = ChatContext({NAME: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "exit"]
REPLIES = (("right", 0.45), ("random", 0.15), ("lesson", 0.20), ("nothing", 0.20))
"""Shares of the replies to a question."""


@dataclass(frozen=True)
class RoomWalks:
    """Episodes of the compact room."""

    personas: tuple[tuple[Callable[[], Persona], float], ...]
    """Shares of the personas that play without advice, or ignore it."""
    advice: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """Shares of the advice at the start.

    The kinds are no advice ("none"), the direction of the stairs ("right"), any direction
    ("random"), or a lesson of another kind ("other").
    """
    fidelity: float = 0.85
    """Probability that advice of kind "other" is followed; a direction always is."""
    slip: float = 0.03
    """Probability of a random action."""
    turns: int = 8
    """Maximal turns of an episode."""
    offer: bool = False
    """Whether the agent may ask; see `asking_turn` and `replied`."""

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
        hint = hit(lesson(*told), task) if told else None
        persona = self._persona(told, rng)
        *head, seen = CONTEXT.opening(task, Observation(game.reset(task)), hint)
        segments = [*head, *([OFFER] if self.offer else []), seen]
        asks = asking_turn(rng, advised=told is not None) if self.offer else None
        success = False
        for turn in range(self.turns):
            if turn == asks and not showing(game, STAIRS):
                reply, follower = replied(game, task, rng)
                segments += [
                    Segment("assistant", COMPACT_CALL, "tool_call"),
                    Segment("user", reply, "tool_result"),
                ]
                persona = follower or persona
            action = (
                rng.choice(list(COMPASS)) if rng.random() < self.slip else persona.act(game, rng)
            )
            result = game.step(action)
            segments += [Segment("assistant", action, "policy"), *CONTEXT.following(result)]
            if result.done:
                success = result.success and turn < SCORED_TURNS
                break
        return Episode(task, hint, tuple(segments), success)

    def _told(self, task: Task, rng: random.Random) -> tuple[str, str] | None:
        """Return kind and direction of the lesson at the start, or None."""
        said, any_direction = draw(self.advice, rng), rng.choice(list(COMPASS))
        if said == "none":
            return None
        if said == "other":
            return rng.choice(OTHER_KINDS), any_direction
        right = true_bearing(int(task.params["lgen"])) if said == "right" else None
        return "exit", right or any_direction

    def _persona(self, told: tuple[str, str] | None, rng: random.Random) -> Persona:
        own = draw(self.personas, rng)()
        if told is None or (told[0] != "exit" and rng.random() >= self.fidelity):
            return own
        return adherent(*told) or own


def replied(game: RoomGame, task: Task, rng: random.Random) -> tuple[str, Persona | None]:
    """Return the reply to a question and the persona that follows it.

    The reply is the direction of the stairs from the current position, any direction, an unchanged
    lesson (followed from the current position), or nothing. The persona is None if the agent
    continues as before.
    """
    said, direction = draw(REPLIES, rng), rng.choice(list(COMPASS))
    if said == "nothing":
        return COMPACT_NOTHING, None
    if said == "lesson":
        kind = rng.choice(["exit", *OTHER_KINDS])
        return lesson(kind, direction), adherent(kind, direction)
    if said == "right":
        direction = true_bearing(int(task.params["lgen"]), game.position) or direction
    return from_here(direction), adherent("exit", direction)


PERSONAS: tuple[tuple[Callable[[], Persona], float], ...] = (
    (Explorer, 0.50),
    (Walker, 0.30),
    (Pacer, 0.20),
)
ACTOR_WALKS = RoomWalks(
    PERSONAS, advice=(("none", 0.25), ("right", 0.37), ("random", 0.12), ("other", 0.26))
)
ASKING_WALKS = replace(
    ACTOR_WALKS,
    advice=(("none", 0.50), ("right", 0.20), ("random", 0.10), ("other", 0.20)),
    offer=True,
)
EXTRACTOR_WALKS = RoomWalks(
    PERSONAS, advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15)), slip=0.15
)
