"""Rollouts without training: `crl rollout`."""

from __future__ import annotations

import asyncio

from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.evaluation.metrics import rollout_metrics
from crl.failures import TaskGroup
from crl.monitor.run_dir import RunDir
from crl.planning.methods import build_method
from crl.planning.tasks import specs
from crl.protocols import Monitor
from crl.records.writer import EpisodeWriter
from crl.run.assemble import open_collector
from crl.run.loop import Stopwatch


def require_playable(config: RunConfig) -> None:
    """Raise `ConfigError` if the episodes of the run's method need its training."""
    method, name = build_method(config, specs(config)), config.spec.name
    if method.advice.between_attempts:
        reason, switch = "reflects between attempts, but crl rollout writes no experience", ""
    elif method.step.intrinsic:
        reason = "has an intrinsic reward, which crl rollout does not compute"
        switch = "novelty_coef"
    elif method.step.replay:
        reason = "draws tasks again by their failures, but crl rollout analyses no failures"
        switch = "replay_ratio"
    else:
        return
    known = switch in type(config.method_settings).model_fields if config.method_settings else False
    remedy = f"Add --set {name}.{switch}=0, or use crl train" if known else "Use crl train"
    raise ConfigError("method", config.method, reason, remedy)


async def play(config: RunConfig, run: RunDir, monitor: Monitor, *, scripted: bool = False) -> None:
    """Play the training episodes of `run.steps` steps with the initial actor, and record them.

    They are the episodes of `crl train` if no step changes the weights: the same tasks in the same
    groups, guided and free. Experience comes from the bank `bank.init`, which is only read.
    `scripted` is that of `open_collector`.
    """
    writer = EpisodeWriter(run.episodes, config.run.keep_episodes)
    try:
        async with (
            open_collector(config, run, monitor, scripted=scripted) as (collector, supervisor),
            TaskGroup() as tasks,
        ):
            tasks.create_task(collector.run(), name="collector")
            watchdog = tasks.create_task(supervisor.watchdog.run(), name="watchdog")
            for step in range(config.run.steps):
                stopwatch = Stopwatch()
                with stopwatch("wait"):
                    batch = await collector.batch(step)
                monitor.trajectories(batch)
                with stopwatch("prepare"):
                    await writer.write(step + 1, batch)
                    supervisor.batch_finished(batch)
                    metrics = await asyncio.to_thread(rollout_metrics, batch, 0)
                monitor.log(step + 1, "train", metrics | stopwatch.metrics())
                await collector.complete(step)
            watchdog.cancel()
    finally:
        await writer.aclose()
