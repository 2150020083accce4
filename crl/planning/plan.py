"""Dry run: the checks of a run, and its plan as text.

The plan has the config, devices, GPUs, models, tasks and batch arithmetic. No model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from crl.config.method import BUNDLED_METHODS
from crl.config.models import (
    Profile,
    adapter_base,
    bundled_models,
    download_command,
    find_model,
    is_adapter,
    model_size,
)
from crl.config.models.packaged import PACKAGED_MODELS, imported_folder
from crl.config.models.shapes import PUBLISHED_SHAPES, ModelShape
from crl.config.retrieval import retrieval_policy
from crl.config.schema import (
    GOAL_SCOPES,
    EmbedderSection,
    RetrievalSection,
    RunConfig,
    TaskConfig,
)
from crl.engines.backends import ENGINES
from crl.errors import ConfigError
from crl.evaluation.online import MEMBERS, UNCOUNTED_VISITS, VISITS
from crl.learners.backends import LEARNERS
from crl.planning import preflight, tasks
from crl.planning.gpu_plan import (
    GpuPlan,
    describe,
    embedder_shapes,
    gpu_plan,
    model_shapes,
    planned_elsewhere,
)
from crl.planning.gpus import Gpu, visible_gpus
from crl.planning.model_checks import adapted_layers, model_sections
from crl.planning.model_size import dense_shape, parse_size, planned_shape
from crl.planning.step_time import estimate
from crl.protocols import TaskSource
from crl.types import RoleName
from crl.wording import counted, device_text, percent


def dry_run(config: RunConfig, show: Callable[[str], object], *, size: str | None = None) -> None:
    """Call `show` with the plan of a run. Raise the `ConfigError` with which a run would end.

    The plan is not shown if the settings or the models are wrong. It is shown if only this machine
    is unsuitable. If the plan is for another machine, `show` is also called with the reasons why
    this machine is unsuitable, and these reasons are not errors.

    With `size`, such as 1.5B, the GPUs are planned for hypothetical models of this size, and
    neither the run's models nor this machine are checked.
    """
    preflight.require(config, *(("settings",) if size else ("settings", "models")))
    visible = visible_gpus()
    shapes = hypothetical_shapes(config, size) if size else None
    gpus = gpu_plan(config, visible, shapes=shapes)
    if size and gpus is None:
        reason = "is only used to plan GPUs, but the run has none"
        raise ConfigError(
            "--size", size, reason, "Add --set gpus=1 --set gpu_memory=80, or use --preset gpu1"
        )
    show(plan(config, gpus and _gpus(config, gpus, visible, size, shapes), shapes))
    if not size and planned_elsewhere(config, visible):
        errors = [str(error) for _, error in preflight.problems(config, "machine")]
        show("\n" + _section("missing on this machine", "\n".join(errors)))
    elif not size:
        preflight.require(config, "machine")
    if gpus:
        gpus.require_fit()


def plan(
    config: RunConfig,
    gpus: str | None = None,
    hypothetical: Mapping[str, ModelShape] | None = None,
) -> str:
    """Return the plan as text, in sections with a heading each.

    `gpus` is the text of the GPU plan, None without GPUs. `hypothetical`: sizes of hypothetical
    models by role; None for the run's models. Raise `ConfigError` for environments that are not
    installed.
    """
    sections = {
        "resolved config": "\n".join(_toml(config.model_dump())),
        "devices": _devices(config),
        **({"GPUs": gpus} if gpus else {}),
        "models": _hypothetical(config, hypothetical) if hypothetical else _models(config),
        "tasks": _tasks(config),
        "batch": _batch(config),
        **({"experience": _experience(config)} if config.with_bank else {}),
    }
    if method := config.method_settings.plan(config) if config.method_settings else ():
        sections[f"method {config.spec.name}"] = "\n".join(method)
    return "\n\n".join(_section(title, text) for title, text in sections.items())


def _section(title: str, text: str) -> str:
    return f"── {title} ──\n{text}"


def hypothetical_shapes(config: RunConfig, size: str) -> dict[str, ModelShape]:
    """Return the sizes of hypothetical models: actor and extractor have `size`, such as 1.5B.

    An embedder of the run keeps its own size. Raise `ConfigError` for a size that is not readable.
    """
    roles = model_sections(config)
    context = max(section.max_context_tokens for section in roles.values())
    shape = dense_shape(parse_size(size), context)
    return dict.fromkeys(roles, shape) | embedder_shapes(config)


def _gpus(
    config: RunConfig,
    gpus: GpuPlan,
    visible: Sequence[Gpu],
    size: str | None,
    shapes: Mapping[str, ModelShape] | None,
) -> str:
    """Return the GPU plan and the estimate of a step's time as text.

    `shapes`: sizes of hypothetical models; None for the run's models.
    """
    shapes, lines = shapes or model_shapes(config), [describe(gpus)]
    if size:
        shape = shapes["actor"]
        lines.insert(
            0,
            f"for hypothetical models of {shape.parameters:,} parameters as "
            f"{' and '.join(model_sections(config))}: {shape.layers} layers of {shape.hidden}, "
            f"{shape.attention.heads} heads, {shape.attention.kv_heads} key-value heads",
        )
    name = visible[0].name if len(visible) >= gpus.count else None
    if not gpus.problems and (time := estimate(config, gpus, shapes, name)):
        lines += ["", time]
    return "\n".join(lines)


def overview(config: RunConfig, only: RoleName | None = None) -> str:
    """Return the text that a run shows at its start: models, tasks with renderings, devices.

    `only` is the role whose model is the only one in use, or None.
    """
    return "\n".join([_models(config, only), _tasks(config), _devices(config)])


def _toml(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the lines of `table` as TOML: first its values, then its sub-tables.

    TOML has no null, so an unset value becomes a comment.
    """
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if prefix and values:
        yield f"\n[{prefix.removesuffix('.')}]"
    for name, value in values.items():
        yield (
            f"# {name} is unset"
            if value is None
            else f"{name} = {json.dumps(value, ensure_ascii=False)}"
        )
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{prefix}{name}.")


