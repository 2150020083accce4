"""Assembly of a run: the parts are built from the config and connected.

Four files help: `models.py` opens engines and learners, and `bank.py` the experience bank. In
`crl.planning`, `context.py` chooses the prompts, and `tasks.py` environments and task streams.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crl.config import RunConfig
from crl.config.models import Profile
from crl.config.resume import measured_settings
from crl.config.schema import RATE_WINDOW
from crl.engines.background import BackgroundEngine
from crl.envs.base import EnvSpec
from crl.evaluation.evaluate import Evaluator
from crl.evaluation.online import OnlineEvaluator
from crl.evaluation.probe import AdviceProbe
from crl.evaluation.scheduling import EpisodeScheduler, no_report
from crl.failures import reported
from crl.modeling.memory import GpuAssignment
from crl.monitor.resources import no_resources, resource_metrics
from crl.monitor.run_dir import RunDir
from crl.monitor.stages import stage
from crl.planning import tasks
from crl.planning.context import agent_prompts, critic_prompt
from crl.planning.gpu_plan import assigned_gpus
from crl.planning.methods import build_method
from crl.prompts import hashes
from crl.protocols import (
    Advice,
    Engine,
    EnvironmentPool,
    Learner,
    Method,
    Monitor,
    Retriever,
    State,
    TaskSource,
)
from crl.records.writer import EpisodeWriter
from crl.rollout.attempts import Attempts, Members
from crl.rollout.collector import Collector
from crl.rollout.critic import Critic
from crl.rollout.decoding import Decoding
from crl.rollout.episode import AcceptAll, EpisodeRunner, Limits, NullRetriever, Observer
from crl.rollout.gate import StalenessGate
from crl.rollout.perplexity import PerplexityReward
from crl.rollout.rates import SuccessRates
from crl.rollout.rerender import Rerenderer
from crl.rollout.scripted import FreePlanner, NoSampler, ScriptedRunner
from crl.rollout.waves import DirectSampler, LockstepSampler, Sampler, SequentialSampler
from crl.run.bank import BankSource, RunBank, open_bank_copy, open_experience
from crl.run.critic import CriticParts, Warmup
from crl.run.experience import (
    ReadOnlyRetriever,
)
from crl.run.loop import (
    Actor,
    Checkpoints,
    Measurements,
    Outputs,
    Rollouts,
    Schedule,
    TrainingLoop,
)
from crl.run.models import (
    ModelRole,
    actor_model,
    extractor_model,
    open_role_engine,
    open_role_learner,
    print_to_stderr,
)
from crl.run.progress import evaluation_bar
from crl.run.supervision.health import EpisodeHealth
from crl.run.supervision.supervisor import Supervisor, noted, noted_episode
from crl.seeds import derive_seed
from crl.wording import printable_lines


@asynccontextmanager
async def open_training_loop(
    config: RunConfig,
    run: RunDir,
    monitor: Monitor,
    *,
    started: float | None = None,
    checkpoint: Path | None = None,
    retriever_override: Retriever | None = None,
    progress_bar: bool = False,
) -> AsyncIterator[TrainingLoop]:
    """Yield the training loop of a run, ready to start. Close its parts on exit.

    * `started`: time (`time.monotonic`) at which the run began. None: now.
    * `checkpoint`: checkpoint of this run from which it continues. The caller restores it.
    * `retriever_override`: retriever that replaces the bank. Nothing is distilled then (a control
      experiment).
    * `progress_bar`: allows a progress bar in the terminal.
    """
    async with AsyncExitStack() as stack:
        with reported():  # parts may be slow to close
            yield await _training_loop(
                config,
                run,
                monitor,
                stack,
                started=time.monotonic() if started is None else started,
                checkpoint=checkpoint,
                retriever_override=retriever_override,
                progress_bar=progress_bar,
            )


async def _training_loop(
    config: RunConfig,
    run: RunDir,
    monitor: Monitor,
    stack: AsyncExitStack,
    *,
    started: float,
    checkpoint: Path | None,
    retriever_override: Retriever | None,
    progress_bar: bool,
) -> TrainingLoop:
    supervisor = Supervisor(config.run, monitor.note, run.append_to_log)
    specs, gpus = tasks.specs(config), assigned_gpus(config)
    method, actor = build_method(config, specs), actor_model(config, monitor.note)
    method = replace(method, distiller=None, extractor=None) if retriever_override else method
    learner, engine = await _open_actor(config, gpus, actor, method, monitor, stack)
    pool = tasks.environment_pool(config, specs, stack, monitor.note)
    stream = tasks.train_stream(config, specs)
    replay = method.step.replay(stream) if method.step.replay and method.distiller else None
    source: TaskSource = replay or stream
    background = BackgroundEngine(engine) if _writes_in_background(config, method) else None
    experience, bank = await open_experience(
        config, specs, gpus, method, run, monitor, stack,
        actor_engine=background or engine,
        checkpoint=checkpoint, progress_bar=progress_bar,
        on_progress=supervisor.watchdog.progress,
        perplexity=_perplexity_reward(config, method, engine, actor),
        replay=replay,
    )  # fmt: skip
    retriever = experience.retriever if experience else retriever_override or NullRetriever()
    runner = replace(
        _runner(config, specs, actor, method, engine, pool, retriever),
        observer=Observer(supervisor.episode),
    )
    critic = _critic_parts(config, specs, runner) if config.critic.enabled else None
    if critic:
        runner = replace(runner, judge=critic.critic)
    evaluator, probe = _evaluation_parts(
        config, specs, method, runner, engine, bank, critic.success_rates if critic else None,
        report=partial(monitor.progress, "evaluation"),
    )  # fmt: skip
    members = None
    if method.advice.between_attempts and experience:
        members = Attempts(experience, method.advice.count, in_order=config.run.deterministic)
    collector = _collector(
        config, runner, source, method, checkpoint, members,
        report=partial(monitor.progress, "rollouts"),
    )  # fmt: skip
    with_extractor = experience is not None and config.with_extractor
    models = _model_dirs(config, actor, with_extractor=with_extractor)
    return TrainingLoop(
        method,
        _schedule(config),
        Rollouts(source, collector, pool, runner.decoding.clock),
        Actor(learner, engine, Rerenderer(runner.decoding.renderer, runner.limits), background),
        experience,
        critic,
        _measurements(config, specs, evaluator, probe),
        _outputs(config, run, monitor, stack, models, started, supervisor),
    )


def _measurements(
    config: RunConfig, specs: Mapping[str, EnvSpec], evaluator: Evaluator, probe: AdviceProbe
) -> Measurements:
    resources = no_resources if config.run.deterministic else resource_metrics
    return Measurements(evaluator, probe, _measured_settings(config, specs), resources)


def _writes_in_background(config: RunConfig, method: Method) -> bool:
    """Return whether the trained actor writes the bank, and no episode waits for its answers."""
    writes = method.distiller is not None and config.writer == "actor"
    return writes and config.actor.train and not method.advice.between_attempts


async def _open_actor(
    config: RunConfig, gpus: Mapping[str, GpuAssignment], actor: ModelRole, method: Method,
    monitor: Monitor, stack: AsyncExitStack,
) -> tuple[Learner | None, Engine]:  # fmt: skip
    """Start the actor's learner, if it is trained, and its engine."""
    learner = None
    if config.actor.train:
        with stage(monitor, "starting the actor's learner"):
            learner = await open_role_learner(config, gpus, actor, method.actor.loss, stack)
    with stage(monitor, "starting the actor's engine"):
        engine = await open_role_engine(config, gpus, actor, stack, trained=config.actor.train)
    return learner, engine


