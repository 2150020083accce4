"""Commands behind `crl rollout`, `crl learn`, `crl sft` and `crl bank build`."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from crl.config.load import dump
from crl.config.schema import RunConfig
from crl.errors import ConfigError, Interrupted
from crl.failures import reporting
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.planning import preflight
from crl.planning.model_checks import require_same_tokenizer
from crl.planning.plan import overview
from crl.planning.tasks import scripted_players, specs
from crl.prompts import hashes
from crl.protocols import Monitor
from crl.records.reader import episode_shards
from crl.records.shards import read_shard
from crl.run.halves.build import build, built, file_requests
from crl.run.halves.learn import learn
from crl.run.halves.play import play, require_playable
from crl.run.halves.sft import SftResult, SftSettings, Source, fine_tune
from crl.run.main import open_monitor
from crl.run.supervision.ending import Ending, logged_failure
from crl.run.supervision.interruptible import AGAIN, interruptible
from crl.run.supervision.signals import INTERRUPTED, Interrupts, do_nothing
from crl.types import RoleName
from crl.wording import counted


def play_episodes(config: RunConfig, folder: Path, *, scripted: bool = False) -> int:
    """Play the episodes of a run's steps, record them in the new directory `folder`, return 0.

    `scripted`: let scripted players play. Raise `CrlError` if this cannot start or fails.
    """
    preflight.require(config, checks=preflight.ROLLOUT_CHECKS)
    if scripted:
        scripted_players(specs(config))
    else:
        require_playable(config)
    run, steps = _new_folder(config, folder), config.run.steps

    async def played(monitor: Monitor) -> str:
        await play(config, run, monitor, scripted=scripted)
        return (
            f"played {counted(steps, 'step')}; the episodes: {run.episodes}\n"
            f"  list them:     crl episodes {run.path}\n"
            f"  train on them: crl {'sft' if scripted else 'learn'} --from {run.path}"
        )

    _carry_out(config, run, steps, played)
    return 0


def learn_from_episodes(
    config: RunConfig, shards: Mapping[int, Path], folder: Path, *, recorder: Path | None
) -> int:
    """Train the actor on recorded episodes, write it to the new directory `folder`, return 0.

    `shards` are those of `crl.records.reader.episode_shards`. `recorder` is the model that played
    them, or None if the actor is the same model. Raise `CrlError` if this cannot start or fails.
    """
    preflight.require(config)
    _check_shards(shards, "train on the steps before it with --steps N")
    if recorder:
        require_same_tokenizer(config.actor.model, recorder)
    run = _new_folder(config, folder)
    target = run.path / "actor"

    async def learned(monitor: Monitor) -> str:
        updates = await learn(config, shards, target, monitor)
        trained = f"trained on {counted(len(shards), 'step')}; "
        if updates:
            return f"{trained}the trained actor, in Hugging Face format: {target}"
        return f"{trained}no update was made: the weights in {target} are unchanged"

    _carry_out(config, run, max(shards), learned)
    return 0


def fine_tune_on(
    config: RunConfig, source: Source, folder: Path, settings: SftSettings, *, command: str
) -> int:
    """Train a model on demonstrations, write it to the new directory `folder`, return 0.

    Without files and drills, scripted players first play `run.steps` steps, which are recorded in
    `folder`. `command` is the command line, which is saved with the config.

    Raise `CrlError` if this cannot start or fails.
    """
    preflight.require(config, checks=preflight.fine_tuning_checks(settings.role))
    scripted = source.files is None and source.drilled is None
    if scripted:
        scripted_players(specs(config))
    elif isinstance(source.files, Mapping):
        _check_shards(source.files, "give one file of the others")
    run = _new_folder(config, folder, command)
    role = settings.role
    target = run.path / role

    async def tuned(monitor: Monitor) -> str:
        demonstrations = source
        if scripted:
            await play(config, run, monitor, scripted=True)
            demonstrations = replace(source, files=episode_shards(run.path))
        result = await fine_tune(config, demonstrations, target, monitor, settings)
        _write_config(result.config, run, command)
        further = ["crl", "train", "--tasks", ",".join(config.tasks)]
        if config.preset != RunConfig.model_fields["preset"].default:
            further += ["--preset", config.preset]
        return (
            f"the {role} after epoch {result.epoch}, in Hugging Face format: {target}\n"
            f"{_losses(result)}  train it further: "
            f"{shlex.join([*further, '--set', f'{role}.model={target}'])}"
        )

    _carry_out(config, run, None, tuned, only=role)
    return 0


def build_bank(config: RunConfig, source: Mapping[int, Path] | Path, folder: Path) -> int:
    """Distil episodes into a new bank in the new directory `folder`, return 0.

    `source` is that of `crl.run.halves.build.build`. Raise `CrlError` if this cannot start or
    fails.
    """
    preflight.require(config, checks=preflight.ROLLOUT_CHECKS)
    if isinstance(source, Path):
        if not list(file_requests(source, frozenset(config.tasks))):
            raise ConfigError("--from", str(source), "has no episodes", "Give another file")
    else:
        _check_shards(source, "give one file of the others")
    run = _new_folder(config, folder)

    async def distilled(monitor: Monitor) -> str:
        return built(config, run, await build(config, source, run, monitor))

    _carry_out(config, run, None, distilled)
    return 0


def _losses(result: SftResult) -> str:
    """Return a line with the held-out losses; empty without held-out demonstrations."""
    if result.start is None or result.best is None:
        return ""
    return f"  held-out loss:    {result.start:.3f} → {result.best:.3f} nats per token\n"


def _check_shards(shards: Mapping[int, Path], remedy: str) -> None:
    """Raise `ConfigError` if an episode cannot be read, before anything is trained.

    `remedy` is an alternative to restoring the file.
    """
    for path in shards.values():
        try:
            for _ in read_shard(path):
                pass
        except ConfigError as error:
            raise ConfigError(
                error.key, error.value, error.reason, f"Restore the file, or {remedy}"
            ) from error


def _new_folder(config: RunConfig, folder: Path, command: str = "") -> RunDir:
    run = RunDir.create(folder)
    _write_config(config, run, command)
    return run


def _write_config(config: RunConfig, run: RunDir, command: str) -> None:
    dump(config, run.config, prompts=hashes(config.prompts.files), command=command)


def _carry_out(
    config: RunConfig, run: RunDir, steps: int | None,
    work: Callable[[Monitor], Coroutine[Any, Any, str]], only: RoleName | None = None,
) -> None:  # fmt: skip
    """Await `work` and note the text that it returns.

    Failures and interrupts end the process like those of a run. `steps` is the last step that
    `work` logs, if known. `only` is the role whose model is the only one in use, or None.
    """
    screen = PlainMonitor(steps=steps)
    ending = Ending(run, screen)
    lost = f"{run.path} is incomplete"
    interrupts = Interrupts(lambda: ending.exit_now(INTERRUPTED, f"exiting immediately: {lost}"))
    with interrupts.handled():
        try:
            with (
                run.lock(),
                closing(open_monitor(config, run, screen, time.monotonic())) as monitor,
                reporting(ending.failed),
            ):
                monitor.note(f"{run.path}\n{overview(config, only)}\n")
                interrupts.stop = do_nothing  # until the event loop runs
                done = asyncio.run(
                    interruptible(
                        work(monitor),
                        interrupts,
                        lambda: monitor.note(f"interrupted: {lost} {AGAIN}"),
                    )
                )
                monitor.note(done)
        except ConfigError:
            if not run.episodes.exists():
                run.clear()
            raise
        except Exception as error:
            if (failure := logged_failure(error, run)) is error:
                raise
            raise failure from error
        except asyncio.CancelledError as error:
            raise Interrupted from error
        finally:
            ending.done()