def _devices(config: RunConfig) -> str:
    lines = [
        f"{'engine':<12} {ENGINES[config.engine.kind].describe(config.engine)}",
        f"{'learner':<12} {LEARNERS[config.learner.kind].describe(config.learner)}",
    ]
    lines.append(f"{'environments':<12} {_hosts(config)}")
    return "\n".join(lines)


def _hosts(config: RunConfig) -> str:
    hostings = {spec.runtime.hosting for spec in tasks.specs(config).values()}
    counts = {
        "threads": (config.rollout.env_threads, "thread"),
        "processes": (config.rollout.env_processes, "process", "processes"),
    }
    return ", ".join(counted(*counts[hosting]) for hosting in counts if hosting in hostings)


def _hypothetical(config: RunConfig, shapes: Mapping[str, ModelShape]) -> str:
    """Return the sizes of the hypothetical models as text."""
    return "\n".join(
        f"{role:<10} hypothetical, {shapes[role].parameters:,} parameters (--size)"
        for role in model_sections(config)
    )


def _models(config: RunConfig, only: RoleName | None = None) -> str:
    models = [
        _model(role, section.model, config.profile(role)) + _adapter(config, role)
        for role, section in model_sections(config, only).items()
    ]
    untrained = [] if only else _untrained_warnings(config)
    return "\n".join([*models, *untrained, *_writer_warnings(config)])


def _untrained_warnings(config: RunConfig) -> list[str]:
    """Return the warnings about packaged models as published."""
    published = {name: str(imported_folder(name)) for name in PACKAGED_MODELS}
    names = ",".join(config.tasks)
    commands = {
        ("actor", "compact"): f"--preset NAME --from drills --role actor --tasks {names}",
        ("extractor", "compact"): f"--preset NAME --from drills --role extractor --tasks {names}",
        ("actor", "full"): f"--from scripted --model NAME --tasks {names}",
        ("extractor", "full"): f"--from FILE.jsonl --role extractor --model NAME --tasks {names}",
    }
    return [
        f"warning: {role}.model is {name} as published, and hardly any of its replies can be used "
        f"(docs/results/language-models.md, Prompts). Train it first: crl sft "
        f"{commands[role, config.profile(role)].replace('NAME', name)}"
        for role, section in model_sections(config).items()
        for name, folder in published.items()
        if section.model in (name, folder)
    ]