def _outputs(
    config: RunConfig, run: RunDir, monitor: Monitor, stack: AsyncExitStack,
    models: Mapping[str, Path], started: float, supervisor: Supervisor,
) -> Outputs:  # fmt: skip
    """Return the outputs of a run. `models`: directory of the initial model of each role."""
    episodes = EpisodeWriter(run.episodes, config.run.keep_episodes)
    stack.push_async_callback(episodes.aclose)
    profiles: dict[str, Profile] = {
        role: config.profile(role) for role in ("actor", "extractor") if role in models
    }
    adapters = frozenset(role for role in models if getattr(config, role).lora.rank)
    return Outputs(monitor, run, models, profiles, adapters, episodes, started, supervisor)


def _perplexity_reward(
    config: RunConfig, method: Method, engine: Engine, actor: ModelRole
) -> PerplexityReward | None:
    """Return the source of the perplexity-reduction reward; None without this reward."""
    settings = config.extractor.perplexity
    if not settings.weight or method.extractor is None:
        return None
    return PerplexityReward(engine, actor.renderer, settings)


def _measured_settings(config: RunConfig, specs: Mapping[str, EnvSpec]) -> dict[str, Any]:
    """Return what evaluations depend on: settings, and the SHA-256 of the prompts of agents.

    The SHA-256 of a prompt that agents do not read is None.
    """
    read = agent_prompts(config, specs)
    prompts = {
        f"prompts.{name}": digest if name in read else None
        for name, digest in hashes(config.prompts.files).items()
    }
    return prompts | measured_settings(config)


def _model_dirs(config: RunConfig, actor: ModelRole, *, with_extractor: bool) -> dict[str, Path]:
    """Return the directory of each role's initial model."""
    extractor = {"extractor": extractor_model(config).path} if with_extractor else {}
    return {"actor": actor.path} | extractor


