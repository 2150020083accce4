"""Experience bank of a run, and the scratch banks of its evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from crl.config import RunConfig
from crl.embedders import open_embedder
from crl.embedders.cached import CachedEmbedder
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.evaluation.diagnostics import Diagnostics
from crl.manager import (
    BankFailures,
    Distilled,
    ExperienceManager,
    ManagerSettings,
    Progress,
    Prompts,
    QueueSettings,
)
from crl.manager.storage.database import copy_database, require_vectors_of
from crl.manager.storage.store import Store
from crl.modeling.memory import GpuAssignment
from crl.modeling.tokens import ChatRenderer
from crl.monitor.run_dir import RunDir
from crl.monitor.stages import stage
from crl.planning.context import bank_prompts
from crl.planning.machine_checks import require_assigned
from crl.planning.preflight import require_compatible_extractor
from crl.protocols import (
    Embedder,
    Engine,
    Method,
    Monitor,
    TaskReplay,
)
from crl.rollout.perplexity import PerplexityReward
from crl.run.checkpoint import read_state, trained_model
from crl.run.experience import (
    ExperiencePipeline,
    ExtractorTrainer,
    PipelineSettings,
    Replay,
)
from crl.run.models import (
    NO_GPU,
    ModelRole,
    actor_model,
    extractor_model,
    model_of,
    open_role_engine,
    open_role_learner,
    open_untrained_engine,
)
from crl.run.progress import StderrMonitor, embedding_progress
from crl.scratch import scratch_folder
from crl.seeds import derive_seed

EMBEDDING_CACHE_BYTES = 96 << 20
"""Bytes of float32 vectors that the embedding cache holds: 65,536 texts at 384 dimensions."""


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
        """Copy of this factory with `retrieval.trial_share` = 0: no search is a trial.

        Evaluations use it, so that a rarely retrieved experience never replaces the best-known one.
        """
        retrieval = self.settings.retrieval.model_copy(update={"trial_share": 0.0})
        return replace(self, settings=replace(self.settings, retrieval=retrieval))

    async def open(
        self, path: Path, engine: Engine, stack: AsyncExitStack,
        on_distilled: Callable[[Distilled], None] | None = None, *, background: bool = False,
    ) -> ExperienceManager:  # fmt: skip
        """Open the bank at `path`. `stack` closes it.

        `on_distilled` is called with each distilled answer. `background`: True if the bank distils
        in the background, see `QueueSettings.bounded`.
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
    untrained_engine: Callable[[AsyncExitStack], Awaitable[Engine]] | None
    """Function that opens an engine with the extractor that the run started with.

    None if the lessons of the writer are not compared.
    """

    @asynccontextmanager
    async def open_scratch(
        self, on_distilled: Callable[[Distilled], None]
    ) -> AsyncIterator[ExperienceManager]:
        """Yield a temporary copy of the bank, at the bank's step and without trials."""
        async with AsyncExitStack() as stack:
            path = _temporary_bank(stack)
            await self.manager.export_copy(path)
            manager = await self.factory.without_trials.open(path, self.engine, stack, on_distilled)
            manager.advance(self.manager.step)
            yield manager

    @asynccontextmanager
    async def open_untrained(
        self, on_distilled: Callable[[Distilled], None]
    ) -> AsyncIterator[ExperienceManager]:
        """Yield an empty temporary bank with the extractor that the run started with."""
        assert self.untrained_engine, "lessons are not compared"
        async with AsyncExitStack() as stack:
            path = _temporary_bank(stack)
            yield await self.factory.open(
                path, await self.untrained_engine(stack), stack, on_distilled
            )


def _temporary_bank(stack: AsyncExitStack) -> Path:
    """Return the path of a new bank that is removed when `stack` closes."""
    return Path(stack.enter_context(TemporaryDirectory(dir=scratch_folder()))) / "bank.sqlite"