def _writer_warnings(config: RunConfig) -> list[str]:
    """Return the warning about a tiny actor that writes notes although the extractor could."""
    writes = config.spec.notes and config.distils and config.writer == "actor"
    chosen = writes and hasattr(config.method_settings, "writer")
    if not chosen or config.profile("actor") != "compact":
        return []
    return [
        "warning: the actor writes notes on episodes, but tiny actors were not trained to write: "
        f"most of its answers are dropped. Add --set {config.spec.name}.writer=extractor"
    ]


def _adapter(config: RunConfig, role: RoleName) -> str:
    """Return the text for the adapter that is trained; empty if all weights are.

    An actor that is not trained is named here, and an extractor in `_experience`.
    """
    if role == "actor" and not config.actor.train:
        return "; not trained"
    if (adapter := config.trained_adapter(role)) is None:
        return ""
    layers = adapted_layers(model_sections(config)[role].model, adapter, role)
    count = adapter.rank * sum(sum(dims) for _, dims in layers)
    trained = f"{count:,} trainable parameters" if layers else "an unknown number of parameters"
    return f"; adapter of rank {adapter.rank} with {trained}"


def _model(role: RoleName, name: str, profile: Profile) -> str:
    key = f"{role}.model"
    path = find_model(name, key)
    if path is None:
        return (
            f"{role:<10} {name} (not downloaded: {download_command(name)})\n"
            f"           {PUBLISHED_SHAPES[name].parameters:,} parameters; profile {profile}"
        )
    if size := model_size(path, key):
        weights = f"{size.parameters:,} parameters, {size.bytes / 2**20:,.1f} MiB"
    else:
        weights = _counted_parameters(name, key)
    source = "bundled" if name in bundled_models() else "local directory"
    source = "GGUF file, converted to float32" if path.is_file() else source
    source = f"adapter of {adapter_base(path, key)}" if is_adapter(path) else source
    return f"{role:<10} {path} ({source})\n           {weights}; profile {profile}"


def _counted_parameters(name: str, key: str) -> str:
    """Return the text for the size of a model without safetensors files."""
    try:
        return f"{planned_shape(name, key).parameters:,} parameters"
    except ConfigError:  # the checks of the run or the GPU plan report it, if it is an error
        return "size unknown"


NO_SEARCH_RESULTS = (
    "warning: searches find hardly any experience, because it guides only episodes with its own "
    "{range}, and every group has a new one. Add --set bank.scope=task to share it"
)
"""Note on a task in which no goal or variation returns, for a bank that does not share it."""


def _searches_own_goal(config: RunConfig) -> bool:
    """Return whether training episodes search for experiences with their own goal.

    The attempts of Reflexion get their notes without a search.
    """
    notes = config.spec.notes
    searches = config.guides and (notes is None or notes.key is not None)
    return searches and config.bank.scope in GOAL_SCOPES


