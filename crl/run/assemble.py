"""Assembly of a run: the parts are built from the config and connected.

This file chooses the concrete class of each part. Two files help it: `context.py` builds the
actor's prompts, and `tasks.py` builds the environments and the task streams.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from crl.config import RunConfig, resolve_model
from crl.config.models import model_profile
from crl.config.schema import RATE_WINDOW, ActorSection, ExtractorSection
from crl.embedders import open_embedder
from crl.embedders.cached import CachedEmbedder
from crl.engines.backends import ENGINES, ServedModel, open_engine
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.evaluation.diagnostics import Diagnostics
from crl.evaluation.evaluate import Evaluator
from crl.evaluation.online import OnlineEvaluator
from crl.evaluation.probe import AdviceProbe
from crl.evaluation.scheduling import EpisodeScheduler
from crl.learners.backends import LEARNERS, TrainedModel, open_learner
from crl.learners.step import TrainSettings
from crl.manager import (
    Distilled,
    ExperienceManager,
    ManagerSettings,
    Progress,
    Prompts,
    QueueSettings,
)
from crl.manager.storage.database import copy_database
from crl.methods.parts.asking import CompactRefinePrompt, FullRefinePrompt
from crl.methods.parts.distilling import CompactDistilPrompt, FullDistilPrompt, turns_text
from crl.methods.parts.judging import CompactCriticPrompt, FullCriticPrompt
from crl.methods.parts.merging import CompactMergePrompt, FullMergePrompt
from crl.modeling.loading import (
    load_tokenizer,
    precision,
    resolve_device,
    stop_ids,
)
from crl.modeling.memory import GpuAssignment
from crl.modeling.tokens import ChatRenderer
from crl.monitor.run_dir import RunDir
from crl.planning import tasks
from crl.planning.context import chat_context
from crl.planning.gpu_plan import assigned_gpus
from crl.planning.machine_checks import require_assigned
from crl.planning.preflight import require_compatible_extractor
from crl.prompts import prompt
from crl.protocols import (
    Embedder,
    Engine,
    EnvironmentPool,
    Learner,
    Loss,
    Method,
    Monitor,
    Retriever,
)
from crl.rollout.collector import Collector
from crl.rollout.critic import Critic
from crl.rollout.decoding import Decoding
from crl.rollout.episode import AcceptAll, EpisodeRunner, Limits, NullRetriever
from crl.rollout.gate import StalenessGate
from crl.rollout.rates import SuccessRates
from crl.rollout.rerender import Rerenderer
from crl.rollout.waves import DirectSampler, LockstepSampler, Sampler
from crl.run.checkpoint import read_state
from crl.run.critic import CriticParts, Warmup
from crl.run.experience import (
    ExperiencePipeline,
    ExtractorTrainer,
    PipelineSettings,
    ReadOnlyRetriever,
)
from crl.run.loop import Actor, Measurements, Outputs, Rollouts, Schedule, TrainingLoop
from crl.run.progress import embedding_progress
from crl.seeds import derive_seed

NO_GPU = GpuAssignment()

EMBEDDING_CACHE_BYTES = 96 << 20
"""Bytes of float32 vectors that the embedding cache holds: 65,536 texts at 384 dimensions."""


@asynccontextmanager
async def open_training_loop(
    config: RunConfig,
    run: RunDir,
    monitor: Monitor,
    *,
    retriever_override: Retriever | None = None,
    progress_bar: bool = False,
) -> AsyncIterator[TrainingLoop]:
    """Yield the training loop of a run, ready to start. Close its parts on exit.

    `retriever_override` is a retriever that replaces the bank. Nothing is distilled then (a control
    experiment). `progress_bar` allows a progress bar in the terminal.
    """
    async with AsyncExitStack() as stack:
        specs, gpus = tasks.specs(config), assigned_gpus(config)
        method, actor = _method(config, specs), _actor(config)
        if retriever_override:
            method = replace(method, distiller=None, extractor=None)
        learner = await _learner(config, gpus, actor, method.actor.loss, stack)
        engine, pool = (
            await _engine(config, gpus, actor, stack),
            tasks.environment_pool(config, specs, stack, monitor.note),
        )
        experience, bank = await _experience(
            config, specs, gpus, method, run, monitor, stack, progress_bar=progress_bar
        )
        retriever = experience.retriever if experience else retriever_override or NullRetriever()
        runner = _runner(config, specs, actor, method, engine, pool, retriever)
        critic = _critic_parts(config, specs, runner) if config.critic.enabled else None
        if critic:
            runner = replace(runner, judge=critic.critic)
        source = tasks.train_stream(config, specs)
        gate = StalenessGate(config.rollout.groups, config.rollout.max_staleness)
        evaluator, probe = _evaluation_parts(
            config, specs, runner, engine, bank, critic.success_rates if critic else None
        )
        collector = Collector(
            runner,
            source,
            method.planner,
            gate,
            group_size=config.rollout.group_size,
            steps=config.run.steps,
        )
        models = {"actor": actor.path}
        if experience:
            models["extractor"] = resolve_model(config.extractor.model)
        yield TrainingLoop(
            method,
            _schedule(config),
            Rollouts(source, collector, pool),
            Actor(learner, engine, Rerenderer(runner.decoding.renderer, runner.limits)),
            experience,
            critic,
            Measurements(evaluator, probe),
            Outputs(monitor, run.checkpoints, models),
        )


def _schedule(config: RunConfig) -> Schedule:
    return Schedule(
        steps=config.run.steps,
        minibatches=config.actor.minibatches,
        seed=config.run.seed,
        eval_every=config.run.eval_every,
        checkpoint_every=config.run.checkpoint_every,
        probe_every=config.eval.probe_every if config.spec.probe else 0,
    )


@asynccontextmanager
async def open_evaluator(
    config: RunConfig, checkpoint: Path, run: RunDir
) -> AsyncIterator[Evaluator]:
    """Yield the evaluator of a finished run: models of `checkpoint` and a copy of the run's bank.

    No learner and no train stream are built. Raise `ConfigError` if the run's bank file is missing.
    """
    async with AsyncExitStack() as stack:
        specs, gpus = tasks.specs(config), assigned_gpus(config, learners=False)
        method, actor = _method(config, specs), replace(_actor(config), path=checkpoint / "actor")
        engine, pool = (
            await _engine(config, gpus, actor, stack),
            tasks.environment_pool(config, specs, stack),
        )
        bank = None
        if method.distiller:
            trained = checkpoint / "extractor"
            extractor = (
                replace(_extractor(config), path=trained)
                if trained.is_dir()
                else _extractor(config)
            )
            progress = embedding_progress(partial(print, file=sys.stderr))
            factory = await _bank_factory(config, specs, gpus, progress, stack)
            directory = Path(stack.enter_context(TemporaryDirectory()))
            if not run.bank.is_file():
                raise ConfigError(
                    "run",
                    str(run.path),
                    f"its bank file {run.bank.name} is missing",
                    "Restore the file",
                )
            await copy_database(run.bank, directory / run.bank.name)
            extractor_engine = await _engine(config, gpus, extractor, stack)
            manager = await factory.open(directory / run.bank.name, extractor_engine, stack)
            manager.advance(int(checkpoint.name))
            bank = RunBank(
                manager, extractor_engine, factory, partial(_untrained_engine, config, gpus)
            )
        runner = _runner(config, specs, actor, method, engine, pool, NullRetriever())
        rates = None
        if config.critic.enabled:
            rates = SuccessRates(min_episodes=config.critic.min_episodes, window=RATE_WINDOW)
            rates.load_state(read_state(checkpoint)["success_rates"])
        yield _evaluation_parts(config, specs, runner, engine, bank, rates)[0]


# ── the models ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ModelRole:
    """Actor or extractor of a run, with its section of the config."""

    name: Literal["actor", "extractor"]
    path: Path
    section: ActorSection | ExtractorSection

    @property
    def key(self) -> str:
        """Config key that names the model."""
        return f"{self.name}.model"

    @property
    def renderer(self) -> ChatRenderer:
        tokenizer = load_tokenizer(self.path, self.key)
        return ChatRenderer(tokenizer, stop_ids(self.path, tokenizer, self.key))


def _actor(config: RunConfig) -> ModelRole:
    return ModelRole("actor", resolve_model(config.actor.model), config.actor)


def _extractor(config: RunConfig) -> ModelRole:
    return ModelRole(
        "extractor", resolve_model(config.extractor.model, "extractor.model"), config.extractor
    )


def _method(config: RunConfig, specs: Mapping[str, EnvSpec]) -> Method:
    context = chat_context(
        config.tasks, specs, config.prompts.files,
        can_ask=config.ask.enabled, retrieve_by_goal=config.bank.key_text_weight is not None,
    )  # fmt: skip
    method = config.spec.build(config, config.method_settings, context)
    if not isinstance(method, Method):
        reason = f"its function build returned {type(method).__name__}, not a Method"
        raise ConfigError("method", config.method, reason, "Return a crl.protocols.Method")
    return method


async def _learner(
    config: RunConfig,
    gpus: Mapping[str, GpuAssignment],
    role: ModelRole,
    loss: Loss,
    stack: AsyncExitStack,
) -> Learner:
    section = config.learner
    assigned = gpus.get(f"{role.name} learner", NO_GPU)
    if not LEARNERS[section.kind].in_process and _learner_device(config).type == "cuda":
        require_assigned("learner.device", section.device, assigned.gpus, "learner.device=cpu")
    model = TrainedModel(
        role.name,
        role.path,
        _precision(config, role),
        role.section.optimizer,
        loss,
        _train_settings(config, role.section),
    )
    learner = await open_learner(
        section,
        model,
        assigned,
        receivers=ENGINES[config.engine.kind].nccl_receivers(config.engine),
        deterministic=config.run.deterministic,
    )
    stack.push_async_callback(learner.aclose)
    return learner


def _train_settings(config: RunConfig, section: ActorSection | ExtractorSection) -> TrainSettings:
    actor = section if isinstance(section, ActorSection) else None
    return TrainSettings(
        temperature=section.temperature,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        max_grad_norm=section.optimizer.max_grad_norm,
        recompute=actor is not None and actor.old_logp == "recompute",
        importance_cap=actor.importance_cap if actor else None,
        kl_coef=section.kl_coef,
        activation_checkpointing=config.learner.activation_checkpointing,
    )


async def _engine(
    config: RunConfig, gpus: Mapping[str, GpuAssignment], role: ModelRole, stack: AsyncExitStack
) -> Engine:
    assigned = gpus.get(f"{role.name} engine", NO_GPU)
    return await _open_engine(config, assigned, role, config.engine.replicas, stack)


async def _untrained_engine(
    config: RunConfig, gpus: Mapping[str, GpuAssignment], stack: AsyncExitStack
) -> Engine:
    """Open an engine with one replica of the extractor that the run started with.

    It runs in addition to all other engines.
    """
    return await _open_engine(
        config, gpus.get("untrained extractor", NO_GPU), _extractor(config), 1, stack
    )


async def _open_engine(
    config: RunConfig,
    assigned: GpuAssignment,
    role: ModelRole,
    replicas: int,
    stack: AsyncExitStack,
) -> Engine:
    section = config.engine
    if not ENGINES[section.kind].in_process:
        require_assigned("engine.kind", section.kind, assigned.gpus, "engine.kind=torch")
    engine = await open_engine(
        section,
        ServedModel(
            role.name, role.path, _precision(config, role), role.section.max_context_tokens
        ),
        assigned,
        replicas=replicas,
        deterministic=config.run.deterministic,
    )
    stack.push_async_callback(engine.aclose)
    return engine


def _learner_device(config: RunConfig) -> torch.device:
    return resolve_device(config.learner.device, "learner.device")


def _precision(config: RunConfig, role: ModelRole) -> Literal["float32", "bfloat16"]:
    """Return the precision of learner and engine.

    Both use the same one, so the engine samples with exactly the weights that the learner
    publishes.
    """
    dtype = precision(config.learner.precision, role.path, _learner_device(config))
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def _runner(
    config: RunConfig, specs: Mapping[str, EnvSpec], role: ModelRole, method: Method,
    engine: Engine, pool: EnvironmentPool, retriever: Retriever,
) -> EpisodeRunner:  # fmt: skip
    return EpisodeRunner(
        decoding=Decoding(
            _sampler(config, engine),
            role.renderer,
            max_context=config.actor.max_context_tokens,
            temperature=config.actor.temperature,
            seed=config.run.seed,
        ),
        pool=pool,
        context=method.context,
        shaper=method.shaper,
        retriever=retriever,
        limits=_limits(
            config,
            overtime=config.distils and method.distiller is not None,
            max_questions=config.ask.questions,
        ),
    )


def _limits(config: RunConfig, *, overtime: bool, max_questions: int) -> dict[str, Limits]:
    """Return the limits of each task's episodes, by task name.

    Without `overtime` no episode is played past its turn limit: overtime is useful only for
    distillation. `max_questions` is the number of questions that a guided episode may ask.
    """
    return {
        name: Limits(
            task.max_turns,
            task.max_response_tokens,
            task.window,
            task.extra_turns if overtime else 0,
            max_questions,
        )
        for name, task in config.tasks.items()
    }


def _sampler(config: RunConfig, engine: Engine) -> Sampler:
    return LockstepSampler(engine) if config.run.deterministic else DirectSampler(engine)


def _critic(config: RunConfig, runner: EpisodeRunner, rates: SuccessRates) -> Critic:
    """Return the critic that judges retrieved experiences for the episodes of `runner`."""
    compact = model_profile(_actor(config).path) == "compact"
    tokens = {
        name: config.critic.max_response_tokens or task.max_response_tokens
        for name, task in config.tasks.items()
    }
    return Critic(
        runner.decoding,
        CompactCriticPrompt()
        if compact
        else FullCriticPrompt(prompt("critic", config.prompts.files)),
        rates,
        tokens,
    )


def _critic_parts(
    config: RunConfig, specs: Mapping[str, EnvSpec], runner: EpisodeRunner
) -> CriticParts:
    rates = SuccessRates(min_episodes=config.critic.min_episodes, window=RATE_WINDOW)
    warmup_runner = replace(
        runner, retriever=NullRetriever(), limits=_limits(config, overtime=False, max_questions=0)
    )
    source = tasks.train_stream(config, specs)
    warmup = Warmup(
        warmup_runner,
        source,
        config.critic.warmup,
        config.rollout.groups,
        config.rollout.group_size,
    )
    return CriticParts(_critic(config, runner, rates), rates, warmup)


# ── extractor and bank ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class BankFactory:
    """Factory of banks: everything that a bank needs except its file and its extractor's engine."""

    embedder: CachedEmbedder
    renderer: ChatRenderer
    prompts: Prompts
    settings: ManagerSettings
    seed: int
    progress: Progress

    @property
    def without_trials(self) -> BankFactory:
        """This factory with `retrieval.trial_share` = 0: no search is a trial.

        Evaluations use it, so that a rarely retrieved experience never replaces the best-known one.
        """
        retrieval = self.settings.retrieval.model_copy(update={"trial_share": 0.0})
        return replace(self, settings=replace(self.settings, retrieval=retrieval))

    async def open(
        self, path: Path, engine: Engine, stack: AsyncExitStack,
        on_distilled: Callable[[Distilled], None] | None = None, *, background: bool = False,
    ) -> ExperienceManager:  # fmt: skip
        """Open the bank at `path`. `stack` closes it.

        `on_distilled` is called with each distilled answer. `background` is whether the bank
        distils in the background, see `QueueSettings.bounded`.
        """
        settings = replace(self.settings, queue=QueueSettings(bounded=background))
        manager = await ExperienceManager.open(
            path, engine, self.embedder, self.renderer, self.prompts, settings,
            seed=self.seed, on_distilled=on_distilled, progress=self.progress,
        )  # fmt: skip
        stack.push_async_callback(manager.aclose)
        return manager


