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
    companions: Mapping[str, Path],
    state: State,
) -> Path:
    """Write the checkpoint of `step` under `root` (RUN/checkpoints) and return its path.

    A complete checkpoint of the same step is kept and nothing is written. `companions` maps each
    role to a model directory: its tokenizer files and profile are copied beside the role's weights.
    Raise `LearnerError` if a learner cannot save; the incomplete directory is then removed.
    """
    target, draft = root / str(step), root / f".{step}.part"
    if (target / MANIFEST).is_file():
        return target
    shutil.rmtree(draft, ignore_errors=True)
    for role, learner in learners.items():
        directory = draft / role
        directory.mkdir(parents=True)
        try:
            await learner.save(directory)
        except LearnerError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise LearnerError(
                f"{directory}: not written, {error}. Is the disk full? "
                "The checkpoints that are there are whole."
            ) from error
        for file in companions[role].iterdir():
            if _travels(file) and not (directory / file.name).exists():
                shutil.copy2(file, directory / file.name)
    manifest = {"step": step, "models": sorted(learners), "state": state}
    (draft / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    draft.rename(target)
    return target


def read_state(checkpoint: Path) -> State:
    """Return the state of every part, as it was passed to `save_checkpoint`."""
    return json.loads((checkpoint / MANIFEST).read_text("utf-8"))["state"]


def _travels(file: Path) -> bool:
    """Return whether a companion file is copied: tokenizer files and the profile are.

    Weight indices (*.index.json) and recipe.json are not: they describe the companion's own
    weights.
    """
    about_old_weights = file.name.endswith(".index.json") or file.name == "recipe.json"
    return (
        file.is_file()
        and file.suffix in {".json", ".jinja", ".txt", ".model"}
        and not about_old_weights
    )


def latest_checkpoint(root: Path) -> Path:
    """Return the newest complete checkpoint under `root`. Raise `ConfigError` if there is none."""
    complete = _complete(root)
    if not complete:
        raise ConfigError(
            "run",
            str(root.parent),
            "it holds no complete checkpoint",
            "Give a run that reached its first checkpoint",
        )
    return max(complete, key=lambda path: int(path.name))


def saved_states(root: Path) -> list[State]:
    """Return the states of all complete checkpoints under `root` (RUN/checkpoints)."""
    return [json.loads((path / MANIFEST).read_text("utf-8"))["state"] for path in _complete(root)]


def _complete(root: Path) -> list[Path]:
    return [path.parent for path in root.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