def _experience(config: RunConfig) -> str:
    extractor, bank, retrieval = config.extractor, config.bank, config.retrieval
    training = (
        f"one training step per {counted(extractor.batch, 'credit unit')}"
        if config.trains_extractor
        else "not trained"
    )
    writing = (
        f"the {config.writer} writes notes on episodes"
        if config.spec.notes
        else "every episode is distilled"
    )
    writing = "frozen: nothing is distilled" if bank.frozen else writing
    place = "variation" if bank.scope == "variation" else "goal"
    sizes = {f" per {place}": bank.max_per_goal, "": bank.max_entries}
    bounds = [
        f"{counted(limit, 'experience')}{scope}"
        for scope, limit in sizes.items()
        if limit is not None
    ]
    ranges = {
        "shared": ", shared by all tasks",
        "goal": ", each experience for its own goal",
        "variation": ", each experience for its own variation of a task",
    }
    shared = ranges.get(bank.scope, "")
    limits = (
        f"at most {' and '.join(bounds)} (evicts by {bank.evict})"
        if bounds
        else "any number of experiences"
    )
    guidance = config.spec.guidance
    guided = (guidance and guidance.text(config.method_settings)) or (
        f"{config.guided_members} of {config.rollout.group_size} members are guided, one "
        f"experience per {retrieval.per}"
    )
    return "\n".join(
        [
            *([f"extractor  {training}"] if config.with_extractor else []),
            f"bank       {writing}; {limits}; "
            f"{f'starts from {_origin(config)}' if bank.init else 'starts empty'}{shared}",
            f"embedder   {_embedder(config.embedder)}",
            f"retrieval  {guided}, chosen by {_choice(retrieval)}"
            if config.guides
            else "retrieval  no agent is shown an experience",
            *(
                [f"questions  at most {config.ask.limit} per guided episode"]
                if config.ask.enabled
                else []
            ),
            *(
                [
                    "critic     the actor accepts, refines or rejects each retrieved experience"
                    + _warmup(config)
                ]
                if config.critic.enabled
                else []
            ),
        ]
    )


def _origin(config: RunConfig) -> str:
    """Return the bank that the run starts from, with the method of its run if it is another one."""
    file = Path(config.bank.init).parent / "config.json"
    try:
        method = json.loads(file.read_text("utf-8"))["config"]["method"]
    except (OSError, ValueError, KeyError, TypeError):  # a bank without its run
        return config.bank.init
    other = method in set(BUNDLED_METHODS) - {config.method}
    return f"{config.bank.init} of a run of {method}" if other else config.bank.init


def _choice(retrieval: RetrievalSection) -> str:
    policy = retrieval_policy(retrieval.choice)
    return policy.description + (
        f"; {percent(retrieval.trial_share)} of searches choose the least retrieved one"
        if retrieval.trial_share and policy.trials
        else ""
    )


def _warmup(config: RunConfig) -> str:
    batches = config.critic.warmup
    return (
        f"; warm-up of {counted(batches, 'batch', 'batches')} without experience" if batches else ""
    )


def _embedder(section: EmbedderSection) -> str:
    if section.is_url:
        return f"{section.name} at {section.model}"
    if not section.is_encoder:
        return section.model
    vllm = section.kind == "vllm"
    place = "in a vLLM pooling engine" if vllm else f"on {device_text(section.device)}"
    return f"{section.model} {place}"


def _tasks(config: RunConfig) -> str:
    profile = config.profile("actor")
    specs = tasks.specs(config)
    data_notes, sources = tasks.data_notes(specs), tasks.train_sources(config, specs)
    lines = []
    for name, task in config.tasks.items():
        reason = (
            f"the actor has the {profile} profile"
            if task.rendering == profile
            else "set in the config"
        )
        extra_turns = task.extra_turns if config.plays_overtime else 0
        drawn, returns = _drawn(config, task, sources[name])
        lines += [
            f"{name}  {task.rendering} rendering: {reason}",
            f"  {counted(task.max_turns, 'turn')} of at most "
            f"{counted(task.max_response_tokens, 'token')}, context {task.context}"
            + (
                f"; unfinished episodes continue for at most {counted(extra_turns, 'turn')}, "
                "only for distillation"
                if extra_turns
                else ""
            ),
            *([f"  {drawn}"] if drawn else []),
            *(
                [f"  {NO_SEARCH_RESULTS.format(range=config.bank.scope)}"]
                if not returns and _searches_own_goal(config)
                else []
            ),
            *([f"  {data_notes[name]}"] if name in data_notes else []),
        ]
    return "\n".join(lines)


