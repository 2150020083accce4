"""Trained models and banks of a run as directories for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crl.config.load import SavedRun
from crl.config.models import is_adapter
from crl.errors import ConfigError
from crl.learners.optimizer_file import OPTIMIZER_FILE
from crl.manager import ExperienceManager
from crl.manager.storage.database import copy_database
from crl.manager.storage.store import Store
from crl.modeling.adapters import (
    base_has_moved,
    moved_base,
    unchanged_base,
    write_base_name,
)
from crl.modeling.gguf import converted
from crl.monitor.run_dir import RunDir
from crl.run.bank import require_bank
from crl.run.checkpoint import MANIFEST, read_manifest, read_state
from crl.run.exporting.cards import CARD, bank_card, model_card
from crl.run.models import print_to_stderr


def export_model(
    saved: SavedRun, checkpoint: Path, role: str, target: Path, *, merge: bool = False
) -> None:
    """Write a trained model to the new directory `target`, in Hugging Face format with a card.

    `merge`: merge the adapter of the checkpoint into its base model.

    Raise `ConfigError` if the checkpoint has no model of this role or no adapter to merge, if
    `target` is not empty, or if the run deletes the checkpoint meanwhile.
    """
    with _new_directory(target), _complete(checkpoint):
        source = checkpoint / role
        if not source.is_dir():
            trained = read_manifest(checkpoint)["models"]
            reason = f"{checkpoint} has no {role}, because the run did not train one"
            remedy = f"Export the {trained[0]}" if trained else "Export the bank with --bank"
            raise ConfigError("--role", role, reason, remedy)
        if merge and not is_adapter(source):
            reason = f"the {role} has no adapter, because all of its weights were trained"
            raise ConfigError("--merge", True, reason, "Leave it out")
        initial: str = getattr(saved.config, role).model
        if merge:
            from crl.modeling.lora import write_merged

            base = converted(moved_base(source, initial, f"{role}.model"), "merge", print_to_stderr)
            write_merged(source, base, target, "merge")
        else:
            _copy_model(source, target, initial, f"{role}.model")
        (target / CARD).write_text(model_card(saved, checkpoint, role, target), "utf-8")


def merge_adapter(adapter: Path, target: Path) -> None:
    """Write the base model of the adapter in a directory, with it merged, to the new `target`.

    Raise `ConfigError` if the base model is gone or has changed, or if `target` is not empty.
    """
    from crl.modeling.lora import write_merged

    with _new_directory(target):
        base = converted(unchanged_base(adapter, "merge"), "merge", print_to_stderr)
        write_merged(adapter, base, target, "merge")


def _copy_model(source: Path, target: Path, initial: str, key: str) -> None:
    """Copy a model of a checkpoint without its optimizer.

    `initial` is the model of the role in the settings of the run. An adapter names it if its base
    model has moved there.
    """
    ignored = shutil.ignore_patterns(OPTIMIZER_FILE)
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    if is_adapter(target) and base_has_moved(target, key):
        with suppress(ConfigError):  # an adapter can be exported without its base model
            write_base_name(target, moved_base(target, initial, key))


async def export_bank(saved: SavedRun, run: RunDir, checkpoint: Path, target: Path) -> None:
    """Write the bank at a checkpoint to the new directory `target`, with a card.

    The copy starts a new run (`bank.init`): it has neither the queue nor pending rewards. Raise
    `ConfigError` if the run has no bank, if `target` is not empty, or if the run deletes the
    checkpoint meanwhile, and `StoreError` if the copy fails.
    """
    if not saved.config.with_bank:
        reason = f"the method {saved.config.spec.name} of the run has no bank"
        raise ConfigError("run", str(run.path), reason, "Leave out --bank to export the actor")
    require_bank(run)
    with _new_directory(target), _complete(checkpoint):
        whole = target / "whole.sqlite"
        await copy_database(run.bank, whole)
        store = await Store.open(whole)
        try:
            archive = (await store.rollback(read_state(checkpoint)["bank"])).archive
            entries = len(await store.entries())
        finally:
            await store.aclose()
        await ExperienceManager.start_from(whole, target / run.bank.name)
        for path in (whole, *([archive] if archive else [])):
            path.unlink()
        (target / CARD).write_text(bank_card(saved, checkpoint, entries), "utf-8")


@contextmanager
def _new_directory(target: Path) -> Iterator[None]:
    """Create the directory `target` for an export. After an error, remove what was created.

    Raise `ConfigError` if `target` exists and is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        reason = "exists and is not an empty directory"
        raise ConfigError("DIR", str(target), reason, "Choose another directory")
    created = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        RunDir(target).clear()
        for path in created:
            path.rmdir()
        raise


@contextmanager
def _complete(checkpoint: Path) -> Iterator[None]:
    """Raise `ConfigError` if the run deletes `checkpoint` inside the context.

    The manifest is deleted first. While it exists, all other files exist.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not (checkpoint / MANIFEST).is_file():
        reason = "was deleted by the run while it was being copied"
        remedy = "Export again: the last checkpoint is kept, and so are those of run.keep_every"
        raise ConfigError("checkpoint", str(checkpoint), reason, remedy) from error
    if error:
        raise error
