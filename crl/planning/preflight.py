"""Checks that a run makes before anything is started: one list for run, dry run and `crl doctor`.

`CHECKS` is the list, in the order in which problems are reported. `EVALUATION_CHECKS` is the part
that `crl eval` needs, `ROLLOUT_CHECKS` that of `crl rollout`. The checks need neither weights nor
engines. They import torch only for a device that is asked for, for DeepSpeed and vLLM, and for
models of uncommon architectures.

Checks of weights stay in the run, in `crl.modeling.loading`: weights that are missing in a file,
logits that are changed after the output head, and packed sequences. Checks of the
answers of an endpoint stay there too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from crl import embedders
from crl.config.catalog import tasks as bundled_tasks
from crl.config.models import profile_of
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.config.schema import RunConfig
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.manager.storage.database import active_tasks, check_bank
from crl.planning import machine_checks, model_checks, tasks
from crl.planning.context import agent_prompts
from crl.planning.methods import require_method
from crl.prompts import hashes
from crl.types import RoleName
from crl.wording import counted

Subject = Literal["settings", "models", "machine"]
"""Subject of a check.

settings = the config, and the files and environments that it names; models = files of actor and
extractor; machine = what is installed, downloaded and plugged in on this machine.
"""


@dataclass(frozen=True)
class Check:
    """Check of a run."""

    name: str
    """Name in the output of `crl doctor`."""
    subject: Subject
    require: Callable[[RunConfig], None]
    """Function that raises `ConfigError` if the run cannot start."""
    detailed: bool = False
    """True if `crl doctor` reports the subject in lines of its own, with more detail."""


def require(config: RunConfig, *subjects: Subject, checks: Iterable[Check] | None = None) -> None:
    """Raise the `ConfigError` of the first check that fails.

    Only checks of `subjects` are made; without `subjects`, all of them. `checks`: checks to make
    instead of `CHECKS`.
    """
    for check in CHECKS if checks is None else checks:
        if not subjects or check.subject in subjects:
            check.require(config)


def problems(config: RunConfig, *subjects: Subject) -> Iterator[tuple[Check, ConfigError]]:
    """Yield the failed checks of `subjects` with their errors; without `subjects`, of all."""
    for check in CHECKS:
        try:
            require(config, *subjects, checks=[check])
        except ConfigError as error:
            yield check, error


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


def require_prompts(config: RunConfig) -> None:
    """Raise `ConfigError` for a prompt file that cannot be used, or that no model reads."""
    hashes(config.prompts.files)
    require_prompts_used(config)


def require_prompts_used(config: RunConfig) -> None:
    """Raise `ConfigError` for a prompt file of the user that no model of the run reads.

    Tiny models read no prompt files: they know only the game's texts.
    """
    if not config.prompts.files:
        return
    used_prompts = set(agent_prompts(config, tasks.specs(config)))
    if config.with_bank and config.profile(config.writer) == "full":
        used_prompts |= (
            {config.spec.notes.prompt if config.spec.notes else "distil"}
            | ({"merge"} if config.extractor.merge_every else set())
            | ({"vote"} if config.bank.evict_votes else set())
        )
        used_prompts |= {"refine"} if config.ask.enabled else set()
    if "full" in {config.profile("actor"), *(task.rendering for task in config.tasks.values())}:
        used_prompts |= config.method_settings.prompts() if config.method_settings else set()
    for name, path in config.prompts.files.items():
        if name not in used_prompts:
            remedy = f"Remove it, or {_prompt_remedy(config, name, used_prompts)}"
            raise ConfigError(
                f"prompts.{name}", str(path), "is not used by any model of this run", remedy
            )


def _prompt_remedy(config: RunConfig, prompt: str, used: Collection[str]) -> str:
    """Return advice on how a run that uses the prompts `used` could use `prompt`.

    The advice is the prompt that its agents read instead, else another method, else the switch that
    is off, else language models.
    """
    instructions = {"actor": "actor_tags", "actor_tags": "actor"}
    if (other := instructions.get(prompt)) in used:
        return f"set prompts.{other}, which the agents of these tasks read instead"
    of_method = {"reflection": "reflexion", "tip": "empo2"}
    of_method |= dict.fromkeys(("failure", "predict", "retrieve"), "role_agent")
    if prompt in of_method and config.spec.name != of_method[prompt]:
        return f"choose --method {of_method[prompt]}"
    if prompt not in instructions and not config.with_bank:
        return f"choose another method than {config.spec.name}, which has no experience"
    if prompt == "experience" and not config.guides:
        return f"choose another method than {config.spec.name}, whose agents read no experience"
    ask, critic = (
        (config.ask.enabled, "ask.enabled=true"),
        (config.critic.enabled, "critic.enabled=true"),
    )
    vote, merge = (
        (config.bank.evict_votes, "bank.evict_votes=2"),
        (config.extractor.merge_every, "extractor.merge_every=5"),
    )
    switches = {"ask": ask, "refine": ask, "critic": critic, "vote": vote, "merge": merge}
    on, setting = switches.get(prompt, (True, ""))
    return (
        "use language models as actor.model and extractor.model" if on else f"add --set {setting}"
    )


def require_tasks(config: RunConfig) -> None:
    """Raise `ConfigError` if an environment is missing or cannot provide the run's tasks."""
    specs = tasks.specs(config)
    require_renderings(config, specs)
    require_eval_support(config, specs)
    require_eval_sizes(config, specs)
    tasks.train_stream(config, specs)
    tasks.eval_sets(config, specs)
    tasks.online_tasks(config, specs)
    tasks.probe_tasks(config, specs)


