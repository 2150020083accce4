"""What a run would do, for `--dry-run`: config, devices, model, tasks and batch arithmetic. No model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from crl.config.models import bundled_models, model_profile, model_size, resolve_model
from crl.config.schema import RunConfig
from crl.prompts import hashes
from crl.run import tasks


def plan(config: RunConfig) -> str:
    """Sections of text with a heading each. Raises `ConfigError` for what a run would refuse of prompts, model and tasks."""
    hashes(config.prompts.files)
    specs = tasks.specs(config)
    tasks.train_stream(config, specs)
    tasks.eval_sets(config, specs)
    sections = {
        "resolved config": "\n".join(_toml(config.model_dump())),
        "devices": _devices(config),
        "model": _model(config),
        "tasks": _tasks(config),
        "batch": _batch(config),
    }
    return "\n\n".join(f"── {title} ──\n{text}" for title, text in sections.items())


def overview(config: RunConfig) -> str:
    """What a run says when it starts: who plays what, in which rendering, on what."""
    return "\n".join([_model(config), _tasks(config), _devices(config)])


def _toml(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The table as TOML, its own values before its sub-tables. TOML has no null: what is unset is a comment."""
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if prefix and values:
        yield f"\n[{prefix.removesuffix('.')}]"
    for name, value in values.items():
        yield f"# {name} is unset" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{prefix}{name}.")


def _devices(config: RunConfig) -> str:
    rows = (("engine", config.engine.kind, config.engine), ("learner", config.learner.kind, config.learner))
    lines = [f"{name:<12} {kind} on {_device(part.device)}, {_count(part.threads, 'CPU thread')}" for name, kind, part in rows]
    lines.append(f"{'environments':<12} {_count(config.rollout.env_threads, 'thread')}")
    return "\n".join(lines)


def _device(device: str) -> str:
    return "cuda when present, else cpu" if device == "auto" else device


def _model(config: RunConfig) -> str:
    path = resolve_model(config.actor.model)
    size = model_size(path)
    weights = f"{size.parameters:,} parameters, {size.bytes / 2**20:,.1f} MiB" if size else "no safetensors files, size unknown"
    source = "bundled" if config.actor.model in bundled_models() else "your directory"
    return f"actor  {path} ({source})\n       {weights}; profile {model_profile(path)}"


def _tasks(config: RunConfig) -> str:
    profile = model_profile(resolve_model(config.actor.model))
    lines = []
    for name, task in config.tasks.items():
        why = f"the actor's model declares the {profile} profile" if task.rendering == profile else "set by hand"
        stream = task.stream
        lines += [
            f"{name}  {task.rendering} rendering: {why}",
            f"  {_count(task.turns, 'turn')} of at most {_count(task.max_response_tokens, 'token')}, context {task.context}",
            f"  {_count(stream.places, 'place')}, {stream.permanent} permanent, the others for {_count(stream.visits, 'visit')}",
        ]
    return "\n".join(lines)


def _batch(config: RunConfig) -> str:
    rollout, steps = config.rollout, config.run.steps
    rollouts = rollout.groups * rollout.group_size
    staleness = f"at most {_count(rollout.max_staleness, 'step')} ahead" if rollout.max_staleness else "synchronous"
    episodes = sum(task.eval.known + task.eval.new for task in config.tasks.values())
    evals = _evaluations(config)
    return "\n".join(
        [
            f"a step    {_count(rollout.groups, 'group')} × {rollout.group_size} members = {rollouts} rollouts, {staleness}",
            f"          {_count(config.actor.minibatches, 'minibatch', 'minibatches')} of about "
            f"{rollouts / config.actor.minibatches:g} rollouts = as many optimizer updates",
            f"training  {_count(steps, 'step')} × {rollouts} = {steps * rollouts:,} episodes, {steps * config.actor.minibatches:,} updates",
            f"eval      {_count(evals, 'time')} × {_count(episodes, 'episode')} = {evals * episodes:,} episodes at temperature "
            f"{config.eval.temperature:g}",
        ]
    )


def _evaluations(config: RunConfig) -> int:
    """Before and after the run, and every `eval_every` steps between."""
    steps, every = config.run.steps, config.run.eval_every
    return 1 if steps == 0 else 2 + ((steps - 1) // every if every else 0)


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
