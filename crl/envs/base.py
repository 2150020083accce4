"""Interfaces that an environment author implements and declares.

A `Game` is synchronous and exchanges plain text: `reset(task)` and `step(action)`. An `EnvSpec`
declares everything that the rest of `crl` needs to know about an environment. `crl.envs.registry`
finds specs by name. `crl.envs.hosting.threads` runs games for the rollouts. examples/doors/doors.py
is a complete user-defined environment. A task file in the same folder refers to it as
`doors.py:SPEC`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from crl.protocols import TaskSource
from crl.types import Segment, Split, StepResult, Task

Rendering = Literal["full", "compact"]
"""Style of a game's texts: `full` for real LLMs, `compact` for the bundled tiny models."""

Hosting = Literal["threads", "processes"]
"""Where games run: `threads` in this process, `processes` in worker processes.

`threads` requires that different instances can be stepped from several threads.
"""


class Game(Protocol):
    """One text game at a time, private to one episode.

    Methods may block. They may also raise: the host converts the exception into a `RolloutError`.
    """

    def reset(self, task: Task) -> str:
        """Start the episode that `task` defines, regardless of earlier episodes.

        Return the first observation.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Play the agent's text.

        An invalid action does not advance the game: the result has `valid` False, and its text says
        that the action is invalid.
        """
        ...

    def close(self) -> None:
        """Free the game's resources. Called once, in any state."""
        ...


class ScriptedPlayer(Protocol):
    """Player that uses the text interface alone.

    It proves that a task can be solved, and it plays demonstrations.
    """

    def begin(self, goal: str, observation: str) -> None:
        """Forget all earlier episodes and read the first observation."""
        ...

    def act(self) -> str:
        """Return the next action, written as an agent would write it."""
        ...

    def observe(self, observation: str) -> None:
        """Read the observation that follows the last action."""
        ...


