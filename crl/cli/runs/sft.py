"""Command `crl sft`: supervised fine-tuning of actor or extractor on demonstrations.

Modules that need torch are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli import completion
from crl.cli.command import Seed, Sets, command
from crl.cli.runs.halves import NewRun, new_folder, run_of_file, shard_of_file
from crl.config.supervised import OBJECTIVE, decay_key, rate_key, role_settings
from crl.errors import ConfigError
from crl.types import RoleName

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

SCRIPTED = "scripted"
"""Value of `--from` for demonstrations of the scripted players."""

DRILLS = "drills"
"""Value of `--from` for the demonstrations from which the bundled models learned."""

STEPS = 4
"""Default of --steps."""

DEMONSTRATIONS = 400
"""Default of --demonstrations."""

UNUSED: Mapping[str, Mapping[str, str]] = {
    "recorded": {
        "--tasks": "does not apply to recorded episodes, which have the tasks of their run",
        "--preset": "does not apply to recorded episodes, which have the settings of their run",
        "--steps": "does not apply to recorded episodes, which are all used",
        "--demonstrations": "does not apply to recorded episodes, which are all used",
    },
    "conversations": {
        "--steps": "does not apply to conversations, which are all used",
        "--demonstrations": "does not apply to conversations, which are all used",
        "--lost": "does not apply to conversations, which are neither won nor lost",
    },
    SCRIPTED: {"--demonstrations": "does not apply to scripted players: give --steps"},
    DRILLS: {
        "--steps": "does not apply to drills: give --demonstrations",
        "--lost": "does not apply to drills, which are neither won nor lost",
    },
}
"""Reasons why an option has no effect, by kind of source."""

LEARNING_RATE = 1e-4
"""Default of --learning-rate."""

# ── options ───────────────────────────────────────────────────────────────────────────────────────


def _sources(incomplete: str) -> list[str]:
    """Complete the source of demonstrations."""
    return completion.choices((SCRIPTED, DRILLS))(incomplete) + completion.runs(incomplete)


Source = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="SOURCE",
        autocompletion=_sources,
        help="scripted = demonstrations of the environments' scripted players; drills = "
        "demonstrations that the bundled models learned from; or a run with recorded episodes, one "
        "file of them (RUN/episodes/STEP.jsonl.gz), or conversations (FILE.jsonl).",
    ),
]
TrainedRole = Annotated[
    RoleName,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Role to train: actor, or extractor, which learns from drills or conversations.",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        autocompletion=completion.tasks,
        help="Tasks. Required, except for recorded episodes, which have their own.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.models,
        help="Model to train (default: ROLE.model).",
    ),
]
SourcePreset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.presets,
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
Demonstrations = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help=f"Number of demonstrations from drills (default: {DEMONSTRATIONS}).",
    ),
]
Epochs = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of epochs.")]
BatchTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Maximum number of tokens in one update.")
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help=f"Learning rate (default: that of your preset file, or {LEARNING_RATE:g}).",
    ),
]
HeldOut = Annotated[
    float,
    typer.Option(metavar="SHARE", min=0, help="Share of the places that are held out; 0 = none."),
]
Patience = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Stop after N epochs without a lower held-out loss."),
]
Decay = Annotated[
    bool,
    typer.Option("--decay", help="Let the learning rate fall linearly to 0 until the last update."),
]
ContextWeight = Annotated[
    float,
    typer.Option(
        metavar="X",
        min=0,
        help="Weight of the loss on all other tokens, beside that on the demonstrator's tokens.",
    ),
]
Lost = Annotated[bool, typer.Option("--lost", help="Train on lost episodes too.")]


@command
def sft(
    context: typer.Context,
    source: Source,
    role: TrainedRole = "actor",
    tasks: Tasks = None,
    model: Model = None,
    preset: SourcePreset = None,
    steps: Steps = None,
    demonstrations: Demonstrations = None,
    epochs: Epochs = 3,
    batch_tokens: BatchTokens = 4096,
    learning_rate: LearningRate = None,
    held_out: HeldOut = 0.1,
    patience: Patience = 1,
    decay: Decay = False,
    context_weight: ContextWeight = 0.0,
    lost: Lost = False,
    seed: Seed = None,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Train a model to imitate demonstrations, as a start for reinforcement learning."""
    given = {
        "--tasks": tasks,
        "--preset": preset,
        "--steps": steps,
        "--demonstrations": demonstrations,
        "--lost": lost or None,
    }
    kind = _kind(source)
    _refuse_unused(kind, given)
    _refuse_settings(role, _settings(sets))
    _refuse_no_samples(source, kind, role, held_out)
    options = {"run.steps": steps or STEPS} | role_settings(role, model)
    options |= {} if seed is None else {"run.seed": seed}
    rate = {rate_key(role): LEARNING_RATE if learning_rate is None else learning_rate}
    if kind == "recorded":
        config, own = _config_of_run(Path(source), options | rate, sets), {*_settings(sets)}
    else:
        config, own = _config_of_tasks(source, tasks, preset or "cpu", options, sets)
        if learning_rate is not None or rate_key(role) not in own:
            config, _ = _config_of_tasks(source, tasks, preset or "cpu", options | rate, sets)
    _require_objective(config, role)
    from crl.config.command import command_line
    from crl.run.halves import sft as halves
    from crl.run.halves.commands import fine_tune_on

    drilled = None
    if kind == DRILLS:
        drilled = halves.drilled(config, role, demonstrations or DEMONSTRATIONS)
    return fine_tune_on(
        config,
        halves.Source(source, _files(source, kind), lost, drilled),
        run_dir or new_folder("sft"),
        halves.SftSettings(
            role, epochs, batch_tokens, held_out, patience, _warmup(config, role, own), decay,
            context_weight,
        ),
        command=command_line("sft", _given(context), sets or ()),
    )  # fmt: skip


