"""Commands `crl episodes` and `crl replay`: the recorded training episodes of a run.

The episodes of a running run can be read too. Modules that need more than typer are imported inside
the commands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli import completion
from crl.cli.command import command
from crl.cli.output import (
    AsJson,
    Limit,
    print_json,
    print_lines,
    report_count,
    terminal_width,
)
from crl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from crl.types import Trajectory

EPISODE_ID = re.compile(r"[^/]+/([0-9]{1,9})/([0-9]{1,9})/([0-9]{1,9})")
"""Id of an episode: run/step/group/member. It counts steps from 0, and `--step` from 1."""

LINES_AT_ONCE = 1000
"""Number of lines of an episode that are printed at once."""

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run.", autocompletion=completion.runs),
]
EpisodeId = Annotated[
    str | None,
    typer.Argument(
        metavar="EPISODE",
        help="Only this episode: its id, run/STEP/GROUP/MEMBER, as crl bank show prints it.",
    ),
]
Step = Annotated[
    int | None, typer.Option(metavar="S", min=1, help="Only episodes of this training step.")
]
Group = Annotated[
    int | None, typer.Option(metavar="G", help="Only this group (numbered over the whole run).")
]
Member = Annotated[int | None, typer.Option(metavar="M", help="Only this member of each group.")]
TaskName = Annotated[str | None, typer.Option(metavar="NAME", help="Only episodes of this task.")]
Won = Annotated[bool, typer.Option("--won", help="Only won episodes.")]
Failed = Annotated[bool, typer.Option("--failed", help="Only lost episodes, errors included.")]
Guided = Annotated[bool, typer.Option("--guided", help="Only guided episodes.")]
Free = Annotated[bool, typer.Option("--free", help="Only free episodes.")]


@dataclass(frozen=True)
class Selection:
    """Choice of episodes. None and False choose all."""

    step: int | None
    group: int | None
    member: int | None
    task: str | None
    won: bool
    failed: bool
    guided: bool
    free: bool

    def __post_init__(self) -> None:
        for one, other in (("won", "failed"), ("guided", "free")):
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(
                    f"--{one}", True, f"excludes --{other}", f"Leave out --{one} or --{other}"
                )

    def newest(self, run: Path, shown: int) -> tuple[list[dict[str, Any]], int]:
        """Return the newest `shown` chosen episodes (0 = all), newest first, and their number."""
        from crl.records.reader import episode_shards
        from crl.records.shards import read_records

        chosen: list[dict[str, Any]] = []
        total = 0
        steps = None if self.step is None else (self.step,)
        for path in reversed(episode_shards(run, steps).values()):
            for record in reversed([r for r in read_records(path) if self._chooses(r)]):
                total += 1
                if not shown or total <= shown:
                    chosen.append(record)
        return chosen, total

    def explain(self, run: Path, total: int) -> None:
        """Print on stderr which steps have episodes if none was chosen."""
        from crl.records.reader import episode_shards

        if not total:
            steps = list(episode_shards(run))
            typer.echo(
                f"the run has episodes of the steps {steps[0]} to {steps[-1]}, counted from 1; "
                "ids of episodes count them from 0",
                err=True,
            )

    def _chooses(self, record: dict[str, Any]) -> bool:
        wanted = {"group": self.group, "member": self.member, "task": self.task}
        return (
            all(value in (None, record[name]) for name, value in wanted.items())
            and not (self.won and not record["success"])
            and not (self.failed and record["success"])
            and not (self.guided and record["condition"] == "free")
            and not (self.free and record["condition"] == "guided")
        )


def _address(
    episode: str | None, step: int | None, group: int | None, member: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the chosen step, group and member: those of the id `episode`, if there is one."""
    if episode is None:
        return step, group, member
    if not (step is group is member is None):
        reason = "excludes --step, --group and --member"
        raise ConfigError("episode", episode, reason, "Leave out the options or the id")
    match = EPISODE_ID.fullmatch(episode)
    if match is None:
        remedy = "Give an id such as run/2/47/3, or --step 3 --group 47 --member 3"
        raise ConfigError("episode", episode, "is not the id of an episode", remedy)
    return int(match[1]) + 1, int(match[2]), int(match[3])


