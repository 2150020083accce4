"""Checked requests of `crl eval` with options: a model, its settings and its bank.

The module needs no torch, so wrong input is reported immediately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.config.layers import Layer, Tree, leaves, merge, nested, parse_set, put
from crl.config.load import load, load_saved, task_layers
from crl.config.models import find_model, is_adapter, model_profile
from crl.config.schema import RunConfig
from crl.config.validate import run_config
from crl.embedders import known_name
from crl.errors import ConfigError
from crl.evaluation.samples import Source
from crl.manager.storage.database import active_tasks, check_bank, require_vectors_of, snapshots
from crl.modeling.adapters import base_has_moved
from crl.monitor.run_dir import RunDir
from crl.planning import tasks
from crl.protocols import State
from crl.run.checkpoint import chosen_checkpoint, read_manifest, read_state, trained_model

REFUSED: Mapping[str, str] = {
    r"(method|learner\..*|monitor\..*)": "an evaluation trains nothing",
    r"run\.(?!seed|deterministic|max_error_rate).*": "an evaluation trains nothing",
    r"(actor|extractor)\.(lora|optimizer)\..*": "an evaluation trains nothing",
    r"(actor|extractor)\.model": "the checkpoint has the models",
    r"bank\.init": "--bank FILE names the bank of an evaluation",
}
"""Reasons why `--set` cannot change a setting of a run for its evaluation."""

REFUSED_OF_OWN_BANK: Mapping[str, str] = {
    r"embedder\..*": "the vectors in the bank were made by the embedder of the run",
}
"""Further reasons, unless `--bank` names another bank."""


@dataclass(frozen=True)
class Options:
    """Options of `crl eval`. None = not given."""

    step: int | None = None
    tasks: str | None = None
    experience: Source | None = None
    samples: int | None = None
    temperature: float | None = None
    bank: Path | None = None
    preset: str | None = None
    sets: Sequence[str] = ()

    @property
    def given(self) -> dict[str, Any]:
        """Given options by name, as JSON."""
        values = {
            "step": self.step,
            "tasks": self.tasks,
            "experience": self.experience and self.experience.value,
            "samples": self.samples,
            "temperature": self.temperature,
            "bank": self.bank and str(self.bank),
            "preset": self.preset,
            "set": list(self.sets) or None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Bank:
    """Bank of an evaluation."""

    path: Path | None
    """File; None = an empty bank."""
    snapshot: int | None
    """Snapshot of the checkpoint; None = the bank as it is."""
    foreign: bool
    """True for the bank that `--bank` names."""


@dataclass(frozen=True)
class Request:
    """Checked evaluation."""

    subject: Path
    """Run directory or model, as the user named it."""
    config: RunConfig
    """Settings. `actor.model`, and `extractor.model` if it was trained, are evaluated."""
    source: Source
    samples: int
    bank: Bank | None
    """None without experience."""
    checkpoint: Path | None
    """Checkpoint of a run; None for a model."""
    options: Options

    @property
    def step(self) -> int | None:
        """Completed actor steps; None for a model."""
        return int(self.checkpoint.name) if self.checkpoint else None

    @property
    def state(self) -> State:
        """State of the checkpoint; empty for a model."""
        return read_state(self.checkpoint) if self.checkpoint else {}

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of the files of weights that the checkpoint lists, by relative path."""
        if self.checkpoint is None:
            return {}
        files = read_manifest(self.checkpoint).get("files", {})
        return {
            name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")
        }

    @property
    def name(self) -> str:
        """Name of the file in which the results are saved."""
        parts = [] if self.step is None else [f"step{self.step}"]
        parts.append("no-experience" if self.source is Source.none else self.source.value)
        if self.samples > 1:
            parts.append(f"{self.samples}samples")
        return "-".join(parts)


