"""Checkpoints of a run: RUN/checkpoints/STEP with the models, all parts' states and a manifest.

A checkpoint is written under a temporary name and renamed when it is complete. A directory without
a manifest is not a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from crl.errors import ConfigError, LearnerError
from crl.protocols import Learner, State

MANIFEST = "manifest.json"


async def save_checkpoint(
    root: Path,
    step: int,
    learners: Mapping[str, Learner],
    model_dirs: Mapping[str, Path],
    state: State,
) -> Path:
    """Write the checkpoint of `step` under `root` (RUN/checkpoints) and return its path.

    A complete checkpoint of the same step is kept and nothing is written. `model_dirs` maps each
    role to a model directory: its tokenizer files and profile are copied beside the role's weights.
    Raise `LearnerError` if a learner cannot save; the incomplete directory is then removed.
    """
    target, partial_dir = root / str(step), root / f".{step}.part"
    if (target / MANIFEST).is_file():
        return target
    shutil.rmtree(partial_dir, ignore_errors=True)
    for role, learner in learners.items():
        role_dir = partial_dir / role
        role_dir.mkdir(parents=True)
        try:
            await learner.save(role_dir)
        except LearnerError as error:
            shutil.rmtree(partial_dir, ignore_errors=True)
            raise LearnerError(
                f"{role_dir}: cannot be written: {error}. Check whether the disk is full. "
                "All existing checkpoints are complete."
            ) from error
        for file in model_dirs[role].iterdir():
            if _is_copied(file) and not (role_dir / file.name).exists():
                shutil.copy2(file, role_dir / file.name)
    manifest = {"step": step, "models": sorted(learners), "state": state}
    (partial_dir / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    partial_dir.rename(target)
    return target


def read_state(checkpoint: Path) -> State:
    """Return the state of every part, as it was passed to `save_checkpoint`."""
    return json.loads((checkpoint / MANIFEST).read_text("utf-8"))["state"]


def _is_copied(file: Path) -> bool:
    """Return whether a file of a model directory is copied into a checkpoint.

    Tokenizer files and the profile are copied. Weight indices (*.index.json) and recipe.json are
    not, because they describe the weights in the model directory.
    """
    describes_weights = file.name.endswith(".index.json") or file.name == "recipe.json"
    return (
        file.is_file()
        and file.suffix in {".json", ".jinja", ".txt", ".model"}
        and not describes_weights
    )


def latest_checkpoint(root: Path) -> Path:
    """Return the newest complete checkpoint under `root`. Raise `ConfigError` if there is none."""
    complete = _complete_checkpoints(root)
    if not complete:
        raise ConfigError(
            "run",
            str(root.parent),
            "has no complete checkpoint",
            "Use a run that has written a checkpoint",
        )
    return max(complete, key=lambda path: int(path.name))


def saved_states(root: Path) -> list[State]:
    """Return the states of all complete checkpoints under `root` (RUN/checkpoints)."""
    return [
        json.loads((path / MANIFEST).read_text("utf-8"))["state"]
        for path in _complete_checkpoints(root)
    ]


def _complete_checkpoints(root: Path) -> list[Path]:
    return [path.parent for path in root.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
