"""Training loop of a run.

* `Collector`: plays groups of episodes, as far ahead of training as the staleness gate allows.
* `Learner`: owns the actor's trained weights. Absent if the actor is not trained.
* `Engine`: owns the copy of the weights that samples.
* `ExperiencePipeline`: owns bank and extractor, which learn from episodes. Absent without
  experience.
* `CriticParts`: judges experience and knows the actor's success rates. Absent if the critic is off.
* `Evaluator` and `AdviceProbe`: measure on fixed task sets.
* `Monitor`: records metrics, episodes and notes.

`assemble.py` connects these parts. This file defines the order of events in a step:

    collect a batch → advantages → credit and queue the batch → minibatches → learner → publish →
    engine → bank's step → evaluation and probe, if due → next step may start
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from crl.algo.training_batch import training_batch
from crl.config.models import Profile
from crl.engines.background import BackgroundEngine
from crl.envs.hosting.threads import Hosts
from crl.errors import CheckpointError
from crl.evaluation.evaluate import Evaluation, Evaluator
from crl.evaluation.metrics import rollout_metrics, solved_within
from crl.evaluation.probe import AdviceProbe
from crl.evaluation.records import evaluation_record, read_evaluation
from crl.failures import TaskGroup
from crl.manager import RolledBack
from crl.manager.calls import CallClock
from crl.manager.storage.database import finish_then_cancel
from crl.monitor.resources import no_resources
from crl.monitor.run_dir import RunDir
from crl.monitor.stages import stage
from crl.protocols import Engine, Learner, Method, Monitor, Rerender, State, TaskSource
from crl.records.position import position
from crl.records.writer import EpisodeWriter
from crl.rollout.collector import Collector
from crl.run.checkpoint import (
    complete_steps,
    prepare_checkpoint,
    prune_checkpoints,
    read_state,
    saved_snapshots,
)
from crl.run.critic import CriticParts
from crl.run.experience import ExperiencePipeline
from crl.run.supervision.mismatch import MismatchDetector
from crl.run.supervision.supervisor import Supervisor
from crl.run.sync import restore_weights, sync_weights
from crl.run.totals import Totals
from crl.seeds import generator
from crl.types import Minibatch, StepStats, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoints:
    """Times of a run's checkpoints, and which of them are kept."""

    every: int
    """Steps between two checkpoints; 0 = by `seconds` alone."""
    seconds: float
    """Maximum number of seconds between two checkpoints; 0 = by `every` alone."""
    keep_last: int
    """Number of the last checkpoints that are kept."""
    keep_every: int
    """Steps between two checkpoints that are kept for good; 0 = none."""


@dataclass(frozen=True)
class Schedule:
    """Length of a run, and intervals between its periodic tasks."""

    steps: int
    """Actor steps of the run."""
    group_size: int
    """Members of a group."""
    minibatches: int
    """Minibatches of one step."""
    seed: int
    """Root of the random draws that make minibatches."""
    eval_every: int
    """Steps between two evaluations; 0 = only before and after the run."""
    checkpoints: Checkpoints
    """Times of checkpoints, and which of them are kept."""
    probe_every: int
    """Steps between two advice probes; 0 = no probes."""


@dataclass(frozen=True)
class Rollouts:
    """Parts that collect training episodes."""

    source: TaskSource
    collector: Collector
    environments: Hosts
    sampling: CallClock
    """Clock of the sampling of replies in training episodes."""


@dataclass(frozen=True)
class Actor:
    """Parts that train and sample the actor."""

    learner: Learner | None
    """None if the actor is not trained."""
    engine: Engine
    rerender: Rerender
    background: BackgroundEngine | None = None
    """Access of the bank's writer to `engine`, if its requests yield to new weights."""


