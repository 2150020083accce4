"""Drills of maze, key room, river and Sokoban.

The actor imitates the scripted players and weaker versions of them. In maze and key room most
episodes are played under advice. The extractor answers the episodes; in maze and key room one
answer in four is a useful lesson.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from crl.envs import keyroom, maze, river, sokoban
from crl.envs.actions import COMPASS
from crl.envs.base import EnvSpec
from crl.envs.curriculum import ScriptedPlayer
from crl.envs.keyroom import lessons as keyroom_lessons
from crl.envs.maze import lessons as maze_lessons
from crl.envs.places import Places
from crl.envs.room.lessons import lesson as room_lesson
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.drill import Drill, Episode, as_hit, weighted_choice
from crl.tiny.drills.grid_players import PlaceFollower, WayFollower, player_factories
from crl.types import Observation, Segment, Task

GENERIC_LESSONS = tuple(room_lesson(kind) for kind in ("lead", "careful", "time"))
"""Lessons that are true everywhere and help nowhere."""
PERSONAS = (0.55, 0.25, 0.10, 0.10)
"""Shares of the skilled, late, forgetful and drifting player (`grid_players.player_factories`)."""
ACTOR_ADVICE = (("none", 0.30), ("right", 0.40), ("wrong", 0.15), ("generic", 0.15))
EXTRACTOR_ADVICE = (("none", 0.50), ("right", 0.15), ("wrong", 0.20), ("generic", 0.15))
GENERIC_ADVICE = (("none", 0.85), ("generic", 0.15))


@dataclass(frozen=True)
class Lessons:
    """Functions on the lessons of a task."""

    random_lesson: drill.LessonSampler
    """Function that draws a lesson that a bank may contain."""
    from_episode: Callable[[Sequence[Segment]], str | None]
    """Function that returns the lesson that an episode's texts teach, or None."""
    follower: Callable[[str, random.Random, ScriptedPlayer], ScriptedPlayer]
    """Function that returns the player that follows a lesson: follower(text, rng, fallback).

    `fallback` plays if the lesson gives no advice, or after the advice ends.
    """


@dataclass(frozen=True)
class GridTask:
    """Task with its places and turn limits, as in tasks/*.toml."""

    spec: EnvSpec
    places: Places
    scored_turns: int
    """Turns within which an episode must succeed."""
    turns: int
    """Maximal turns of an episode."""
    lessons: Lessons | None = None
    """Functions on the task's lessons, None if the task has no lessons."""

    @property
    def players(self) -> tuple[Callable[[random.Random], ScriptedPlayer], ...]:
        """Makers of the skilled, late, forgetful and drifting player."""
        skilled = self.spec.curriculum.scripted_player
        assert skilled is not None
        return player_factories(skilled, self.spec.actions.choices)

    @property
    def actor_walks(self) -> GridWalks:
        return GridWalks(self, ACTOR_ADVICE if self.lessons else GENERIC_ADVICE)

    @property
    def extractor_walks(self) -> GridWalks:
        return GridWalks(self, EXTRACTOR_ADVICE if self.lessons else GENERIC_ADVICE)


@dataclass(frozen=True)
class GridWalks:
    """Episodes of a grid."""

    grid: GridTask
    advice: tuple[tuple[str, float], ...]
    """Shares of the advice at the start.

    The kinds are no advice ("none"), the advisor's advice ("right", "wrong"), or a generic lesson
    ("generic"). The advisor's advice is followed, a generic lesson is not.
    """

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (
            episode.segments
            for episode in self.episodes(rng, self.grid.places.demonstration_tasks(n))
        )

    def episodes(self, rng: random.Random, tasks: Iterable[Task]) -> Iterator[Episode]:
        game = self.grid.spec.make_game("compact")
        context = ChatContext({self.grid.spec.name: ""})
        try:
            for task in tasks:
                text = self._draw_advice(task, rng)
                hint = as_hit(text, task) if text else None
                player = self._player(text, rng)
                first = game.reset(task)
                player.begin(task.goal, first)
                advice = [hint] if hint else []
                segments, success = [*context.opening(task, Observation(first), advice)], False
                for turn in range(self.grid.turns):
                    action = player.act()
                    result = game.step(action)
                    segments += [drill.demonstrated(action), *context.feedback(result)]
                    if result.done:
                        success = result.success and turn < self.grid.scored_turns
                        break
                    player.observe(result.text)
                yield Episode(task, hint, tuple(segments), success)
        finally:
            game.close()

    def _draw_advice(self, task: Task, rng: random.Random) -> str | None:
        kind, advisor = weighted_choice(self.advice, rng), self.grid.spec.curriculum.advisor
        if kind == "generic":
            return rng.choice(GENERIC_LESSONS)
        if kind == "none" or advisor is None:
            return None
        return advisor.right(task) if kind == "right" else advisor.wrong(task, rng)

    def _player(self, text: str | None, rng: random.Random) -> ScriptedPlayer:
        default = rng.choices(self.grid.players, PERSONAS)[0](rng)
        return (
            self.grid.lessons.follower(text, rng, default)
            if self.grid.lessons and text and makes_claim(text)
            else default
        )