async def bank_factory(
    config: RunConfig, specs: Mapping[str, EnvSpec], gpus: Mapping[str, GpuAssignment],
    progress: Progress, stack: AsyncExitStack,
) -> BankFactory:  # fmt: skip
    """Return the factory of the run's banks. `stack` closes its embedder.

    Raise `ConfigError` if the extractor cannot read the run's episodes.
    """
    settings = ManagerSettings(
        bank=config.bank,
        retrieval=config.retrieval,
        extractor=config.extractor.model_copy(update={"train": config.trains_extractor}),
        ask=config.ask,
        credit_window_steps=config.rollout.max_staleness + 8,
        # With the critic, rewards contain the verdict's score, whatever the episode's outcome. With
        # the perplexity-reduction reward, they contain a bonus that most experiences earn.
        # Subtracting the batch mean removes the mean of both again.
        centred=config.extractor.baseline == "batch"
        or config.critic.enabled
        or config.extractor.perplexity.weight > 0,
        deterministic=config.run.deterministic,
    )
    embedder = await stack.enter_async_context(_embedder(config, gpus.get("embedder", NO_GPU)))
    cached = CachedEmbedder(embedder, max(1, EMBEDDING_CACHE_BYTES // (4 * embedder.dim)))
    writer = extractor_model(config) if config.with_extractor else actor_model(config)
    seed, renderer = derive_seed(config.run.seed, "bank"), writer.renderer
    require_compatible_extractor(config)
    prompts = bank_prompts(config, specs, renderer)
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


async def open_experience(
    config: RunConfig, specs: Mapping[str, EnvSpec], gpus: Mapping[str, GpuAssignment],
    method: Method, run: RunDir, monitor: Monitor, stack: AsyncExitStack, *, actor_engine: Engine,
    checkpoint: Path | None, progress_bar: bool, on_progress: Callable[[], object],
    perplexity: PerplexityReward | None = None, replay: TaskReplay | None = None,
) -> tuple[ExperiencePipeline, RunBank] | tuple[None, None]:  # fmt: skip
    """Start the extractor and open the run's bank. Return Nones for a method without a bank.

    `actor_engine` writes the bank if the method has no extractor.

    The run begins with `checkpoint`, or anew if it is None. `on_progress` is called after every
    distillation and every training step of the extractor. `perplexity` is the source of the
    perplexity-reduction reward, if any. `replay` is the train stream if it repeats tasks because of
    failures.
    """
    if method.distiller is None:
        return None, None
    engine, role = actor_engine, None
    if config.with_extractor:
        role = extractor_model(config, monitor.note)
        trained = method.extractor is not None
        with stage(monitor, "starting the extractor's engine"):
            engine = await open_role_engine(config, gpus, role, stack, trained=trained)
    with stage(monitor, "starting the embedder"):
        progress = embedding_progress(monitor, progress_bar=progress_bar)
        factory = await bank_factory(config, specs, gpus, progress, stack)
    advisors = ((name, spec.curriculum.advisor) for name, spec in specs.items())
    diagnostics = Diagnostics({name: advisor for name, advisor in advisors if advisor})
    mark = read_state(checkpoint)["mark"] if checkpoint else None
    run_name = mark or await _start_bank(config.bank.init, run)
    background, failures = not config.run.deterministic, None

    def record(distilled: Distilled) -> None:
        diagnostics.record_distilled(distilled)
        if failures:
            failures.add(distilled)
        on_progress()

    manager = await factory.open(run.bank, engine, stack, record, background=background)
    failures = BankFailures(manager, run_name) if replay else None
    trainer = None
    if method.extractor and role:
        with stage(monitor, "starting the extractor's learner"):
            learner = await open_role_learner(config, gpus, role, method.extractor.loss, stack)
        trainer = ExtractorTrainer(
            manager, method.extractor, learner, engine, monitor, diagnostics.answers, on_progress
        )
    experience = ExperiencePipeline(
        manager, engine, method.distiller, trainer, diagnostics, factory.embedder, monitor,
        PipelineSettings(
            run_name,
            background=background,
            own_engine=config.with_extractor,
            merge_every=0 if config.bank.frozen else config.extractor.merge_every,
            baseline=config.extractor.baseline,
            perplexity=perplexity,
            replay=Replay(replay, failures, manager.calls) if replay and failures else None,
        ),
    )  # fmt: skip
    return experience, RunBank(manager, engine, factory, _untrained(config, gpus))


async def _start_bank(init: str | None, run: RunDir) -> str:
    """Copy the bank at `init` to the new run. Return the name that marks the run's episodes."""
    if not init:
        return "run"
    await ExperienceManager.start_from(Path(init), run.bank)
    # The ids of this run must differ from those already in the bank.
    return "run" + hashlib.sha256(run.bank.read_bytes()).hexdigest()[:8]


def require_bank(run: RunDir) -> None:
    """Raise `ConfigError` if the bank file of a run is missing."""
    if not run.bank.is_file():
        reason = f"its bank file {run.bank.name} is missing"
        raise ConfigError("run", str(run.path), reason, "Restore the file")


@dataclass(frozen=True)
class BankSource:
    """Bank of an evaluation, which reads a copy of it."""

    path: Path | None
    """File of the bank; None = an empty bank."""
    extractor: ModelRole | None
    """Extractor; None if it is never asked, or if the actor writes the bank."""
    step: int = 0
    """Number of completed actor steps, the clock of the bank."""
    snapshot: int | None = None
    """Snapshot to which the copy is rolled back; None = the bank as it is."""
    foreign: bool = False
    """True for a bank that the user names. Its vectors must be those of the config's embedder."""


def run_bank_source(config: RunConfig, checkpoint: Path, run: RunDir) -> BankSource:
    """Return the bank of a run with the extractor of `checkpoint`.

    Raise `ConfigError` if the run's bank file is missing.
    """
    require_bank(run)
    role = None
    if config.with_extractor:
        model = trained_model(checkpoint, "extractor", config.extractor.model)
        role = model_of("extractor", model, config.extractor)
    return BankSource(run.bank, role, int(checkpoint.name))


async def open_bank_copy(
    config: RunConfig, specs: Mapping[str, EnvSpec], gpus: Mapping[str, GpuAssignment],
    source: BankSource, stack: AsyncExitStack, *, actor_engine: Engine,
) -> RunBank:  # fmt: skip
    """Open a temporary copy of a bank.

    `actor_engine` writes it if the source has no extractor.

    Raise `ConfigError` if another embedder made the vectors of a foreign bank.
    """
    progress = embedding_progress(StderrMonitor())
    factory = await bank_factory(config, specs, gpus, progress, stack)
    if source.path and source.foreign:
        require_vectors_of(source.path, factory.embedder.name, "bank")
    path = _temporary_bank(stack)
    if source.path:
        await copy_database(source.path, path)
    if source.snapshot is not None:
        store = await Store.open(path)
        try:
            await store.rollback(source.snapshot)
        finally:
            await store.aclose()
    role = source.extractor
    engine = await open_role_engine(config, gpus, role, stack) if role else actor_engine
    manager = await factory.open(path, engine, stack)
    manager.advance(source.step)
    return RunBank(manager, engine, factory, _untrained(config, gpus))


def _untrained(
    config: RunConfig, gpus: Mapping[str, GpuAssignment]
) -> Callable[[AsyncExitStack], Awaitable[Engine]] | None:
    """Return the `untrained_engine` of a `RunBank`."""
    return partial(open_untrained_engine, config, gpus) if config.compares_lessons else None
