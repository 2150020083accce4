"""Recipes of the bundled models; `crl make-models` makes them from scratch with fixed seeds.

A model directory holds the weights and the tokenizer in Hugging Face format, crl.json (the model's
profile) and recipe.json (how the model was made, and its final loss).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from crl.config.load import versions
from crl.config.models import write_profile
from crl.errors import ConfigError
from crl.modeling.tokens import ChatRenderer
from crl.seeds import derive_seed, generator
from crl.tiny.drills import ACTOR_DRILLS, EXTRACTOR_DRILLS, Drill, webshop
from crl.tiny.warm_start import (
    END,
    Shape,
    SupervisedSettings,
    demonstrated_trace,
    epoch_batches,
    new_model,
    train_supervised,
    train_tokenizer,
)

TOKENIZER_SAMPLE = 2000
"""Demonstrations of each drill on which the tokenizer is trained."""


@dataclass(frozen=True)
class TrainingRecipe:
    """Training plan of a model: the drills of `first_drills` alone, then all drills."""

    drills: tuple[Drill, ...]
    """All drills, including those of `first_drills`."""
    epochs: int
    """Epochs over all drills."""
    settings: SupervisedSettings
    first_drills: tuple[Drill, ...] = ()
    """Drills at the start of the training."""
    first_epochs: int = 0
    """Epochs over the drills of `first_drills`."""
    shape: Shape = field(default_factory=Shape)


RECIPES = {
    # Copying of words must be learnt first. In a mixture with all other drills, the actor does not
    # learn to combine advice with its observation.
    "tiny-actor": TrainingRecipe(
        ACTOR_DRILLS, 2, SupervisedSettings(), first_drills=webshop.COPY_DRILLS, first_epochs=3
    ),
    # Larger batches cause more spelling errors. The context weight is low because chunks of a bank
    # are random: learning to predict them is useless.
    "tiny-extractor": TrainingRecipe(
        EXTRACTOR_DRILLS, 4, SupervisedSettings(batch_tokens=2048, context_weight=0.3)
    ),
}


def make_all_models(out: Path, seed: int) -> None:
    """Make every bundled model in a subdirectory of `out`. This takes an hour on one core.

    Raise `ConfigError` if `out` is not empty or a subdirectory cannot be made.
    """
    _require_empty(out)
    _make_directories([out / name for name in RECIPES])
    for name, recipe in RECIPES.items():
        make_model(out / name, recipe, seed, command=f"crl make-models --seed {seed}")


def _require_empty(out: Path) -> None:
    """Raise `ConfigError` if `out` exists and is not an empty directory."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    reason = "exists and is not empty" if out.is_dir() else "exists and is not a directory"
    raise ConfigError("--out", str(out), reason, "Choose another --out, or remove it first")


def _make_directories(directories: Sequence[Path]) -> None:
    """Make the directories. This is done first, so that errors show before the training."""
    for directory in directories:
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                "--out",
                str(directory),
                f"cannot be created ({error.strerror})",
                "Give another directory",
            ) from error


def make_model(directory: Path, recipe: TrainingRecipe, seed: int, *, command: str) -> None:
    """Make a model that imitates the drills' demonstrators, with a new tokenizer.

    The directory must exist. `command` is recorded in recipe.json.
    """
    begin = time.monotonic()
    # Two threads are slower on such small matrices. One thread gives the same result everywhere.
    torch.set_num_threads(1)
    print(f"{directory.name}: making demonstrations")
    by_drill = {
        drill.name: list(drill.make(generator(seed, "drill", drill.name), drill.count))
        for drill in recipe.drills
    }
    tokenizer = train_tokenizer(
        [x for demonstrations in by_drill.values() for x in demonstrations[:TOKENIZER_SAMPLE]],
        recipe.shape.vocabulary,
    )
    renderer = ChatRenderer(tokenizer, [tokenizer.get_vocab()[END]])
    traces = {
        name: [demonstrated_trace(x, renderer) for x in demonstrations]
        for name, demonstrations in by_drill.items()
    }
    model = new_model(recipe.shape, tokenizer, derive_seed(seed, "weights"))
    all_traces = [trace for drill_traces in traces.values() for trace in drill_traces]
    tokens, parameters = sum(len(t.ids) for t in all_traces), model.num_parameters()
    print(
        f"{directory.name}: {len(all_traces):,} demonstrations, {tokens:,} tokens, "
        f"{parameters:,} parameters, {time.monotonic() - begin:.0f} s"
    )
    first_traces = [trace for drill in recipe.first_drills for trace in traces[drill.name]]
    rng, batch_tokens = generator(seed, "school"), recipe.settings.batch_tokens
    epochs = [first_traces] * recipe.first_epochs + [all_traces] * recipe.epochs
    loss = train_supervised(
        model,
        [batch for epoch in epochs for batch in epoch_batches(epoch, batch_tokens, rng)],
        recipe.settings,
        print,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_profile(directory, "compact")
    (directory / "recipe.json").write_text(
        json.dumps(_record(recipe, command, loss), indent=2) + "\n", "utf-8"
    )
    print(f"{directory.name}: done in {time.monotonic() - begin:.0f} s: {directory}")


def _record(recipe: TrainingRecipe, command: str, loss: float) -> dict[str, Any]:
    """Return the content of recipe.json: how the model was made, and its final loss."""
    return {
        "command": command,
        "shape": asdict(recipe.shape),
        "schooling": asdict(recipe.settings),
        "first": {
            "drills": [drill.name for drill in recipe.first_drills],
            "epochs": recipe.first_epochs,
        },
        "drills": {drill.name: drill.count for drill in recipe.drills},
        "epochs": recipe.epochs,
        "nats_a_token": round(loss, 4),
        "versions": versions(),
    }
