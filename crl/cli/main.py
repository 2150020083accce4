"""Command line of crl. Commands contain little code.

Modules that need torch are imported inside the commands, so that `crl --help` is fast.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import crl
from crl.cli import bank, completion, config, models
from crl.cli.command import Command, MethodOption, Preset, Seed, Sets, Tasks, chosen, command
from crl.cli.doctor import doctor
from crl.cli.new_task import new_task
from crl.cli.output import is_terminal, print_lines
from crl.cli.play import play
from crl.cli.runs.build import build
from crl.cli.runs.compare import compare
from crl.cli.runs.episodes import episodes, replay
from crl.cli.runs.eval import evaluate
from crl.cli.runs.halves import learn, rollout
from crl.cli.runs.plot import plot
from crl.cli.runs.report import report
from crl.cli.runs.serve import serve
from crl.cli.runs.sft import sft
from crl.cli.tasks import list_tasks
from crl.cli.watch import watch
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.protocols import Monitor

app = typer.Typer(
    name="crl",
    help="Train LLM agents in text environments with reinforcement learning.",
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts and usage errors as plain text
    pretty_exceptions_enable=False,
)

app.add_typer(bank.app, name="bank")
app.add_typer(config.app, name="config")
app.add_typer(models.app, name="models")


def main() -> None:
    """Run the command line `crl`.

    Exit codes: 0 = done, 1 = failed, 2 = invalid input, 130 = interrupted.
    """
    try:
        app(prog_name="crl")
    finally:
        # A late Ctrl-C or SIGTERM must not change the exit code while the interpreter shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Role(StrEnum):
    """Trained models of a run."""

    actor = "actor"
    extractor = "extractor"


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if wanted."""
    if wanted:
        typer.echo(f"crl {crl.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


# ── options of `train`, `resume`, `fork` and `export` ─────────────────────────────────────────────

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run.", autocompletion=completion.runs),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", help="Number of training steps (default: the preset's)."),
]
NewRun = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="New directory for the run (default: runs/TASKS-METHOD-TIME)."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check the run, print its resolved config and its plan, then exit."
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With --dry-run: plan the GPUs for models of this size, e.g. 1.5B or 350M.",
    ),
]
FromStep = Annotated[
    int | None,
    typer.Option(
        "--from", metavar="STEP", help="Checkpoint to start from (default: the last one)."
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="Print log lines instead of a dashboard.")]


@app.command(cls=Command)
@command
def train(
    tasks: Tasks,
    method: MethodOption = None,
    preset: Preset = "cpu",
    steps: Steps = None,
    seed: Seed = None,
    run_dir: NewRun = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    size: Size = None,
    plain: Plain = False,
) -> int:
    """Train on one or more tasks."""
    from crl.config.command import command_line
    from crl.config.load import load
    from crl.monitor.run_dir import require_free
    from crl.monitor.stages import stage

    given = {"method": method, "run.steps": steps, "run.seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    config = load(tasks.split(","), preset=preset, options=options, sets=sets or ())
    run_dir = (
        run_dir
        or Path("runs")
        / f"{'+'.join(config.tasks)}-{config.spec.name}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    require_free(run_dir)
    if dry_run:
        from crl.planning import plan

        plan.dry_run(config, typer.echo, size=size)
        return 0
    if size is not None:
        raise ConfigError("--size", size, "only applies to a dry run", "Add --dry-run")
    repeated = {
        "--tasks": tasks,
        "--method": method,
        "--preset": None if preset == "cpu" else preset,
        "--steps": steps,
    }
    with closing(_screen(config, run_dir, plain)) as screen:
        with stage(screen, "import of the libraries"):
            from crl.run.main import train as run
        command = command_line("train", repeated, sets or ())
        return run(config, run_dir, command=command, screen=screen)


@app.command(cls=Command)
@command
def resume(
    run: Run,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of training steps of the whole run."),
    ] = None,
    checkpoint: FromStep = None,
    sets: Sets = None,
    plain: Plain = False,
) -> int:
    """Continue a run from its last checkpoint, however it ended."""
    from crl.config.load import load_saved
    from crl.config.resume import resumed_config
    from crl.monitor.stages import stage

    config, changes = resumed_config(
        load_saved(run).config,
        options={} if steps is None else {"run.steps": steps},
        sets=sets or (),
        has_moved=_has_moved(run),
    )
    with closing(_screen(config, run, plain)) as screen:
        with stage(screen, "import of the libraries"):
            from crl.run.main import resume_run
        return resume_run(config, changes, run, step=checkpoint, screen=screen)


@app.command(cls=Command)
@command
def fork(
    run: Run,
    new_run: Annotated[Path, typer.Argument(metavar="NEW_RUN", help="New directory for the copy.")],
    checkpoint: FromStep = None,
    sets: Sets = None,
) -> None:
    """Copy a run as it was at a checkpoint, to continue it with other settings."""
    from crl.config.load import load_saved
    from crl.config.resume import resumed_config

    config, changes = resumed_config(
        load_saved(run).config, options={}, sets=sets or (), has_moved=_has_moved(run)
    )
    from crl.run.main import fork_run

    step = fork_run(config, run, new_run, step=checkpoint)
    steps = "" if step < config.run.steps else f" --steps {max(1, 2 * step)}"
    print_lines(
        [
            f"forked {run} at step {step} to {new_run}",
            *(f"  {change}" for change in changes),
            f"continue it with: crl resume {shlex.quote(str(new_run))}{steps}",
        ]
    )


@app.command(cls=Command)
@command
def export(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="New or empty directory for the export.")
    ],
    role: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.choices(Role),
            help="Model to export: actor (default) or extractor.",
        ),
    ] = None,
    bank: Annotated[
        bool, typer.Option("--bank", help="Export the bank instead of a model.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the model's adapter into its base model.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Checkpoint to export (default: the last one)."),
    ] = None,
) -> None:
    """Export a trained model in Hugging Face format, or the bank, with a card.

    With --merge, RUN may also be the directory of an adapter.
    """
    from crl.config.load import load_saved
    from crl.config.models import is_adapter

    chosen_role = chosen(Role, "--role", role or Role.actor)
    if bank and role:
        reason = "does not apply to --bank, which exports no model"
        raise ConfigError("--role", role, reason, "Leave out --role or --bank")
    if bank and merge:
        reason = "does not apply to --bank, which exports no model"
        raise ConfigError("--merge", True, reason, "Leave out --merge or --bank")
    if is_adapter(run):
        if not merge:
            reason = "is the directory of an adapter and not of a run"
            raise ConfigError(
                "run", str(run), reason, "Add --merge to merge it into its base model"
            )
        _merge(run, folder, role, step)
        return
    load_saved(run)  # report a wrong path immediately, before torch is imported
    from crl.run.main import export_run

    name = None if bank else chosen_role.value
    checkpoint = export_run(run, folder, role=name, step=step, merge=merge)
    what = "bank" if bank else chosen_role
    print_lines([f"exported the {what} of {checkpoint} to {folder}"])


