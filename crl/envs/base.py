"""What an environment author writes, and what an environment declares.

A `Game` is synchronous text in, text out: `reset(task)` and `step(action)`. An `EnvSpec` declares everything the rest of
`crl` needs to know about it; `crl.envs.registry` finds specs by name and `crl.envs.host` runs games for the rollouts. A
whole environment of one's own:

    class Guess:                                                  # a Game; reset(task) twice is the same episode
        def reset(self, task):
            self.secret = random.Random(task.seed).randrange(8)
            return "Guess a number from 0 to 7."

        def step(self, action):
            guess = parse_choice(action, NUMBERS)
            if guess is None:                                     # told to the agent; the game does not advance
                return StepResult("Answer with one number from 0 to 7.", valid=False)
            won = int(guess) == self.secret
            return StepResult("Right." if won else "Wrong.", reward=float(won), done=won, success=won)

        def close(self): ...

    SPEC = EnvSpec(name="guess", hosting="threads", make_game=lambda rendering: Guess(), ...)

and `my_module:SPEC` is its name in a task file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
            raise ValueError(f"needs places >= 1 and 0 <= permanent <= places, not {self.places} and {self.permanent}")
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
class EnvSpec:
    """What an environment declares.

    `name` is also the `name` of its tasks. `turns` is the usual turn limit (the rollout counts, not the game).
    `reward_range` bounds an episode's reward. `actions` is the closed action set, empty when actions are free text;
    `action_format` says for the prompt what an action looks like. `query_with_observation`: the first observation
    belongs to the retrieval query.

    make_game(rendering): a new game; blocking.
    task_source(seed, settings): the train stream of a run with that seed.
    eval_tasks(split, n, seed, settings): `known` tasks are fixed under the run's seed and settings, `new` ones are the
    same in every run; the first n of a larger request are the n of a smaller one. Leaves no trace anywhere.
    scripted_player(rng): a player for either rendering.
    revisit(task, visit): the task's place under held-out dynamics of its own; None where places do not persist.
    digest(segments): an episode in few words, read off its texts alone, for tiny extractors; None: its whole texts.
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
    scripted_player: Callable[[random.Random], ScriptedPlayer]
    revisit: Callable[[Task, int], Task] | None = None
    digest: Callable[[Sequence[Segment]], str] | None = None
    advisor: Advisor | None = None
    probe_tasks: Callable[[int], tuple[Task, ...]] = lambda n: ()


@dataclass(frozen=True, slots=True)
class Played:
    """An episode of a scripted player: the texts it saw (one more than actions) and what came of it."""

    observations: tuple[str, ...]
    actions: tuple[str, ...]
    reward: float
    success: bool


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
            return Played(tuple(observations), tuple(actions), reward, result.success)
        player.observe(result.text)
    return Played(tuple(observations), tuple(actions), reward, False)
