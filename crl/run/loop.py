"""The training loop.

Cast. The `Collector` plays groups as far ahead as the staleness gate allows. The `Learner` owns the trained weights, the
`Engine` the copy that samples. The `Evaluator` measures on fixed sets. The `Monitor` writes everything down. They are wired
in `assemble.py`; this file only says in which order things happen:

    collect a batch → advantages → minibatches → learner → publish → engine → next step may start
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from crl.algo import build_minibatches
from crl.errors import EngineError
from crl.protocols import Engine, Learner, Method, Monitor, TaskSource
from crl.rollout.collector import Collector
from crl.run.checkpoint import save_checkpoint
from crl.run.evaluate import Evaluation, Evaluator
from crl.run.figures import rollout_figures
from crl.seeds import generator
from crl.types import Minibatch, StepStats, Trajectory

T = TypeVar("T")

SYNC_DEADLINE_S = 600.0
"""Seconds that one weight sync may take, both sides together."""


@dataclass(frozen=True)
class Schedule:
    """steps: actor steps of the run; minibatches: of one step; seed: root of the draws of minibatches; eval_every and
    checkpoint_every: steps between two, 0 = only at the ends."""

    steps: int
    minibatches: int
    seed: int
    eval_every: int
    checkpoint_every: int


@dataclass
class Loop:
    """One run. `stop` asks it to end after the step that is under way; `completed` says how far it came."""

    method: Method
    schedule: Schedule
    source: TaskSource
    collector: Collector
    engine: Engine
    learner: Learner
    evaluator: Evaluator
    monitor: Monitor
    checkpoints: Path
    companions: Mapping[str, Path]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    skipped_updates: int = 0
    mid_step: bool = False
    """Between a batch's training and the step's completion: weights and counters do not belong together."""

    @property
    def completed(self) -> int:
        return self.collector.completed_steps

    async def run(self) -> None:
        """Trains to the end, or to `stop`, and writes a checkpoint either way. What kills a part ends the run with its cause."""
        await self._evaluate(0)
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(self.collector.run(), name="collector")
            for step in range(self.completed, self.schedule.steps):
                if not await self._step(step):
                    break
            collecting.cancel()
        await self._evaluate(self.completed)
        await self.checkpoint()

    async def checkpoint(self) -> Path:
        state = {"learner": self.learner.state(), "source": self.collector.source_state(), "skipped_updates": self.skipped_updates}
        return await save_checkpoint(self.checkpoints, self.completed, {"actor": self.learner}, self.companions, state)

    async def _step(self, step: int) -> bool:
        """One actor step; False when the run was asked to stop before its batch was there."""
        clock = Clock()
        with clock("wait"):
            batch = await self._unless_stopped(self.collector.batch(step))
        if batch is None:
            return False
        self.monitor.trajectories(batch)
        figures = rollout_figures(batch, self.engine.version)
        self.mid_step = True
        with clock("train"):
            stats = await self.learner.step(self._minibatches(step, batch))
        with clock("sync"):
            if stats.updates:
                await self._sync()
        self.source.observe(batch)
        self.skipped_updates += stats.skipped
        figures |= {f"actor/{name}": value for name, value in stats.metrics.items()}
        figures |= self._step_figures(stats, batch, clock)
        self.monitor.log(step + 1, "train", figures)
        # Before the step completes: in a synchronous run no rollout is under way here, so none shares a batch with an eval.
        if self._due(step + 1, self.schedule.eval_every):
            await self._evaluate(step + 1)
        await self.collector.complete(step)
        self.mid_step = False
        if self._due(step + 1, self.schedule.checkpoint_every):
            await self.checkpoint()
        return not self.stop.is_set()

    def _minibatches(self, step: int, batch: Sequence[Trajectory]) -> Sequence[Minibatch]:
        """What the actor trains on: the sum of the method's advantage terms, over trajectories without errors."""
        role = self.method.actor
        played = [t for t in batch if t.error is None]
        if not played:
            return ()
        advantages = torch.stack([term(played) for term in role.terms]).sum(0)
        views = [role.view(t) for t in played]
        draw = generator(self.schedule.seed, "minibatches", step)
        return build_minibatches(played, advantages, views, count=self.schedule.minibatches, rng=draw)

    async def _sync(self) -> None:
        """Sender and receiver run together, under one deadline."""
        handle = await self.learner.publish()
        try:
            async with asyncio.timeout(SYNC_DEADLINE_S):
                await asyncio.gather(self.engine.update_weights(handle), handle.done())
        except TimeoutError as error:
            raise EngineError(f"a weight sync took more than {SYNC_DEADLINE_S:.0f} s") from error

    async def _evaluate(self, step: int) -> None:
        if step in self.evaluations:
            return
        clock = Clock()
        with clock("eval"):
            evaluation = await self._unless_stopped(self.evaluator.evaluate())
        if evaluation is not None:
            self.evaluations[step] = evaluation
            self.monitor.log(step, "eval", evaluation.figures() | clock.figures())

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` comes to; None when the run is asked to stop before, and then `work` is cancelled."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.wait({working, stopping})  # an evaluation has environments to give back

    def _step_figures(self, stats: StepStats, batch: Sequence[Trajectory], clock: Clock) -> dict[str, float]:
        seconds = sum(clock.seconds.values())
        tokens = sum(sum(trace.mask) for t in batch for trace in t.traces)
        return {
            "actor/updates": stats.updates,
            "actor/skipped_updates": self.skipped_updates,
            "actor/version": self.engine.version,
            "rollout/sampled_tokens": tokens,
            "perf/sampled_tokens_per_s": tokens / seconds if seconds else 0.0,
            "perf/episodes_per_s": len(batch) / seconds if seconds else 0.0,
            **clock.figures(),
        }

    @staticmethod
    def _due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0


class Clock:
    """Where the time went: `with clock("train"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def figures(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}
