"""From a config to a run's parts, wired: the only file that names concrete classes."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crl.config import RunConfig, TaskConfig, resolve_model
from crl.engines.torch import TorchEngine
from crl.envs.base import EnvSpec, Rendering
from crl.envs.host import ThreadHost
from crl.errors import ConfigError
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.modeling import load_model, load_tokenizer, resolve_device, stop_ids
from crl.prompts import Overrides, fill, prompt
from crl.protocols import Engine, EnvironmentPool, Method, Monitor
from crl.rollout.collector import Collector
from crl.rollout.episode import EpisodeRunner, Limits
from crl.rollout.gate import StalenessGate
from crl.rollout.waves import Direct, Waves
from crl.run import tasks
from crl.run.evaluate import Evaluator
from crl.run.loop import Loop, Schedule
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@asynccontextmanager
async def training(config: RunConfig, checkpoints: Path, monitor: Monitor) -> AsyncIterator[Loop]:
    """A run ready to start; its parts are closed on the way out, whatever happened."""
    async with AsyncExitStack() as stack:
        specs = tasks.specs(config)
        method, path = _method(config, specs), resolve_model(config.actor.model)
        learner = _learner(config, method, path)
        stack.push_async_callback(learner.aclose)
        engine, pool = await _engine(config, path, stack), await _pool(config, specs, stack)
        runner = _runner(config, path, method, engine, pool)
        source = tasks.train_stream(config, specs)
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
        specs = tasks.specs(config)
        engine, pool = await _engine(config, model, stack), await _pool(config, specs, stack)
        yield _evaluator(config, specs, _runner(config, model, _method(config, specs), engine, pool), engine)


def _method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    module = importlib.import_module(f"crl.methods.{config.method}")
    return module.build(config, {name: _instructions(task, specs[name], config.prompts.files) for name, task in config.tasks.items()})


def _instructions(task: TaskConfig, spec: EnvSpec, overrides: Overrides) -> str:
    """The system prompt; none for tiny models, which were taught the game's texts alone."""
    if task.rendering == "compact":
        return ""
    example = spec.actions[0] if spec.actions else "your action"
    return fill(prompt("actor", overrides), turns=task.turns, actions=spec.action_format, example=example)


def _learner(config: RunConfig, method: Method, path: Path) -> LocalLearner:
    actor = config.actor
    settings = TrainSettings(
        temperature=actor.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        max_grad_norm=actor.optimizer.max_grad_norm,
        recompute=actor.old_logp == "recompute",
        importance_cap=actor.importance_cap,
    )
    model = load_model(path, resolve_device(config.learner.device, "learner.device"))
    return LocalLearner(model, method.actor.loss, actor.optimizer, settings, threads=config.learner.threads)


async def _engine(config: RunConfig, path: Path, stack: AsyncExitStack) -> Engine:
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA's matrix products refuse to be deterministic
        torch.use_deterministic_algorithms(True)
    model = load_model(path, resolve_device(config.engine.device, "engine.device"))
    _require_context(config, model)
    engine = TorchEngine(
        model,
        max_batch=config.engine.max_batch,
        max_context=config.actor.max_context_tokens,
        threads=config.engine.threads,
    )
    stack.push_async_callback(engine.aclose)
    return engine


def _require_context(config: RunConfig, model: PreTrainedModel) -> None:
    longest, wanted = getattr(model.config, "max_position_embeddings", None), config.actor.max_context_tokens
    if longest is not None and wanted > longest:
        raise ConfigError("actor.max_context_tokens", wanted, f"the model reads at most {longest} tokens", f"Choose at most {longest}")


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
    sets = tasks.eval_sets(config, specs)
    sampler = Waves(engine) if config.run.deterministic else Direct(engine)
    seed = derive_seed(config.run.seed, "eval")
    own = replace(runner, sampler=sampler, temperature=config.eval.temperature, seed=seed)
    return Evaluator(own, sets, concurrency=config.rollout.groups * config.rollout.group_size)
