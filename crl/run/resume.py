"""Continuation of an ended run from one of its checkpoints.

Everything after the checkpoint is undone: the bank is rolled back to the checkpoint's snapshot, and
later metrics, episodes and checkpoints move to RUN/discarded/N. A copy of the newer bank is kept
there too. The log keeps its lines.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from crl.config.load import SavedRun, load_saved, versions
from crl.config.models import find_model, is_adapter, weight_shapes
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.manager.storage.database import copy_database, snapshots
from crl.manager.storage.store import Store
from crl.modeling.adapters import moved_remedy, require_same_base
from crl.monitor.run_dir import RunDir
from crl.planning.model_checks import model_sections
from crl.records import position
from crl.run.bank import require_bank
from crl.run.checkpoint import (
    chosen_checkpoint,
    complete_steps,
    later_checkpoints,
    read_manifest,
    read_state,
    trained_model,
    write_manifest,
)
from crl.wording import counted


@dataclass(frozen=True)
class Resumption:
    """Checkpoint from which a run continues, and the directory of discarded files."""

    checkpoint: Path
    discarded: Path
    """Directory of discarded files. It does not exist if nothing is discarded."""

    @property
    def step(self) -> int:
        """Number of completed steps at the checkpoint."""
        return int(self.checkpoint.name)

    @property
    def is_evaluated(self) -> bool:
        """True if the run was evaluated at the checkpoint's step."""
        evaluations = read_state(self.checkpoint)["measurements"]["evaluations"]
        return self.step in [step for step, _ in evaluations]


def choose(run: RunDir, step: int | None, note: Callable[[str], object]) -> Resumption:
    """Return the resumption from the checkpoint of `step`, or from the last undamaged one.

    `note` is called with a line of text for every damaged checkpoint that is skipped. Raise
    `ConfigError` if there is no such checkpoint, or if the bank does not have its snapshot.
    """
    checkpoint = chosen_checkpoint(run.checkpoints, step, note)
    state = read_state(checkpoint)
    if "records" not in state:
        raise ConfigError(
            "run",
            str(run.path),
            "its checkpoint was written by a version of crl that could not resume runs",
            "Train again",
        )
    if "bank" in state:
        require_bank(run)
        if state["bank"] not in snapshots(run.bank):
            raise ConfigError(
                "run",
                str(run.path),
                f"its bank has no snapshot of the checkpoint of step {checkpoint.name}",
                "Restore the bank.sqlite of this run, or use another checkpoint with --from STEP",
            )
    return Resumption(checkpoint, run.new_discarded())


def discard(run: RunDir, resumption: Resumption) -> str:
    """Discard metrics, episodes, checkpoints and their evaluations after the checkpoint.

    The summary is deleted: the run writes another one at its end. Return a line of text that names
    what was discarded.
    """
    target = resumption.discarded
    # Later checkpoints first: without them, a process that is killed here is resumed from the same
    # checkpoint again.
    for path in later_checkpoints(run.checkpoints, resumption.step):
        (target / "checkpoints").mkdir(parents=True, exist_ok=True)
        path.rename(target / "checkpoints" / path.name)
    for path in run.path.glob("eval/step*"):
        if (number := re.match(r"step(\d+)", path.name)) and int(number[1]) > resumption.step:
            (target / "eval").mkdir(parents=True, exist_ok=True)
            path.rename(target / "eval" / path.name)
    records = read_state(resumption.checkpoint)["records"]
    warning = position.missing_metrics(run, records)
    position.discard(run, records, resumption.step, target)
    run.summary.unlink(missing_ok=True)
    text = "\n".join([*filter(None, [warning]), f"resuming at step {resumption.step}"])
    if not target.exists():
        return text
    last = max(_trained_steps(target / run.metrics.name), default=resumption.step)
    steps = last - resumption.step
    what = "what was written" if steps < 1 else f"{counted(steps, 'step')}"
    verb = "are" if steps > 1 else "is"
    return f"{text}; {what} after it {verb} discarded (kept in {target})"