# ── the tasks ─────────────────────────────────────────────────────────────────────────────────────


def way_in_episode(segments: Sequence[Segment]) -> str | None:
    way = maze_lessons.found_way(segments)
    return maze_lessons.lesson(way) if way else None


def places_in_episode(segments: Sequence[Segment]) -> str | None:
    key, door = keyroom_lessons.found_cells(segments)
    return keyroom_lessons.lesson(key, door) if key and door else None


def follow_way(text: str, rng: random.Random, fallback: ScriptedPlayer) -> ScriptedPlayer:
    return WayFollower(maze_lessons.read(text) or [], fallback)


def follow_places(text: str, rng: random.Random, fallback: ScriptedPlayer) -> ScriptedPlayer:
    advised = keyroom_lessons.read(text)
    return PlaceFollower(*advised, rng) if advised else fallback


def random_way(rng: random.Random) -> str:
    return maze_lessons.lesson([rng.choice(list(COMPASS)) for _ in range(rng.randint(3, 7))])


def random_places(rng: random.Random) -> str:
    cells = [(x, y) for x in range(1, 6) for y in range(1, 6)]
    key, door = rng.sample(cells, 2)
    return keyroom_lessons.lesson(key, door)


MAZE = GridTask(
    maze.SMALL_SPEC, maze.SMALL_PLACES, 14, 20, Lessons(random_way, way_in_episode, follow_way)
)
KEYROOM = GridTask(
    keyroom.SPEC, keyroom.PLACES, 20, 20, Lessons(random_places, places_in_episode, follow_places)
)
RIVER = GridTask(river.SMALL_SPEC, river.SMALL_PLACES, 20, 20)
SOKOBAN = GridTask(sokoban.SPEC, sokoban.PLACES, 20, 20)

# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class GridLessons:
    """Extractor's answers to finished episodes.

    An answer is one of the generic lessons or the task's lesson, drawn uniformly. If the task's
    lesson is drawn and the episode does not show it, or the task has none, nothing is learnt.
    """

    walks: GridWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        digest = self.walks.grid.spec.curriculum.digest
        assert digest is not None
        episodes = self.walks.episodes(rng, self.walks.grid.places.demonstration_tasks(n))
        return drill.lessons(
            digest,
            episodes,
            lambda episode: self.answer(rng.choice((None, *GENERIC_LESSONS)), episode),
        )

    def answer(self, generic: str | None, episode: Episode) -> str:
        lessons = self.walks.grid.lessons
        return drill.lesson_answer(
            generic or (lessons.from_episode(episode.segments) if lessons else None),
            episode.hint,
            makes_claim,
        )


def makes_claim(text: str) -> bool:
    return text not in GENERIC_LESSONS


@dataclass(frozen=True)
class LessonDrills:
    """Demonstrations that need only a task's lessons: verdicts of actors, merges of extractors."""

    grid: GridTask

    def verdicts(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return drill.verdicts(
            rng,
            ((task, self._random_lesson(rng)) for task in self.grid.places.demonstration_tasks(n)),
        )

    def merges(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return drill.merges(rng, n, self.grid.spec.name, self._random_lesson, makes_claim)

    def _random_lesson(self, rng: random.Random) -> str:
        lessons = self.grid.lessons
        return (
            lessons.random_lesson(rng)
            if lessons and rng.random() < 0.65
            else rng.choice(GENERIC_LESSONS)
        )


ACTOR_DRILLS = (
    Drill("maze walks", 5_000, MAZE.actor_walks.make, MAZE.spec.name),
    Drill("key room walks", 3_000, KEYROOM.actor_walks.make, KEYROOM.spec.name),
    Drill("river walks", 1_500, RIVER.actor_walks.make, RIVER.spec.name),
    Drill("sokoban walks", 3_000, SOKOBAN.actor_walks.make, SOKOBAN.spec.name),
    Drill("maze verdicts", 500, LessonDrills(MAZE).verdicts, MAZE.spec.name, "critic"),
    Drill("key room verdicts", 500, LessonDrills(KEYROOM).verdicts, KEYROOM.spec.name, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("maze lessons", 5_000, GridLessons(MAZE.extractor_walks).make, MAZE.spec.name),
    Drill("key room lessons", 5_000, GridLessons(KEYROOM.extractor_walks).make, KEYROOM.spec.name),
    Drill("river lessons", 1_000, GridLessons(RIVER.extractor_walks).make, RIVER.spec.name),
    Drill("sokoban lessons", 1_000, GridLessons(SOKOBAN.extractor_walks).make, SOKOBAN.spec.name),
    Drill("maze merges", 3_000, LessonDrills(MAZE).merges, MAZE.spec.name, "merge"),
    Drill("key room merges", 3_000, LessonDrills(KEYROOM).merges, KEYROOM.spec.name, "merge"),
)
