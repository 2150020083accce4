"""Command `crl play`: games played by a person or by an environment's scripted player.

The player sees and answers as an actor would. No model and no torch are needed. Modules that need
more than typer are imported where they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from crl.cli import completion
from crl.cli.command import chosen, command, metavar
from crl.errors import ConfigError, CrlError, Interrupted, RolloutError
from crl.seeds import generator
from crl.types import Observation, Segment, StepResult, Task
from crl.wording import counted, printable_lines

if TYPE_CHECKING:
    from crl.config import TaskConfig
    from crl.envs.base import EnvSpec, PlayedEpisode, Rendering
    from crl.envs.curriculum import ScriptedPlayer
    from crl.protocols import ContextProvider
    from crl.types import Split

T = TypeVar("T")


class RenderingName(StrEnum):
    """Renderings of an environment."""

    full, compact = "full", "compact"


class SplitName(StrEnum):
    """Splits of a task's episodes."""

    train, seen, unseen = "train", "seen", "unseen"


@command
def play(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            autocompletion=completion.task,
            help="A task's name, or the path of its TOML file.",
        ),
    ],
    rendering: Annotated[
        str,
        typer.Option(
            metavar=metavar(RenderingName),
            autocompletion=completion.choices(RenderingName),
            help="Rendering for language models (full) or for the bundled tiny models.",
        ),
    ] = RenderingName.full,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the run whose tasks are played.")
    ] = 0,
    split: Annotated[
        str,
        typer.Option(
            metavar=metavar(SplitName),
            autocompletion=completion.choices(SplitName),
            help="Training tasks, or the tasks of an eval set.",
        ),
    ] = SplitName.train,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of tasks to play.")] = 1,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Let the environment's scripted player play.")
    ] = False,
) -> None:
    """Play a task yourself with the actor's view. One line of input is one action."""
    rendering_name = chosen(RenderingName, "--rendering", rendering)
    split_name = chosen(SplitName, "--split", split)
    playable = PlayableTask.load(task, cast("Rendering", rendering_name.value))
    player = playable.scripted_player(seed) if scripted else HumanPlayer(_read)
    won: list[bool] = []
    try:
        tasks_of = cast("Split", split_name.value)
        for played in playable.episodes(tasks_of, episodes, seed, player, _show):
            won.append(played.success)
            typer.echo(_outcome(played))
    except EOFError:
        typer.echo("\nstopped")
    except KeyboardInterrupt as error:
        typer.echo("\nstopped")
        raise Interrupted from error
    finally:
        if episodes > 1:
            typer.echo(f"won {sum(won)} of {counted(len(won), 'episode')}")


def _read() -> str:
    """Read one action from stdin. Raise `EOFError` at its end."""
    line = input("> ")
    if not sys.stdin.isatty():
        typer.echo(line)  # a terminal has already shown the input
    typer.echo()
    return line


def _show(text: str) -> None:
    """Print a text with escapes, followed by an empty line."""
    typer.echo(printable_lines(text) + "\n")


def _outcome(played: PlayedEpisode) -> str:
    """Return the result of an episode in words."""
    turns = counted(len(played.actions), "turn")
    outcome = "won" if played.success else "lost" if played.done else "turn limit reached: lost"
    return f"{outcome} in {turns}, reward {played.reward:g}"


