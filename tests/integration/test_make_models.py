"""The bundled models are made from their recipes by `crl make-models`."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import crl.config.models as crl_models
from crl.config.schema import RunConfig
from crl.envs import scienceworld
from crl.errors import ConfigError
from crl.modeling.loading import load_model, load_tokenizer, stop_ids
from crl.protocols import Monitor
from crl.run.halves import make_models
from crl.run.halves.make_models import make_all_models
from crl.run.halves.sft import SftResult, SftSettings, Source, fine_tune
from crl.tiny.drills import demonstrations, room
from crl.tiny.new_models import Shape
from crl.tiny.recipe import RECIPES, Optimizer, Recipe, Stage
from support.simulator import INSTALLED
from support.whole_runs import crl


def small(recipe: Recipe) -> Recipe:
    """Return the recipe with few demonstrations, and without a missing simulator."""
    stages = (
        replace(
            stage,
            epochs=1,
            drills=tuple(
                replace(drill, count=4)
                for drill in stage.drills
                if INSTALLED or drill.env != scienceworld.SMALL
            ),
        )
        for stage in recipe.stages
    )
    return replace(recipe, stages=tuple(stages), optimizer=replace(recipe.optimizer, warmup=0))


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Recipe]:
    """Make the recipes small, and do without the simulator of ScienceWorld."""
    found = {name: small(recipe) for name, recipe in RECIPES.items()}
    monkeypatch.setattr(make_models, "RECIPES", found)
    monkeypatch.setattr(make_models, "require_simulators", lambda drills: None)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.soak
def test_models_are_reproducible_and_can_be_loaded(
    recipes: Mapping[str, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled models are not used: they may be missing while new ones are made."""
    monkeypatch.setattr(crl_models, "bundled_models", list)
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for out, seed in ((one, 1), (two, 1), (other, 2)):
        result = crl("make-models", "--out", out, "--seed", seed)
        assert (result.exit_code, result.stderr) == (0, "")
    assert contents(one) == contents(two)
    assert {path.name for path in one.iterdir()} == {*recipes}
    for name in recipes:
        model, tokenizer = load_model(one / name, torch.device("cpu")), load_tokenizer(one / name)
        assert model.num_parameters() < 220_000
        assert stop_ids(one / name, tokenizer) == (tokenizer.eos_token_id,)
        text = (one / name / "recipe.json").read_text("utf-8")
        assert json.loads(text)["command"] == "crl make-models --seed 1"
        assert str(tmp_path) not in text
        weights = [(folder / name / "model.safetensors").read_bytes() for folder in (one, other)]
        assert weights[0] != weights[1]


def test_the_trainer_has_the_settings_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the trainings of a recipe with two stages."""
    called: list[tuple[RunConfig, Source, SftSettings, bytes]] = []

    async def recorded(
        config: RunConfig, source: Source, target: Path, monitor: Monitor, settings: SftSettings
    ) -> SftResult:
        weights = (Path(config.extractor.model) / "model.safetensors").read_bytes()
        called.append((config, source, settings, weights))
        return await fine_tune(config, source, target, monitor, settings)

    monkeypatch.setattr(make_models, "fine_tune", recorded)
    drills = tuple(replace(drill, count=3) for drill in room.EXTRACTOR_DRILLS)
    stages = (Stage(drills[:1], 1), Stage(drills, 2))
    optimizer = Optimizer(0.002, 1, 0.05, 0.97)
    recipe = Recipe("extractor", stages, 50, 0.25, optimizer, Shape(context=500))
    make_models.make_model(tmp_path / "model", recipe, 3, command="made by a test")
    for (config, source, settings, _), stage in zip(called, stages, strict=True):
        section = config.extractor
        assert (section.max_context_tokens, config.run.seed) == (500, 3)
        used = section.optimizer
        assert (used.learning_rate, used.weight_decay) == (0.002, 0.05)
        assert (used.beta1, used.beta2, used.max_grad_norm) == (0.9, 0.97, 1.0)
        assert settings == SftSettings(
            "extractor", stage.epochs, 50, 0.0, warmup=1, decay=True, context_weight=0.25
        )
        assert source.drilled == list(demonstrations(stage.drills, 3))
    first, second = called
    assert first[3] != second[3], "the second stage goes on with the weights of the first"
    last = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert last not in (first[3], second[3])
    with pytest.raises(ConfigError, match="exists already"):
        make_models.make_model(tmp_path / "model", recipe, 3, command="made by a test")


@pytest.mark.soak
def test_finished_models_are_kept(
    recipes: Mapping[str, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the training of the second model, and make both again."""

    async def interrupted(*arguments: Any) -> SftResult:
        if "extractor" in arguments[2].parent.name:
            signal.raise_signal(signal.SIGINT)
        return await fine_tune(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(make_models, "fine_tune", interrupted)
        assert crl("make-models", "--out", tmp_path).exit_code == 130
    actor = tmp_path / "tiny-actor"
    assert {path.name for path in tmp_path.iterdir()} == {actor.name, ".tiny-extractor.part"}
    finished, files = contents(actor), {file: file.stat().st_mtime_ns for file in actor.iterdir()}
    result = crl("make-models", "--out", tmp_path)
    assert result.exit_code == 0
    assert f"tiny-actor: made already: {actor}" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {*recipes}
    assert files == {file: file.stat().st_mtime_ns for file in actor.iterdir()}
    with pytest.raises(ConfigError, match=r"tiny-actor': was made with another seed"):
        make_all_models(tmp_path, seed=2)
    (actor / "recipe.json").write_text("[]", "utf-8")
    with pytest.raises(ConfigError, match=r"tiny-actor': was made with another seed"):
        make_all_models(tmp_path, seed=0)
    del finished["recipe.json"]
    assert finished.items() <= contents(actor).items()


@pytest.mark.usefixtures("recipes")
def test_other_files_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    with pytest.raises(ConfigError, match=r"^--out = .*notes\.txt': is in the way"):
        make_all_models(tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"notes\.txt': cannot be created"):
        make_all_models(file, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert capsys.readouterr().out == ""


def test_the_simulator_is_required_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = crl("make-models", "--out", tmp_path / "models")
    assert result.exit_code == 2
    assert "needs the extra 'scienceworld'" in result.stderr
    assert not (tmp_path / "models").exists()