@dataclass(frozen=True)
class RunBank:
    """Run's bank, and the scratch banks that evaluations make from it."""

    manager: ExperienceManager
    engine: Engine
    factory: BankFactory
    untrained_engine: Callable[[AsyncExitStack], Awaitable[Engine]]
    """Function that opens an engine with the extractor that the run started with."""

    @asynccontextmanager
    async def open_scratch(
        self, on_distilled: Callable[[Distilled], None]
    ) -> AsyncIterator[ExperienceManager]:
        """Yield a temporary copy of the bank, at the bank's step and without trials."""
        async with AsyncExitStack() as stack:
            path = Path(stack.enter_context(TemporaryDirectory())) / "bank.sqlite"
            await self.manager.export_copy(path)
            manager = await self.factory.without_trials.open(path, self.engine, stack, on_distilled)
            manager.advance(self.manager.step)
            yield manager

    @asynccontextmanager
    async def open_untrained(
        self, on_distilled: Callable[[Distilled], None]
    ) -> AsyncIterator[ExperienceManager]:
        """Yield an empty temporary bank with the extractor that the run started with."""
        async with AsyncExitStack() as stack:
            path = Path(stack.enter_context(TemporaryDirectory())) / "bank.sqlite"
            yield await self.factory.open(
                path, await self.untrained_engine(stack), stack, on_distilled
            )


