"""Command `crl bank build`: distil finished episodes into a new bank.

Modules that need torch are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli import completion
from crl.cli.command import Seed, Sets, command
from crl.cli.runs.halves import NewRun, new_folder, run_of_file, shard_of_file
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

FIXED: Mapping[str, Any] = {
    "method": "complementary",
    "actor.train": True,
    "extractor.train": False,
    "extractor.perplexity.weight": 0.0,
    "bank.init": "",
    "bank.frozen": False,
}
"""Settings of the command: nothing is trained, and the bank is new."""

SECTIONS = ("extractor", "bank", "embedder", "retrieval", "ask", "critic")
"""Sections that are taken from the preset if the recorded run had no experience."""


@command
def build(
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="SOURCE",
            autocompletion=completion.runs,
            help="Run or rollouts with recorded episodes, one file of them "
            "(RUN/episodes/STEP.jsonl.gz), or episodes of other programs (FILE.jsonl).",
        ),
    ],
    extractor: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=completion.models,
            help="Extractor (default: extractor.model).",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            autocompletion=completion.tasks,
            help="Tasks of FILE.jsonl (default: the bundled ones that its lines name); not for "
            "recorded ones.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.presets,
            help="Preset to start from with FILE.jsonl: a name, or a TOML file.",
        ),
    ] = None,
    seed: Seed = None,
    run_dir: NewRun = None,
    sets: Sets = None,
) -> int:
    """Distil finished episodes into a new bank, with an extractor that is not trained.

    A run can start from it with bank.init.
    """
    options: dict[str, Any] = dict(FIXED)
    _refuse_fixed(sets or ())
    options |= {} if extractor is None else {"extractor.model": extractor}
    options |= {} if seed is None else {"run.seed": seed}
    _require_source(source)
    recorded = source.is_dir() or source.name.endswith(".jsonl.gz")
    config, episodes = (
        _recorded(source, {"--tasks": tasks, "--preset": preset}, options, sets)
        if recorded
        else _of_file(source, tasks, preset or "cpu", options, sets)
    )
    from crl.run.halves.commands import build_bank

    return build_bank(config, episodes, run_dir or new_folder("bank"))


def _require_source(source: Path) -> None:
    """Raise `ConfigError` if `source` does not exist, or is a bank."""
    reason = "is a bank, but a bank is built from episodes" if source.suffix == ".sqlite" else ""
    if not source.exists():
        reason = "is neither a run nor a file"
    if reason:
        raise ConfigError("--from", str(source), reason, "Give a run, or a file of episodes")


def _refuse_fixed(sets: Sequence[str]) -> None:
    """Raise `ConfigError` for an argument of `--set` that is a setting of the command."""
    from crl.config.layers import leaves, parse_set

    for key, value in (leaf for text in sets for leaf in leaves(parse_set(text).data)):
        if key in FIXED:
            reason = "has no effect: the bank is new, and nothing is trained"
            raise ConfigError(key, value, reason, "Leave it out")


def _recorded(
    source: Path, unused: Mapping[str, str | None], options: Mapping[str, Any],
    sets: list[str] | None,
) -> tuple[RunConfig, Mapping[int, Path]]:  # fmt: skip
    """Return the settings of a run with other options, and its recorded episodes."""
    from crl.config.load import load, load_saved
    from crl.config.resume import changed_config
    from crl.records.reader import episode_shards

    for name, value in unused.items():
        if value is not None:
            reason = "does not apply to recorded episodes, which have the settings of their run"
            raise ConfigError(name, value, reason, "Leave it out")
    run = run_of_file(source) if source.is_file() else source
    saved = load_saved(run).config
    if not saved.with_extractor:
        profile = {"actor.profile": saved.profile("actor")}
        of_preset = load(["room"], preset=saved.preset, options=profile | dict(options))
        saved = saved.model_copy(update={name: getattr(of_preset, name) for name in SECTIONS})
    # Without evaluations, the plan of GPUs has no second extractor.
    unplayed = {f"tasks.{name}.eval.online_places": 0 for name in saved.tasks}
    if saved.method != FIXED["method"]:
        unplayed["complementary.guided_share"] = 1  # no group is played: any size is possible
    config, _ = changed_config(saved, options={**options, **unplayed}, sets=sets or ())
    return config, shard_of_file(source) if source.is_file() else episode_shards(run)


def _of_file(
    source: Path, tasks: str | None, preset: str, options: Mapping[str, Any],
    sets: list[str] | None,
) -> tuple[RunConfig, Path]:  # fmt: skip
    """Return the settings for a file of episodes, and the file."""
    from crl.config.load import load

    names = _bundled_tasks(source) if tasks is None else tasks.split(",")
    return load(names, preset=preset, options=options, sets=sets or ()), source


def _bundled_tasks(source: Path) -> list[str]:
    """Return the tasks that the lines of a file name.

    Raise `ConfigError` if one is not bundled: it could be a path, and a file of another program
    must not choose code that is executed.
    """
    from crl.config import catalog
    from crl.records.conversations import read_lines

    names: dict[str, None] = {}
    for place, line in read_lines(source):
        name = line.get("task") if isinstance(line, dict) else None
        if not isinstance(name, str) or name not in catalog.tasks():
            reason = f"is of the task {name!r}, which is not bundled"
            if name is None:
                reason = "is not a JSON object with a task"
            remedy = "Correct it, or name the tasks of the file with --tasks"
            raise ConfigError("--from", place, reason, remedy)
        names[name] = None
    if not names:
        raise ConfigError("--from", str(source), "has no episodes", "Give another file")
    return list(names)
