"""Checkpoints of a run: RUN/checkpoints/STEP with the models, all parts' states and a manifest.

A checkpoint is written under a temporary name, synchronised to disk and then renamed. Its manifest
lists the size and the SHA-256 of every file, and its own SHA-256, so that a damaged file is found
before it is loaded. A checkpoint is renamed before it is deleted, so that a directory without a
manifest is a damaged checkpoint. This module never deletes a damaged checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from crl.config.models import Profile, is_adapter, resolve_model
from crl.errors import CheckpointError, ConfigError, LearnerError
from crl.modeling.adapters import base_has_moved, moved_base, with_base
from crl.modeling.files import copy_model_files
from crl.protocols import Learner, State

MANIFEST = "manifest.json"

DIGEST = "sha256"
"""Key of the manifest's own SHA-256, which is computed without this key."""

JSON_PARTS = 4_096
"""Number of small parts of a manifest that are written at once."""

SIZE_FACTOR = 7
"""Upper bound of the size of a checkpoint relative to the weights.

A weight in bfloat16 takes 2 bytes, AdamW's two moments and the float32 weight 12.
"""


async def prepare_checkpoint(
    root: Path,
    step: int,
    learners: Mapping[str, Learner],
    model_dirs: Mapping[str, Path],
    state: State,
    *,
    profiles: Mapping[str, Profile] = MappingProxyType({}),
    adapters: Collection[str] = (),
    records: Sequence[Path] = (),
    replace: bool = False,
) -> Callable[[], Path]:
    """Copy the models for the checkpoint of `step` under `root` (RUN/checkpoints).

    Return a function that writes the checkpoint and returns its path. It may be called in any
    thread, also while the next steps are being trained. A complete checkpoint of the same step is
    kept and nothing is written, unless `replace` is true.

    `model_dirs` maps each role to a model directory: its tokenizer files and profile are copied
    beside the role's weights. `profiles` are declared instead of the copied ones. `adapters` are
    roles of which only an adapter is saved. `records` are existing files of the run that are
    synchronised to disk before the checkpoint becomes valid.

    Both functions raise `CheckpointError` if the disk has not enough space, a learner cannot save
    or a file cannot be written. The incomplete directory is then removed.
    """
    target, partial_dir = root / str(step), root / f".{step}.part"
    if (target / MANIFEST).is_file() and not replace:
        return lambda: target
    shutil.rmtree(partial_dir, ignore_errors=True)
    with _checkpoint_errors(partial_dir, target):
        _require_space(root, [model_dirs[role] for role in learners.keys() - set(adapters)])
        saves: dict[str, Callable[[], None]] = {}
        partial_dir.mkdir(parents=True)
        for role, learner in learners.items():
            (partial_dir / role).mkdir()
            saves[role] = await learner.prepare_save(partial_dir / role)
    manifest = {"step": step, "models": sorted(learners), "state": state}

    def write() -> Path:
        with _checkpoint_errors(partial_dir, target):
            for role, save in saves.items():
                save()
                copy_model_files(model_dirs[role], partial_dir / role, profiles.get(role))
            for path in records:
                _sync(path)
            write_manifest(partial_dir, manifest | {"files": _synchronised(partial_dir)})
            _finish(partial_dir, target)
        return target

    return write


@contextmanager
def _checkpoint_errors(partial_dir: Path, target: Path) -> Iterator[None]:
    """Raise errors of a learner and of the disk as `CheckpointError`. Remove `partial_dir` then."""
    try:
        yield
    except (LearnerError, OSError) as error:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise CheckpointError(
            f"{target}: the checkpoint cannot be written: {error}. Check whether the disk is full. "
            "All existing checkpoints are complete."
        ) from error


