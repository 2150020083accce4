"""Interfaces that an environment author implements and declares.

A `Game` is synchronous and exchanges plain text: `reset(task)` and `step(action)`. An `EnvSpec`
declares the environment: its games (`Runtime`), its tasks (`EnvTasks`), its actions
(`ActionSpace`) and, optionally, its parts for tiny models (`crl.envs.curriculum`).
`crl.envs.registry` finds specs by name. `crl.envs.hosting.threads` runs games for the rollouts.
examples/doors/doors.py is a complete user-defined environment. A task file in the same folder
refers to it as `doors.py:SPEC`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from crl.config.schema import EmbedderSection, SearchSection
from crl.envs.curriculum import Curriculum, ScriptedPlayer
from crl.protocols import TaskSource
from crl.types import Split, StepResult, StreamSettings, Task

Rendering = Literal["full", "compact"]
"""Style of a game's texts: `full` for language models, `compact` for tiny models."""

Hosting = Literal["threads", "processes"]
"""Place where games run: `threads` of this process, or worker `processes`.

`threads` requires that different instances can be stepped from several threads.
"""


EmbedTexts = Callable[[Sequence[str]], Any]
"""Function that returns the embeddings of texts: float32 [len(texts), dim], unit norm.

It blocks, and may be called from any thread. It raises `RolloutError` if the embedder fails.
"""
OpenEmbed = Callable[[EmbedderSection], EmbedTexts]
"""Function that opens an embedder. It raises `ConfigError` if the embedder cannot be opened."""


class Game(Protocol):
    """Text game of one episode at a time.

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


@dataclass(frozen=True, slots=True)
class Data:
    """Data that an environment is played on."""

    description: str
    """Description of the data."""
    official: bool
    """True if published results were measured on the same data."""
    hint: str = ""
    """Instruction for users who want the official data."""


@dataclass(frozen=True, slots=True)
class EnvTasks:
    """Tasks of an environment."""

    train_stream: Callable[[int, StreamSettings], TaskSource]
    """`train_stream(seed, settings)` returns the train stream of a run with that seed."""
    eval_tasks: Callable[[Split, int, int, StreamSettings], tuple[Task, ...]]
    """`eval_tasks(split, n, seed, settings)` returns n evaluation tasks and has no side effects.

    Tasks of the seen split are fixed by the run's seed and settings. Tasks of the unseen split are
    the same in every run. A request for n tasks returns the first n tasks of any larger request.
    """
    revisit: Callable[[Task, int], Task] | None = None
    """`revisit(task, visit)` returns the task's place under separate held-out dynamics.

    None if places do not persist.
    """
    split_sizes: Callable[[], Mapping[Split, int]] | None = None
    """`split_sizes()` returns the numbers of games of the eval splits that are fixed sets of games.

    `crl eval` plays each of these games once per sample. None if splits have no fixed size.
    """
    query_with_observation: bool = False
    """True if the retrieval query includes the first observation.

    Set it if the goals alone do not tell the tasks apart.
    """
    data: Callable[[], Data] | None = None
    """`data()` describes the data that this machine uses. Set by environments with official data.

    Raises `ConfigError` if the data folder that the user has set is unusable.
    """


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Actions of an environment, which an agent writes as text.

    Raise `ValueError` for invalid values.
    """

    choices: tuple[str, ...] = ()
    """Closed set of actions. Empty if actions are free text."""
    description: str = ""
    """Description of an action, for the prompt. Default: the choices, separated by commas.

    Free text needs a description.
    """
    example: str = ""
    """Example of an action, for the prompt. Default: the first choice."""
    tagged: bool = False
    """True if an action has tags of its own, which `description` and `example` show.

    Otherwise the prompt asks for the action in answer tags.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.choices, tuple) or not all(
            isinstance(action, str) for action in self.choices
        ):
            raise ValueError(
                f"choices of actions must be a tuple of strings, which is empty if actions are "
                f"free text, not {self.choices!r}"
            )
        if not self.choices and not self.description:
            raise ValueError("actions that are free text need a description")
        if self.tagged and not self.example:
            raise ValueError("actions with tags of their own need an example")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Place where an environment's games run, and requirements and settings of the games.

    Raise `ValueError` for invalid values.
    """

    hosting: Hosting = "threads"
    affinity: bool = False
    """True if a worker process plays a task faster after it has recently played the same task.

    The episodes of a task are then sent to the same worker.
    """
    extra: str = ""
    """Extra of `crl` that the environment needs. Empty if it needs none.

    The extra must have the name of the module that it installs: a check looks for this module.
    """
    configured: Callable[[SearchSection, OpenEmbed], EnvSpec] | None = None
    """`configured(settings, open_embed)` returns the environment with settings of a search tool.

    None if the environment has no search tool.
    """
    require_program: Callable[[str, str], None] | None = None
    """`require_program(key, name)` raises `ConfigError` for the setting `key` = `name` if a program
    that the games start is not installed. None if they start none.
    """

    def __post_init__(self) -> None:
        if self.hosting not in get_args(Hosting):
            raise ValueError(
                f"hosting must be {' or '.join(get_args(Hosting))}, not {self.hosting!r}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """Declaration of an environment.

    Raise `ValueError` for invalid values. Two specs are equal only if they are the same object.
    """

    name: str
    """Name of the environment. Its tasks have the same `name`."""
    make_game: Callable[[Rendering], Game]
    """`make_game(rendering)` returns a new game. It may block."""
    tasks: EnvTasks
    """Training and evaluation tasks, such as `Places(…).tasks` or `SeededTasks(…).tasks`."""
    actions: ActionSpace
    turns: int
    """Usual turn limit of an episode. The rollout counts the turns, the game does not."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Bounds of an episode's total reward. The bounds hold after every step."""
    runtime: Runtime = Runtime()
    curriculum: Curriculum = field(default_factory=Curriculum)
    """Parts for tiny models and diagnostics. Empty if the environment has none."""

    def __post_init__(self) -> None:
        for key, kind in (("tasks", EnvTasks), ("actions", ActionSpace)):
            if not isinstance(value := getattr(self, key), kind):
                raise ValueError(f"{self.name}: {key} must be an {kind.__name__}, not {value!r}")
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
    """True if the game ended the episode."""


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