def _merge(adapter: Path, folder: Path, role: str | None, step: int | None) -> None:
    """Export the adapter in a directory with its base model."""
    for key, value in (("--role", role), ("--step", step)):
        if value is not None:
            reason = "does not apply to the directory of an adapter"
            raise ConfigError(key, value, reason, "Leave it out")
    from crl.run.exporting.export import merge_adapter

    merge_adapter(adapter, folder)
    print_lines([f"merged the adapter {adapter} into its base model: {folder}"])


def _has_moved(run: Path) -> Callable[[str, str, str], bool]:
    """Return `crl.run.resume.has_moved` of a run. It is imported at its first call."""

    def moved(role: str, old: str, new: str) -> bool:
        from crl.monitor.run_dir import RunDir
        from crl.run.resume import has_moved

        return has_moved(RunDir(run))(role, old, new)

    return moved


def _screen(config: RunConfig, run_dir: Path, plain: bool) -> Monitor:
    """Return the dashboard if stdout is a terminal that can show it, otherwise log lines."""
    if plain or not is_terminal():
        from crl.monitor.plain import PlainMonitor

        return PlainMonitor(steps=config.run.steps)
    from crl.cli.dashboard.screen import Dashboard
    from crl.monitor.snapshot import RunInfo

    return Dashboard(RunInfo.of(config, run_dir))


app.command("eval", cls=Command)(evaluate)
app.command("watch", cls=Command)(watch)
app.command("compare", cls=Command)(compare)
app.command("report", cls=Command)(report)
app.command("plot", cls=Command)(plot)
app.command("serve", cls=Command)(serve)
app.command("tasks", cls=Command)(list_tasks)
app.command("play", cls=Command)(play)
app.command("new-task", cls=Command)(new_task)
app.command("doctor", cls=Command)(doctor)
app.command("episodes", cls=Command)(episodes)
app.command("replay", cls=Command)(replay)
app.command("rollout", cls=Command)(rollout)
app.command("learn", cls=Command)(learn)
app.command("sft", cls=Command)(sft)
bank.app.command("build", cls=Command)(build)


@app.command("make-models", cls=Command)
@command
def make_models(
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory for the directories of the models."),
    ] = Path("models"),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random numbers.")] = 0,
) -> None:
    """Create the bundled tiny models from scratch, in hours. Finished models are kept."""
    from crl.run.halves.make_models import make_all_models

    make_all_models(out, seed)
