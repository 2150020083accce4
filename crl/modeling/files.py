"""Files of a model's directory besides its weights. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from crl.config.models import (
    ADAPTER_CONFIG,
    Profile,
    is_adapter,
    model_profile,
    write_profile,
)


def copy_model_files(model_dir: Path, target: Path, profile: Profile | None = None) -> None:
    """Copy the tokenizer files, the config and the profile of a model to the directory `target`.

    Files that exist there are not replaced. An adapter gets no config, which is that of its base
    model. If `profile` is given, the copy declares it instead of the profile of the model.
    """
    for file in model_dir.iterdir():
        skipped = file.name == "config.json" and is_adapter(target)
        if _is_copied(file) and not skipped and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)
    if profile and profile != model_profile(target):
        write_profile(target, profile)


def _is_copied(file: Path) -> bool:
    """Return whether a file of a model directory belongs to copies with other weights.

    Weight indices (*.index.json), recipe.json and adapter_config.json describe the weights in the
    directory, and so they do not.
    """
    describes_weights = file.name.endswith(".index.json") or file.name in (
        "recipe.json",
        ADAPTER_CONFIG,
    )
    return (
        file.is_file()
        and file.suffix in {".json", ".jinja", ".txt", ".model"}
        and not describes_weights
    )