def _collector(
    config: RunConfig, runner: EpisodeRunner, source: TaskSource, method: Method,
    checkpoint: Path | None, members: Members | None = None,
    report: Callable[[int, int], object] = no_report,
) -> Collector:  # fmt: skip
    rollout = config.rollout
    completed_steps = int(checkpoint.name) if checkpoint else 0
    gate = StalenessGate(rollout.groups, rollout.max_staleness, completed_steps)
    return Collector(
        runner,
        source,
        method.planner,
        gate,
        group_size=rollout.group_size,
        steps=config.run.steps,
        members=members,
        report=report,
    )


def _schedule(config: RunConfig) -> Schedule:
    return Schedule(
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        minibatches=config.actor.minibatches,
        seed=config.run.seed,
        eval_every=config.run.eval_every,
        checkpoints=Checkpoints(
            config.run.checkpoint_every,
            0.0 if config.run.deterministic else 60 * config.run.checkpoint_minutes,
            config.run.keep_last,
            config.run.keep_every,
        ),
        probe_every=config.eval.probe_every if "probe" in config.uses else 0,
    )


@asynccontextmanager
async def open_collector(
    config: RunConfig, run: RunDir, monitor: Monitor, *, scripted: bool = False
) -> AsyncIterator[tuple[Collector, Supervisor]]:
    """Yield the collector of a run whose actor is not trained, and the supervisor of its episodes.

    The bank of the run, if any, is only read. With `scripted`, the scripted players of the
    environments play instead of the actor, without experience, and no model is loaded.
    """
    async with AsyncExitStack() as stack:
        with reported():  # parts may be slow to close
            open_parts = _open_scripted_collector if scripted else _open_collector
            yield await open_parts(config, run, monitor, stack)


async def _open_scripted_collector(
    config: RunConfig, run: RunDir, monitor: Monitor, stack: AsyncExitStack
) -> tuple[Collector, Supervisor]:
    specs = tasks.specs(config)
    method, actor = build_method(config, specs), actor_model(config, monitor.note)
    supervisor = Supervisor(config.run, monitor.note, run.append_to_log)
    decoding = Decoding(
        NoSampler(), actor.renderer, config.actor.max_context_tokens, 1.0, config.run.seed
    )
    pool = tasks.environment_pool(config, specs, stack, monitor.note)
    runner = ScriptedRunner(
        decoding, pool, method.context, method.shaper, NullRetriever(), episode_limits(config),
        observer=Observer(supervisor.episode), players=tasks.scripted_players(specs),
    )  # fmt: skip
    free = replace(method, planner=FreePlanner())
    collector = _collector(config, runner, tasks.train_stream(config, specs), free, None)
    return collector, supervisor


async def _open_collector(
    config: RunConfig, run: RunDir, monitor: Monitor, stack: AsyncExitStack
) -> tuple[Collector, Supervisor]:
    specs, gpus = tasks.specs(config), assigned_gpus(config, learners=False)
    method, actor = build_method(config, specs), actor_model(config, monitor.note)
    engine = await open_role_engine(config, gpus, actor, stack)
    pool = tasks.environment_pool(config, specs, stack, monitor.note)
    retriever: Retriever = NullRetriever()
    if config.bank.init and method.distiller:
        asked = config.ask.enabled and config.with_extractor
        extractor = extractor_model(config) if asked else None
        source = BankSource(Path(config.bank.init), extractor, foreign=True)
        bank = await open_bank_copy(config, specs, gpus, source, stack, actor_engine=engine)
        retriever = ReadOnlyRetriever(bank.manager)
    supervisor = Supervisor(config.run, monitor.note, run.append_to_log)
    runner = replace(
        _runner(config, specs, actor, method, engine, pool, retriever),
        observer=Observer(supervisor.episode),
    )
    collector = _collector(config, runner, tasks.train_stream(config, specs), method, None)
    return collector, supervisor


@asynccontextmanager
async def open_evaluator(
    config: RunConfig, actor: ModelRole, source: BankSource | None, rates_state: State | None
) -> AsyncIterator[Evaluator]:
    """Yield the evaluator of a model, with a copy of a bank.

    No learner and no train stream are built. `rates_state` holds the success rates that the actor
    sees if it judges experience.
    """
    async with AsyncExitStack() as stack:
        specs, gpus = tasks.specs(config), assigned_gpus(config, learners=False)
        method, health = build_method(config, specs), EpisodeHealth(config.run.max_error_rate)
        engine, pool = (
            await open_role_engine(config, gpus, actor, stack),
            tasks.environment_pool(config, specs, stack),
        )
        bank = None
        if source:
            bank = await open_bank_copy(config, specs, gpus, source, stack, actor_engine=engine)
        runner = replace(
            _runner(config, specs, actor, method, engine, pool, NullRetriever()),
            observer=Observer(partial(noted_episode, health, _print_lines)),
        )
        rates = None
        if config.critic.enabled and rates_state:
            rates = _success_rates(config)
            rates.load_state(rates_state)
        with evaluation_bar() as report:
            yield _evaluation_parts(config, specs, method, runner, engine, bank, rates, report)[0]
        with noted(_print_lines):
            health.evaluation_finished()


