"""A game for a person, or shown by the environment's scripted player, with the actor's view of it: no model, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from crl.config import TaskConfig
from crl.config.catalog import mixture, task_file
from crl.config.load import task_settings
from crl.envs.base import EnvSpec, Played, Rendering, ScriptedPlayer, no_player, play
from crl.envs.host import CheckedGame, describe
from crl.envs.registry import get_spec, require_extra
from crl.errors import ConfigError, CrlError, RolloutError
from crl.protocols import ContextProvider
from crl.run.context import chat_context
from crl.run.tasks import first_tasks
from crl.seeds import generator
from crl.types import Observation, Segment, Split, StepResult, Task

T = TypeVar("T")


class Person:
    """A `ScriptedPlayer` that reads its actions: what there is to observe it was shown. Raises `EOFError` when there are no more."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    def begin(self, goal: str, observation: str) -> None:
        """It sees the screen."""

    def act(self) -> str:
        return self._read()

    def observe(self, observation: str) -> None:
        """It sees the screen."""


class Shown:
    """A player in an actor's place: it is told, and its answers are read, as an actor's. show: called with every text that it is told,
    and with what it says unless it is a person, whose terminal shows that."""

    def __init__(
        self,
        player: ScriptedPlayer,
        context: ContextProvider,
        task: Task,
        show: Callable[[str], None],
    ) -> None:
        self._player, self._context, self._task, self._show = player, context, task, show

    def begin(self, goal: str, observation: str) -> None:
        self._tell(self._context.opening(self._task, Observation(observation), None))
        self._player.begin(goal, observation)

    def act(self) -> str:
        text = self._player.act()
        if not isinstance(self._player, Person):
            self._show(f"> {text}")
        return self._context.parse(self._task, text).action

    def observe(self, observation: str) -> None:
        self.end(observation)
        self._player.observe(observation)

    def end(self, observation: str) -> None:
        """The last text of an episode, which no player reads any more."""
        self._tell(self._context.following(StepResult(observation)))

    def _tell(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._show(segment.text)


class ShownGame:
    """A `Game` as a run plays it: what it raises is a `RolloutError` in a run's words; what its end raises is shown."""

    def __init__(self, spec: EnvSpec, rendering: Rendering, show: Callable[[str], None]) -> None:
        self._name, self._show = spec.name, show
        self._game = CheckedGame(self._said("make", spec.make_game, rendering), spec.reward_range)

    def reset(self, task: Task) -> str:
        return self._said("reset", self._game.reset, task)

    def step(self, action: str) -> StepResult:
        return self._said("step", self._game.step, action)

    def close(self) -> None:
        try:
            self._said("close", self._game.close)
        except CrlError as error:
            self._show(" ".join(str(error).split()))

    def _said(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except CrlError:
            raise
        except (Exception, SystemExit) as error:  # whatever a game raises
            raise RolloutError("env", f"{self._name}: {what}: {describe(error)}") from error


@dataclass(frozen=True)
class Table:
    """A task that is ready to be played, in one rendering."""

    config: TaskConfig
    spec: EnvSpec

    @classmethod
    def of(cls, name: str, rendering: Rendering) -> Table:
        """name: of a task, or the path of its file. Raises `ConfigError` for what cannot be played."""
        path = task_file(name)
        if mixed := mixture(path):
            raise ConfigError(
                "task", name, "is a mixture", f"Play one of its tasks: {', '.join(mixed.tasks)}"
            )
        config = TaskConfig.model_validate(task_settings(path, rendering))
        spec = get_spec(config.env, key := f"tasks.{config.name}.env")
        require_extra(spec, key)
        return cls(config, spec)

    def scripted(self, seed: int) -> ScriptedPlayer:
        if self.spec.scripted_player is no_player:
            raise ConfigError(
                "task",
                self.config.name,
                "has no scripted player",
                "Play it yourself, without --scripted",
            )
        return self.spec.scripted_player(generator(seed, "scripted player"))

    def episodes(
        self, split: Split, n: int, seed: int, player: ScriptedPlayer, show: Callable[[str], None]
    ) -> Iterator[Played]:
        """Plays the first n tasks that a run with this seed trains or is evaluated on. Raises `RolloutError` for an episode that would
        be an error of the run."""
        name, config = self.config.name, self.config
        context = chat_context({name: config}, {name: self.spec})
        tasks = first_tasks(name, config, self.spec, split, n, seed)
        game = ShownGame(self.spec, config.rendering, show)
        try:
            for task in tasks:
                shown = Shown(player, context, task, show)
                played = play(game, task, shown, config.turns)
                if played.done:
                    shown.end(played.observations[-1])
                yield played
        finally:
            game.close()
