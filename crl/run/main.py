"""Commands behind `crl train`, `crl resume`, `crl fork` and `crl eval`.

They cover a run from its directory to its summary, including interruptions and errors.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from crl.config.load import dump, load_saved
from crl.config.resume import Change
from crl.config.schema import RunConfig
from crl.errors import (
    CheckpointError,
    ConfigError,
    CrlError,
    Interrupted,
    LearnerError,
    StallError,
    StoreError,
    is_disk_full,
)
from crl.evaluation.evaluate import Evaluation
from crl.failures import reporting
from crl.monitor.fan_out import FanOut
from crl.monitor.files import FileMonitor
from crl.monitor.follow import logged_lines
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir, require_free
from crl.monitor.sinks import sinks
from crl.planning import preflight
from crl.planning.plan import overview
from crl.planning.tasks import data_notes, specs
from crl.prompts import hashes
from crl.protocols import Monitor
from crl.run import resume
from crl.run.assemble import open_evaluator, open_training_loop
from crl.run.bank import run_bank_source
from crl.run.checkpoint import (
    chosen_checkpoint,
    latest_checkpoint,
    read_state,
    repair,
    trained_model,
)
from crl.run.exporting import export
from crl.run.loop import TrainingLoop
from crl.run.models import model_of, print_to_stderr
from crl.run.resume import Resumption
from crl.run.summary import Outcome, SuccessReport, Summary, experience_report
from crl.run.supervision.ending import Ending, first_cause, log_traceback, logged_failure
from crl.run.supervision.interruptible import run_evaluation
from crl.run.supervision.signals import INTERRUPTED, Interrupts, do_nothing
from crl.scratch import scratch_folder
from crl.wording import counted


def train(config: RunConfig, run_dir: Path, *, command: str, screen: Monitor) -> int:
    """Train a new run and return the exit code.

    The run is shown on `screen`, which is closed at the end. `command` is the command line without
    --seed and --run-dir; the summary shows it. Raise `CrlError` if the run cannot start or fails.
    The traceback of any error except a `ConfigError` is written to RUN/log.txt.
    """
    started = time.monotonic()
    preflight.require(config)
    run = RunDir.create(run_dir)
    try:
        with _disk_errors(run):
            dump(config, run.config, prompts=hashes(config.prompts.files), command=command)
    except BaseException:
        run.clear()  # the same command can be repeated
        raise
    try:
        with run.lock():
            return _run(config, run, screen, started, f"run {run.path}\n{overview(config)}\n")
    except ConfigError:
        # Without metrics the run has not begun: make the directory empty again.
        if not run.metrics.exists() or not run.metrics.stat().st_size:
            run.clear()
        raise


def resume_run(
    config: RunConfig, changes: Sequence[Change], run_dir: Path, *, step: int | None,
    screen: Monitor,
) -> int:  # fmt: skip
    """Continue a run from its checkpoint of `step`, or from the last one. Return the exit code.

    `changes` are the settings in which `config` differs from the saved one. Raise `CrlError` as
    `train` does, and `ConfigError` if there is no undamaged checkpoint, or if the run is finished.
    """
    started = time.monotonic()
    resume.require_initial_models(config)
    preflight.require(config, checks=preflight.RESUME_CHECKS)
    run = RunDir(run_dir)
    with run.lock():
        repair(run.checkpoints)

        def note(text: str) -> None:
            print_to_stderr(text)
            run.append_to_log(text)

        resumption = resume.choose(run, step, note)
        done = resumption.step - (0 if resumption.is_evaluated else 1)
        if done >= config.run.steps:
            reason = f"the run has completed {counted(resumption.step, 'step')}"
            remedy = f"Extend it with --steps {resumption.step + 1} or more"
            raise ConfigError("run.steps", config.run.steps, reason, remedy)
        resume.require_base_models(config, resumption.checkpoint)
        state = read_state(resumption.checkpoint)
        started -= state["seconds"]
        length = state["records"][run.metrics.name]
        screen.resumed(logged_lines(run.metrics, length), state["seconds"])
        saved = load_saved(run_dir)
        others = resume.unset_changes(saved, hashes(config.prompts.files))
        opening = "\n".join([f"run {run.path}", *(f"  {change}" for change in (*changes, *others))])
        return _run(config, run, screen, started, opening, resumption)


def fork_run(config: RunConfig, source: Path, target: Path, *, step: int | None) -> int:
    """Make the new run `target` from a checkpoint of the run `source`. Return its step.

    `step` is the step of the checkpoint, or None for the last one. Raise `ConfigError` if there is
    no undamaged checkpoint, if `source` is being trained, or if `target` is not empty.
    """
    old = RunDir(source)
    require_free(target)
    if source.resolve() in target.resolve().parents:
        reason = f"lies in the run {source}"
        raise ConfigError("run_dir", str(target), reason, "Choose a directory beside it")
    with old.lock():
        repair(old.checkpoints)
        resumption = resume.choose(old, step, print_to_stderr)
        with TemporaryDirectory(dir=scratch_folder(target.parent)) as folder:
            new = RunDir(Path(folder) / "run")
            asyncio.run(resume.fork(old, new, resumption.checkpoint))
            dump(
                config,
                new.config,
                prompts=hashes(config.prompts.files),
                command=load_saved(source).command,
                lineage=resume.lineage(old, resumption.step),
            )
            new.path.rename(target)  # replaces an empty directory
    return resumption.step


def export_run(
    run_dir: Path, target: Path, *, role: str | None, step: int | None, merge: bool = False
) -> Path:
    """Export a model of a run, or the bank if `role` is None. Return the checkpoint.

    `step` is the step of the checkpoint, or None for the last one. `merge` is that of
    `export.export_model`. Raise `CrlError` as `export.export_model` and `export.export_bank` do.
    """
    run, saved = RunDir(run_dir), load_saved(run_dir)
    if role is None:
        checkpoint = resume.choose(run, step, print_to_stderr).checkpoint
        asyncio.run(export.export_bank(saved, run, checkpoint, target))
    else:  # needs no bank
        checkpoint = chosen_checkpoint(run.checkpoints, step, print_to_stderr)
        export.export_model(saved, checkpoint, role, target, merge=merge)
    return checkpoint


def _run(
    config: RunConfig, run: RunDir, screen: Monitor, started: float, opening: str,
    resumption: Resumption | None = None,
) -> int:  # fmt: skip
    """Run the training loop and return the exit code.

    `started` is the time at which the run began; time before an interruption counts. `opening` is
    the first note.
    """
    ending = Ending(run, screen)
    interrupts = Interrupts(lambda: ending.interrupted_again(INTERRUPTED))
    with interrupts.handled():
        try:
            with (
                _disk_errors(run),
                closing(
                    open_monitor(
                        config, run, screen, started, resumption.step if resumption else None
                    )
                ) as monitor,
                reporting(ending.failed),
            ):
                monitor.note(opening)
                process = _Process(run, monitor, screen, ending, interrupts)
                interrupts.stop = do_nothing  # until the event loop runs
                try:
                    return asyncio.run(_train(config, process, started, resumption))
                finally:
                    interrupts.stop = do_nothing  # only the outputs have to be closed
        except ConfigError:
            raise
        except Exception as error:
            if (failure := logged_failure(error, run)) is error:
                raise
            raise failure from error
        except BaseException as error:
            if not interrupts.received:
                log_traceback(error, run)
                raise
            text = (
                f"interrupted before the first step of {run.path}: there is nothing to resume. "
                "Remove it, or train again in another directory"
            )
            if resumption:
                text = f"interrupted: no step was trained after step {resumption.step}"
            print_to_stderr(text)
            with suppress(OSError):
                run.append_to_log(text)
            raise Interrupted from error
        finally:
            ending.done()


@dataclass(frozen=True)
class _Process:
    """Process of a run: its outputs and the ways in which it ends."""

    run: RunDir
    monitor: Monitor
    screen: Monitor
    ending: Ending
    interrupts: Interrupts


@contextmanager
def _disk_errors(run: RunDir) -> Iterator[None]:
    """Raise `CrlError` for an `OSError` that means a full disk.

    This covers the files of a run except the bank, whose errors are `StoreError`s.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise CrlError(
            f"{run.path}: {error.strerror}. "
            "Free some disk space. All existing checkpoints are complete."
        ) from error