def _given(context: typer.Context) -> dict[str, Any]:
    """Return the options of the command line, except the seed, the directory and the settings."""
    names = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in (None, "seed", "run_dir", "sets")
    }
    return {
        option: context.params[name]
        for name, option in names.items()
        if (given := context.get_parameter_source(name)) and given.name == "COMMANDLINE"
    }


def _kind(source: str) -> str:
    """Return the kind of the demonstrations: a key of `UNUSED`.

    Raise `ConfigError` for a path that does not exist.
    """
    path = Path(source)
    if source in (SCRIPTED, DRILLS):
        return source
    if not source or not path.exists():
        reason = "is neither scripted, nor drills, nor a run, nor a file"
        raise ConfigError("--from", source, reason, "Give one of these")
    return "recorded" if path.is_dir() or path.name.endswith(".jsonl.gz") else "conversations"


def _refuse_unused(kind: str, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that has no effect on demonstrations of this kind.

    `given`: values of options by name; None = not given.
    """
    for name, reason in UNUSED[kind].items():
        if given[name] is not None:
            raise ConfigError(name, given[name], reason, "Leave it out")


def _refuse_no_samples(source: str, kind: str, role: RoleName, held_out: float) -> None:
    """Raise `ConfigError` if nothing remains that the role can be trained on."""
    if role == "extractor" and kind in (SCRIPTED, "recorded"):
        reason = f"cannot learn from {source}, where only the actor answers"
        raise ConfigError("--role", role, reason, "Give drills, or a file of conversations")
    if held_out >= 1:
        reason = "leaves nothing to train on"
        raise ConfigError("--held-out", held_out, reason, "Use a share below 1")


def _refuse_settings(role: RoleName, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings of `--set` that do not apply to the training of a role.

    They are the update at which the learning rate is 0, and adapter and optimizer of the other
    role.
    """
    if (key := decay_key(role)) in given:
        reason = "does not apply: supervised fine-tuning computes the number of updates itself"
        raise ConfigError(key, given[key], reason, "Leave it out; use --decay for a decay")
    other = "actor" if role == "extractor" else "extractor"
    for key, value in given.items():
        section, _, name = key.partition(".")
        if section == other and name.startswith(("lora.", "optimizer.")):
            reason = f"has no effect: --role {role} trains the {role} alone"
            raise ConfigError(key, value, reason, f"Set {role}.{name}, or add --role {other}")


def _files(source: str, kind: str) -> Mapping[int, Path] | Path | None:
    """Return recorded episodes by step, a file of conversations, or None for other sources."""
    from crl.records.reader import episode_shards

    path = Path(source)
    if kind == "recorded":
        return shard_of_file(path) if path.is_file() else episode_shards(path)
    return path if kind == "conversations" else None


def _settings(sets: Sequence[str] | None) -> dict[str, Any]:
    """Return the settings that `--set` gives, by dotted key."""
    from crl.config.layers import leaves, parse_set

    return {key: value for text in sets or () for key, value in leaves(parse_set(text).data)}


def _warmup(config: RunConfig, role: RoleName, own: Collection[str]) -> int | None:
    """Return the warm-up of the settings, if it is among those that the user gave (`own`)."""
    given = f"{role}.optimizer.warmup_steps" in own
    return getattr(config, role).optimizer.warmup_steps if given else None


def _require_objective(config: RunConfig, role: RoleName) -> None:
    """Raise `ConfigError` for settings with which the loss or the model would be another one."""
    if role == "extractor" and not config.trains_extractor:
        key, given = _untrained_by(config)
        reason = "leaves the extractor untrained, but --role extractor trains it"
        raise ConfigError(key, given, reason, "Leave it out")
    for name, value in OBJECTIVE[role].items():
        if (given := getattr(getattr(config, role), name)) != value:
            fixed = value if isinstance(value, str) else f"{value:g}"
            reason = f"does not apply: supervised fine-tuning always uses {fixed}"
            raise ConfigError(f"{role}.{name}", given, reason, "Leave it out")


def _untrained_by(config: RunConfig) -> tuple[str, object]:
    """Return the key and the value of the setting that leaves the extractor untrained."""
    if not config.with_extractor:
        return "method", config.method
    return ("bank.frozen", True) if config.bank.frozen else ("extractor.train", False)


def _config_of_run(path: Path, options: Mapping[str, Any], sets: list[str] | None) -> RunConfig:
    """Return the config of the run whose episodes are demonstrations, with other settings."""
    from crl.config.load import load_saved
    from crl.config.resume import changed_config

    run = run_of_file(path) if path.is_file() else path
    if not (run / "config.json").is_file():
        reason = f"is not a recording: {run} is not a run directory and contains no config.json"
        remedy = "Give a run directory, a file in its folder episodes, or a file of conversations"
        raise ConfigError("--from", str(path), reason, remedy)
    return changed_config(load_saved(run).config, options=options, sets=sets or ())[0]


def _config_of_tasks(
    source: str, tasks: str | None, preset: str, options: Mapping[str, Any],
    sets: list[str] | None,
) -> tuple[RunConfig, set[str]]:  # fmt: skip
    """Return the config of scripted players, of drills or of a file of conversations.

    The second result holds the dotted keys that `--set` or a preset file of the user gives. Bundled
    presets have the optimizers of reinforcement learning, whose values do not count.
    """
    from crl.config.catalog import preset_file, presets
    from crl.config.load import resolve

    if tasks is None:
        raise ConfigError("--tasks", None, f"is required for {source}", "Add --tasks room")
    config, origins = resolve(tasks.split(","), preset=preset, options=options, sets=sets or ())
    file = None if preset in presets() else str(preset_file(preset))
    return config, {*_settings(sets)} | {key for key, origin in origins.items() if origin == file}
