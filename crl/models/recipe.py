"""Recipes of the bundled models; `crl make-models` makes them from scratch with fixed seeds.

A model directory holds the weights and the tokenizer in Hugging Face format, crl.json (the model's
profile) and recipe.json (how the model was made, and its final loss).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from crl.config.load import versions
from crl.errors import ConfigError
from crl.models.drills import ACTOR_DRILLS, EXTRACTOR_DRILLS, Drill, webshop
from crl.models.warm_start import (
    END,
    Schooling,
    Shape,
    demonstrated_trace,
    epoch,
    new_model,
    school,
    train_tokenizer,
)
from crl.seeds import derive_seed, generator
from crl.tokens import ChatRenderer

TOKENIZER_SAMPLE = 2000
"""Demonstrations of each drill on which the tokenizer is trained."""

SHAPE = Shape()


@dataclass(frozen=True)
class TrainingRecipe:
    """Training plan of a model: the drills of `first` alone, then all drills."""

    drills: tuple[Drill, ...]
    """All drills, including those of `first`."""
    epochs: int
    """Epochs over all drills."""
    schooling: Schooling
    first: tuple[Drill, ...] = ()
    """Drills at the start of the training."""
    first_epochs: int = 0
    """Epochs over the drills of `first`."""


MODELS = {
    # Copying of words must be learnt first. In a mixture with all other drills, the actor does not
    # learn to combine advice with its observation.
    "tiny-actor": TrainingRecipe(
        ACTOR_DRILLS, 2, Schooling(), first=webshop.COPYING, first_epochs=3
    ),
    # Larger batches cause more spelling errors. The context weight is low because chunks of a bank
    # are random: learning to predict them is useless.
    "tiny-extractor": TrainingRecipe(
        EXTRACTOR_DRILLS, 4, Schooling(batch_tokens=2048, context_weight=0.3)
    ),
}


def make(out: Path, seed: int) -> None:
    """Make every bundled model in a subdirectory of `out`. This takes an hour on one core.

    Raise `ConfigError` if one of the subdirectories exists or cannot be made.
    """
    _make_directories([out / name for name in MODELS])
    for name, recipe in MODELS.items():
        make_model(out / name, recipe, seed)


def _make_directories(directories: Sequence[Path]) -> None:
    """Make the directories. This is done first, so that errors show before the training."""
    for directory in directories:
        if directory.exists():
            raise ConfigError(
                "--out",
                str(directory),
                "it exists already",
                "give another directory, or remove it first",
            )
    for directory in directories:
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                "--out",
                str(directory),
                f"cannot be made ({error.strerror})",
                "give another directory",
            ) from error


def make_model(directory: Path, recipe: TrainingRecipe, seed: int) -> None:
    """Make a model that imitates the drills' demonstrators, with a new tokenizer.

    The directory must exist.
    """
    begin = time.monotonic()
    # Two threads are slower on such small matrices. One thread gives the same result everywhere.
    torch.set_num_threads(1)
    print(f"{directory.name}: demonstrations")
    drilled = {
        drill.name: list(drill.make(generator(seed, "drill", drill.name), drill.count))
        for drill in recipe.drills
    }
    tokenizer = train_tokenizer(
        [x for demonstrations in drilled.values() for x in demonstrations[:TOKENIZER_SAMPLE]],
        SHAPE.vocabulary,
    )
    renderer = ChatRenderer(tokenizer, [tokenizer.get_vocab()[END]])
    traces = {
        name: [demonstrated_trace(x, renderer) for x in demonstrations]
        for name, demonstrations in drilled.items()
    }
    model = new_model(SHAPE, tokenizer, derive_seed(seed, "weights"))
    everything = [trace for some in traces.values() for trace in some]
    tokens, parameters = sum(len(t.ids) for t in everything), model.num_parameters()
    print(
        f"{directory.name}: {len(everything):,} demonstrations, {tokens:,} tokens, "
        f"{parameters:,} parameters, {time.monotonic() - begin:.0f} s"
    )
    first = [trace for drill in recipe.first for trace in traces[drill.name]]
    draw, size = generator(seed, "school"), recipe.schooling.batch_tokens
    courses = [first] * recipe.first_epochs + [everything] * recipe.epochs
    loss = school(
        model,
        [batch for course in courses for batch in epoch(course, size, draw)],
        recipe.schooling,
        print,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "crl.json").write_text(json.dumps({"profile": "compact"}) + "\n", "utf-8")
    (directory / "recipe.json").write_text(
        json.dumps(_record(recipe, seed, loss), indent=2) + "\n", "utf-8"
    )
    print(f"{directory.name}: done in {time.monotonic() - begin:.0f} s: {directory}")


def _record(recipe: TrainingRecipe, seed: int, loss: float) -> dict[str, Any]:
    """Return the content of recipe.json: how the model was made, and its final loss."""
    return {
        "command": f"crl make-models --seed {seed}",
        "shape": asdict(SHAPE),
        "schooling": asdict(recipe.schooling),
        "first": {"drills": [drill.name for drill in recipe.first], "epochs": recipe.first_epochs},
        "drills": {drill.name: drill.count for drill in recipe.drills},
        "epochs": recipe.epochs,
        "nats_a_token": round(loss, 4),
        "versions": versions(),
    }