@command
def episodes(
    run: Run, episode: EpisodeId = None, step: Step = None, group: Group = None,
    member: Member = None, task: TaskName = None, won: Won = False, failed: Failed = False,
    guided: Guided = False, free: Free = False, limit: Limit = 20, as_json: AsJson = False,
) -> None:  # fmt: skip
    """List training episodes of a run, the newest first. With --json one object per line."""
    from crl.cli.runs.episode_text import episode_table

    selection = Selection(*_address(episode, step, group, member), task, won, failed, guided, free)
    records, total = selection.newest(run, limit)
    if as_json:
        for record in records:
            print_json(record)
    elif records:
        print_lines(episode_table(records, terminal_width()))
    report_count(len(records), total)
    selection.explain(run, total)


@command
def replay(
    run: Run, episode: EpisodeId = None, step: Step = None, group: Group = None,
    member: Member = None, task: TaskName = None, won: Won = False, failed: Failed = False,
    guided: Guided = False, free: Free = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show sampled tokens with log-probs and versions.")
    ] = False,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Maximum number of episodes; 0 = all.")
    ] = 1,
) -> None:  # fmt: skip
    """Show training episodes as the agent saw them, the newest first."""
    from rich.console import Console

    from crl.cli.runs.episode_text import replay_lines

    selection = Selection(*_address(episode, step, group, member), task, won, failed, guided, free)
    records, total = selection.newest(run, limit)
    decode = _decoder(run) if tokens and records else None
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with _paged(console):
        for trajectory in _complete(run, records):
            _print_lines(console, replay_lines(trajectory, console.width, decode))
    report_count(len(records), total)
    selection.explain(run, total)


def _print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines that have one style each.

    They are printed in batches and without rich's layout, which takes minutes for millions of
    lines.
    """
    from rich.segment import Segment, Segments

    remaining, end = iter(lines), Segment.line()
    while batch := list(islice(remaining, LINES_AT_ONCE)):
        segments = []
        for line in batch:
            style = console.get_style(line.style) if line.style else None
            segments += [Segment(line.plain, style), end] if line.plain else [end]
        console.print(Segments(segments))


def _complete(run: Path, records: Sequence[dict[str, Any]]) -> Iterator[Trajectory]:
    """Yield the episodes of the records, with their token columns, in the same order."""
    from crl.records.reader import read_episodes

    for step, of_step in groupby(records, key=lambda record: record["step"]):
        episodes = {(t.address.group, t.address.member): t for t in read_episodes(run, [step])}
        yield from (episodes[record["group"], record["member"]] for record in of_step)


def _decoder(run: Path) -> Callable[[int], str]:
    """Return the function that returns the text of one of the actor's tokens."""
    from crl.config.load import load_saved
    from crl.modeling.loading import load_tokenizer
    from crl.monitor.run_dir import RunDir
    from crl.planning.model_checks import recording_model

    tokenizer = load_tokenizer(recording_model(RunDir(run), load_saved(run).config.actor.model))
    return lambda token: str(tokenizer.decode([token]))


def _paged(console: Console) -> AbstractContextManager[object]:
    """Return a context that shows its output in a pager.

    The output is printed if it is not a terminal, or if PAGER names a program that does not exist.
    """
    if not (console.is_terminal and _pager_exists()):
        return nullcontext()
    os.environ.setdefault("LESS", "-R")  # shows colours
    return console.pager(styles=True)


def _pager_exists() -> bool:
    """Return whether the pager of the environment exists. Without one, pydoc chooses a pager."""
    command = os.environ.get("MANPAGER") or os.environ.get("PAGER")
    if not command:
        return True
    try:
        words = [word for word in shlex.split(command) if "=" not in word]
    except ValueError:
        return False
    return bool(words and shutil.which(words[0]))