def evaluate_run(run_dir: Path) -> int:
    """Repeat the evaluation of the run's last checkpoint, print the result, and return 0.

    The files of the run are not changed.
    """
    config = load_saved(run_dir).config
    checkpoint = latest_checkpoint(RunDir(run_dir).checkpoints, print_to_stderr)
    preflight.require(config, checks=preflight.EVALUATION_CHECKS)
    work = _evaluate(config, checkpoint, RunDir(run_dir))
    result = run_evaluation(work, f"the evaluation of {run_dir}")
    print(f"{checkpoint}, after {counted(int(checkpoint.name), 'step')}")
    success = SuccessReport(config.eval.temperature, result, data_notes=data_notes(specs(config)))
    print("\n".join(success.lines()))
    return 0


async def _evaluate(config: RunConfig, checkpoint: Path, run: RunDir) -> Evaluation:
    source = run_bank_source(config, checkpoint, run) if config.with_bank else None
    rates = read_state(checkpoint)["success_rates"] if config.critic.enabled else None
    actor = model_of("actor", trained_model(checkpoint, "actor", config.actor.model), config.actor)
    async with open_evaluator(config, actor, source, rates) as evaluator:
        return await evaluator.evaluate()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection inside the context.

    Scanning the imported modules and loaded models would pause rollouts for 0.2 s each time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def short_thread_turns() -> Iterator[None]:
    """Let threads keep the interpreter lock for at most 1 ms at a time inside the context.

    With Python's 5 ms, the event loop would wait that long for a thread that writes episodes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _train(
    config: RunConfig, process: _Process, started: float, resumption: Resumption | None
) -> int:
    """Open the parts of the run, train, close the parts, and return the exit code."""
    _stop_by_cancelling(process.interrupts)
    run, monitor = process.run, process.monitor
    async with open_training_loop(
        config,
        run,
        monitor,
        started=started,
        checkpoint=resumption.checkpoint if resumption else None,
        progress_bar=isinstance(process.screen, PlainMonitor),
    ) as loop:
        if resumption:
            await _restore(config, run, loop, resumption)
        process.ending.completed_steps = lambda: loop.completed_steps
        _stop_after_step(process.interrupts, loop)
        with frozen_heap(), short_thread_turns():
            await _run_loop(loop)
        summary = await _summary(config, run, loop, started)
        summary.write(run.summary)
        monitor.note(summary.text())
        return INTERRUPTED if loop.interrupted else 0


async def _run_loop(loop: TrainingLoop) -> None:
    """Run the loop. After an error between two steps, write a checkpoint if it can be trusted."""
    try:
        await loop.run()
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        without = LearnerError | StoreError | StallError | CheckpointError
        if not isinstance(cause, without) and not loop.mid_step:
            try:
                await loop.checkpoint()
            except CheckpointError as error:  # it must not hide the cause
                loop.outputs.monitor.note(f"warning: {error}")
        raise cause from cause.__cause__ or group


def _stop_by_cancelling(interrupts: Interrupts) -> None:
    """Let the first interrupt cancel the current task, while the parts of the run are opened."""
    event_loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    interrupts.stop = lambda: event_loop.call_soon_threadsafe(task.cancel)
    if interrupts.received:
        task.cancel()


def _stop_after_step(interrupts: Interrupts, loop: TrainingLoop) -> None:
    """Let the first interrupt stop `loop`, which writes a checkpoint of the last completed step.

    A step whose batch is still being collected is dropped. A step that is being trained is
    completed.
    """
    event_loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.outputs.monitor.note(
            "interrupted: writing a checkpoint (press Ctrl-C again to exit immediately)"
        )
        loop.stop.set()

    interrupts.stop = lambda: event_loop.call_soon_threadsafe(stop)


async def _summary(config: RunConfig, run: RunDir, loop: TrainingLoop, started: float) -> Summary:
    """Return the summary of a run that has ended."""
    evaluations = loop.measurements.evaluations
    before, after = evaluations.get(0), evaluations.get(loop.completed_steps)
    if before is None or not loop.completed_steps:
        before, after = before or after, None
    return Summary(
        steps=loop.completed_steps,
        warnings=loop.supervisor.warnings.lines(),
        seconds=time.monotonic() - started,
        totals=loop.totals,
        success=SuccessReport(
            config.eval.temperature,
            before,
            after,
            data_notes=data_notes(specs(config)),
        ),
        skipped_updates=loop.skipped_updates
        + (
            experience.trainer.skipped_updates
            if (experience := loop.experience) and experience.trainer
            else 0
        ),
        outcome=Outcome(
            run.path,
            run.checkpoint(loop.completed_steps),
            config.run.steps,
            interrupted=loop.interrupted,
            actor_updated=loop.actor.engine.version > 0,
            actor_trained=config.updates("actor"),
            deterministic=config.run.deterministic,
        ),
        experience=await experience_report(loop, config.writer),
    )


async def _restore(
    config: RunConfig, run: RunDir, loop: TrainingLoop, resumption: Resumption
) -> None:
    """Undo everything after the checkpoint, and restore all parts.

    All parts of the run are already open, so nothing is undone for a run that cannot start.
    """
    saved = load_saved(run.path)
    loop.outputs.monitor.note(resume.discard(run, resumption))
    dump(
        config,
        run.config,
        prompts=hashes(config.prompts.files),
        command=saved.command,
        lineage=saved.lineage,
    )
    if await loop.restore(resumption.checkpoint):
        resume.keep_archives(run, resumption)


def open_monitor(
    config: RunConfig, run: RunDir, screen: Monitor, started: float,
    completed_steps: int | None = None,
) -> Monitor:  # fmt: skip
    """Return the monitor of a run. `completed_steps`: step at which it is resumed."""
    files = FileMonitor(run, started=started, deterministic=config.run.deterministic)
    monitor = FanOut(files, {"screen": screen})
    for name, open_sink in sinks(config, run, completed_steps).items():
        monitor.add(name, open_sink)
    return monitor
