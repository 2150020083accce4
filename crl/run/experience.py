"""Experience pipeline of a run: distillation, credit of experiences, extractor training.

Finished episodes are queued for distillation into the bank. Experiences that guided an episode earn
credit. The extractor is trained on full batches of credit units. Distillation and training run in
the background while the actor plays and trains. A deterministic run does both at step boundaries
instead (`finish_pending`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from crl.embedders.cached import CachedEmbedder
from crl.evaluation.diagnostics import Diagnostics
from crl.failures import TaskGroup
from crl.manager import (
    CallClock,
    DistilRequest,
    ExperienceManager,
    ExtractorSample,
    Generation,
    RolledBack,
)
from crl.protocols import (
    DistillationFilter,
    Embedder,
    Engine,
    ExtractorRole,
    FailureLibrary,
    Hit,
    Learner,
    Metrics,
    Monitor,
    Question,
    SearchRequest,
    State,
    TaskReplay,
)
from crl.rollout.crediting import credit_and_submit
from crl.rollout.perplexity import PerplexityReward
from crl.run.supervision.mismatch import MismatchDetector
from crl.run.sync import restore_weights, sync_weights
from crl.types import Minibatch, RewardBaseline, TokenTrace, TrainSample, Trajectory

REPORTED_EXPERIENCES = 200
"""Experiences that are passed to the monitor after every step."""


class ExtractorTrainer:
    """Trainer of the extractor on full batches of credit units, oldest first.

    An update is skipped if its loss or gradient is not finite. The rewards of such a batch are
    kept: its units stay pending until the next actor step (`ExperienceManager.postpone`), and
    training continues with other batches. A batch without signal (all advantages are 0) makes no
    update either, but its rewards are spent: there is nothing to learn from them.

    `answers` holds the latest answers of the extractor. Those sampled by the engine's current
    version are used to compare the trainer's log-probs with the engine's. The batch cannot be used
    for this: credit arrives late, so older versions sampled its answers.

    `on_trained` is called after every training step.
    """

    def __init__(
        self, manager: ExperienceManager, role: ExtractorRole, learner: Learner, engine: Engine,
        monitor: Monitor, answers: Collection[Generation] = (),
        on_trained: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.learner, self._answers, self._on_trained = learner, answers, on_trained
        self._manager, self._role, self._engine, self._monitor = manager, role, engine, monitor
        self._mismatch = MismatchDetector("extractor", monitor)
        self._lock = asyncio.Lock()
        self.updates = 0
        self.skipped_updates = 0
        self.trained_tokens = 0

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which no training step runs.

        Inside, weights, counters and bank are consistent with each other.
        """
        return self._lock

    async def train(self) -> None:
        """Train until no full batch is left.

        If the caller is cancelled, a step that has begun is still completed.
        """
        while await shielded(asyncio.create_task(self._train_batch())):
            pass

    async def _train_batch(self) -> bool:
        async with self._lock:
            step = self._manager.step
            samples = await self._manager.take_batch(self._role.batch, step)
            if samples is None:
                return False
            started = time.monotonic()
            current_traces = [
                answer.trace
                for answer in self._answers
                if set(answer.completion.versions) == {self._engine.version}
            ]
            minibatches = extractor_minibatches(samples, current_traces)
            stats = await self.learner.step(minibatches)
            trained_at = time.monotonic()
            if stats.skipped:
                self._manager.postpone(step)
            else:
                await self._manager.mark_trained([sample.id for sample in samples], step)
            sent_bytes = await sync_weights(self.learner, self._engine) if stats.updates else 0
        self._on_trained()
        self.updates += stats.updates
        self.skipped_updates += stats.skipped
        self.trained_tokens += sum(minibatch.sequence_tokens for minibatch in minibatches)
        reward_metrics = (
            {}
            if stats.skipped
            else {"extractor/reward": fmean(sample.reward for sample in samples)}
        )
        self._monitor.log(
            step,
            "extractor",
            {f"extractor/{name}": value for name, value in stats.metrics.items()}
            | reward_metrics
            | {
                "extractor/samples": len(samples),
                "extractor/updates": self.updates,
                "extractor/skipped_updates": self.skipped_updates,
                "extractor/version": self._engine.version,
                "total/trained_tokens/extractor": self.trained_tokens,
                "time/train": trained_at - started,
                "time/sync": time.monotonic() - trained_at,
                "perf/sync_bytes": sent_bytes,
            },
        )
        self._mismatch.observe(step, stats.metrics)
        return True


