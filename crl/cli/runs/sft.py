"""Command `crl sft`: supervised fine-tuning of the actor on demonstrations.

Modules that need torch are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli.command import Seed, Sets, command
from crl.cli.runs.halves import NewRun, new_folder, run_of_file, shard_of_file
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

SCRIPTED = "scripted"
"""Value of `--from` for demonstrations of the scripted players."""

STEPS = 4
"""Default of --steps."""

UNUSED: Mapping[str, Mapping[str, str]] = {
    "recorded": {
        "--tasks": "does not apply to recorded episodes, which have the tasks of their run",
        "--preset": "does not apply to recorded episodes, which have the settings of their run",
        "--steps": "does not apply to recorded episodes, which are all used",
    },
    "conversations": {
        "--steps": "does not apply to conversations, which are all used",
        "--lost": "does not apply to conversations, which are neither won nor lost",
    },
}
"""Reasons why an option has no effect, by kind of source."""

WARMUP = "actor.optimizer.warmup_steps"
"""Setting that replaces the default warm-up, which depends on the number of updates."""

OBJECTIVE: Mapping[str, float] = {"actor.temperature": 1.0, "actor.kl_coef": 0.0}
"""Settings that the loss of supervised fine-tuning fixes."""


# ── options ───────────────────────────────────────────────────────────────────────────────────────

Source = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="scripted = demonstrations of the environments' scripted players; or a run with "
        "recorded episodes, one file of them (RUN/episodes/STEP.jsonl.gz), or conversations "
        "(FILE.jsonl).",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Tasks; required for scripted players and conversations."),
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model to train (default: actor.model).")
]
SourcePreset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Preset to start from: a name, or the path of a TOML file (default: cpu). Recorded "
        "episodes have the settings of their run.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help=f"Training steps that scripted players play (default: {STEPS})."
    ),
]
Epochs = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of epochs.")]
BatchTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Maximum number of tokens in one update.")
]
LearningRate = Annotated[float, typer.Option(metavar="X", help="Learning rate.")]
HeldOut = Annotated[
    float,
    typer.Option(metavar="SHARE", min=0, help="Share of the places that are held out; 0 = none."),
]
Patience = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Epochs without a lower held-out loss after which it ends."
    ),
]
Lost = Annotated[bool, typer.Option("--lost", help="Train on lost episodes too.")]


@command
def sft(
    source: Source,
    tasks: Tasks = None,
    model: Model = None,
    preset: SourcePreset = None,
    steps: Steps = None,
    epochs: Epochs = 3,
    batch_tokens: BatchTokens = 4096,
    learning_rate: LearningRate = 1e-4,
    held_out: HeldOut = 0.1,
    patience: Patience = 1,
    lost: Lost = False,
    seed: Seed = None,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Train the actor to imitate demonstrations, as a start for reinforcement learning."""
    given = {"--tasks": tasks, "--preset": preset, "--steps": steps, "--lost": lost or None}
    _refuse_unused(source, given)
    options: dict[str, Any] = {
        "method": "grpo",  # no other model is needed
        "actor.optimizer.learning_rate": learning_rate,
        "run.steps": steps or STEPS,
        **OBJECTIVE,
    }
    options |= {} if seed is None else {"run.seed": seed}
    options |= {} if model is None else {"actor.model": model}
    if _is_recorded(source):
        config = _config_of_run(Path(source), options, sets)
    else:
        config = _config_of_tasks(source, tasks, preset or "cpu", options, sets)
    _require_objective(config)
    if held_out >= 1:
        raise ConfigError(
            "--held-out", held_out, "leaves nothing to train on", "Use a share below 1"
        )
    from crl.run.halves import sft as halves
    from crl.run.halves.commands import fine_tune_on

    return fine_tune_on(
        config,
        halves.Source(source, _files(source), lost),
        run_dir or new_folder("sft"),
        halves.SftSettings(epochs, batch_tokens, held_out, patience, _warmup(config, sets or ())),
    )


def _refuse_unused(source: str, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that has no effect on demonstrations from `source`.

    `given`: values of options by name; None = not given.
    """
    if source == SCRIPTED or not Path(source).exists():
        return
    for name, reason in UNUSED["recorded" if _is_recorded(source) else "conversations"].items():
        if given[name] is not None:
            raise ConfigError(name, given[name], reason, "Leave it out")


def _is_recorded(source: str) -> bool:
    """Return whether `source` names recorded episodes: a run, or one file of them."""
    path = Path(source)
    return path.is_dir() or path.name.endswith(".jsonl.gz")


def _files(source: str) -> Mapping[int, Path] | Path | None:
    """Return recorded episodes by step, a file of conversations, or None for scripted players."""
    from crl.records.reader import episode_shards

    path = Path(source)
    if _is_recorded(source):
        return shard_of_file(path) if path.is_file() else episode_shards(path)
    return None if source == SCRIPTED else path


def _warmup(config: RunConfig, sets: Sequence[str]) -> int | None:
    """Return the warm-up that `--set` gives, or None."""
    from crl.config.layers import leaves, parse_set

    given = {key for text in sets for key, _ in leaves(parse_set(text).data)}
    return config.actor.optimizer.warmup_steps if WARMUP in given else None


def _require_objective(config: RunConfig) -> None:
    """Raise `ConfigError` for settings with which the loss would be another one."""
    for key, value in OBJECTIVE.items():
        if (given := getattr(config.actor, key.removeprefix("actor."))) != value:
            reason = f"does not apply: supervised fine-tuning has the value {value:g}"
            raise ConfigError(key, given, reason, "Leave it out")


def _config_of_run(path: Path, options: Mapping[str, Any], sets: list[str] | None) -> RunConfig:
    """Return the config of the run whose episodes are demonstrations, with other settings."""
    from crl.config.load import load_saved
    from crl.config.resume import changed_config

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