def require_renderings(config: RunConfig, specs: Mapping[str, EnvSpec]) -> None:
    """Raise `ConfigError` for the compact rendering of an environment for language models only."""
    for name, spec in specs.items():
        if spec.curriculum.small and config.tasks[name].rendering == "compact":
            raise ConfigError(
                f"tasks.{name}.env",
                spec.name,
                "is only for language models, but the task has the compact rendering",
                f"Use {spec.curriculum.small}, or a language model as actor",
            )


def require_eval_sizes(config: RunConfig, specs: Mapping[str, EnvSpec]) -> None:
    """Raise `ConfigError` if eval sets have more games than a split of a fixed size."""
    for name, spec in specs.items():
        if spec.tasks.split_sizes is None:
            continue
        available = spec.tasks.split_sizes()
        sizes = config.tasks[name].eval
        larger = {
            f"tasks.{name}.eval.{split}": (getattr(sizes, split), size)
            for split, size in available.items()
            if getattr(sizes, split) > size
        }
        for key, (requested, size) in larger.items():
            reason = f"{spec.name} has only {counted(size, 'game')} of this split"
            remedy = f"Add {' '.join(f'--set {other}={n}' for other, (_, n) in larger.items())}"
            raise ConfigError(key, requested, reason, remedy)


def require_eval_support(config: RunConfig, specs: Mapping[str, EnvSpec]) -> None:
    """Raise `ConfigError` for an evaluation that an environment does not support.

    Online evaluation needs `revisit`, the advice probe needs `advisor`.
    """
    for name, spec in specs.items():
        sizes = config.tasks[name].eval
        if sizes.online_places and not spec.tasks.revisit:
            reason = (
                f"has no effect because {spec.name} has no persistent places "
                "(its EnvSpec has no revisit)"
            )
            raise ConfigError(
                f"tasks.{name}.eval.online_places",
                sizes.online_places,
                reason,
                "Set it to 0, or define revisit",
            )
        if sizes.probe_places and not spec.curriculum.advisor:
            reason = (
                f"has no effect because the right advice in {spec.name} is unknown "
                "(its EnvSpec has no advisor)"
            )
            raise ConfigError(
                f"tasks.{name}.eval.probe_places",
                sizes.probe_places,
                reason,
                "Set it to 0, or define an advisor",
            )


def require_extractor(config: RunConfig) -> None:
    """Raise `ConfigError` if the bank's writer cannot read the episodes."""
    if config.with_bank:
        require_compatible_extractor(config)


def require_compatible_extractor(config: RunConfig) -> None:
    """Raise `ConfigError` if a compact writer of the bank would read full episodes, or vote.

    A compact writer is trained only on digests of compact episodes.
    """
    writer = config.writer
    if config.profile(writer) == "full":
        return
    section = getattr(config, writer)
    # Compact because a setting says so, as in the preset smollm2, or because the model is.
    model, chosen = section.model, profile_of(section.model, f"{writer}.model") == "full"
    if config.bank.evict_votes is not None:
        reason = (
            f"needs {writer}.profile=full"
            if chosen
            else f"needs a language model as {writer}, but {model} "
            "is a tiny model that was not trained to vote"
        )
        raise ConfigError("bank.evict_votes", config.bank.evict_votes, reason, "Leave it unset")
    for name, task in config.tasks.items():
        if task.rendering != "full":
            continue
        reason = f"reads only the compact rendering, but tasks.{name}.rendering is full"
        if chosen:
            remedy = f"Add --set {writer}.profile=full"
            raise ConfigError(f"{writer}.profile", section.profile, reason, remedy)
        remedy = f"Use a language model as {writer}, or a tiny model as actor"
        if config.profile("actor") == "compact":
            # The [compact] table of every bundled task has the compact rendering.
            remedy = (
                f"Remove --set tasks.{name}.rendering, or this setting in your preset"
                if name in bundled_tasks()
                else f"Set tasks.{name}.rendering to compact, with --set or in the table "
                "[compact] of the task's file"
            )
        raise ConfigError(f"{writer}.model", model, reason, remedy)


