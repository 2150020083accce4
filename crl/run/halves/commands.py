"""Commands behind `crl rollout` and `crl learn`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from crl.config.load import dump
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.planning import preflight
from crl.planning.plan import overview
from crl.prompts import hashes
from crl.protocols import Monitor
from crl.run.halves.learn import learn
from crl.run.halves.play import play
from crl.run.main import open_monitor
from crl.run.supervision.ending import first_cause, logged_failure
from crl.run.supervision.signals import sigterm_as_interrupt
from crl.wording import counted


def play_episodes(config: RunConfig, folder: Path) -> int:
    """Play the episodes of a run's steps, record them in the new directory `folder`, return 0.

    Raise `CrlError` if this cannot start or fails.
    """
    preflight.require(config, checks=preflight.EVALUATION_CHECKS)
    run = _new_folder(config, folder)
    with _outputs(config, run) as monitor:
        asyncio.run(_first_cause(play(config, run, monitor)))
        monitor.note(
            f"played {counted(config.run.steps, 'step')}; the episodes: {run.episodes}\n"
            f"  list them:     crl episodes {run.path}\n"
            f"  train on them: crl learn --from {run.path}"
        )
    return 0


def learn_from_episodes(config: RunConfig, shards: Mapping[int, Path], folder: Path) -> int:
    """Train the actor on recorded episodes, write it to the new directory `folder`, return 0.

    `shards` are those of `crl.records.reader.episode_shards`. Raise `CrlError` if this cannot start
    or fails.
    """
    preflight.require(config)
    run = _new_folder(config, folder)
    (target := run.path / "actor").mkdir()
    with _outputs(config, run) as monitor:
        asyncio.run(_first_cause(learn(config, shards, target, monitor)))
        monitor.note(
            f"trained on {counted(len(shards), 'step')}; "
            f"the trained actor, in Hugging Face format: {target}"
        )
    return 0


def _new_folder(config: RunConfig, folder: Path) -> RunDir:
    run = RunDir.create(folder)
    dump(config, run.config, prompts=hashes(config.prompts.files))
    return run


@contextmanager
def _outputs(config: RunConfig, run: RunDir) -> Iterator[Monitor]:
    """Yield the monitor. Write the traceback of an error to the log, as a run does."""
    screen = PlainMonitor(steps=config.run.steps)
    try:
        with (
            run.lock(),
            sigterm_as_interrupt(),
            closing(open_monitor(config, run, screen, time.monotonic())) as monitor,
        ):
            monitor.note(f"{run.path}\n{overview(config)}\n")
            yield monitor
    except ConfigError:
        run.clear()
        raise
    except Exception as error:
        raise logged_failure(error, run) from error


async def _first_cause(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`. If it fails with an exception group, raise the first error in it."""
    try:
        await work
    except BaseExceptionGroup as group:
        raise (cause := first_cause(group)) from cause.__cause__ or group