def prune_checkpoints(root: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all checkpoints under `root` except the last `keep_last`.

    A checkpoint whose step is a multiple of `keep_every` is kept too; 0 = none.
    """
    paths = _complete_checkpoints(root)
    for path in paths[: max(0, len(paths) - keep_last)]:
        if not (keep_every and int(path.name) % keep_every == 0):
            # `repair` deletes the rest if the process is killed here.
            path.rename(deleted := path.with_name(f".{path.name}.deleted"))
            shutil.rmtree(deleted)


def read_state(checkpoint: Path) -> State:
    """Return the state of every part, as it was passed to `prepare_checkpoint`."""
    return read_manifest(checkpoint)["state"]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raise `OSError` if it cannot be read, and `ValueError` if it is not a manifest.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("state"), dict):
        raise ValueError("it has no state")
    if not isinstance(manifest.get("files", {}), dict):
        raise ValueError("its list of files is not an object")
    return manifest


def write_manifest(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint with its SHA-256, and synchronise it to disk."""
    body = {key: value for key, value in manifest.items() if key != DIGEST}
    # In small parts, because `json.dumps` holds the interpreter lock.
    parts, digest = json.JSONEncoder().iterencode(body), hashlib.sha256()
    temporary = checkpoint / f"{MANIFEST}.part"
    with temporary.open("wb") as file:
        while part := "".join(islice(parts, JSON_PARTS)).encode():
            digest.update(part)
            file.write(part)
        file.seek(-1, os.SEEK_END)  # before the last brace
        file.write(f', "{DIGEST}": "{digest.hexdigest()}"}}'.encode())
    _sync(temporary)
    temporary.rename(checkpoint / MANIFEST)


def chosen_checkpoint(root: Path, step: int | None, note: Callable[[str], object]) -> Path:
    """Return the checkpoint of `step`, or the last undamaged one if `step` is None.

    `note` and errors are those of `latest_checkpoint` and `checkpoint_of`.
    """
    return latest_checkpoint(root, note) if step is None else checkpoint_of(root, step)


def latest_checkpoint(root: Path, note: Callable[[str], object]) -> Path:
    """Return the newest checkpoint under `root` whose files are undamaged.

    `note` is called with a line of text for every newer checkpoint that is damaged. Raise
    `ConfigError` if there is no undamaged checkpoint.
    """
    damaged = []
    for path in reversed(_checkpoints(root)):
        if not (reason := damage(path)):
            return path
        note(f"{reason}: the checkpoint of step {path.name} is not used")
        damaged.append(path)
    if damaged:
        reason = "has no undamaged checkpoint"
        remedy = "Restore a copy of a checkpoint, or train again in another directory"
    else:
        reason = "has no complete checkpoint"
        remedy = (
            "Wait for the first checkpoint of a run in progress. Otherwise train again in another "
            "directory. crl rollout, crl learn and crl sft write no checkpoints: use the model in "
            "their directory"
        )
    raise ConfigError("run", str(root.parent), reason, remedy)


def checkpoint_of(root: Path, step: int) -> Path:
    """Return the checkpoint of `step`. Raise `ConfigError` if there is none or it is damaged."""
    paths = _checkpoints(root)
    if (path := root / str(step)) not in paths:
        steps = ", ".join(path.name for path in paths) or "none"
        reason = f"{root.parent} has no checkpoint of this step"
        raise ConfigError("checkpoint", step, reason, f"Its checkpoints: {steps}")
    if reason := damage(path):
        raise ConfigError("checkpoint", step, reason, "Choose another checkpoint")
    return path


def trained_model(checkpoint: Path, role: str, initial: str) -> Path:
    """Return the directory of a model of a checkpoint.

    `initial` is the model of the role in the settings of the run. If the run did not train the
    role, its directory is returned. If the base model that an adapter names has moved there, the
    directory is a temporary one, with an adapter that names it.

    Raise `ConfigError` if the base model is gone, or if another model is in its place.
    """
    model = (checkpoint / role).resolve()
    if not model.is_dir():
        return resolve_model(initial, f"{role}.model")
    if not is_adapter(model):
        return model
    moved = base_has_moved(model, f"{role}.model")
    base = moved_base(model, initial, f"{role}.model")
    return with_base(model, base) if moved else model


def damage(checkpoint: Path) -> str:
    """Return which file of a checkpoint is damaged, and how; "" if none is.

    Checkpoints of older versions have no list of files and no SHA-256 of the manifest, which are
    then not checked.
    """
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return f"{checkpoint / MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{checkpoint / MANIFEST} cannot be read ({error})"
    digest = manifest.pop(DIGEST, None)
    if digest and digest != hashlib.sha256(json.dumps(manifest).encode()).hexdigest():
        return f"{checkpoint / MANIFEST} has changed since it was written (its SHA-256 differs)"
    for name, expected in manifest.get("files", {}).items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected["size"]:
            return f"{path} has {size:,} bytes instead of {expected['size']:,}"
        if _digest(path) != expected["sha256"]:
            return f"{path} has changed since it was written (its SHA-256 differs)"
    return ""


def saved_snapshots(root: Path, known: Mapping[int, int]) -> dict[int, int]:
    """Return the bank's snapshot of every complete checkpoint under `root`, by step.

    Only manifests of steps that `known` lacks are read. `known` must not have a step whose
    checkpoint may have been replaced. Checkpoints without a bank, or with a damaged manifest, are
    left out.
    """
    found: dict[int, int] = {}
    for path in _complete_checkpoints(root):
        step = int(path.name)
        with suppress(OSError, ValueError, KeyError):
            found[step] = known[step] if step in known else read_state(path)["bank"]
    return found


def complete_steps(root: Path) -> list[int]:
    """Return the steps of all complete checkpoints under `root`, in ascending order."""
    return [int(path.name) for path in _complete_checkpoints(root)]


def later_checkpoints(root: Path, step: int) -> list[Path]:
    """Return the checkpoints after `step`, also damaged ones."""
    return [path for path in _checkpoints(root) if int(path.name) > step]


def _checkpoints(root: Path) -> list[Path]:
    """Return the directories of all checkpoints, the oldest first."""
    paths = [path for path in root.glob("*") if path.name.isdigit()]
    return sorted(paths, key=lambda path: int(path.name))


def _complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, the oldest first."""
    return [path for path in _checkpoints(root) if (path / MANIFEST).is_file()]


def _require_space(root: Path, model_dirs: list[Path]) -> None:
    """Create `root`. Raise `OSError` if the disk has not enough free space for a checkpoint.

    The size of the last checkpoint is needed. The first one is estimated from `model_dirs`, the
    models whose weights are all saved.
    """
    root.mkdir(parents=True, exist_ok=True)
    if paths := _complete_checkpoints(root):
        needed = sum(file.stat().st_size for file in _files(paths[-1]))
    else:
        weights = [file for folder in model_dirs for file in folder.glob("*.safetensors")]
        needed = SIZE_FACTOR * sum(file.stat().st_size for file in weights)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(f"it needs {needed:,} bytes, but the disk has {free:,} free bytes")


def _synchronised(folder: Path) -> dict[str, dict[str, int | str]]:
    """Write all files to the disk. Return their sizes and SHA-256, by relative path."""
    files: dict[str, dict[str, int | str]] = {}
    for path in _files(folder):
        _sync(path)
        files[str(path.relative_to(folder))] = {
            "size": path.stat().st_size,
            "sha256": _digest(path),
        }
    return files


def _finish(partial_dir: Path, target: Path) -> None:
    """Rename a complete checkpoint to `target`, and write its directories to the disk."""
    for folder in (*(path for path in partial_dir.iterdir() if path.is_dir()), partial_dir):
        _sync(folder)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)  # `repair` takes it back if the process is killed now
    partial_dir.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair(root: Path) -> None:
    """Remove what a killed process left under `root` besides complete checkpoints."""
    for old in root.glob(".*.old"):
        target = root / old.name.removeprefix(".").removesuffix(".old")
        if not (target / MANIFEST).is_file() and (old / MANIFEST).is_file():
            shutil.rmtree(target, ignore_errors=True)
            old.rename(target)
        else:
            shutil.rmtree(old)
    for path in (*root.glob(".*.part"), *root.glob(".*.deleted")):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Write a file or the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