async def shielded(work: asyncio.Task[bool]) -> bool:
    """Return the result of `work`, or raise its error.

    If the caller is cancelled, await the end of `work`. Then raise its error, if any, and otherwise
    the cancellation.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if error := None if work.cancelled() else work.exception():
            raise error from None
        raise


def extractor_minibatches(
    samples: Sequence[ExtractorSample], probe: Collection[TokenTrace] = ()
) -> tuple[Minibatch, ...]:
    """Return the minibatch of one optimizer update; empty if no sample has signal.

    CRL eq. 3 divides by the trained tokens of the whole batch, including samples without signal.
    For `probe` see `Minibatch`.
    """
    tokens = sum(sum(sample.trace.mask) for sample in samples)
    signal = tuple(
        TrainSample(s.trace, s.advantage, 1 / len(samples))
        for s in samples
        if s.advantage and any(s.trace.mask)
    )
    return (Minibatch(signal, tokens, tuple(probe)),) if signal else ()


class ObservedRetriever:
    """`Retriever` that reports its results to the diagnostics.

    `run_name` is the name that marks this run's questions in the bank.
    """

    def __init__(
        self, manager: ExperienceManager, diagnostics: Diagnostics, *, run_name: str
    ) -> None:
        self._manager, self._diagnostics, self._run_name = manager, diagnostics, run_name

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        hits = await self._manager.search(requests)
        self._diagnostics.record_search(requests, hits)
        return hits

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return await self._manager.refine(
            replace(question, name=f"{self._run_name}/{question.name}"), hit
        )


class ReadOnlyRetriever:
    """`Retriever` for evaluations: it changes no counters and stores nothing in the bank."""

    def __init__(self, manager: ExperienceManager) -> None:
        self._manager = manager

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        return await self._manager.search(requests, counted=False)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return await self._manager.refine(question, hit, counted=False)


@dataclass(frozen=True)
class Replay:
    """Training tasks that are drawn again because of failures, and the library of failures."""

    tasks: TaskReplay
    library: FailureLibrary
    clock: CallClock
    """Clock that times the retrieval, with its embeddings."""

    async def retrieve(self) -> None:
        """Choose the tasks for the next draws, from the failures since the last call."""
        with self.clock(counted=False):
            await self.tasks.retrieve(self.library)

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call."""
        return self.tasks.take_metrics(self.library)

    def state(self) -> State:
        """Return the state for a checkpoint. The train stream's own state is not part of it."""
        return {"library": self.library.state(), "retrieval": self.tasks.retrieval()}

    def load_state(self, state: State) -> None:
        """Load a state, after those of the bank and of the train stream."""
        self.library.load_state(state["library"])
        self.tasks.load_retrieval(state["retrieval"])


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of an `ExperiencePipeline`."""

    run_name: str
    """Name that marks this run's episodes in the bank."""
    background: bool
    """True if distillation and training run in the background, not at step boundaries."""
    own_engine: bool = True
    """True if only the bank uses the engine, not the actor too."""
    merge_every: int = 0
    """Actor steps between two merges of the bank; 0 = no merges."""
    baseline: RewardBaseline = "batch"
    """Members of a group with whose rewards `credit_and_submit` compares."""
    perplexity: PerplexityReward | None = None
    """Source of the perplexity-reduction reward; None without this reward."""
    replay: Replay | None = None
    """Repetition of training tasks; None without it."""


