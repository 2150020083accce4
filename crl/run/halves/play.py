"""Rollouts without training: `crl rollout`."""

from __future__ import annotations

import asyncio

from crl.config.schema import RunConfig
from crl.evaluation.metrics import rollout_metrics
from crl.failures import TaskGroup
from crl.monitor.run_dir import RunDir
from crl.protocols import Monitor
from crl.records.writer import EpisodeWriter
from crl.run.assemble import open_collector
from crl.run.loop import Stopwatch


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
