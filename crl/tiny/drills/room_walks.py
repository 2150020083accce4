"""Scripted walks through the compact room: good and bad play, and episodes for the extractor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks
from crl.envs.room.game import RoomGame
from crl.envs.room.lessons import LESSONS, from_here, lesson, true_stairs_direction
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills.drill import OFFER, Episode, as_hit, asking_turn, weighted_choice
from crl.tiny.drills.room_personas import (
    STAIRS,
    Explorer,
    Pacer,
    Persona,
    Walker,
    cells_showing,
    persona_for_lesson,
)
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
    """True if the agent may ask; see `asking_turn` and `question_reply`."""

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
        advice = self._draw_advice(task, rng)
        hint = as_hit(lesson(*advice), task) if advice else None
        persona = self._persona(advice, rng)
        *head, first = CONTEXT.opening(task, Observation(game.reset(task)), [hint] if hint else [])
        segments = [*head, *([OFFER] if self.offer else []), first]
        asks = asking_turn(rng, advised=advice is not None) if self.offer else None
        success = False
        for turn in range(self.turns):
            if turn == asks and not cells_showing(game, STAIRS):
                reply, follower = question_reply(game, task, rng)
                segments += [
                    Segment("assistant", COMPACT_CALL, "tool_call"),
                    Segment("user", reply, "tool_result"),
                ]
                persona = follower or persona
            action = (
                rng.choice(list(COMPASS)) if rng.random() < self.slip else persona.act(game, rng)
            )
            result = game.step(action)
            segments += [Segment("assistant", action, "policy"), *CONTEXT.feedback(result)]
            if result.done:
                success = result.success and turn < SCORED_TURNS
                break
        return Episode(task, hint, tuple(segments), success)

    def _draw_advice(self, task: Task, rng: random.Random) -> tuple[str, str] | None:
        """Return kind and direction of the lesson at the start, or None."""
        kind, any_direction = weighted_choice(self.advice, rng), rng.choice(list(COMPASS))
        if kind == "none":
            return None
        if kind == "other":
            return rng.choice(OTHER_KINDS), any_direction
        right = true_stairs_direction(int(task.params["lgen"])) if kind == "right" else None
        return "exit", right or any_direction

    def _persona(self, advice: tuple[str, str] | None, rng: random.Random) -> Persona:
        default = weighted_choice(self.personas, rng)()
        if advice is None or (advice[0] != "exit" and rng.random() >= self.fidelity):
            return default
        return persona_for_lesson(*advice) or default


def question_reply(game: RoomGame, task: Task, rng: random.Random) -> tuple[str, Persona | None]:
    """Return the reply to a question and the persona that follows it.

    The reply is the direction of the stairs from the current position, any direction, an unchanged
    lesson (followed from the current position), or nothing. The persona is None if the agent
    continues as before.
    """
    kind, direction = weighted_choice(REPLIES, rng), rng.choice(list(COMPASS))
    if kind == "nothing":
        return COMPACT_NO_RESULT, None
    if kind == "lesson":
        lesson_kind = rng.choice(["exit", *OTHER_KINDS])
        return lesson(lesson_kind, direction), persona_for_lesson(lesson_kind, direction)
    if kind == "right":
        direction = true_stairs_direction(int(task.params["lgen"]), game.position) or direction
    return from_here(direction), persona_for_lesson("exit", direction)


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