def keep_archives(run: RunDir, resumption: Resumption) -> None:
    """Move the copy of a bank that was rolled back to the other discarded files.

    A resume that was killed may have left another one.
    """
    for archive in sorted(run.path.glob(f"{run.bank.stem}-before-rollback-*")):
        resumption.discarded.mkdir(parents=True, exist_ok=True)
        target = resumption.discarded / run.bank.name
        archive.rename(target.with_name(archive.name) if target.exists() else target)


def has_moved(run: RunDir) -> Callable[[str, str, str], bool]:
    """Return a function that tells whether the initial model of a role has moved.

    Its arguments are the role, the old and the new path. The old path must have no model. The
    weights at the new path must have the shapes of the trained ones, if the role is trained. An
    actor that is not trained cannot move. The function raises `ConfigError` if an adapter was
    trained and the new path has another base model.
    """

    def moved(role: str, old: str, new: str) -> bool:
        key = f"{role}.model"
        if role not in ("actor", "extractor") or _exists(old):
            return False
        if (found := find_model(new, key)) is None:
            return False
        steps = complete_steps(run.checkpoints)[-1:]
        trained = [path for step in steps if (path := run.checkpoint(step) / role).is_dir()]
        if role == "actor" and not trained:
            return False  # the checkpoint has no weights to compare with
        for path in filter(is_adapter, trained):
            require_same_base(path, found, key)
        return all(
            weight_shapes(path, key) == weight_shapes(found, key)
            for path in trained
            if not is_adapter(path)
        )

    return moved


def require_initial_models(config: RunConfig) -> None:
    """Raise `ConfigError` if a model that the run began with is gone."""
    for role, section in model_sections(config).items():
        try:
            find_model(section.model, f"{role}.model")
        except ConfigError as error:
            remedy = f"Restore it. {moved_remedy(error.key)}"
            raise ConfigError(error.key, error.value, error.reason, remedy) from error


def _exists(model: str) -> bool:
    try:
        return find_model(model, "model") is not None
    except ConfigError:
        return False


def unset_changes(saved: SavedRun, prompts: Mapping[str, str]) -> list[str]:
    """Return the differences from a saved run in prompts and packages.

    `prompts` are the SHA-256 of the current prompts, by name.
    """
    prompt_changes = [
        f"prompts.{name}: the text has changed"
        for name in sorted({*saved.prompts, *prompts})
        if saved.prompts.get(name) != prompts.get(name)
    ]
    before, now = saved.versions, versions()
    package_changes = [
        f"{name}: {before[name]} → {now.get(name)}"
        for name in before  # others were not recorded yet
        if before[name] != now.get(name)
    ]
    return [*prompt_changes, *package_changes]


async def fork(source: RunDir, target: RunDir, checkpoint: Path) -> None:
    """Copy a checkpoint of `source`, its bank and its metrics to the new run `target`.

    The bank is rolled back to the checkpoint. Episodes are not copied.
    """
    shutil.copytree(checkpoint, copy := target.checkpoints / checkpoint.name)
    state = read_state(checkpoint)
    if "bank" in state:
        await copy_database(source.bank, target.bank)
        store = await Store.open(target.bank)
        try:
            archive = (await store.rollback(state["bank"])).archive
        finally:
            await store.aclose()
        if archive:
            archive.unlink()
    manifest = read_manifest(copy)
    length = manifest["state"]["records"][source.metrics.name]
    if source.metrics.is_file():
        with source.metrics.open("rb") as file:
            target.metrics.write_bytes(file.read(length))
    manifest["state"]["records"] = position.position(target)
    write_manifest(copy, manifest)


def lineage(source: RunDir, step: int) -> list[Mapping[str, str | int]]:
    """Return the runs from which a fork of `source` at `step` descends, the nearest last."""
    return [
        *load_saved(source.path).lineage,
        {"run": str(source.path.resolve()), "step": step},
    ]


def _trained_steps(metrics: Path) -> Iterator[int]:
    """Yield the steps of the discarded lines. The last line may be incomplete after a crash."""
    if not metrics.is_file():
        return
    for line in metrics.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["kind"] == "train":
            yield record["step"]


def require_base_models(config: RunConfig, checkpoint: Path) -> None:
    """Raise `ConfigError` if the base model of a checkpoint's adapter is gone or has changed."""
    for role, section in model_sections(config).items():
        trained_model(checkpoint, role, section.model)
