"""Commands `crl rollout` and `crl learn`: the two halves of a run, for debugging.

Modules that need torch are imported inside the commands.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import MethodOption, Preset, Seed, Sets, Tasks, command
from crl.errors import ConfigError

NewRun = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="New directory for the output (default: runs/COMMAND-TIME)."),
]


@command
def rollout(
    tasks: Tasks,
    method: MethodOption = None,
    preset: Preset = "cpu",
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of training steps to play.")
    ] = 1,
    seed: Seed = None,
    scripted: Annotated[
        bool,
        typer.Option("--scripted", help="Let the environments' scripted players play, unguided."),
    ] = False,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Play the episodes of training steps without training, and record them.

    A bank is read with --set bank.init=FILE.
    """
    from crl.config.load import load

    given = {"method": method, "run.steps": steps, "run.seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    config = load(tasks.split(","), preset=preset, options=options, sets=sets or ())
    from crl.run.halves.commands import play_episodes

    return play_episodes(config, run_dir or new_folder("rollout"), scripted=scripted)


@command
def learn(
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="RUN|FILE",
            autocompletion=completion.runs,
            help="Run or rollouts whose recorded episodes are trained on, or one file of them: "
            "RUN/episodes/STEP.jsonl.gz.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of recorded steps (default: all)."),
    ] = None,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Train the actor on recorded episodes, with the settings of their run."""
    from crl.config.load import load_saved
    from crl.config.resume import changed_config
    from crl.monitor.run_dir import RunDir
    from crl.planning.model_checks import recording_model
    from crl.records.reader import episode_shards
    from crl.wording import counted

    run = run_of_file(source) if source.is_file() else source
    saved = load_saved(run).config
    shards = shard_of_file(source) if source.is_file() else episode_shards(run)
    if steps is not None and steps > len(shards):
        reason = f"{source} has episodes of only {counted(len(shards), 'step')}"
        raise ConfigError("--steps", steps, reason, "Use a smaller number")
    try:
        config, _ = changed_config(saved, options={"actor.train": True}, sets=sets or ())
    except ConfigError as error:
        if (error.key, error.value) != ("actor.train", True):
            raise
        reason = f"its method is {saved.method}, which trains no model"
        raise ConfigError("--from", str(source), reason, "Add --set method=grpo") from error
    if not config.actor.train:
        raise ConfigError("actor.train", False, "crl learn trains the actor", "Leave it out")
    recorder = None
    if config.actor.model != saved.actor.model:
        recorder = recording_model(RunDir(run), saved.actor.model)
    from crl.run.halves.commands import learn_from_episodes

    chosen = dict(list(shards.items())[:steps])
    folder = run_dir or new_folder("learn")
    return learn_from_episodes(config, chosen, folder, recorder=recorder)


def run_of_file(file: Path) -> Path:
    """Return the nearest folder above a file of episodes that is a run.

    For a file in RUN/discarded/N/episodes it is RUN, not the folder above `episodes`.
    """
    folders = file.resolve().parents
    runs = (folder for folder in folders[1:] if (folder / "config.json").is_file())
    return next(runs, folders[0])


def shard_of_file(file: Path) -> dict[int, Path]:
    """Return a file of episodes by its step. Raise `ConfigError` if it is no such file."""
    from crl.records.shards import shards

    found = {step: path for step, path in shards(file.parent).items() if path.name == file.name}
    if not found:
        reason = "is not a file of recorded episodes"
        raise ConfigError("--from", str(file), reason, "Give a file RUN/episodes/STEP.jsonl.gz")
    return found


def new_folder(command: str) -> Path:
    return Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