def _drawn(config: RunConfig, task: TaskConfig, source: TaskSource) -> tuple[str, bool]:
    """Return the text for what a train stream draws, and whether a goal or variation can return.

    A stream with a length has so many games, in shuffled rounds. Only streams of places read the
    settings of the stream. The text is empty for other streams.
    """
    if isinstance(source, Sized):
        groups = config.rollout.groups * config.run.steps // len(config.tasks)
        text = f"{counted(len(source), 'game')} in shuffled rounds, {counted(groups, 'group')}"
        share = max(0.0, 1 - len(source) / max(groups, 1))
        returns = share > 0 or config.bank.scope != "variation"  # other games may have the goal
        return f"{text}: {percent(share)} of the groups repeat a game", returns
    if "place" not in source.draw(1)[0].params:
        return "", True
    stream = task.stream
    if stream.permanent == 0 and stream.visits == 1:
        return "a new place in every group", False
    text = (
        f"{counted(stream.places, 'place')}, {stream.permanent} permanent, "
        f"the others for {counted(stream.visits, 'visit')}"
    )
    return text, True


def _batch(config: RunConfig) -> str:
    rollout, steps = config.rollout, config.run.steps
    rollouts = rollout.groups * rollout.group_size
    guidance = config.spec.guidance
    bound = "at most " if guidance and guidance.attempts else ""
    staleness = (
        f"at most {counted(rollout.max_staleness, 'step')} ahead"
        if rollout.max_staleness
        else "synchronous"
    )
    groups = counted(rollout.groups, "group")
    per_step = min(config.actor.minibatches, config.rollout.groups)
    updates = steps * per_step if config.actor.train else 0
    minibatches = (
        f"{counted(per_step, 'minibatch', 'minibatches')} of about "
        f"{rollouts / per_step:g} rollouts, one optimizer update each"
    )
    return "\n".join(
        [
            f"a step    {groups} × {rollout.group_size} members = {bound}{rollouts} rollouts, "
            f"{staleness}{_shares(config)}",
            f"          {minibatches if updates else 'the actor is not trained'}",
            f"training  {counted(steps, 'step')} × {rollouts} = "
            f"{bound}{steps * rollouts:,} episodes, {updates:,} updates",
            f"eval      {_evaluations(config)} at temperature {config.eval.temperature:g}",
        ]
    )


def _shares(config: RunConfig) -> str:
    """Return the text for each task's share of a batch; empty with one task."""
    share, remainder = divmod(config.rollout.groups, len(config.tasks))
    shares = f"{share} or {counted(share + 1, 'group')}" if remainder else counted(share, "group")
    return f"; {shares} of each task" if len(config.tasks) > 1 else ""


def _evaluations(config: RunConfig) -> str:
    """Return the text for the number of evaluations and their episodes.

    A run is evaluated at its start, at its end, and every `eval_every` steps. The first evaluation
    builds no online bank, unless it is the only one.
    """
    steps, every = config.run.steps, config.run.eval_every
    evals = 1 if steps == 0 else 2 + ((steps - 1) // every if every else 0)
    sets = sum(_set_episodes(task, config) for task in config.tasks.values())
    online = sum(_online_episodes(task, config) for task in config.tasks.values())
    if not online or evals == 1:
        return (
            f"{counted(evals, 'time')} × {counted(sets + online, 'episode')} = "
            f"{evals * (sets + online):,} episodes"
        )
    total = evals * (sets + online) - online
    return (
        f"{counted(evals, 'time')}, {counted(sets, 'episode')} at the start "
        f"and {sets + online:,} later = at most {total:,} episodes"
    )


def _set_episodes(task: TaskConfig, config: RunConfig) -> int:
    """Return the number of episodes of a task's eval sets in one evaluation.

    Seen and unseen tasks are played without experience. In a run with experience, seen tasks are
    also played with it.
    """
    return task.eval.seen * (2 if config.guides else 1) + task.eval.unseen


def _online_episodes(task: TaskConfig, config: RunConfig) -> int:
    """Return the number of episodes of a task's online evaluation; 0 if no online bank is built.

    All visits are played with the online bank. The visits that count are also played without it.
    """
    has_online = config.distils and config.guides
    return (
        task.eval.online_places * (VISITS + VISITS - UNCOUNTED_VISITS) * MEMBERS
        if has_online
        else 0
    )