@dataclass(frozen=True)
class Measurements:
    """Parts that measure on fixed task sets, and their results; and metrics of the machine."""

    evaluator: Evaluator
    probe: AdviceProbe
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that results depend on, by dotted key. Results with other settings differ."""
    resources: Callable[[], Mapping[str, float]] = no_resources
    """Source of the metrics of the machine, which is asked after every step."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """Finished evaluations, by the number of completed steps."""
    probes: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of finished advice probes, by the number of completed steps."""

    def state(self) -> State:
        """Return the results as JSON."""
        return {
            "settings": dict(self.settings),
            "evaluations": [
                [step, evaluation_record(evaluation)]
                for step, evaluation in self.evaluations.items()
            ],
            "probes": [[step, dict(metrics)] for step, metrics in self.probes.items()],
        }

    def load_state(self, state: State) -> list[str]:
        """Load results. Return the keys of settings that differ from those of the results.

        Results with other settings are not loaded. Settings that the state lacks are not compared:
        older checkpoints have fewer.
        """
        before, now = state.get("settings", {}), self.settings
        if changed := [key for key in before if key not in now or now[key] != before[key]]:
            return changed
        for step, record in state["evaluations"]:
            self.evaluations[step] = read_evaluation(record)
        self.probes.update(state["probes"])
        return []


@dataclass(frozen=True)
class Outputs:
    """Destinations of a run's results."""

    monitor: Monitor
    run: RunDir
    """Directory of the run."""
    model_dirs: Mapping[str, Path]
    """Directory of each role's initial model, see `prepare_checkpoint`."""
    profiles: Mapping[str, Profile]
    """Profile of each role's model."""
    adapters: frozenset[str]
    """Roles of which only an adapter is trained."""
    episodes: EpisodeWriter
    """Writer of the batches."""
    started: float
    """Time (`time.monotonic`) at which the run began; earlier for a resumed run."""
    supervisor: Supervisor
    """Source of warnings."""