def no_player(rng: random.Random) -> ScriptedPlayer:
    """Raise `LookupError`. Used as `scripted_player` by environments that have none."""
    raise LookupError("this environment has no scripted player")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of the train stream of an environment with persistent places.

    Other environments ignore them.
    """

    places: int = 32
    """Number of named places that exist at the same time."""
    permanent: int = 8
    """Number of places that stay for the whole run.

    The seen split is evaluated in these places.
    """
    visits: int = 5
    """Number of visits after which a place that is not permanent gets a new layout."""

    def __post_init__(self) -> None:
        if self.places < 1 or not 0 <= self.permanent <= self.places:
            raise ValueError(
                f"places must be at least 1, and permanent must be between 0 and places, "
                f"not {self.places} and {self.permanent}"
            )
        if self.visits < 1:
            raise ValueError(f"visits must be at least 1, not {self.visits}")


@dataclass(frozen=True, slots=True)
class LessonVerdict:
    """Classification of a lesson for one place."""

    kind: str
    """Kind of the lesson. Every environment has its own kinds."""
    correct: bool
    """Whether the lesson is right advice for the place."""


class Advisor(Protocol):
    """Ground truth about an environment's places. Never used by rollouts.

    The advice probe and the diagnostics of lessons use it. Methods may play the game to find the
    truth, so they block.
    """

    def right(self, task: Task) -> str:
        """Return the most helpful lesson for the task's place, worded as a good extractor would."""
        ...

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Return a lesson with the same wording that misleads."""
        ...

    def judge(self, task: Task, text: str) -> LessonVerdict:
        """Classify a lesson about the task's place."""
        ...

    def informative(self, segments: Sequence[Segment]) -> bool:
        """Return whether an episode shows the information that right advice needs."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """Data that an environment is played on."""

    description: str
    """Description of the data."""
    official: bool
    """Whether published results were measured on the same data."""
    hint: str = ""
    """Instruction for users who want the official data."""


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """Declaration of an environment.

    Raise `ValueError` for invalid values. Two specs are equal only if they are the same object.
    """

    name: str
    """Name of the environment. Its tasks have the same `name`."""
    hosting: Hosting
    turns: int
    """Usual turn limit of an episode. The rollout counts the turns, the game does not."""
    reward_range: tuple[float, float]
    """Bounds of an episode's total reward. The bounds hold after every step."""
    actions: tuple[str, ...]
    """Closed set of actions. Empty if actions are free text."""
    action_format: str
    """Description of an action, for the prompt."""
    query_with_observation: bool
    """Whether the retrieval query includes the first observation."""
    make_game: Callable[[Rendering], Game]
    """`make_game(rendering)` returns a new game. It may block."""
    task_source: Callable[[int, StreamSettings], TaskSource]
    """`task_source(seed, settings)` returns the train stream of a run with that seed."""
    eval_tasks: Callable[[Split, int, int, StreamSettings], tuple[Task, ...]]
    """`eval_tasks(split, n, seed, settings)` returns n evaluation tasks and has no side effects.

    Tasks of the seen split are fixed by the run's seed and settings. Tasks of the unseen split are
    the same in every run. A request for n tasks returns the first n tasks of any larger request.
    """
    scripted_player: Callable[[random.Random], ScriptedPlayer] = no_player
    """`scripted_player(rng)` returns a player that reads both renderings.

    `no_player` if the environment has none.
    """
    revisit: Callable[[Task, int], Task] | None = None
    """`revisit(task, visit)` returns the task's place under separate held-out dynamics.

    None if places do not persist.
    """
    digest: Callable[[Sequence[Segment]], str] | None = None
    """`digest(segments)` summarises an episode from its texts alone, for tiny extractors.

    None: the extractor reads the complete texts.
    """
    advisor: Advisor | None = None
    """Ground truth for diagnostics. None if there is none."""
    probe_tasks: Callable[[int], tuple[Task, ...]] = lambda n: ()
    """`probe_tasks(n)` returns n tasks of the advice probe.

    Returns an empty tuple if the environment has no advisor.
    """
    extra: str = ""
    """Extra of `crl` that the environment needs. Empty if it needs none.

    The extra is named after the module that it installs.
    """
    data: Callable[[], Data] | None = None
    """`data()` describes the data that this machine uses. Set by environments with official data.

    Raises `ConfigError` if the data folder that the user has set is unusable.
    """
    affinity: bool = False
    """Whether a worker process plays a task faster if it has played the same task recently.

    If True, the episodes of a task are sent to the same worker.
    """

    def __post_init__(self) -> None:
        if self.hosting not in get_args(Hosting):
            raise ValueError(
                f"{self.name}: hosting must be {' or '.join(get_args(Hosting))}, "
                f"not {self.hosting!r}"
            )
        if not isinstance(self.actions, tuple) or not all(
            isinstance(action, str) for action in self.actions
        ):
            raise ValueError(
                f"{self.name}: actions must be a tuple of strings, which is empty if actions are "
                f"free text, not {self.actions!r}"
            )
        if self.turns < 1:
            raise ValueError(f"{self.name}: turns must be at least 1, not {self.turns}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD in place of every lone surrogate.

    A truncated escape in a data file leaves a lone surrogate. Neither tokenizers nor files accept
    it.
    """
    return _SURROGATE.sub("\ufffd", text)


def named_for_run(task: Task, name: str) -> Task:
    """Return the environment's task with the run's name, and no lone surrogates in its goal."""
    return replace(task, name=name, goal=replace_surrogates(task.goal))


def invalid_action_text(rendering: Rendering, actions: Sequence[str]) -> str:
    """Return the message for an agent whose text is not one of a closed set of actions."""
    if rendering == "compact":
        return "unknown action."
    return f"That is not an action, and nothing happened. The actions are: {', '.join(actions)}."


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """Episode of a scripted player."""

    observations: tuple[str, ...]
    """Texts that the player saw: one more than `actions`."""
    actions: tuple[str, ...]
    reward: float
    success: bool
    done: bool
    """Whether the game ended the episode."""


def play_episode(game: Game, task: Task, player: ScriptedPlayer, turns: int) -> PlayedEpisode:
    """Play one episode of at most `turns` turns through text alone.

    An invalid action uses one turn.
    """
    observations, actions, reward = [game.reset(task)], [], 0.0
    player.begin(task.goal, observations[0])
    for _ in range(turns):
        actions.append(player.act())
        result = game.step(actions[-1])
        observations.append(result.text)
        reward += result.reward
        if result.done:
            return PlayedEpisode(
                tuple(observations), tuple(actions), reward, result.success, done=True
            )
        player.observe(result.text)
    return PlayedEpisode(tuple(observations), tuple(actions), reward, success=False, done=False)