def _print_lines(text: str) -> None:
    """Print text of an environment on stderr."""
    print_to_stderr(printable_lines(text))


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
            top_p=config.actor.top_p,
            top_k=config.actor.top_k,
        ),
        pool=pool,
        context=method.context,
        shaper=method.shaper,
        retriever=retriever,
        limits=episode_limits(
            config,
            overtime=config.plays_overtime and method.distiller is not None,
            max_questions=config.ask.questions,
            advice=method.advice,
        ),
    )


def episode_limits(
    config: RunConfig, *, overtime: bool = False, max_questions: int = 0,
    advice: Advice | None = None,
) -> dict[str, Limits]:  # fmt: skip
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
            advice or Advice(),
        )
        for name, task in config.tasks.items()
    }


def _sampler(config: RunConfig, engine: Engine) -> Sampler:
    return LockstepSampler(engine) if config.run.deterministic else DirectSampler(engine)


def _critic(config: RunConfig, runner: EpisodeRunner, rates: SuccessRates) -> Critic:
    """Return the critic that judges retrieved experiences for the episodes of `runner`."""
    tokens = {
        name: config.critic.max_response_tokens or task.max_response_tokens
        for name, task in config.tasks.items()
    }
    return Critic(
        runner.decoding,
        critic_prompt(config.profile("actor"), config.prompts.files),
        rates,
        tokens,
    )


def _success_rates(config: RunConfig) -> SuccessRates:
    return SuccessRates(min_episodes=config.critic.min_episodes, window=RATE_WINDOW)


def _critic_parts(
    config: RunConfig, specs: Mapping[str, EnvSpec], runner: EpisodeRunner
) -> CriticParts:
    rates = _success_rates(config)
    warmup_runner = replace(
        runner,
        retriever=NullRetriever(),
        limits=episode_limits(config),
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


# ── measurements ──────────────────────────────────────────────────────────────────────────────────


def _evaluation_parts(
    config: RunConfig, specs: Mapping[str, EnvSpec], method: Method, runner: EpisodeRunner,
    engine: Engine, bank: RunBank | None, rates: SuccessRates | None,
    report: Callable[[int, int], object],
) -> tuple[Evaluator, AdviceProbe]:  # fmt: skip
    """Return the evaluator and the advice probe.

    Both use a separate root of random draws: no eval episode shares a draw with a train episode. In
    a deterministic run, their completions do not depend on the episodes that run at the same time.
    `rates` are the success rates shown to the actor when it judges experience in evaluations. None:
    the actor is not asked to judge. The probe's advice is never judged. `report` is that of
    `EpisodeScheduler`.
    """
    sets = tasks.eval_sets(config, specs)
    sampler = SequentialSampler(engine) if config.run.deterministic else DirectSampler(engine)
    decoding = replace(
        runner.decoding,
        sampler=sampler,
        temperature=config.eval.temperature,
        seed=derive_seed(config.run.seed, "eval"),
        top_p=1.0,
        top_k=0,
    )
    eval_runner = replace(runner, decoding=decoding, retriever=NullRetriever(), judge=AcceptAll())
    probe_runner = replace(eval_runner, limits=episode_limits(config))
    if rates:
        eval_runner = replace(eval_runner, judge=_critic(config, eval_runner, rates))
    set_runner = replace(
        eval_runner,
        limits=episode_limits(config, max_questions=config.ask.questions, advice=method.advice),
    )
    scheduler = EpisodeScheduler(
        _max_in_flight(config), in_order=config.run.deterministic, report=report
    )
    online = None
    # A frozen bank learns nothing about unseen places.
    bank = bank if config.guides else None
    if bank and method.distiller and not config.bank.frozen:
        places = tasks.online_tasks(config, specs)
        online = OnlineEvaluator(
            eval_runner, places, bank.open_scratch,
            bank.open_untrained if bank.untrained_engine else None, scheduler,
            method.distiller,
        )  # fmt: skip
    retriever = ReadOnlyRetriever(bank.manager) if bank else None
    evaluator = Evaluator(set_runner, sets, scheduler, bank=retriever, online=online)
    return evaluator, AdviceProbe(probe_runner, tasks.probe_tasks(config, specs), scheduler)


def _max_in_flight(config: RunConfig) -> int:
    """Return the number of episodes that an evaluation keeps in flight at most.

    By default, this is the number of training, for which engine and environments are sized.
    """
    if config.eval.concurrency:
        return config.eval.concurrency
    rollout = config.rollout
    return rollout.groups * rollout.group_size * (1 + rollout.max_staleness)