class TrainingLoop:
    """Training loop of a run, from its warm-up to its last checkpoint."""

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        rollouts: Rollouts,
        actor: Actor,
        experience: ExperiencePipeline | None,
        critic: CriticParts | None,
        measurements: Measurements,
        outputs: Outputs,
    ) -> None:
        """Store the parts.

        `experience` is None in a run without experience, `critic` if the actor does not judge
        experience.
        """
        self.method, self.schedule, self.outputs = method, schedule, outputs
        self.rollouts, self.actor, self.measurements = rollouts, actor, measurements
        self.experience, self.critic = experience, critic
        self.supervisor = outputs.supervisor
        self.supervisor.watchdog.details = self._details
        self.stop = asyncio.Event()
        """Event that ends the run after the current step."""
        self.totals = Totals()
        self.skipped_updates = 0
        """Actor updates that were skipped because loss or gradient was not finite."""
        self.warmed_up = False
        """True after the critic's warm-up."""
        self.mid_step = False
        """True between the credit of a batch and the completion of its step.

        In this phase weights and counters are inconsistent: no checkpoint may be written.
        """
        self._mismatch = MismatchDetector("actor", outputs.monitor)
        self._sampled_s = 0.0
        """Seconds of the sampling of replies at the last step, for the time of predictions."""
        self._checkpoint_time = time.monotonic()
        self._tasks = TaskGroup()
        self._snapshots: dict[int, int] = {}
        """The bank's snapshots that written checkpoints refer to, by step."""
        self._writing: asyncio.Task[None] | None = None
        """Task that writes a checkpoint while the run continues."""

    @property
    def completed_steps(self) -> int:
        """Number of completed steps."""
        return self.rollouts.collector.completed_steps

    @property
    def interrupted(self) -> bool:
        """True if the run was asked to stop before its final measurements were complete."""
        steps, measured = self.schedule.steps, self.measurements
        complete = steps in measured.evaluations and (
            steps in measured.probes or not self.schedule.probe_every
        )
        return self.stop.is_set() and not complete

    @property
    def _learners(self) -> dict[str, Learner]:
        return {
            **({"actor": self.actor.learner} if self.actor.learner else {}),
            **(self.experience.learners if self.experience else {}),
        }

    async def run(self) -> None:
        """Train until the last step or until `stop`, then write a checkpoint.

        An error in one of the parts cancels the others. It is raised in an exception group, without
        a checkpoint.
        """
        async with TaskGroup() as self._tasks:
            watchdog = self._tasks.create_task(self.supervisor.watchdog.run(), name="watchdog")
            await self._run()
            watchdog.cancel()

    async def _run(self) -> None:
        await self._warm_up()
        if not self.completed_steps:
            await self._evaluate_and_probe(0)
        await self._measure_if_due(self.completed_steps)  # an interruption may have skipped it
        async with TaskGroup() as tasks:
            background = [tasks.create_task(self.rollouts.collector.run(), name="collector")]
            background += [
                tasks.create_task(learner.watch(), name=f"{role} learner")
                for role, learner in self._learners.items()
            ]
            if self.experience:
                background.append(tasks.create_task(self.experience.run(), name="experience"))
            for step in range(self.completed_steps, self.schedule.steps):
                if not await self._step(step):
                    break
            for task in background:
                task.cancel()
        if self.experience and not self.stop.is_set():
            with stage(self.outputs.monitor, "distilling the last episodes"):
                await self._unless_stopped(self.experience.finish())
        await self._evaluate_and_probe(self.completed_steps)
        await self.checkpoint(replace=True)

    async def checkpoint(self, *, replace: bool = False) -> Path:
        """Write a checkpoint of the completed steps and return its path.

        An existing checkpoint of the same step is kept, unless `replace` is true.
        It holds the trained models, the state of every part, and a reference to a bank snapshot.
        """
        write = await self._prepare_checkpoint(replace=replace)
        return await self._in_thread(write)

    async def _prepare_checkpoint(self, *, replace: bool = False) -> Callable[[], Path]:
        """Copy everything that a checkpoint holds. Return a function that writes the checkpoint.

        First wait for a checkpoint that is being written, so that only one copy is in memory.
        """
        if self._writing:
            await asyncio.wait({self._writing})
        step = self.completed_steps
        if not replace and step in complete_steps(self.outputs.run.checkpoints):
            return lambda: self.outputs.run.checkpoint(step)
        state: State = {"source": self.rollouts.collector.source_state()}
        if self.actor.learner:
            state["learner"] = self.actor.learner.state()
        async with self.experience.paused() if self.experience else nullcontext():
            if self.experience:
                self._snapshots = await asyncio.to_thread(
                    saved_snapshots, self.outputs.run.checkpoints, self._snapshots
                )
                state |= await self.experience.state(self._snapshots.values())
            if self.method.step.intrinsic:
                state["intrinsic"] = self.method.step.intrinsic.state()
            if self.critic:
                state["success_rates"] = self.critic.success_rates.state()
            state["environments"] = self.rollouts.environments.metrics()
            state["warmed_up"] = self.warmed_up
            state["skipped_updates"] = self.skipped_updates
            state["totals"] = asdict(self.totals)
            state["supervision"] = self.supervisor.state()
            state["measurements"] = self.measurements.state()
            state["records"] = position(self.outputs.run)
            state["seconds"] = time.monotonic() - self.outputs.started
            write = await prepare_checkpoint(
                self.outputs.run.checkpoints,
                step,
                self._learners,
                self.outputs.model_dirs,
                state,
                profiles=self.outputs.profiles,
                adapters=self.outputs.adapters,
                records=[path for path in [self.outputs.run.metrics] if path.exists()],
                replace=replace,
            )
            return partial(self._write_checkpoint, step, state, write)

    def _write_checkpoint(self, step: int, state: State, write: Callable[[], Path]) -> Path:
        """Write a checkpoint. Only then its snapshot of the bank replaces an earlier one."""
        path = write()
        if "bank" in state:
            self._snapshots[step] = state["bank"]
        return path

    async def _in_thread(self, write: Callable[[], Path]) -> Path:
        """Write a checkpoint in a thread, and delete those that are no longer kept."""
        kept = self.schedule.checkpoints

        def write_and_prune() -> tuple[Path, OSError | None]:
            path = write()
            try:
                prune_checkpoints(
                    self.outputs.run.checkpoints,
                    keep_last=kept.keep_last,
                    keep_every=kept.keep_every,
                )
            except OSError as error:
                return path, error
            return path, None

        await self.outputs.episodes.flush()
        work = asyncio.ensure_future(asyncio.to_thread(write_and_prune))
        with stage(self.outputs.monitor, "writing a checkpoint"):
            path, error = await finish_then_cancel(work)
        if error:
            self._warn(f"an old checkpoint cannot be deleted: {error}.")
        return path

    async def restore(self, checkpoint: Path) -> RolledBack | None:
        """Restore all parts to a checkpoint of this run. Call this method before `run`.

        The collector must have been created for the checkpoint's step. Return the result for the
        bank, or None for a run without experience.
        """
        state = read_state(checkpoint)
        if self.actor.learner:
            await restore_weights(
                self.actor.learner, self.actor.engine, checkpoint / "actor", state["learner"]
            )
        self.rollouts.source.load_state(state["source"])
        if self.method.step.intrinsic and "intrinsic" in state:  # it may have been off before
            self.method.step.intrinsic.load_state(state["intrinsic"])
        if self.critic:
            self.critic.success_rates.load_state(state["success_rates"])
        self.rollouts.environments.resume(state["environments"])
        self.warmed_up = state["warmed_up"]
        self.skipped_updates = state["skipped_updates"]
        self.totals = Totals(**state["totals"])
        self.supervisor.load_state(state.get("supervision", {}))  # absent in older checkpoints
        if changed := self.measurements.load_state(state["measurements"]):
            self.outputs.monitor.note(
                f"{', '.join(changed)} changed after the last evaluation: "
                "the summary is not compared with evaluations before this point"
            )
        return await self.experience.restore(checkpoint, state) if self.experience else None

    async def _step(self, step: int) -> bool:
        """Run one actor step. Return False if the run was asked to stop.

        If it was asked before the batch was complete, nothing is trained.
        """
        learner, engine = self.actor.learner, self.actor.engine
        stopwatch, busy_before = Stopwatch(), engine.busy_s
        started, distil_before = time.monotonic(), self._distil_seconds()
        with stopwatch("wait"):
            batch = await self._unless_stopped(self.rollouts.collector.batch(step))
        if batch is None:
            return False
        self.mid_step = True
        if self.method.step.intrinsic and self.experience:
            with stopwatch("novelty"):
                batch = await self.method.step.intrinsic.add(batch, self.experience.embedder)
        self.outputs.monitor.trajectories(batch)
        with stopwatch("prepare"):
            await self.outputs.episodes.write(step + 1, batch)
            self.supervisor.batch_finished(batch)
            metrics = await asyncio.to_thread(rollout_metrics, batch, engine.version)
            minibatches, signal = await self._training_batch(step, batch) if learner else ((), {})
            metrics |= await self._measured(batch) | await self._predictions(batch)
            if self.method.advice.between_attempts:
                metrics |= self._attempts(batch)
        metrics |= signal
        if self.experience:
            with stopwatch("submit"):
                await self.experience.observe(batch)
        stats, exchange = StepStats(0, 0), {"perf/sync_bytes": 0.0}
        if learner:
            with stopwatch("train"), stage(self.outputs.monitor, "training the actor"):
                stats = await learner.step(minibatches)
            with stopwatch("sync"):
                exchange = await self._sync(learner, stats)
        if self.experience:
            with stopwatch("bank"):
                # Without training, steps are faster than distillation: the bank would stay empty.
                await self.experience.complete(step + 1, batch, settle=not learner)
        self.rollouts.source.observe(batch)
        self.totals.add(batch)
        self.totals.add_training(minibatches)
        if self.critic:
            self.critic.success_rates.observe(batch)
            critiques = self.critic.critic.take_metrics()
            self.totals.actor_tokens += int(critiques.get("critic/sampled_tokens", 0))
            metrics |= critiques
        self.skipped_updates += stats.skipped
        metrics |= self.totals.metrics()
        metrics |= {f"actor/{name}": value for name, value in stats.metrics.items()}
        metrics |= self._step_metrics(stats, batch, stopwatch)
        metrics |= self._distil_share(started, distil_before)
        metrics["perf/rollout_busy_s"] = engine.busy_s - busy_before
        metrics |= {**exchange, **self.measurements.resources()}
        self._log(step, metrics)
        self._mismatch.observe(step, stats.metrics)
        await self._complete(step)
        return not self.stop.is_set()

    async def _sync(self, learner: Learner, stats: StepStats) -> dict[str, float]:
        """Send the weights of a step with an update to the engine.

        Return the metrics of the transfer.
        """
        background = self.actor.background
        before = background.interrupted if background else 0
        engine = background or self.actor.engine
        metrics = {"perf/sync_bytes": await sync_weights(learner, engine) if stats.updates else 0.0}
        if background:
            metrics["perf/sync_interrupted"] = background.interrupted - before
        return metrics

    def _distil_seconds(self) -> float:
        """Return the seconds so far in which calls for the bank were in progress."""
        return self.experience.manager.calls.seconds() if self.experience else 0.0

    def _distil_share(self, started: float, distil_before: float) -> dict[str, float]:
        """Add a step to the totals and return the share of calls for the bank in its time.

        `started` is the time (`time.monotonic`) at which the step began, and `distil_before` the
        value of `_distil_seconds` then.
        """
        distil_s, step_s = self._distil_seconds() - distil_before, time.monotonic() - started
        self.totals.add_step(step_s, distil_s)
        return {"perf/distil_share": distil_s / step_s} if self.experience else {}

    async def _measured(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Return the method's own metrics of a batch, and the seconds of their computation."""
        if not self.method.step.measure:
            return {}
        started = time.monotonic()
        metrics = await asyncio.to_thread(self.method.step.measure, batch)
        return {**metrics, "perf/measure_s": time.monotonic() - started}

    async def _predictions(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Return the sampling time of predictions since the last call, if agents predict.

        The estimate is the sampling time of the replies times the share of predictions in their
        text.
        """
        if not self.method.step.predicted:
            return {}
        share = await asyncio.to_thread(self.method.step.predicted, batch)
        before, self._sampled_s = self._sampled_s, self.rollouts.sampling.seconds()
        return {"time/predictions": share * (self._sampled_s - before)}

    def _attempts(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Count the attempts of a step. Return the share of groups that succeeded within each."""
        groups = len({t.group for t in batch})
        solved = solved_within(batch, self.schedule.group_size)
        self.totals.add_attempts(groups, solved)
        return {f"rollout/success/attempt/{n}": won / groups for n, won in enumerate(solved, 1)}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a trained step, and write the warnings that they cause."""
        self.outputs.monitor.log(step + 1, "train", metrics | self.rollouts.environments.metrics())
        self.supervisor.watchdog.progress()
        bank = self.experience.last_metrics if self.experience else {}
        self.supervisor.warnings.observe(step + 1, {**bank, **metrics})

    async def _training_batch(
        self, step: int, batch: Sequence[Trajectory]
    ) -> tuple[Sequence[Minibatch], dict[str, float]]:
        """Return the minibatches of a step, and metrics of their signal."""
        return await asyncio.to_thread(
            training_batch,
            self.method.actor,
            self.actor.rerender,
            batch,
            count=self.schedule.minibatches,
            rng=generator(self.schedule.seed, "minibatches", step),
        )

    async def _complete(self, step: int) -> None:
        """Complete a trained step. Run evaluation, probe and checkpoint if they are due.

        Evaluation and probe come first. A synchronous run has no rollout in flight then, so no
        rollout shares a forward pass with an eval episode. If they fail, the step is completed all
        the same, so that a checkpoint can be written.
        """
        try:
            await self._measure_if_due(step + 1)
        finally:
            await self.rollouts.collector.complete(step)
            self.mid_step = False
        if self._checkpoint_due(step + 1):
            await self._try_checkpoint()

    def _checkpoint_due(self, step: int) -> bool:
        """Return whether a periodic checkpoint is due after `step` steps."""
        times = self.schedule.checkpoints
        late = 0 < times.seconds <= time.monotonic() - self._checkpoint_time
        return self._due(step, times.every) or (late and step < self.schedule.steps)

    async def _try_checkpoint(self) -> None:
        """Begin to write a checkpoint. If it fails, the run continues with a warning.

        Return when the states are copied. The files are written while the run continues.
        """
        try:
            write = await self._prepare_checkpoint()
        except CheckpointError as error:
            self._warn(error)
        else:
            self._writing = self._tasks.create_task(self._try_write(write), name="checkpoint")
        self._checkpoint_time = time.monotonic()

    async def _try_write(self, write: Callable[[], Path]) -> None:
        try:
            await self._in_thread(write)
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error: CheckpointError | str) -> None:
        self.outputs.monitor.note(f"warning: {error} The run continues")

    async def _warm_up(self) -> None:
        """Play the critic's warm-up and log the success rates.

        A resumed run does not repeat it: its checkpoint has the rates.
        """
        if not self.critic or not self.critic.warmup.batches or self.warmed_up:
            return
        stopwatch = Stopwatch()
        with stopwatch("warmup"), stage(self.outputs.monitor, "warming up the critic"):
            trajectories = await self._unless_stopped(self.critic.warmup.play())
        if trajectories is None:
            return
        self.warmed_up = True
        self.totals.add(trajectories)
        episodes = self.critic.success_rates.observe(trajectories)
        if episodes == 0:
            self.outputs.monitor.note(
                "all warm-up episodes failed with an error: the critic has no success rate "
                "until an unguided training episode completes"
            )
        success_rates = {
            f"warmup/{name}/success": rate
            for name, rate in self.critic.success_rates.metrics().items()
        }
        self.outputs.monitor.log(
            0, "warmup", {"warmup/episodes": episodes, **success_rates, **stopwatch.metrics()}
        )

    async def _measure_if_due(self, step: int) -> None:
        """Run the periodic evaluation and probe after `step` steps, if they are due."""
        if self._due(step, self.schedule.eval_every):
            await self._evaluate(step)
        if self._due(step, self.schedule.probe_every):
            await self._probe(step)

    async def _evaluate_and_probe(self, step: int) -> None:
        """Evaluate and probe, at the same time unless the run is deterministic."""
        parts = [partial(self._evaluate, step)]
        if self.schedule.probe_every:
            parts.append(partial(self._probe, step))
        await self.measurements.evaluator.scheduler.gather(parts)

    async def _evaluate(self, step: int) -> None:
        if step in self.measurements.evaluations:
            return
        stopwatch = Stopwatch()
        with stopwatch("eval"):
            last = step == self.schedule.steps
            # No online banks at the start: before any training they are least informative and take
            # longest to build.
            evaluation = await self._unless_stopped(
                self.measurements.evaluator.evaluate(online=step > 0 or last, compare_lessons=last)
            )
        if evaluation is not None:
            self.outputs.monitor.log(step, "eval", evaluation.metrics() | stopwatch.metrics())
            self.measurements.evaluations[step] = evaluation

    async def _probe(self, step: int) -> None:
        if step in self.measurements.probes:
            return
        stopwatch = Stopwatch()
        with stopwatch("probe"):
            metrics = await self._unless_stopped(self.measurements.probe.measure())
        if metrics:
            self.outputs.monitor.log(step, "probe", {**metrics, **stopwatch.metrics()})
        if metrics is not None:
            self.measurements.probes[step] = metrics

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`; None if the run is asked to stop first.

        In that case `work` is cancelled.
        """
        work_task, stop_task = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({work_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            return work_task.result() if work_task.done() else None
        finally:
            work_task.cancel()
            stop_task.cancel()
            # A cancelled evaluation still has to release its environments.
            await asyncio.wait({work_task, stop_task})
            if not work_task.cancelled():
                work_task.exception()  # an error of cancelled work has no effect

    def _step_metrics(
        self, stats: StepStats, batch: Sequence[Trajectory], stopwatch: Stopwatch
    ) -> dict[str, float]:
        seconds = sum(stopwatch.seconds.values())
        tokens = sum(t.activity.sampled_tokens for t in batch)
        updates = {
            "actor/updates": stats.updates,
            "actor/skipped_updates": self.skipped_updates,
        }
        return {
            **(updates if self.actor.learner else {}),
            "actor/version": self.actor.engine.version,
            "rollout/sampled_tokens": tokens,
            "perf/sampled_tokens_per_s": tokens / seconds if seconds else 0.0,
            "perf/episodes_per_s": len(batch) / seconds if seconds else 0.0,
            **stopwatch.metrics(),
        }

    def _details(self) -> list[str]:
        """Return lines on the parts of the run that are not tasks, for the watchdog."""
        parts = {
            "rollouts": self.rollouts.collector.details(),
            "environments": self.rollouts.environments.details(),
            "actor engine": self.actor.engine.details(),
            "extractor engine": self.experience.details() if self.experience else [],
            **{f"{role} learner": learner.details() for role, learner in self._learners.items()},
        }
        return [
            f"{self.completed_steps} of {self.schedule.steps} steps completed",
            *(f"{part}: {line}" for part, lines in parts.items() for line in lines),
        ]

    def _due(self, step: int, every: int) -> bool:
        """Return whether a periodic task is due after `step` steps; `every` = 0 means never.

        It is not due after the last step: `run` measures and saves when all work has settled.
        """
        return every > 0 and step % every == 0 and step < self.schedule.steps


class Stopwatch:
    """Stopwatch for named sections: `with stopwatch("train"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds spent so far, by section name."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}
