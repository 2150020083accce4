"""From a config to a run's parts, wired: the only file that names concrete classes."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from crl.config import RunConfig, TaskConfig, resolve_model
from crl.engines.torch import TorchEngine
from crl.envs.base import EnvSpec, Rendering, StreamSettings
from crl.envs.host import ThreadHost
from crl.envs.mixture import Mixture
from crl.envs.registry import get_spec
from crl.errors import ConfigError
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.modeling import load_model, load_tokenizer, resolve_device, stop_ids
from crl.prompts import prompt
from crl.protocols import Engine, EnvironmentPool, Method, Monitor, TaskSource
from crl.rollout.collector import Collector
from crl.rollout.episode import EpisodeRunner, Limits
from crl.rollout.gate import StalenessGate
from crl.rollout.waves import Direct, Waves
from crl.run.evaluate import EvalSet, Evaluator
from crl.run.loop import Loop, Schedule
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Split, Task


@asynccontextmanager
async def training(config: RunConfig, checkpoints: Path, monitor: Monitor) -> AsyncIterator[Loop]:
    """A run ready to start; its parts are closed on the way out, whatever happened."""
    async with AsyncExitStack() as stack:
        specs = _specs(config)
        method, path = _method(config, specs), resolve_model(config.actor.model)
        learner = _learner(config, method, path)
        stack.push_async_callback(learner.aclose)
        engine, pool = await _engine(config, path, stack), await _pool(config, specs, stack)
        runner = _runner(config, path, method, engine, pool)
        source = _source(config, specs)
        gate = StalenessGate(config.rollout.groups, config.rollout.max_staleness)
        size = config.rollout.group_size
        yield Loop(
            method=method,
            schedule=Schedule(
                steps=config.run.steps,
                minibatches=config.actor.minibatches,
                seed=config.run.seed,
                eval_every=config.run.eval_every,
                checkpoint_every=config.run.checkpoint_every,
            ),
            source=source,
            collector=Collector(runner, source, method.planner, gate, group_size=size, steps=config.run.steps),
            engine=engine,
            learner=learner,
            evaluator=_evaluator(config, specs, runner, engine),
            monitor=monitor,
            checkpoints=checkpoints,
            companions={"actor": path},
        )


@asynccontextmanager
async def evaluation(config: RunConfig, model: Path) -> AsyncIterator[Evaluator]:
    """The run's evaluator with `model` as the actor: no learner, no train stream."""
    async with AsyncExitStack() as stack:
        specs = _specs(config)
        engine, pool = await _engine(config, model, stack), await _pool(config, specs, stack)
        yield _evaluator(config, specs, _runner(config, model, _method(config, specs), engine, pool), engine)


def _specs(config: RunConfig) -> dict[str, EnvSpec]:
    return {name: get_spec(task.env) for name, task in config.tasks.items()}


def _method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    module = importlib.import_module(f"crl.methods.{config.method}")
    return module.build(config, {name: _instructions(task, specs[name]) for name, task in config.tasks.items()})


def _instructions(task: TaskConfig, spec: EnvSpec) -> str:
    """The system prompt; none for tiny models, which were taught the game's texts alone."""
    if task.rendering == "compact":
        return ""
    example = spec.actions[0] if spec.actions else "your action"
    return prompt("actor").format(turns=task.turns, actions=spec.action_format, example=example)


def _source(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Mixture:
    sources: dict[str, TaskSource] = {}
    for name, spec in specs.items():
        stream = _stream(config.tasks[name])
        with _refusable(f"tasks.{name}.stream", asdict(stream)):
            sources[name] = spec.task_source(config.run.seed, stream)
    return Mixture(sources)


def _stream(task: TaskConfig) -> StreamSettings:
    return StreamSettings(**task.stream.model_dump())


@contextmanager
def _refusable(key: str, value: object) -> Iterator[None]:
    """What an environment cannot offer it refuses with a `ValueError`; the value is the user's to correct."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(key, value, str(error), "Choose another value") from error


def _learner(config: RunConfig, method: Method, path: Path) -> LocalLearner:
    actor = config.actor
    settings = TrainSettings(
        temperature=actor.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        max_grad_norm=actor.optimizer.max_grad_norm,
        recompute=actor.old_logp == "recompute",
        importance_cap=actor.importance_cap,
    )
    model = load_model(path, resolve_device(config.learner.device))
    return LocalLearner(model, method.actor.loss, actor.optimizer, settings, threads=config.learner.threads)


async def _engine(config: RunConfig, path: Path, stack: AsyncExitStack) -> Engine:
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    engine = TorchEngine(
        load_model(path, resolve_device(config.engine.device)),
        max_batch=config.engine.max_batch,
        max_context=config.actor.max_context_tokens,
        threads=config.engine.threads,
    )
    stack.push_async_callback(engine.aclose)
    return engine


async def _pool(config: RunConfig, specs: Mapping[str, EnvSpec], stack: AsyncExitStack) -> EnvironmentPool:
    hosted: dict[str, tuple[EnvSpec, Rendering]] = {name: (specs[name], task.rendering) for name, task in config.tasks.items()}
    host = ThreadHost(hosted, threads=config.rollout.env_threads, deadline=config.rollout.env_deadline)
    stack.push_async_callback(host.aclose)
    return host


def _runner(config: RunConfig, path: Path, method: Method, engine: Engine, pool: EnvironmentPool) -> EpisodeRunner:
    tokenizer = load_tokenizer(path)
    return EpisodeRunner(
        sampler=Waves(engine) if config.run.deterministic else Direct(engine),
        pool=pool,
        context=method.context,
        shaper=method.shaper,
        renderer=ChatRenderer(tokenizer, stop_ids(path, tokenizer)),
        limits={name: Limits(task.turns, task.max_response_tokens, task.window) for name, task in config.tasks.items()},
        max_context=config.actor.max_context_tokens,
        temperature=config.actor.temperature,
        seed=config.run.seed,
    )


def _evaluator(config: RunConfig, specs: Mapping[str, EnvSpec], runner: EpisodeRunner, engine: Engine) -> Evaluator:
    """Evaluations draw from a root of their own: no eval episode shares a draw with a train episode."""
    sets = {key: tasks for name, spec in specs.items() for key, tasks in _eval_sets(config, name, spec).items()}
    sampler = Waves(engine) if config.run.deterministic else Direct(engine)
    seed = derive_seed(config.run.seed, "eval")
    own = replace(runner, sampler=sampler, temperature=config.eval.temperature, seed=seed)
    return Evaluator(own, sets, concurrency=config.rollout.groups * config.rollout.group_size)


def _eval_sets(config: RunConfig, name: str, spec: EnvSpec) -> dict[EvalSet, tuple[Task, ...]]:
    task, stream = config.tasks[name], _stream(config.tasks[name])
    sizes: dict[Split, int] = {"known": task.eval.known, "new": task.eval.new}
    sets: dict[EvalSet, tuple[Task, ...]] = {}
    for split, size in sizes.items():
        if size:
            with _refusable(f"tasks.{name}.eval.{split}", size):
                sets[name, split] = tuple(replace(t, name=name) for t in spec.eval_tasks(split, size, config.run.seed, stream))
    return sets
