"""Training on recorded episodes: `crl learn`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from crl.algo.training_batch import training_batch
from crl.config.schema import RunConfig
from crl.errors import CrlError
from crl.failures import reported
from crl.modeling.files import copy_model_files
from crl.planning import tasks
from crl.planning.gpu_plan import assigned_gpus
from crl.planning.methods import build_method
from crl.protocols import Learner, Monitor
from crl.records.shards import read_shard
from crl.rollout.rerender import Rerenderer
from crl.run.assemble import episode_limits
from crl.run.loop import Stopwatch
from crl.run.models import ModelRole, actor_model, open_role_learner
from crl.seeds import generator


async def learn(
    config: RunConfig, shards: Mapping[int, Path], target: Path, monitor: Monitor
) -> int:
    """Train the actor on recorded steps, in order, and write it to the empty directory `target`.

    `shards` are those of `crl.records.reader.episode_shards`. Each is one training step of the
    method, with the minibatches that the step has in a run. The extractor is not trained: episodes
    have no answers of it. Return the number of optimizer updates.
    """
    async with AsyncExitStack() as stack:
        with reported():  # the learner may be slow to close
            return await _learn(config, shards, target, monitor, stack)


async def _learn(
    config: RunConfig, shards: Mapping[int, Path], target: Path, monitor: Monitor,
    stack: AsyncExitStack,
) -> int:  # fmt: skip
    specs, gpus = tasks.specs(config), assigned_gpus(config)
    method, actor = build_method(config, specs), actor_model(config, monitor.note)
    learner = await open_role_learner(config, gpus, actor, method.actor.loss, stack)
    rerender = Rerenderer(actor.renderer, episode_limits(config))
    errors: list[str | None] = []
    updates = 0
    for step, path in shards.items():
        stopwatch = Stopwatch()
        with stopwatch("prepare"):
            batch = list(read_shard(path))
            errors += [trajectory.error for trajectory in batch]
            minibatches, signal = training_batch(
                method.actor,
                rerender,
                batch,
                count=config.actor.minibatches,
                rng=generator(config.run.seed, "minibatches", step - 1),
            )
        with stopwatch("train"):
            stats = await learner.step(minibatches)
        updates += stats.updates
        metrics = {f"actor/{name}": value for name, value in stats.metrics.items()}
        metrics |= {"actor/updates": stats.updates, "actor/skipped_updates": stats.skipped}
        monitor.log(step, "train", signal | metrics | stopwatch.metrics())
    if all(errors):
        raise CrlError(f"all {len(errors)} recorded episodes failed. The first error: {errors[0]}")
    await _write(learner, actor, target)
    return updates


async def _write(learner: Learner, initial: ModelRole, target: Path) -> None:
    """Write the model to `target` in Hugging Face format, with the tokenizer of `initial`."""
    write = await learner.prepare_save(target, optimizer=False)

    def finish() -> None:
        write()
        copy_model_files(initial.path, target, initial.section.profile)

    await asyncio.to_thread(finish)