class ExperiencePipeline:
    """Experience pipeline of a run: bank, engine of its writer, and trainer of the extractor.

    * `engine`: the engine of the model that writes the bank
    * `trainer`: None if the extractor is not trained
    """

    def __init__(
        self, manager: ExperienceManager, engine: Engine, distiller: DistillationFilter,
        trainer: ExtractorTrainer | None, diagnostics: Diagnostics, cache: CachedEmbedder,
        monitor: Monitor, settings: PipelineSettings,
    ) -> None:  # fmt: skip
        self._replay, self._replay_due = settings.replay, asyncio.Event()
        self.manager, self.trainer, self.diagnostics = manager, trainer, diagnostics
        self._distiller, self._cache, self._monitor = distiller, cache, monitor
        self._settings = settings
        self.last_metrics: Metrics = {}
        """Metrics of the bank after the last completed step."""
        self._engine, self._busy = engine, engine.busy_s
        self._credit_event, self._merge_due = asyncio.Event(), asyncio.Semaphore(0)
        self.embedder: Embedder = cache
        self.retriever = ObservedRetriever(manager, diagnostics, run_name=settings.run_name)

    async def run(self) -> None:
        """Distil, train and merge in the background until cancelled.

        Call this in a task group. Return immediately if the run works at step boundaries.
        """
        self.manager.calls.take_metrics()  # drops the time before the first step
        if not self._settings.background:
            return
        async with TaskGroup() as tasks:
            tasks.create_task(self.manager.run(), name="distillation")
            if self.trainer:
                tasks.create_task(self._train_when_credited(self.trainer), name="extractor")
            if self._replay:
                tasks.create_task(self._retrieve_when_due(self._replay), name="replay")
            while True:
                await self._merge_due.acquire()
                tasks.create_task(self.manager.merge(), name="merge")

    async def _train_when_credited(self, trainer: ExtractorTrainer) -> None:
        while True:
            await self._credit_event.wait()
            self._credit_event.clear()
            await trainer.train()

    async def _retrieve_when_due(self, replay: Replay) -> None:
        while True:
            await self._replay_due.wait()
            self._replay_due.clear()
            await replay.retrieve()

    async def observe(self, batch: Sequence[Trajectory]) -> None:
        """Credit the experiences that guided `batch` and queue its episodes for distillation.

        The distiller selects the episodes to queue. Credit and queue are durable on return. With
        the perplexity-reduction reward, the actor's engine first scores the prompts of `batch`;
        rollouts continue meanwhile.
        """
        perplexity = self._settings.perplexity
        await credit_and_submit(
            self.manager,
            self._settings.run_name,
            batch,
            self._distiller.select(batch),
            baseline=self._settings.baseline,
            bonuses=await perplexity.bonuses(batch) if perplexity else {},
        )
        self._credit_event.set()

    async def reflect(self, trajectory: Trajectory) -> Sequence[Hit]:
        """Distil a finished episode now and return the experiences that were written.

        This method implements `crl.rollout.attempts.Reflector`.
        """
        request = DistilRequest.from_trajectory(self._settings.run_name, trajectory)
        return await self.manager.distil(request, background=self._settings.background)

    def shown(self, reflections: Sequence[Hit]) -> None:
        """Count a retrieval of each reflection. This method implements `Reflector`, too."""
        self.manager.count(reflections)

    async def complete(
        self, step: int, batch: Sequence[Trajectory], *, settle: bool = False
    ) -> None:
        """Record that `step` actor steps are completed. `batch` is the batch of the last one.

        Advance the bank's clock, start a due merge and a retrieval of tasks, and log the metrics.
        At step boundaries (deterministic run) or with `settle`, first distil all episodes and train
        all full batches.
        """
        self.manager.advance(step)
        due = self._settings.merge_every > 0 and step % self._settings.merge_every == 0
        if settle or not self._settings.background:
            await self.finish_pending()
        if self._settings.background:
            await self.manager.flush()
            if due:
                self._merge_due.release()
            self._replay_due.set()
        else:
            if due:
                await self.manager.merge()
            if self._replay:
                await self._replay.retrieve()
        await self._log_metrics(batch)

    def details(self) -> list[str]:
        """Return lines on the extractor's engine, for the report of a stall."""
        return self._engine.details()

    async def finish(self) -> None:
        """Distil and train everything that is left after the last step, and log the metrics.

        Tasks are retrieved for the last failures, too: the run may be continued later.
        """
        await self.finish_pending()
        if self._replay:
            await self._replay.retrieve()
        await self._log_metrics(())

    async def _log_metrics(self, batch: Sequence[Trajectory]) -> None:
        busy, self._busy = self._busy, self._engine.busy_s
        metrics = {
            **await self.manager.stats(),
            **self.diagnostics.take_metrics(batch),
        }
        if self._settings.own_engine:
            metrics["perf/distil_busy_s"] = self._busy - busy
        metrics["perf/embed_cache_hits"] = self._cache.hit_rate
        metrics |= self.manager.calls.take_metrics()
        if self._replay:
            metrics |= self._replay.take_metrics()
        if self._settings.perplexity:
            metrics |= self._settings.perplexity.take_metrics()
        self.last_metrics = metrics
        metrics |= latency_percentiles(
            "search", self.manager.take_search_times()
        ) | latency_percentiles("refine", self.manager.take_refine_times())
        self._monitor.log(self.manager.step, "bank", metrics)
        self._monitor.experiences(self.manager.latest(REPORTED_EXPERIENCES))

    async def finish_pending(self) -> None:
        """Wait until every queued episode is distilled, then train every full batch."""
        await self.manager.drain()
        if self.trainer:
            await self.trainer.train()

    def paused(self) -> AbstractAsyncContextManager[None]:
        return self.trainer.paused() if self.trainer else nullcontext()

    @property
    def learners(self) -> dict[str, Learner]:
        return {"extractor": self.trainer.learner} if self.trainer else {}

    async def state(self, kept: Iterable[int]) -> State:
        """Return the state for a checkpoint: a new snapshot of the bank and the extractor's state.

        `kept` are the snapshots of the existing checkpoints. The bank deletes all others.
        """
        state: State = {
            "bank": await self.manager.snapshot(kept=list(kept)),
            "mark": self._settings.run_name,
            "manager": self.manager.state(),
            "diagnostics": self.diagnostics.state(),
        }
        if self._replay:
            state["replay"] = self._replay.state()
        if trainer := self.trainer:
            state["extractor"] = {
                "learner": trainer.learner.state(),
                "updates": trainer.updates,
                "skipped_updates": trainer.skipped_updates,
                "trained_tokens": trainer.trained_tokens,
            }
        return state

    async def restore(self, checkpoint: Path, state: State) -> RolledBack:
        """Restore bank, extractor and counters to a checkpoint whose state is `state`."""
        rolled_back = await self.manager.rollback(state["bank"])
        self.manager.load_state(state["manager"])
        self.diagnostics.load_state(state["diagnostics"])
        if self._replay:
            self._replay.load_state(state["replay"])
        if trainer := self.trainer:
            saved = state["extractor"]
            await restore_weights(
                trainer.learner, self._engine, checkpoint / "extractor", saved["learner"]
            )
            trainer.updates = saved["updates"]
            trainer.skipped_updates = saved["skipped_updates"]
            trainer.trained_tokens = saved.get("trained_tokens", 0)  # absent in older checkpoints
        return rolled_back


def latency_percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return median and 95th percentile of durations, in milliseconds; empty without durations."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        f"perf/{name}_p{q}_ms": 1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)]
        for q in (50, 95)
    }
