"""Tasks of a run: environments, train stream and eval sets.

Needs no torch, so a dry run can check them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from functools import partial

from crl.config.schema import EmbedderSection, RunConfig, SearchSection, TaskConfig
from crl.embedders.blocking import open_blocking
from crl.envs.base import EmbedTexts, EnvSpec, Hosting, Rendering, StreamSettings, named_for_run
from crl.envs.curriculum import ScriptedPlayer
from crl.envs.hosting.processes import ProcessHost
from crl.envs.hosting.threads import Hosts, ThreadHost
from crl.envs.mixture import Mixture
from crl.envs.registry import get_spec, require_extra
from crl.errors import ConfigError
from crl.evaluation.evaluate import EvalSet
from crl.evaluation.online import OnlineTask
from crl.evaluation.probe import ProbeTask
from crl.protocols import TaskSource
from crl.types import Split, Task


def specs(config: RunConfig) -> dict[str, EnvSpec]:
    """Return the environment of every task, by task name.

    Raise `ConfigError` like `task_spec`.
    """
    return {name: task_spec(name, task) for name, task in config.tasks.items()}


def task_spec(name: str, task: TaskConfig) -> EnvSpec:
    """Return the environment of a task with its settings.

    Raise `ConfigError` if the environment does not exist, if its extra is not installed, if it has
    no search tool and the task sets one up, or if a setting of the tool has no effect.
    """
    spec = get_spec(task.env, key=f"tasks.{name}.env")
    require_extra(spec, key=f"tasks.{name}.env")
    if spec.runtime.configured:
        with _errors_of_search(name):
            return spec.runtime.configured(task.search, partial(_open_embed, name))
    if task.search != SearchSection():
        reason = f"does not apply: the environment {spec.name} has no search tool"
        raise ConfigError(f"tasks.{name}.search", task.search.model_dump(), reason, "Leave it out")
    return spec


def _open_embed(name: str, section: EmbedderSection) -> EmbedTexts:
    """Open the embedder of a task's search tool. Raise `ConfigError` under the key of the task."""
    with _errors_of_search(name):
        return open_blocking(section)


@contextmanager
def _errors_of_search(name: str) -> Iterator[None]:
    """Raise `ConfigError` of a task's search tool under the key of the task."""
    try:
        yield
    except ConfigError as error:
        key = f"tasks.{name}.search.{error.key}"
        raise ConfigError(key, error.value, error.reason, error.remedy) from error


def data_notes(specs: Mapping[str, EnvSpec]) -> dict[str, str]:
    """Return a note for each task that is not played on the official data, by task name.

    The note says that its metrics are not comparable with published ones.
    """
    data_by_task = {name: spec.tasks.data() for name, spec in specs.items() if spec.tasks.data}
    return {
        name: f"played on {data.description}: metrics are not comparable with published results"
        for name, data in data_by_task.items()
        if not data.official
    }


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
            name: threads if spec.runtime.hosting == "threads" else processes
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
        if spec.runtime.hosting == hosting
    }


def train_stream(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Mixture:
    """Return the run's stream of training tasks. Raise `ConfigError` as `train_sources` does."""
    return Mixture(train_sources(config, specs))


def train_sources(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, TaskSource]:
    """Return the stream of training tasks of each task, by task name.

    Raise `ConfigError` if an environment cannot provide a stream with the run's settings.
    """
    sources: dict[str, TaskSource] = {}
    for name, spec in specs.items():
        stream = _stream(name, config.tasks[name])
        with _config_errors(f"tasks.{name}.stream", asdict(stream)):
            sources[name] = spec.tasks.train_stream(config.run.seed, stream)
    return sources


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
                    tasks = spec.tasks.eval_tasks(split, size, config.run.seed, _stream(name, task))
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
            spec.tasks.train_stream(seed, stream).draw(n)
            if split == "train"
            else spec.tasks.eval_tasks(split, n, seed, stream)
        )

    with _config_errors("--split", split):
        draw_first(1)
    with _config_errors("--episodes", n):
        tasks = draw_first(n)
    return _checked_tasks(
        tasks, n, "train_stream" if split == "train" else "eval_tasks", name, task
    )


def online_tasks(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, OnlineTask]:
    """Return the unseen places of each task with an online evaluation, by task name.

    They are the first `eval.online_places` tasks of the unseen split. Raise `ConfigError` if the
    environment cannot provide as many.
    """
    result = {}
    for name, spec in specs.items():
        task = config.tasks[name]
        if task.eval.online_places and spec.tasks.revisit:
            with _config_errors(f"tasks.{name}.eval.online_places", task.eval.online_places):
                places = spec.tasks.eval_tasks(
                    "unseen", task.eval.online_places, config.run.seed, _stream(name, task)
                )
            result[name] = OnlineTask(
                _checked_tasks(places, task.eval.online_places, "eval_tasks", name, task),
                spec.tasks.revisit,
                spec.curriculum.advisor,
            )
    return result


def scripted_players(
    specs: Mapping[str, EnvSpec],
) -> dict[str, Callable[[random.Random], ScriptedPlayer]]:
    """Return the maker of scripted players of each task, by task name.

    Raise `ConfigError` if a task has none.
    """
    players = {}
    for name, spec in specs.items():
        if spec.curriculum.scripted_player is None:
            reason = "has no scripted player, so nothing can demonstrate it"
            raise ConfigError("--tasks", name, reason, "Choose other tasks, or recorded episodes")
        players[name] = spec.curriculum.scripted_player
    return players


def probe_tasks(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, ProbeTask]:
    """Return the places of each task with an advice probe, by task name.

    Raise `ConfigError` if the environment cannot provide `eval.probe_places` places.
    """
    result = {}
    for name, spec in specs.items():
        task = config.tasks[name]
        curriculum = spec.curriculum
        if (size := task.eval.probe_places) and curriculum.advisor:
            with _config_errors(f"tasks.{name}.eval.probe_places", size):
                places = curriculum.probe_tasks(size)
            result[name] = ProbeTask(
                _checked_tasks(places, size, "probe_tasks", name, task), curriculum.advisor
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
