"""Tasks of a run: environments, train stream and eval sets.

Needs no torch, so a dry run can check them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from crl import embedders, engines
from crl.config.models import profile_of, resolve_model
from crl.config.schema import RunConfig, TaskConfig
from crl.envs.base import EnvSpec, Hosting, Rendering, StreamSettings, named_for_run
from crl.envs.hosting.processes import ProcessHost
from crl.envs.hosting.threads import Hosts, ThreadHost
from crl.envs.mixture import Mixture
from crl.envs.registry import get_spec, require_extra
from crl.errors import ConfigError
from crl.evaluation.evaluate import EvalSet
from crl.evaluation.online import OnlineTask
from crl.evaluation.probe import ProbeTask
from crl.manager.storage.database import check_bank
from crl.protocols import TaskSource
from crl.types import Split, Task


def specs(config: RunConfig) -> dict[str, EnvSpec]:
    """Return the environment of every task, by task name.

    Raise `ConfigError` if an environment does not exist or its extra is not installed.
    """
    result = {
        name: get_spec(task.env, key=f"tasks.{name}.env") for name, task in config.tasks.items()
    }
    for name, spec in result.items():
        require_extra(spec, key=f"tasks.{name}.env")
    return result


def data_notes(specs: Mapping[str, EnvSpec]) -> dict[str, str]:
    """Return a note for each task that is not played on the official data, by task name.

    The note says that its metrics are not comparable with published ones.
    """
    data_by_task = {name: spec.data() for name, spec in specs.items() if spec.data}
    return {
        name: f"played on {data.description}: metrics are not comparable with published results"
        for name, data in data_by_task.items()
        if not data.official
    }


def require_models(config: RunConfig) -> None:
    """Raise `ConfigError` if a model of the run is not on this machine."""
    resolve_model(config.actor.model)
    if config.with_experience:
        resolve_model(config.extractor.model, "extractor.model")


def require_compatible_extractor(config: RunConfig) -> None:
    """Raise `ConfigError` if a compact extractor would have to read full episodes, or to vote.

    A compact extractor is trained only on digests of compact episodes.
    """
    if profile_of(config.extractor.model, "extractor.model") == "full":
        return
    if config.bank.evict_votes is not None:
        reason = (
            f"needs a language model as extractor, but {config.extractor.model} "
            "is a tiny model that was not trained to vote"
        )
        raise ConfigError("bank.evict_votes", config.bank.evict_votes, reason, "Leave it unset")
    for name, task in config.tasks.items():
        if task.rendering == "full":
            reason = f"reads only the compact rendering, but tasks.{name}.rendering is full"
            remedy = "Use a language model as extractor, or a tiny model as actor"
            if profile_of(config.actor.model) == "compact":
                remedy = (
                    f"Set tasks.{name}.rendering to compact: "
                    'write rendering = "compact" in the table [compact] of the task\'s file'
                )
            raise ConfigError("extractor.model", config.extractor.model, reason, remedy)


def require_prompts_used(config: RunConfig) -> None:
    """Raise `ConfigError` for a prompt file of the user that no model of the run reads.

    Tiny models read no prompt files: they know only the game's texts.
    """
    used_prompts: set[str] = set()
    if any(task.rendering == "full" for task in config.tasks.values()):
        used_prompts |= {"actor", "experience"} if config.with_experience else {"actor"}
        used_prompts |= {"ask"} if config.ask.enabled and config.with_experience else set()
    if config.critic.enabled and profile_of(config.actor.model) == "full":
        used_prompts |= {"critic"}
    if config.with_experience and profile_of(config.extractor.model, "extractor.model") == "full":
        used_prompts |= (
            {"distil"}
            | ({"merge"} if config.extractor.merge_every else set())
            | ({"vote"} if config.bank.evict_votes else set())
        )
        used_prompts |= {"refine"} if config.ask.enabled else set()
    for name, path in config.prompts.files.items():
        if name not in used_prompts:
            remedy = f"Remove it, or {_prompt_remedy(config, name)}"
            raise ConfigError(
                f"prompts.{name}", str(path), "is not used by any model of this run", remedy
            )


def require_eval_support(config: RunConfig, specs: Mapping[str, EnvSpec]) -> None:
    """Raise `ConfigError` for an evaluation that an environment does not support.

    Online evaluation needs `revisit`, the advice probe needs `advisor`.
    """
    for name, spec in specs.items():
        sizes = config.tasks[name].eval
        if sizes.online_places and not spec.revisit:
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
        if sizes.probe_places and not spec.advisor:
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


def _prompt_remedy(config: RunConfig, prompt: str) -> str:
    """Return advice on how a run could use `prompt`.

    The advice is another method, else the switch that is off, else language models.
    """
    if prompt != "actor" and not config.with_experience:
        return f"choose another method than {config.spec.name}, which has no experience"
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


def require_bank(config: RunConfig) -> None:
    """Raise `ConfigError` if the run cannot start from its `bank.init`."""
    if config.with_experience and config.bank.init:
        remedy = "Use the bank.sqlite of another run, written by this version of crl"
        check_bank(Path(config.bank.init), "bank.init", remedy, require_entries=config.bank.frozen)


def require_embedder(config: RunConfig) -> None:
    """Raise `ConfigError` if the embedder is not available.

    The check neither loads a model nor calls an endpoint.
    """
    if config.with_experience:
        embedders.require_embedder(config.embedder)


def require_engine(config: RunConfig) -> None:
    """Raise `ConfigError` if the engine of the models or of the embedder is not installed."""
    if config.engine.kind == "vllm":
        engines.prepare_vllm("engine.kind", "vllm")
    if config.with_experience and config.embedder.kind == "vllm":
        engines.prepare_vllm("embedder.kind", "vllm")


def environment_pool(
    config: RunConfig,
    specs: Mapping[str, EnvSpec],
    stack: AsyncExitStack,
    note: Callable[[str], object] = lambda text: None,
) -> Hosts:
    """Return the pool from which episodes acquire environments. `stack` closes it.

    `note` is called with a message for each replaced worker process.
    """
    hosted: dict[str, tuple[EnvSpec, Rendering]] = {
        name: (specs[name], task.rendering) for name, task in config.tasks.items()
    }
    rollout = config.rollout
    threads = ThreadHost(
        _hosted(hosted, "threads"), threads=rollout.env_threads, timeout=rollout.env_timeout
    )
    processes = ProcessHost(
        _hosted(hosted, "processes"),
        processes=rollout.env_processes,
        timeout=rollout.env_timeout,
        note=note,
    )
    hosts = Hosts(
        {
            name: threads if spec.hosting == "threads" else processes
            for name, (spec, _) in hosted.items()
        }
    )
    stack.push_async_callback(hosts.aclose)
    return hosts


def _hosted(
    tasks: Mapping[str, tuple[EnvSpec, Rendering]], hosting: Hosting
) -> dict[str, tuple[EnvSpec, Rendering]]:
    return {
        name: (spec, rendering)
        for name, (spec, rendering) in tasks.items()
        if spec.hosting == hosting
    }


def train_stream(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Mixture:
    """Return the run's stream of training tasks.

    Raise `ConfigError` if an environment cannot provide a stream with the run's settings.
    """
    sources: dict[str, TaskSource] = {}
    for name, spec in specs.items():
        stream = _stream(name, config.tasks[name])
        with _config_errors(f"tasks.{name}.stream", asdict(stream)):
            sources[name] = spec.task_source(config.run.seed, stream)
    return Mixture(sources)


def tasks_with_places(config: RunConfig, specs: Mapping[str, EnvSpec]) -> set[str]:
    """Return the names of the tasks whose train stream consists of named places.

    Other tasks ignore the stream settings. Raise `ConfigError` as `train_stream` does.
    """
    return {
        task.name for task in train_stream(config, specs).draw(len(specs)) if "place" in task.params
    }


def eval_sets(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[EvalSet, tuple[Task, ...]]:
    """Return the run's fixed eval sets, without those of size 0.

    Raise `ConfigError` if an environment cannot provide a set.
    """
    sets: dict[EvalSet, tuple[Task, ...]] = {}
    for name, spec in specs.items():
        task = config.tasks[name]
        sizes: dict[Split, int] = {"seen": task.eval.seen, "unseen": task.eval.unseen}
        for split, size in sizes.items():
            if size:
                with _config_errors(f"tasks.{name}.eval.{split}", size):
                    tasks = spec.eval_tasks(split, size, config.run.seed, _stream(name, task))
                sets[name, split] = _checked_tasks(tasks, size, "eval_tasks", name, task)
    return sets


def first_tasks(
    name: str, task: TaskConfig, spec: EnvSpec, split: Split, n: int, seed: int
) -> tuple[Task, ...]:
    """Return the first `n` tasks that a run with this seed trains on (or evaluates on).

    Raise `ConfigError` if the environment cannot provide `n` tasks of `split`.
    """
    stream = _stream(name, task)

    def draw_first(n: int) -> Sequence[Task]:
        return (
            spec.task_source(seed, stream).draw(n)
            if split == "train"
            else spec.eval_tasks(split, n, seed, stream)
        )

    with _config_errors("split", split):
        draw_first(1)
    with _config_errors("episodes", n):
        tasks = draw_first(n)
    return _checked_tasks(tasks, n, "task_source" if split == "train" else "eval_tasks", name, task)


def online_tasks(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, OnlineTask]:
    """Return the unseen places of each task with an online evaluation, by task name.

    They are the first `eval.online_places` tasks of the unseen split. Raise `ConfigError` if the
    environment cannot provide as many.
    """
    result = {}
    for name, spec in specs.items():
        task = config.tasks[name]
        if task.eval.online_places and spec.revisit:
            with _config_errors(f"tasks.{name}.eval.online_places", task.eval.online_places):
                places = spec.eval_tasks(
                    "unseen", task.eval.online_places, config.run.seed, _stream(name, task)
                )
            result[name] = OnlineTask(
                _checked_tasks(places, task.eval.online_places, "eval_tasks", name, task),
                spec.revisit,
                spec.advisor,
            )
    return result


def probe_tasks(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, ProbeTask]:
    """Return the places of each task with an advice probe, by task name.

    Raise `ConfigError` if the environment cannot provide `eval.probe_places` places.
    """
    result = {}
    for name, spec in specs.items():
        task = config.tasks[name]
        if (size := task.eval.probe_places) and spec.advisor:
            with _config_errors(f"tasks.{name}.eval.probe_places", size):
                places = spec.probe_tasks(size)
            result[name] = ProbeTask(
                _checked_tasks(places, size, "probe_tasks", name, task), spec.advisor
            )
    return result


def _checked_tasks(
    tasks: Sequence[Task], n: int, function: str, name: str, task: TaskConfig
) -> tuple[Task, ...]:
    """Return `tasks` of an environment under the task's name in the run.

    Raise `ConfigError` if their number is not `n`. `function` names the function that returned
    them.
    """
    if len(tasks) != n:
        reason = f"its {function} returned {len(tasks):,} tasks, but {n:,} were requested"
        raise ConfigError(
            f"tasks.{name}.env",
            task.env,
            reason,
            f"Fix {function}: return as many as requested, "
            "or raise a ValueError that says how many exist",
        )
    return tuple(named_for_run(drawn, name) for drawn in tasks)


def _stream(name: str, task: TaskConfig) -> StreamSettings:
    settings = task.stream.model_dump()
    with _config_errors(f"tasks.{name}.stream", settings):
        return StreamSettings(**settings)


@contextmanager
def _config_errors(key: str, value: object) -> Iterator[None]:
    """Turn a `ValueError` inside the context into a `ConfigError` for `key` = `value`.

    An environment raises `ValueError` if it cannot provide what the setting asks for.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(key, value, str(error), "Choose another value") from error
