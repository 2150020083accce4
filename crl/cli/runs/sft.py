"""Command `crl sft`: supervised fine-tuning of the actor on demonstrations.

Modules that need torch are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli.command import Preset, Seed, Sets, command
from crl.cli.runs.halves import NewRun, new_folder, run_of_file, shard_of_file
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

SCRIPTED = "scripted"
"""Value of `--from` for demonstrations of the scripted players."""

WARMUP_UPDATES = 10
"""Default of actor.optimizer.warmup_steps in supervised fine-tuning."""


@command
def sft(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="scripted = demonstrations of the environments' scripted players; or a run with "
            "recorded episodes, one file of them (RUN/episodes/STEP.jsonl.gz), or conversations "
            "(FILE.jsonl).",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Tasks; required for scripted players and conversations."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model to train (default: actor.model)."),
    ] = None,
    preset: Preset = "cpu",
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Training steps that scripted players play.")
    ] = 4,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of epochs.")] = 3,
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tokens in one update.")
    ] = 4096,
    learning_rate: Annotated[float, typer.Option(metavar="X", help="Learning rate.")] = 1e-4,
    held_out: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, help="Share of the places that are held out; 0 = none."
        ),
    ] = 0.1,
    patience: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Epochs without a lower held-out loss after which it ends."
        ),
    ] = 1,
    lost: Annotated[bool, typer.Option("--lost", help="Train on lost episodes too.")] = False,
    seed: Seed = None,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Train the actor to imitate demonstrations, as a start for reinforcement learning."""
    options: dict[str, Any] = {
        "method": "grpo",  # no other model is needed
        "actor.optimizer.learning_rate": learning_rate,
        "actor.optimizer.warmup_steps": WARMUP_UPDATES,
        "actor.temperature": 1.0,
        "actor.kl_coef": 0.0,
        "run.steps": steps,
    }
    options |= {} if seed is None else {"run.seed": seed}
    options |= {} if model is None else {"actor.model": model}
    path = Path(source)
    recorded = path.is_dir() or path.name.endswith(".jsonl.gz")
    if recorded:
        config = _config_of_run(path, tasks, options, sets)
    else:
        config = _config_of_tasks(source, tasks, preset, options, sets)
    for name, value in (("temperature", 1.0), ("kl_coef", 0.0)):
        if (given := getattr(config.actor, name)) != value:
            reason = f"does not apply: supervised fine-tuning has the value {value:g}"
            raise ConfigError(f"actor.{name}", given, reason, "Leave it out")
    if held_out >= 1:
        raise ConfigError(
            "--held-out", held_out, "leaves nothing to train on", "Use a share below 1"
        )
    from crl.records.reader import episode_shards
    from crl.run.halves.commands import fine_tune_on
    from crl.run.halves.sft import SftSettings

    demonstrations: Mapping[int, Path] | Path | None = None if source == SCRIPTED else path
    if recorded:
        demonstrations = shard_of_file(path) if path.is_file() else episode_shards(path)
    return fine_tune_on(
        config,
        demonstrations,
        run_dir or new_folder("sft"),
        SftSettings(epochs, batch_tokens, held_out, patience),
        lost=lost,
    )


def _config_of_run(
    path: Path, tasks: str | None, options: Mapping[str, Any], sets: list[str] | None
) -> RunConfig:
    """Return the config of the run whose episodes are demonstrations, with other settings."""
    from crl.config.load import load_saved
    from crl.config.resume import changed_config

    if tasks is not None:
        reason = "does not apply to recorded episodes, which have the tasks of their run"
        raise ConfigError("--tasks", tasks, reason, "Leave it out")
    run = run_of_file(path) if path.is_file() else path
    return changed_config(load_saved(run).config, options=options, sets=sets or ())[0]


def _config_of_tasks(
    source: str, tasks: str | None, preset: str, options: Mapping[str, Any],
    sets: list[str] | None,
) -> RunConfig:  # fmt: skip
    """Return the config of scripted players or of a file of conversations."""
    from crl.config.load import load

    if source != SCRIPTED and not Path(source).is_file():
        reason = "is neither scripted, nor a run, nor a file"
        raise ConfigError("--from", source, reason, "Give one of these")
    if tasks is None:
        raise ConfigError("--tasks", None, f"is required for {source}", "Add --tasks room")
    return load(tasks.split(","), preset=preset, options=options, sets=sets or ())