async def _bank_factory(
    config: RunConfig, specs: Mapping[str, EnvSpec], gpus: Mapping[str, GpuAssignment],
    progress: Progress, stack: AsyncExitStack,
) -> BankFactory:  # fmt: skip
    settings = ManagerSettings(
        bank=config.bank,
        retrieval=config.retrieval,
        extractor=config.extractor,
        ask=config.ask,
        credit_window_steps=config.rollout.max_staleness + 8,
        # With the critic, rewards contain the verdict's score, whatever the episode's outcome.
        # Subtracting the batch mean removes that score again.
        centred=config.extractor.baseline == "batch" or config.critic.enabled,
        deterministic=config.run.deterministic,
    )
    embedder = await stack.enter_async_context(_embedder(config, gpus.get("embedder", NO_GPU)))
    cached = CachedEmbedder(embedder, max(1, EMBEDDING_CACHE_BYTES // (4 * embedder.dim)))
    seed, renderer = derive_seed(config.run.seed, "bank"), _extractor(config).renderer
    prompts = _prompts(config, specs, renderer)
    return BankFactory(cached, renderer, prompts, settings, seed, progress)


def _embedder(config: RunConfig, assigned: GpuAssignment) -> AbstractAsyncContextManager[Embedder]:
    if config.embedder.kind == "vllm":
        require_assigned("embedder.kind", "vllm", assigned.gpus, "embedder.kind=local")
    return open_embedder(
        config.embedder,
        deterministic=config.run.deterministic,
        gpus=assigned.gpus,
        fraction=assigned.fraction,
    )


def _prompts(config: RunConfig, specs: Mapping[str, EnvSpec], renderer: ChatRenderer) -> Prompts:
    """Return the prompts for the extractor's profile.

    A compact extractor reads digests (whole texts if the environment has no digest). A full
    extractor reads whole episodes. Raise `ConfigError` if the extractor cannot read the run's
    episodes.
    """
    require_compatible_extractor(config)
    extractor, ask = config.extractor, config.ask.enabled
    if model_profile(_extractor(config).path, "extractor.model") == "compact":
        digests = {name: spec.curriculum.digest or turns_text for name, spec in specs.items()}
        return Prompts(
            CompactDistilPrompt(digests),
            CompactMergePrompt(),
            CompactRefinePrompt(digests) if ask else None,
        )
    text = partial(prompt, overrides=config.prompts.files)
    max_prompt_tokens = extractor.max_context_tokens - extractor.max_response_tokens
    return Prompts(
        FullDistilPrompt(
            text("distil"),
            renderer,
            max_prompt_tokens,
            text("vote") if config.bank.evict_votes is not None else None,
        ),
        FullMergePrompt(text("merge")),
        FullRefinePrompt(text("refine"), renderer, max_prompt_tokens) if ask else None,
    )


async def _experience(
    config: RunConfig, specs: Mapping[str, EnvSpec], gpus: Mapping[str, GpuAssignment],
    method: Method, run: RunDir, monitor: Monitor, stack: AsyncExitStack, *, progress_bar: bool,
) -> tuple[ExperiencePipeline, RunBank] | tuple[None, None]:  # fmt: skip
    if method.distiller is None:
        return None, None
    role = _extractor(config)
    engine = await _engine(config, gpus, role, stack)
    factory = await _bank_factory(
        config, specs, gpus, embedding_progress(monitor.note, progress_bar=progress_bar), stack
    )
    advisors = {name: spec.curriculum.advisor for name, spec in specs.items()}
    diagnostics = Diagnostics({name: advisor for name, advisor in advisors.items() if advisor})
    run_name = "run"
    if config.bank.init:
        await ExperienceManager.start_from(Path(config.bank.init), run.bank)
        # The ids of this run must differ from those already in the bank.
        run_name += hashlib.sha256(run.bank.read_bytes()).hexdigest()[:8]
    background = not config.run.deterministic
    manager = await factory.open(
        run.bank, engine, stack, diagnostics.record_distilled, background=background
    )
    trainer = None
    if method.extractor:
        learner = await _learner(config, gpus, role, method.extractor.loss, stack)
        trainer = ExtractorTrainer(
            manager, method.extractor, learner, engine, monitor, diagnostics.answers
        )
    experience = ExperiencePipeline(
        manager, engine, method.distiller, trainer, diagnostics, factory.embedder, monitor,
        PipelineSettings(
            run_name,
            background=background,
            merge_every=0 if config.bank.frozen else config.extractor.merge_every,
            group_baseline=config.extractor.baseline == "group",
        ),
    )  # fmt: skip
    return experience, RunBank(manager, engine, factory, partial(_untrained_engine, config, gpus))


# ── measurements ──────────────────────────────────────────────────────────────────────────────────


def _evaluation_parts(
    config: RunConfig, specs: Mapping[str, EnvSpec], runner: EpisodeRunner, engine: Engine,
    bank: RunBank | None, rates: SuccessRates | None,
) -> tuple[Evaluator, AdviceProbe]:  # fmt: skip
    """Return the evaluator and the advice probe.

    Both use a separate root of random draws: no eval episode shares a draw with a train episode.
    `rates` are the success rates shown to the actor when it judges experience in evaluations. None:
    the actor is not asked to judge. The probe's advice is never judged.
    """
    sets = tasks.eval_sets(config, specs)
    decoding = replace(
        runner.decoding,
        sampler=_sampler(config, engine),
        temperature=config.eval.temperature,
        seed=derive_seed(config.run.seed, "eval"),
    )
    eval_runner = replace(runner, decoding=decoding, retriever=NullRetriever(), judge=AcceptAll())
    probe_runner = replace(eval_runner, limits=_limits(config, overtime=False, max_questions=0))
    if rates:
        eval_runner = replace(eval_runner, judge=_critic(config, eval_runner, rates))
    set_runner = replace(
        eval_runner, limits=_limits(config, overtime=False, max_questions=config.ask.questions)
    )
    scheduler = EpisodeScheduler(_max_in_flight(config), in_order=config.run.deterministic)
    online = None
    if bank and not config.bank.frozen:  # a frozen bank learns nothing about unseen places
        places = tasks.online_tasks(config, specs)
        online = OnlineEvaluator(
            eval_runner, places, bank.open_scratch, bank.open_untrained, scheduler
        )
    retriever = ReadOnlyRetriever(bank.manager) if bank else None
    evaluator = Evaluator(set_runner, sets, scheduler, bank=retriever, online=online)
    return evaluator, AdviceProbe(probe_runner, tasks.probe_tasks(config, specs), scheduler)


def _max_in_flight(config: RunConfig) -> int:
    """Return the number of episodes that training keeps in flight at most.

    Engine and environments are sized for this number.
    """
    rollout = config.rollout
    return rollout.groups * rollout.group_size * (1 + rollout.max_staleness)
