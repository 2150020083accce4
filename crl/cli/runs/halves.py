"""Commands `crl rollout` and `crl learn`: the two halves of a run, for debugging.

Modules that need torch are imported inside the commands.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

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

    return play_episodes(config, run_dir or _new_folder("rollout"))


@command
def learn(
    source: Annotated[
        Path,
        typer.Option(
            "--from", metavar="RUN", help="Run or rollouts whose recorded episodes are trained on."
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

    saved = load_saved(source).config
    shards = episode_shards(source)
    if steps is not None and steps > len(shards):
        reason = f"{source} has episodes of only {len(shards)} steps"
        raise ConfigError("--steps", steps, reason, "Use a smaller number")
    config, _ = changed_config(saved, options={}, sets=sets or ())
    recorder = None
    if config.actor.model != saved.actor.model:
        recorder = recording_model(RunDir(source), saved.actor.model)
    from crl.run.halves.commands import learn_from_episodes

    chosen = dict(list(shards.items())[:steps])
    folder = run_dir or _new_folder("learn")
    return learn_from_episodes(config, chosen, folder, recorder=recorder)


def _new_folder(command: str) -> Path:
    return Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
