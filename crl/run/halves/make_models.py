"""Creation of the bundled models by supervised fine-tuning of new ones: `crl make-models`.

A model directory holds the weights and the tokenizer in Hugging Face format, crl.json (the model's
profile) and recipe.json (how the model was made, and its final loss).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from crl.config.load import resolve, versions
from crl.config.models import write_profile
from crl.config.schema import RunConfig
from crl.config.supervised import role_settings
from crl.errors import ConfigError
from crl.modeling.demonstrations import Demonstration, PlacedDemonstration
from crl.protocols import Metrics, Monitor
from crl.run.halves.sft import SftSettings, Source, fine_tune
from crl.seeds import derive_seed
from crl.tiny.drills import demonstrations, require_simulators
from crl.tiny.new_models import new_model, train_tokenizer
from crl.tiny.recipe import RECIPES, Recipe, Stage

TOKENIZER_SAMPLE = 2000
"""Demonstrations of each drill on which the tokenizer is trained."""

LOSS_SHARE = 0.1
"""Share of the updates, the last ones, from whose log lines the recorded loss is the mean."""


def make_all_models(out: Path, seed: int) -> None:
    """Make every bundled model in a subdirectory of `out`. This takes hours.

    A model that is there already is kept if its recipe.json is that of this call: the seed, the
    recipe and the versions of packages. Changed code of drills is not noticed.

    Raise `ConfigError` if `out` holds something else or cannot be created, and if Java or the
    simulator of ScienceWorld is missing.
    """
    command = f"crl make-models --seed {seed}"
    for recipe in RECIPES.values():
        require_simulators(recipe.drills)
    _require_free(out, command)
    for name, recipe in RECIPES.items():
        if _is_made(out / name, recipe, command):
            shutil.rmtree(_work_folder(out / name), ignore_errors=True)
            print(f"{name}: made already: {out / name}")
        else:
            make_model(out / name, recipe, seed, command=command)


def make_model(directory: Path, recipe: Recipe, seed: int, *, command: str) -> None:
    """Make a model that imitates the drills' demonstrators, with a new tokenizer.

    The directory appears when the model is finished. `command` is recorded in recipe.json.

    Raise `ConfigError` if the directory exists, and if Java or the simulator of ScienceWorld is
    missing.
    """
    require_simulators(recipe.drills)
    if directory.exists():
        raise ConfigError("model", str(directory), "exists already", "Remove it first")
    begin, name, work = time.monotonic(), directory.name, _work_folder(directory)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"{name}: making demonstrations", flush=True)
    made: dict[str, list[PlacedDemonstration]] = {
        drill.name: list(demonstrations([drill], seed)) for drill in recipe.drills
    }
    model = work / "new"
    parameters = _write_new_model(model, recipe, seed, made)
    print(f"{name}: {parameters:,} parameters, {time.monotonic() - begin:.0f} s", flush=True)
    loss = 0.0
    for number, stage in enumerate(recipe.stages, start=1):
        target = work / f"stage{number}"
        loss = _train(model, target, recipe, stage, seed, made, f"{name}: stage {number}")
        model = target
    text = json.dumps(recipe_record(recipe, command, loss), indent=2)
    (model / "recipe.json").write_text(f"{text}\n", "utf-8")
    model.rename(directory)
    shutil.rmtree(work)
    print(f"{name}: done in {time.monotonic() - begin:.0f} s: {directory}", flush=True)


def _work_folder(directory: Path) -> Path:
    """Return the folder in which a model is made before it gets its directory."""
    return directory.with_name(f".{directory.name}.part")


# ── checks ────────────────────────────────────────────────────────────────────────────────────────


def _is_made(directory: Path, recipe: Recipe, command: str) -> bool:
    """Return whether the directory holds a model of this recipe, made by this command."""
    try:
        stored = json.loads((directory / "recipe.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    expected = recipe_record(recipe, command, 0.0)
    return isinstance(stored, dict) and {**stored, "loss": 0.0} == expected


def _require_free(out: Path, command: str) -> None:
    """Create `out`. Raise `ConfigError` if it holds anything but models of `command`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created ({error.strerror})"
        raise ConfigError("--out", str(out), reason, "Give another directory") from error
    for file in sorted(out.iterdir()):
        if file in [_work_folder(out / name) for name in RECIPES]:
            continue
        reason = "is in the way"
        if file.name in RECIPES:
            if _is_made(file, RECIPES[file.name], command):
                continue
            reason = "was made with another seed, recipe or versions of packages"
        raise ConfigError("--out", str(file), reason, "Choose another --out, or remove it first")