def is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run, and not of a model."""
    try:
        return "config" in json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def resolve(subject: Path, options: Options, note: Any) -> Request:
    """Return the checked request. `note` is called with a line for every damaged checkpoint.

    Raise `ConfigError` for invalid options, and if the model, the checkpoint, a task or the bank
    does not exist or does not fit.
    """
    source, samples = options.experience or Source.none, options.samples or 1
    _check_options(options, source)
    if is_run(subject):
        request = _of_run(subject, options, source, samples, note)
    else:
        request = _of_model(subject, options, source, samples)
    if request.bank and request.bank.foreign:
        _check_bank(request)
    if source is Source.online:
        _check_online(request)
    else:
        _check_sizes(request)
    return request


def _check_options(options: Options, source: Source) -> None:
    if options.samples is not None and options.samples < 1:
        raise ConfigError("--samples", options.samples, "must be at least 1", "Use --samples 1")
    if options.temperature is not None and not options.temperature >= 0:
        raise ConfigError(
            "--temperature",
            options.temperature,
            "must not be negative",
            "Use 0 for greedy decoding",
        )
    if options.bank and source is Source.none:
        raise ConfigError(
            "--bank",
            str(options.bank),
            "has no effect without experience",
            "Add --experience bank or --experience online",
        )
    if source is Source.online and (options.samples or 1) > 1:
        raise ConfigError(
            "--samples",
            options.samples,
            "does not apply to the online evaluation, in which the number of visits is fixed",
            "Leave it out",
        )


def _of_run(path: Path, options: Options, source: Source, samples: int, note: Any) -> Request:
    saved, run = load_saved(path).config, RunDir(path)
    if options.preset:
        reason = "does not apply to a run, which has its own settings"
        raise ConfigError("--preset", options.preset, reason, "Leave it out, or use --set")
    checkpoint = chosen_checkpoint(run.checkpoints, options.step, note)
    tree = saved.model_dump(mode="json")
    if options.tasks is not None:
        tree["tasks"] = _tasks_of_run(tree["tasks"], options.tasks, checkpoint, saved)
    overrides, bases = _without_moved_bases(_overrides(options), checkpoint)
    refused = REFUSED if options.bank else {**REFUSED, **REFUSED_OF_OWN_BANK}
    _refuse_settings(overrides, tree["tasks"], refused)
    for role in ("actor", "extractor"):
        if (checkpoint / role).is_dir():
            initial = bases.get(role) or getattr(saved, role).model
            put(tree, f"{role}.model", str(trained_model(checkpoint, role, initial)))
    if any(key == "embedder.model" for layer in overrides for key, _ in leaves(layer.data)):
        tree["embedder"] = {}  # the other settings are those of the run's own embedder
    config = _with_overrides(tree, overrides)
    bank = _bank_of_run(config, run, checkpoint, options, source)
    return Request(path, config, source, samples, bank, checkpoint, options)


def _of_model(subject: Path, options: Options, source: Source, samples: int) -> Request:
    try:
        found = find_model(str(subject), "model")
    except ConfigError as error:
        reason = f"is not a run directory; as a model: {error.reason}"
        raise ConfigError("run", str(subject), reason, error.remedy) from error
    if found is None:
        raise ConfigError(
            "model", str(subject), "is not downloaded", f"Run hf download {subject} first"
        )
    if options.step is not None:
        raise ConfigError(
            "--step", options.step, f"{subject} is a model and not a run", "Leave it out"
        )
    if options.tasks is None:
        reason = "is required for a model, which has no tasks of its own"
        raise ConfigError("--tasks", None, reason, "Add for example --tasks room")
    if source is Source.bank and options.bank is None:
        reason = f"needs a bank, and {subject} is a model and not a run"
        raise ConfigError("--experience", "bank", reason, "Add --bank FILE")
    given: dict[str, Any] = {"actor.model": str(found)}
    if source is Source.none:
        given["method"] = "grpo"  # without extractor and bank
    elif source is Source.bank:
        given["extractor.model"] = str(found)  # it is never asked
    config = load(
        options.tasks.split(","),
        preset=options.preset or "cpu",
        options=given,
        sets=options.sets,
    )
    config = _with_overrides(config.model_dump(mode="json"), _overrides(options))
    if source is not Source.none and not config.guides:
        reason = f"the method {config.spec.name} {_lack(config)}"
        raise ConfigError("--experience", source.value, reason, "Set another method")
    bank = None if source is Source.none else Bank(options.bank, None, options.bank is not None)
    return Request(subject, config, source, samples, bank, None, options)


def _overrides(options: Options) -> list[Layer]:
    layers = [parse_set(text) for text in options.sets]
    if options.temperature is not None:
        layers.append(Layer("--temperature", nested("eval.temperature", options.temperature)))
    return layers


def _without_moved_bases(
    overrides: Sequence[Layer], checkpoint: Path
) -> tuple[list[Layer], dict[str, str]]:
    """Return the overrides without new places of base models, and these places by role.

    `--set ROLE.model=DIR` is the new place of the base model of an adapter if this model has moved.
    """
    others, bases = [], {}
    for layer in overrides:
        for key, value in leaves(layer.data):
            role, _, name = key.partition(".")
            moved = (
                name == "model"
                and is_adapter(checkpoint / role)
                and base_has_moved(checkpoint / role, f"{role}.model")
            )
            if moved:
                bases[role] = str(value)
            else:
                others.append(Layer(layer.origin, nested(key, value)))
    return others, bases


def _with_overrides(tree: Tree, overrides: Sequence[Layer]) -> RunConfig:
    """Return the config of an evaluation: the official size of every split, then `overrides`."""
    config = run_config(tree)
    sizes: Tree = {}
    for name, spec in tasks.specs(config).items():
        split_sizes = spec.tasks.split_sizes() if spec.tasks.split_sizes else {}
        for split, size in split_sizes.items():
            put(sizes, f"tasks.{name}.eval.{split}", size)
    merged, origins = merge([Layer("", tree), Layer("", sizes), *overrides])
    if merged["run"]["deterministic"]:
        merged["rollout"]["max_staleness"] = 0  # required by the schema; nothing is trained
    return run_config(merged, origins={key: origin for key, origin in origins.items() if origin})


def _tasks_of_run(
    own: Mapping[str, Any], names: str, checkpoint: Path, saved: RunConfig
) -> dict[str, Any]:
    """Return the settings of the named tasks: the run's own, else those of the task's file.

    `saved`: settings of the run, which name the actor if it was not trained.
    """
    chosen: dict[str, Any] = {}
    actor = checkpoint / "actor"
    profile = model_profile(actor) if actor.is_dir() else saved.profile("actor")
    for name in filter(None, map(str.strip, names.split(","))):
        if name in own:
            chosen[name] = own[name]
            continue
        for task, layer in task_layers([name], profile).items():
            chosen[task] = own.get(task, layer.data["tasks"][task])
    if not chosen:
        raise ConfigError("--tasks", names, "contains no task", "Give at least one: --tasks room")
    return chosen


def _refuse_settings(
    overrides: Sequence[Layer], own: Mapping[str, Any], refused: Mapping[str, str]
) -> None:
    """Raise `ConfigError` for a setting without effect on a run, and for a task not in `own`."""
    for key, value in (leaf for layer in overrides for leaf in leaves(layer.data)):
        if key.startswith("tasks.") and (name := key.split(".")[1]) not in own:
            raise ConfigError(
                key, value, f"{name} is not a task of this evaluation", f"Add {name} to --tasks"
            )
    for layer in overrides:
        if not layer.origin.startswith("--set"):
            continue
        for key, value in leaves(layer.data):
            for pattern, reason in refused.items():
                if re.fullmatch(pattern, key):
                    raise ConfigError(key, value, f"has no effect: {reason}", "Leave it out")


def _bank_of_run(
    config: RunConfig, run: RunDir, checkpoint: Path, options: Options, source: Source
) -> Bank | None:
    if source is Source.none:
        return None
    if not config.guides:
        reason = f"the method {config.spec.name} of the run {_lack(config)}"
        remedy = (
            "Leave it out"
            if options.bank is None
            else f"Evaluate the model: crl eval {checkpoint / 'actor'} --tasks … --bank FILE"
        )
        raise ConfigError("--experience", source.value, reason, remedy)
    if options.bank:
        return Bank(options.bank, None, foreign=True)
    snapshot = read_state(checkpoint)["bank"]
    if not run.bank.is_file():
        reason = f"its bank file {run.bank.name} is missing"
        raise ConfigError("run", str(run.path), reason, "Restore the file, or give --bank FILE")
    if snapshot not in snapshots(run.bank):
        reason = f"its bank has no snapshot of the checkpoint of step {checkpoint.name}"
        raise ConfigError("run", str(run.path), reason, "Restore the file, or give --bank FILE")
    return Bank(run.bank, snapshot, foreign=False)


def _lack(config: RunConfig) -> str:
    """Return why the method guides no episodes."""
    return "shows its agents no experience" if config.with_bank else "has no bank"


def _check_bank(request: Request) -> None:
    """Raise `ConfigError` if the bank that the user named cannot guide the episodes."""
    assert request.bank
    assert request.bank.path
    path, config = request.bank.path, request.config
    check_bank(path, "bank", "Give the bank.sqlite of a run", require_entries=True)
    if name := known_name(config.embedder):  # others are checked when the bank is opened
        require_vectors_of(path, name, "bank")
    banked = active_tasks(path)
    if config.bank.scope != "shared" and not banked & config.tasks.keys():
        reason = (
            f"its experiences are of other tasks ({', '.join(sorted(banked))}) than those of the "
            f"evaluation ({', '.join(sorted(config.tasks))})"
        )
        raise ConfigError(
            "--bank", str(path), reason, "Use the bank of these tasks, or --set bank.scope=shared"
        )


def _check_sizes(request: Request) -> None:
    sizes = {name: task.eval for name, task in request.config.tasks.items()}
    if not any(size.seen or size.unseen for size in sizes.values()):
        key = f"tasks.{next(iter(sizes))}.eval.unseen"
        reason = "no task of the evaluation has games: both splits are empty"
        raise ConfigError(key, 0, reason, f"Add for example --set {key}=32")


def _check_online(request: Request) -> None:
    config = request.config
    if config.bank.frozen:
        reason = "the bank of the run is frozen, so nothing is learned about unseen places"
        raise ConfigError("--experience", "online", reason, "Use --experience bank")
    if not tasks.online_tasks(config, tasks.specs(config)):
        name = next(iter(config.tasks))
        reason = "no task has places that the online evaluation visits"
        raise ConfigError(
            "--experience", "online", reason, f"Add --set tasks.{name}.eval.online_places=16"
        )