class HumanPlayer:
    """Person as a `ScriptedPlayer`: `read` returns the next action.

    Observations are already on the screen. `read` raises `EOFError` if there are no more actions.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    def begin(self, goal: str, observation: str) -> None:
        """Do nothing: the person sees the screen."""

    def act(self) -> str:
        return self._read()

    def observe(self, observation: str) -> None:
        """Do nothing: the person sees the screen."""


class ActorView:
    """Player that takes an actor's place.

    Prompts are built, and answers parsed, as for an actor. `show` is called with every prompt text
    and every answer. A person's answers are not shown: the terminal shows them already.
    """

    def __init__(
        self,
        player: ScriptedPlayer,
        context: ContextProvider,
        task: Task,
        show: Callable[[str], None],
    ) -> None:
        self._player, self._context, self._task, self._show = player, context, task, show

    def begin(self, goal: str, observation: str) -> None:
        self._show_segments(self._context.opening(self._task, Observation(observation), []))
        self._player.begin(goal, observation)

    def act(self) -> str:
        text = self._player.act()
        if not isinstance(self._player, HumanPlayer):
            self._show(f"> {text}")
        return self._context.parse(self._task, text).action

    def observe(self, observation: str) -> None:
        self.end(observation)
        self._player.observe(observation)

    def end(self, observation: str) -> None:
        """Show an observation. The player does not receive it, unlike in `observe`."""
        self._show_segments(self._context.feedback(StepResult(observation)))

    def _show_segments(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._show(segment.text)


class ReportingGame:
    """`Game` with the checks and the error messages of a run.

    Errors of the game are raised as `RolloutError`; a `CrlError` is raised unchanged. An error in
    `close` is shown instead of raised.
    """

    def __init__(self, spec: EnvSpec, rendering: Rendering, show: Callable[[str], None]) -> None:
        from crl.envs.hosting.threads import CheckedGame

        self._name, self._show = spec.name, show
        self._game = CheckedGame(self._call("make", spec.make_game, rendering), spec.reward_range)

    def reset(self, task: Task) -> str:
        return self._call("reset", self._game.reset, task)

    def step(self, action: str) -> StepResult:
        return self._call("step", self._game.step, action)

    def close(self) -> None:
        try:
            self._call("close", self._game.close)
        except CrlError as error:
            self._show(" ".join(str(error).split()))

    def _call(self, operation: str, function: Callable[..., T], *arguments: Any) -> T:
        from crl.envs.hosting.threads import describe_error

        try:
            return function(*arguments)
        except CrlError:
            raise
        except (Exception, SystemExit) as error:  # a game may raise any error
            raise RolloutError(
                "env", f"{self._name}: {operation}: {describe_error(error)}"
            ) from error


@dataclass(frozen=True)
class PlayableTask:
    """Task that is ready to be played in one rendering."""

    config: TaskConfig
    spec: EnvSpec

    @classmethod
    def load(cls, name: str, rendering: Rendering) -> PlayableTask:
        """Load a task. `name` is the task's name or the path of its file.

        Raise `ConfigError` if the task cannot be played.
        """
        from crl.config import TaskConfig
        from crl.config.catalog import mixture, task_file
        from crl.config.load import task_settings
        from crl.planning.tasks import task_spec

        path = task_file(name, "TASK")
        if mixed := mixture(path):
            raise ConfigError(
                "TASK", name, "is a mixture", f"Play one of its tasks: {', '.join(mixed.tasks)}"
            )
        config = TaskConfig.model_validate(task_settings(path, rendering))
        if rendering == "compact" and config.rendering == "full":
            raise ConfigError(
                "--rendering",
                rendering,
                f"{path} has only the rendering full",
                'Play with --rendering full, or write rendering = "compact" in its table [compact]',
            )
        return cls(config, task_spec(config.name, config))

    def scripted_player(self, seed: int) -> ScriptedPlayer:
        make_player = self.spec.curriculum.scripted_player
        if make_player is None:
            raise ConfigError(
                "TASK",
                self.config.name,
                "has no scripted player",
                "Play it yourself, without --scripted",
            )
        return make_player(generator(seed, "scripted player"))

    def episodes(
        self, split: Split, n: int, seed: int, player: ScriptedPlayer, show: Callable[[str], None]
    ) -> Iterator[PlayedEpisode]:
        """Play the first `n` tasks of `split` in a run with this seed, and yield the episodes.

        The split is "train" or an eval split. Raise `RolloutError` for an episode that would end
        with an error in a run.
        """
        from crl.envs.base import play_episode
        from crl.planning.context import chat_context
        from crl.planning.tasks import first_tasks

        name, config = self.config.name, self.config
        context = chat_context({name: config}, {name: self.spec})
        tasks = first_tasks(name, config, self.spec, split, n, seed)
        game = ReportingGame(self.spec, config.rendering, show)
        try:
            for task in tasks:
                view = ActorView(player, context, task, show)
                played = play_episode(game, task, view, config.max_turns)
                if played.done:
                    view.end(played.observations[-1])
                yield played
        finally:
            game.close()