# ── training ──────────────────────────────────────────────────────────────────────────────────────


def _write_new_model(
    directory: Path, recipe: Recipe, seed: int, made: Mapping[str, Sequence[PlacedDemonstration]]
) -> int:
    """Write a model with random weights and a new tokenizer. Return its number of parameters."""
    disable_progress_bar()  # transformers would show one for the weights
    tokenizer = train_tokenizer(_sample(made), recipe.shape.vocabulary)
    model = new_model(recipe.shape, tokenizer, derive_seed(seed, "weights"))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_profile(directory, "compact")
    return model.num_parameters()


def _sample(made: Mapping[str, Sequence[PlacedDemonstration]]) -> Iterator[Demonstration]:
    """Yield the demonstrations on which the tokenizer is trained."""
    for placed in made.values():
        yield from (demonstration for _, demonstration in islice(placed, TOKENIZER_SAMPLE))


def _train(
    model: Path, target: Path, recipe: Recipe, stage: Stage, seed: int,
    made: Mapping[str, Sequence[PlacedDemonstration]], label: str,
) -> float:  # fmt: skip
    """Train a model and write it to `target`. Return its loss."""
    monitor = _StageMonitor(label)
    source = Source("drills", None, drilled=[x for drill in stage.drills for x in made[drill.name]])
    settings = SftSettings(
        recipe.role,
        stage.epochs,
        recipe.batch_tokens,
        held_out=0.0,
        warmup=recipe.optimizer.warmup,
        decay=True,
        context_weight=recipe.context_weight,
    )
    asyncio.run(fine_tune(_config(model, recipe, seed), source, target, monitor, settings))
    return monitor.final_loss


def _config(model: Path, recipe: Recipe, seed: int) -> RunConfig:
    """Return the config of a stage. One thread on the CPU gives the same result everywhere."""
    role, optimizer = recipe.role, recipe.optimizer
    options: dict[str, Any] = {
        **role_settings(role, str(model)),
        "actor.model": str(model),  # also for the extractor, whose training uses no actor
        f"{role}.max_context_tokens": recipe.shape.context,
        f"{role}.optimizer.learning_rate": optimizer.learning_rate,
        f"{role}.optimizer.weight_decay": optimizer.weight_decay,
        f"{role}.optimizer.beta1": 0.9,
        f"{role}.optimizer.beta2": optimizer.beta2,
        f"{role}.optimizer.max_grad_norm": 1.0,
        "learner.device": "cpu",
        "learner.precision": "float32",
        "learner.micro_batch_tokens": recipe.batch_tokens,
        "run.seed": seed,
    }
    return resolve(("room",), options=options)[0]


class _StageMonitor(Monitor):
    """`Monitor` that prints the losses of a stage, and keeps them.

    The loss is the weighted mean over all tokens, in nats per token.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._losses: list[tuple[int, float]] = []

    @property
    def final_loss(self) -> float:
        """Mean loss of the log lines of the last updates (`LOSS_SHARE`)."""
        first = (1 - LOSS_SHARE) * self._losses[-1][0]
        last = [loss for update, loss in self._losses if update > first]
        return sum(last) / len(last)

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        loss = metrics.get("sft/nll")
        if isinstance(loss, float):
            self._losses.append((step, loss))
            self.note(f"update {step:,}: loss {loss:.3f}")

    def note(self, text: str) -> None:
        print(f"{self._label}: {text}", flush=True)


def recipe_record(recipe: Recipe, command: str, loss: float) -> dict[str, Any]:
    """Return the content of recipe.json: how the model was made, and its final loss."""
    settings = asdict(recipe)
    del settings["stages"]
    return {
        "command": command,
        **settings,
        "stages": [
            {"drills": [drill.name for drill in stage.drills], "epochs": stage.epochs}
            for stage in recipe.stages
        ],
        "drills": {drill.name: drill.count for drill in recipe.drills},
        "loss": round(loss, 4),
        "versions": versions(),
    }
