"""`crl make-models`: makes the bundled models from scratch, with everything seeded.

A model directory holds the weights and the tokenizer in Hugging Face format, crl.json (its profile) and recipe.json (how it was
made and what came of it).
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
"""Demonstrations of each drill that the tokenizer is trained on."""

SHAPE = Shape()


@dataclass(frozen=True)
class Recipe:
    """What a model is taught, and how: `first` alone for so many epochs, then all drills for theirs."""

    drills: tuple[Drill, ...]
    epochs: int
    schooling: Schooling
    first: tuple[Drill, ...] = ()
    first_epochs: int = 0


MODELS = {
    # amid all the others, what it was told and what it sees come together in no action: that a word is copied must be learnt first
    "tiny-actor": Recipe(ACTOR_DRILLS, 2, Schooling(), first=webshop.COPYING, first_epochs=3),
    # in larger batches it misspells more; chunks of a bank are drawn at random, and to foretell them teaches nothing
    "tiny-extractor": Recipe(EXTRACTOR_DRILLS, 4, Schooling(batch_tokens=2048, context_weight=0.3)),
}


def make(out: Path, seed: int) -> None:
    """Makes every bundled model under `out`. Takes an hour on one core. Raises `ConfigError` when `out` holds one already."""
    _make_directories([out / name for name in MODELS])
    for name, recipe in MODELS.items():
        make_model(out / name, recipe, seed)


def _make_directories(directories: Sequence[Path]) -> None:
    """At the start: a bad path should not show after minutes of training."""
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


def make_model(directory: Path, recipe: Recipe, seed: int) -> None:
    """A model that speaks like the drills' demonstrators, with a tokenizer of its own, in a directory that exists."""
    begin = time.monotonic()
    torch.set_num_threads(
        1
    )  # two are slower on matrices this small, and one is the same everywhere
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
        f"{directory.name}: {len(everything):,} demonstrations, {tokens:,} tokens, {parameters:,} parameters, "
        f"{time.monotonic() - begin:.0f} s"
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


def _record(recipe: Recipe, seed: int, loss: float) -> dict[str, Any]:
    """What recipe.json says: how the model was made, and what came of it."""
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
