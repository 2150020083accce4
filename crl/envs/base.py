"""What an environment author writes, and what an environment declares.

A `Game` is synchronous text in, text out: `reset(task)` and `step(action)`. An `EnvSpec` declares everything the rest of
`crl` needs to know about it; `crl.envs.registry` finds specs by name and `crl.envs.host` runs games for the rollouts. A
whole environment of one's own is in examples/doors/doors.py: `doors.py:SPEC` is its name in a task file beside it.
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
"""How a game speaks: `full` for real LLMs, `compact` for the bundled tiny models."""

Hosting = Literal["threads", "processes"]
"""Where a game may live: `threads` when instances can be stepped from several threads of one process."""


class Game(Protocol):
    """One text game at a time, private to one episode. May block; may raise (the host makes it a `RolloutError`)."""

    def reset(self, task: Task) -> str:
        """Starts the episode that `task` fixes, whatever was played before; returns the first observation."""
        ...

    def step(self, action: str) -> StepResult:
        """Plays the agent's text. An invalid action does not advance the game: `valid` is False and the text says so."""
        ...

    def close(self) -> None:
        """Frees what the game holds; called once, in any state."""
        ...


class ScriptedPlayer(Protocol):
    """Plays through the text interface alone: proves that a task can be won, and makes demonstrations."""

    def begin(self, goal: str, observation: str) -> None:
        """Forgets every earlier episode and reads the first observation."""
        ...

    def act(self) -> str:
        """The next action, as an agent would write it."""
        ...

    def observe(self, observation: str) -> None:
        """Reads what the last action brought."""
        ...


def no_player(rng: random.Random) -> ScriptedPlayer:
    """The `scripted_player` of an environment that has none. Raises `LookupError`."""
    raise LookupError("this environment has no scripted player")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The train stream of an environment whose places persist; the others ignore it.

    `places` named places at a time, of which `permanent` stay for the whole run (the `known` eval places); the others
    get a new layout after `visits` visits.
    """

    places: int = 32
    permanent: int = 8
    visits: int = 5

    def __post_init__(self) -> None:
        if self.places < 1 or not 0 <= self.permanent <= self.places:
            raise ValueError(
                f"needs places >= 1 and 0 <= permanent <= places, not {self.places} and {self.permanent}"
            )
        if self.visits < 1:
            raise ValueError(f"visits must be at least 1, not {self.visits}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a lesson is: its kind, and whether it is the right advice for a place."""

    kind: str
    correct: bool


class Advisor(Protocol):
    """The truth about an environment's places, for the advice probe and the diagnostics of lessons; never for rollouts.

    Its methods may play the game to find out: they block.
    """

    def right(self, task: Task) -> str:
        """The lesson that helps most in the task's place, in the words of a good extractor."""
        ...

    def wrong(self, task: Task, rng: random.Random) -> str:
        """A lesson of the same wording that misleads."""
        ...

    def judge(self, task: Task, text: str) -> Verdict: ...
    def informative(self, segments: Sequence[Segment]) -> bool:
        """Whether an episode shows what the right advice needs."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """What an environment is played on. official: whether published figures are of it too; hint: how users get to the official data."""

    what: str
    official: bool
    hint: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """What an environment declares. Raises `ValueError` for what cannot be; a spec equals itself alone.

    `name` is also the `name` of its tasks. `turns` is the usual turn limit (the rollout counts, not the game).
    `reward_range` bounds an episode's reward, after every step of it. `actions` is the closed action set, empty when actions are free text;
    `action_format` says for the prompt what an action looks like. `query_with_observation`: the first observation
    belongs to the retrieval query.

    make_game(rendering): a new game; blocking.
    task_source(seed, settings): the train stream of a run with that seed.
    eval_tasks(split, n, seed, settings): `known` tasks are fixed under the run's seed and settings, `new` ones are the
    same in every run; the first n of a larger request are the n of a smaller one. Leaves no trace anywhere.
    scripted_player(rng): a player for either rendering; `no_player` where there is none.
    revisit(task, visit): the task's place under held-out dynamics of its own; None where places do not persist.
    digest(segments): an episode in few words, read off its texts alone, for tiny extractors; None: its whole texts.
    extra: the extra of `crl` that it needs, named as the module that it brings; empty: none.
    data(): what it is played on here and now, for an environment with official data. Raises `ConfigError` for what users named in vain.
    affinity: a worker process plays a task that it has played of late at less cost, so the episodes of a task go to one worker.
    advisor, probe_tasks(n): the truth for diagnostics, and the tasks of the advice probe; None and empty where there is no such truth.
    """

    name: str
    hosting: Hosting
    turns: int
    reward_range: tuple[float, float]
    actions: tuple[str, ...]
    action_format: str
    query_with_observation: bool
    make_game: Callable[[Rendering], Game]
    task_source: Callable[[int, StreamSettings], TaskSource]
    eval_tasks: Callable[[Split, int, int, StreamSettings], tuple[Task, ...]]
    scripted_player: Callable[[random.Random], ScriptedPlayer] = no_player
    revisit: Callable[[Task, int], Task] | None = None
    digest: Callable[[Sequence[Segment]], str] | None = None
    advisor: Advisor | None = None
    probe_tasks: Callable[[int], tuple[Task, ...]] = lambda n: ()
    extra: str = ""
    data: Callable[[], Data] | None = None
    affinity: bool = False

    def __post_init__(self) -> None:
        if self.hosting not in get_args(Hosting):
            raise ValueError(
                f"{self.name}: hosting must be {' or '.join(get_args(Hosting))}, not {self.hosting!r}"
            )
        if not isinstance(self.actions, tuple) or not all(
            isinstance(action, str) for action in self.actions
        ):
            raise ValueError(
                f"{self.name}: actions must be a tuple of texts, empty when they are free text, not {self.actions!r}"
            )
        if self.turns < 1:
            raise ValueError(f"{self.name}: turns must be at least 1, not {self.turns}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """The text with U+FFFD for every lone surrogate, as a truncated escape in a data file leaves one: no tokenizer and no file takes it."""
    return _SURROGATE.sub("\ufffd", text)


def in_run(task: Task, name: str) -> Task:
    """What an environment drew, as a run has it: under the name that the run gives the task, with a `readable` goal."""
    return replace(task, name=name, goal=readable(task.goal))


def refusal(rendering: Rendering, actions: Sequence[str]) -> str:
    """What an agent is told whose text is none of a closed set of actions."""
    if rendering == "compact":
        return "unknown action."
    return f"That is not an action, and nothing happened. The actions are: {', '.join(actions)}."


@dataclass(frozen=True, slots=True)
class Played:
    """An episode of a scripted player: the texts it saw (one more than actions) and what came of it. done: the game ended it."""

    observations: tuple[str, ...]
    actions: tuple[str, ...]
    reward: float
    success: bool
    done: bool


def play(game: Game, task: Task, player: ScriptedPlayer, turns: int) -> Played:
    """Plays one episode of at most `turns` turns through text alone; an invalid action takes a turn."""
    observations, actions, reward = [game.reset(task)], [], 0.0
    player.begin(task.goal, observations[0])
    for _ in range(turns):
        actions.append(player.act())
        result = game.step(actions[-1])
        observations.append(result.text)
        reward += result.reward
        if result.done:
            return Played(tuple(observations), tuple(actions), reward, result.success, done=True)
        player.observe(result.text)
    return Played(tuple(observations), tuple(actions), reward, success=False, done=False)
