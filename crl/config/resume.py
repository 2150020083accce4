"""Configuration of a run that is resumed: the saved one with a few changes.

Lengths, limits, devices, engines and learners may change. Settings that would make the run another
one may not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from crl.config.layers import Layer, leaves, merge, nested, parse_set
from crl.config.schema import RunConfig
from crl.config.validate import run_config
from crl.errors import ConfigError

FIXED: Mapping[str, str] = {
    r"method": "the checkpoint belongs to a run of another method",
    r"run\.seed": "all random draws of the run depend on it",
    r"run\.deterministic": "it applies to a run as a whole",
    r"(actor|extractor)\.model": "the checkpoint has the models of the run",
    r"(actor|extractor)\.lora\..*": "the checkpoint has the adapter of the run, or none",
    r"(actor|extractor)\.train": "the checkpoint has the trained models of the run",
    r"role_agent\.(replay_ratio|writer)": "the checkpoint has the bank of the run, or none",
    r"empo2\.key": "the tips in the bank have the keys of the run",
    r"critic\.enabled": "the checkpoint has the success rates of a run with a critic, or none",
    r"embedder\.(model|name)": "the vectors in the bank were made by the embedder of the run",
    r"bank\.(init|frozen|scope)": "the bank of the run already exists",
    r"tasks\.[^.]+\.(name|env|rendering|stream\..*)": "the run has drawn its tasks with this value",
    r"tasks\.[^.]+\.search\.(train_sets|test_sets)": "the run has drawn its tasks with this value",
}
"""Reasons why settings cannot change, by a pattern of their keys."""


MEASURED = r"eval\.temperature|actor\.max_context_tokens|tasks\.[^.]+\.(?!stream\.).*"
"""Settings that define what an evaluation of any method measures, by a pattern of their keys."""

MEASURED_WITH_EXPERIENCE = (
    r"ask\.(enabled|limit)|critic\.(min_episodes|max_response_tokens)|bank\.key_text_weight"
    r"|retrieval\.(choice|per|candidates|margin|min_similarity|count_penalty|recent_steps)"
)
"""Further settings of methods whose agents are shown experience: what they are shown, and when.

Settings with which the bank is written are left out, as are those of training: bank and weights are
what an evaluation measures. Timeouts, batches and threads change no result, except on a machine
that is too slow. No search of an evaluation is a trial (`retrieval.trial_share`).
"""


class Change(NamedTuple):
    """Setting that differs from the saved one."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.after}"


def changed_config(
    saved: RunConfig, *, options: Mapping[str, Any], sets: Sequence[str]
) -> tuple[RunConfig, list[Change]]:
    """Return a saved configuration with other settings, and the changes.

    `options` are settings by dotted key. `sets` are arguments `KEY=VALUE`, which override them.
    Raise `ConfigError` for an invalid setting.
    """
    tree = saved.model_dump(mode="json")
    overrides = [Layer("--" + key.rpartition(".")[2], nested(key, v)) for key, v in options.items()]
    overrides += [parse_set(text) for text in sets]
    _refuse_other_runs(overrides, tree["tasks"])
    merged, origins = merge([Layer("", tree), *overrides])
    config = run_config(merged, origins={key: value for key, value in origins.items() if value})
    before, after = dict(leaves(tree)), dict(leaves(config.model_dump(mode="json")))
    changes = [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]
    return config, changes


def resumed_config(
    saved: RunConfig,
    *,
    options: Mapping[str, Any],
    sets: Sequence[str],
    has_moved: Callable[[str, str, str], bool],
) -> tuple[RunConfig, list[Change]]:
    """Return the configuration of a resumed or forked run like `changed_config`.

    `has_moved(role, before, after)` returns whether the model of a role has moved from one place to
    another. Raise `ConfigError` also for a setting that cannot change.
    """
    config, changes = changed_config(saved, options=options, sets=sets)
    for change in changes:
        role, _, name = change.key.partition(".")
        if name == "model" and has_moved(role, change.before, change.after):
            continue
        for pattern, reason in FIXED.items():
            if re.fullmatch(pattern, change.key):
                raise ConfigError(
                    change.key,
                    change.after,
                    f"cannot change from {change.before!r} in a run that continues: {reason}",
                    "Leave it out, or start a new run with crl train",
                )
    return config, changes


def _refuse_other_runs(overrides: Sequence[Layer], tasks: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a preset and for a task that the run does not have."""
    for key, value in (leaf for layer in overrides for leaf in leaves(layer.data)):
        if key == "preset":
            reason = "other settings were based on the preset when the run began"
            raise ConfigError(key, value, reason, "Set these settings themselves")
        if key.startswith("tasks.") and (name := key.split(".")[1]) not in tasks:
            reason = f"{name} is not a task of this run ({', '.join(tasks)}), and none can be added"
            raise ConfigError(key, value, reason, "Correct the name, or start a new run")


def measured_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that define what an evaluation measures, by dotted key.

    Evaluations with different values cannot be compared. The keys depend on the method alone.
    """
    pattern = f"{MEASURED}|{MEASURED_WITH_EXPERIENCE}" if config.guides else MEASURED
    settings = leaves(config.model_dump(mode="json"))
    measured = {key: value for key, value in settings if re.fullmatch(pattern, key)}
    return measured | (config.method_settings.measured(config) if config.method_settings else {})
