"""Commands behind `crl train` and `crl eval`.

They cover a run from its directory to its summary, including interruptions and errors.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from crl.config.load import dump, load_saved
from crl.config.schema import RunConfig
from crl.errors import ConfigError, CrlError, LearnerError, StoreError, is_disk_full
from crl.evaluation.evaluate import Evaluation
from crl.monitor.fan_out import FanOut
from crl.monitor.files import FileMonitor
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.monitor.sinks import open_sinks
from crl.planning import preflight
from crl.planning.plan import overview
from crl.planning.tasks import data_notes, specs
from crl.prompts import hashes
from crl.protocols import Monitor
from crl.run.assemble import open_evaluator, open_training_loop
from crl.run.checkpoint import latest_checkpoint
from crl.run.loop import TrainingLoop
from crl.run.signals import sigterm_as_interrupt
from crl.run.summary import NextSteps, SuccessReport, Summary, experience_report
from crl.wording import counted

INTERRUPTED = 130
"""Exit code of a run that was interrupted."""


def train(config: RunConfig, run_dir: Path, *, command: str, screen: Monitor) -> int:
    """Train a run and return the exit code.

    The run is shown on `screen`, which is closed at the end. `command` is the command line without
    --seed and --run-dir; the summary shows it. Raise `CrlError` if the run cannot start or fails.
    The traceback of any error except a `ConfigError` is written to RUN/log.txt.
    """
    started = time.monotonic()
    preflight.require(config)
    run = RunDir.create(run_dir)
    dump(config, run.config, prompts=hashes(config.prompts.files))
    try:
        with (
            sigterm_as_interrupt(),
            _disk_errors(run),
            closing(_monitor(config, run, screen)) as monitor,
        ):
            monitor.note(f"run {run.path}\n{overview(config)}\n")
            return asyncio.run(_train(config, run, monitor, screen, command, started))
    except ConfigError:
        # Without metrics the run has not begun: make the directory empty again.
        if not run.metrics.exists() or not run.metrics.stat().st_size:
            run.clear()
        raise
    except BaseException as error:
        _log_traceback(error, run.log)
        raise


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


def _log_traceback(error: BaseException, log: Path) -> None:
    """Append the traceback of `error` to `log`. Add its location to the message of a `CrlError`.

    If the log cannot be written (for example, because the disk is full), the message says so.
    """
    note = f"traceback: {log}"
    try:
        with log.open("a", encoding="utf-8") as stream:
            stream.write("".join(traceback.format_exception(error)))
    except OSError as write_error:
        note = f"no traceback: cannot write {log}: {write_error.strerror}"
    if isinstance(error, CrlError):
        error.args = (f"{error} ({note})",)


def evaluate_run(run_dir: Path) -> int:
    """Repeat the evaluation of the run's last checkpoint, print the result, and return 0.

    The files of the run are not changed.
    """
    config = load_saved(run_dir).config
    checkpoint = latest_checkpoint(RunDir(run_dir).checkpoints)
    preflight.require(config, checks=preflight.EVALUATION_CHECKS)
    result = asyncio.run(_evaluate(config, checkpoint, RunDir(run_dir)))
    print(f"{checkpoint}, after {counted(int(checkpoint.name), 'step')}")
    success = SuccessReport(config.eval.temperature, result, data_notes=data_notes(specs(config)))
    print("\n".join(success.lines()))
    return 0


async def _evaluate(config: RunConfig, checkpoint: Path, run: RunDir) -> Evaluation:
    async with open_evaluator(config, checkpoint, run) as evaluator:
        try:
            return await evaluator.evaluate()
        except BaseExceptionGroup as group:
            raise (cause := _first_cause(group)) from cause.__cause__ or group


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


async def _train(
    config: RunConfig, run: RunDir, monitor: Monitor, screen: Monitor, command: str, started: float
) -> int:
    async with open_training_loop(
        config, run, monitor, progress_bar=isinstance(screen, PlainMonitor)
    ) as loop:
        with frozen_heap(), _handle_interrupts(loop, screen):
            try:
                await loop.run()
            except BaseExceptionGroup as group:
                cause = _first_cause(group)
                if not isinstance(cause, LearnerError | StoreError) and not loop.mid_step:
                    await loop.checkpoint()
                raise cause from cause.__cause__ or group
        evaluations = loop.measurements.evaluations
        summary = Summary(
            steps=loop.completed_steps,
            seconds=time.monotonic() - started,
            totals=loop.totals,
            success=SuccessReport(
                config.eval.temperature,
                before=evaluations.get(0),
                after=evaluations.get(loop.completed_steps) if loop.completed_steps else None,
                data_notes=data_notes(specs(config)),
            ),
            skipped_updates=loop.skipped_updates
            + (
                experience.trainer.skipped_updates
                if (experience := loop.experience) and experience.trainer
                else 0
            ),
            next_steps=NextSteps(
                run.path, run.checkpoint(loop.completed_steps), command, config.run.seed
            ),
            experience=await experience_report(loop, run.bank),
        )
        monitor.note(summary.text())
        return INTERRUPTED if loop.stop.is_set() else 0


@contextmanager
def _handle_interrupts(loop: TrainingLoop, screen: Monitor) -> Iterator[None]:
    """Handle Ctrl-C (SIGINT) and SIGTERM inside the context.

    The first signal stops `loop`, which writes a checkpoint of the last completed step. A step
    whose batch is still being collected is dropped. A step that is being trained is completed. The
    second signal ends the process immediately.
    """
    event_loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if loop.stop.is_set():
            try:
                screen.close()  # the screen may have to restore the terminal
            finally:
                os._exit(INTERRUPTED)
        loop.outputs.monitor.note(
            "interrupted: writing a checkpoint (press Ctrl-C again to exit immediately)"
        )
        loop.stop.set()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        event_loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            event_loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _first_cause(group: BaseExceptionGroup) -> BaseException:
    """Return the first error in `group` that is not itself a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _monitor(config: RunConfig, run: RunDir, screen: Monitor) -> Monitor:
    files = FileMonitor(run, deterministic=config.run.deterministic)
    return FanOut([files, screen, *open_sinks(config, run)])