def require_bank(config: RunConfig) -> None:
    """Raise `ConfigError` if the run cannot start from its `bank.init`, or cannot use it."""
    if not config.with_bank or not config.bank.init:
        return
    path = Path(config.bank.init)
    remedy = "Use the bank.sqlite of another run, written by this version of crl"
    check_bank(path, "bank.init", remedy, require_entries=config.bank.frozen)
    if config.bank.scope == "shared":
        return
    try:
        banked = active_tasks(path)
    except sqlite3.Error as error:
        raise ConfigError(
            "bank.init", str(path), f"the file is damaged ({error})", remedy
        ) from error
    if banked and not banked & config.tasks.keys():
        reason = (
            f"its experiences are of other tasks ({', '.join(sorted(banked))}) than the run's "
            f"({', '.join(sorted(config.tasks))}), and with bank.scope={config.bank.scope} they "
            "guide no episode"
        )
        raise ConfigError(
            "bank.init",
            str(path),
            reason,
            "Use the bank of a run of these tasks, or add --set bank.scope=shared",
        )


def require_embedder(config: RunConfig) -> None:
    """Raise `ConfigError` if the settings of the embedder, or the files of its encoder, are wrong.

    The check neither loads a model nor calls an endpoint. An encoder that a preset names may be
    missing: `model_checks.require_models` reports it.
    """
    if config.with_bank and config.embedder.model not in PUBLISHED_SHAPES:
        embedders.require_embedder(config.embedder)


# ── the list ──────────────────────────────────────────────────────────────────────────────────────

CHECKS: tuple[Check, ...] = (
    Check("prompts", "settings", require_prompts),
    Check("tasks", "settings", require_tasks),
    Check("extractor", "settings", require_extractor),
    Check("method", "settings", require_method),
    Check("bank", "settings", require_bank),
    Check("embedder", "settings", require_embedder),
    Check("context", "models", model_checks.require_contexts),
    Check("models", "machine", model_checks.require_models, detailed=True),
    Check("adapters", "models", model_checks.require_adapters),
    Check("adapter ranks", "models", model_checks.require_adapter_ranks),
    Check("tokenizers", "models", model_checks.require_tokenizers),
    Check("merge prompt", "models", model_checks.require_merge_tokens),
    Check("structured outputs", "models", model_checks.require_structured_outputs),
    Check("architectures", "models", model_checks.require_architectures),
    Check("learner", "machine", machine_checks.require_learner, detailed=True),
    Check("engine", "machine", machine_checks.require_engine, detailed=True),
    Check("monitors", "machine", machine_checks.require_monitors),
    Check("GPU plan", "machine", machine_checks.require_gpus, detailed=True),
    Check("devices", "machine", machine_checks.require_devices),
    Check("ranks", "machine", machine_checks.require_ranks),
    Check("nvidia-smi", "machine", machine_checks.require_assigned_gpus),
)
"""Checks of a run, in the order in which they are made."""

RESUME_CHECKS = tuple(check for check in CHECKS if check.name not in ("bank", "adapter ranks"))
"""Checks of a resumed run, which has a bank already, and adapters whose rank cannot change."""


ROLE_CHECKS: Mapping[str, Callable[..., None]] = {
    "context": model_checks.require_contexts,
    "models": model_checks.require_models,
    "adapters": model_checks.require_adapters,
    "adapter ranks": model_checks.require_adapter_ranks,
    "tokenizers": model_checks.require_tokenizers,
    "architectures": model_checks.require_architectures,
    "GPU plan": machine_checks.require_gpus,
    "ranks": machine_checks.require_ranks,
}
"""Checks that can be limited to the model of one role, by the name of the check."""


def fine_tuning_checks(role: RoleName) -> tuple[Check, ...]:
    """Return the checks of supervised fine-tuning, which uses the model of `role` alone.

    The bank, the embedder and the model of the other role are not used.
    """
    return tuple(
        replace(check, require=partial(ROLE_CHECKS[check.name], only=role))
        if check.name in ROLE_CHECKS
        else check
        for check in CHECKS
        if check.name not in ("bank", "embedder")
    )


EVALUATION_CHECKS: tuple[Check, ...] = (
    *(
        check
        for check in CHECKS
        if check.name
        in ("prompts", "tasks", "extractor", "method", "embedder", "structured outputs")
    ),
    Check("engine", "machine", machine_checks.require_engine),
    Check("GPU plan", "machine", machine_checks.require_gpus_to_evaluate),
    Check("devices", "machine", machine_checks.require_engine_devices),
)
"""Checks of an evaluation. Its models and its bank are those of a checkpoint."""

ROLLOUT_CHECKS = (
    *EVALUATION_CHECKS,
    *(check for check in CHECKS if check.name in ("bank", "monitors")),
)
"""Checks of rollouts without training."""
