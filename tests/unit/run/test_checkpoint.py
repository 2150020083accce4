"""Checkpoints: when they are valid, which one is the newest, and loading by other programs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crl.config.models import model_profile
from crl.config.schema import OptimizerSection
from crl.errors import CheckpointError, ConfigError, LearnerError
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import SurrogateLoss
from crl.modeling.loading import load_model, named_weights
from crl.run.checkpoint import (
    damage,
    later_checkpoints,
    latest_checkpoint,
    prepare_checkpoint,
    prune_checkpoints,
    read_state,
    repair,
    saved_snapshots,
)

STATE = {"learner": {"version": 3}, "source": {"drawn": 8}}


@pytest_asyncio.fixture
async def learner(tiny_actor: Path) -> AsyncIterator[LocalLearner]:
    """Yield a learner on the bundled actor with changed weights."""
    model = load_model(tiny_actor, torch.device("cpu"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.125)
    learner = LocalLearner(
        model, SurrogateLoss(0.2, 0.2, "token"), OptimizerSection(), TrainSettings(1.0, 1024, 1.0)
    )
    yield learner
    await learner.aclose()


async def save(
    learner: LocalLearner, root: Path, step: int, model_dir: Path, **options: Any
) -> Path:
    return await write(root, step, {"actor": learner}, {"actor": model_dir}, STATE, **options)


async def write(*args: Any, **options: Any) -> Path:
    return (await prepare_checkpoint(*args, **options))()


async def test_transformers_can_load_a_checkpoint(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    path = await save(learner, tmp_path / "checkpoints", 4, tiny_actor)
    assert path == tmp_path / "checkpoints" / "4"
    manifest = json.loads((path / "manifest.json").read_text())
    files, digest = manifest.pop("files"), manifest.pop("sha256")
    assert len(digest) == 64
    assert manifest == {"step": 4, "models": ["actor"], "state": STATE}
    assert set(files) == {f"actor/{file.name}" for file in (path / "actor").iterdir()}
    assert files["actor/config.json"]["size"] == (path / "actor" / "config.json").stat().st_size
    model = AutoModelForCausalLM.from_pretrained(path / "actor", dtype=torch.float32)
    loaded = named_weights(model)
    for name, weight in named_weights(learner.model).items():
        assert torch.equal(loaded[name], weight), name
    tokenizer, original = (
        AutoTokenizer.from_pretrained(path / "actor"),
        AutoTokenizer.from_pretrained(tiny_actor),
    )
    text = [{"role": "user", "content": "at 2 3\nstairs east"}]
    rendered = tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False)
    assert rendered == original.apply_chat_template(
        text, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.encode("at 2 3") == original.encode("at 2 3")
    assert model_profile(path / "actor") == "compact"
    full = await save(learner, tmp_path / "full", 4, tiny_actor, profiles={"actor": "full"})
    assert model_profile(full / "actor") == "full"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


async def test_only_tokenizer_files_and_the_profile_are_copied(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    model_dir = tmp_path / "companion"
    shutil.copytree(tiny_actor, model_dir)
    (model_dir / "merges.txt").write_text("a b")
    (model_dir / "config.json").write_text("{}")
    (model_dir / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "model-00001-of-00002.safetensors"}}'
    )
    (model_dir / "model-00001-of-00002.safetensors").write_bytes(b"old weights")
    (model_dir / "onnx").mkdir()
    actor = await save(learner, tmp_path / "checkpoints", 1, model_dir) / "actor"
    assert (actor / "merges.txt").read_text() == "a b"
    assert json.loads((actor / "config.json").read_text())["model_type"] == "qwen2", (
        "the model's own config wins"
    )
    copied_names = {path.name for path in actor.iterdir()}
    assert not copied_names & {
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "onnx",
        "recipe.json",
    }, "these files describe other weights"


async def test_saving_twice_changes_nothing(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    path = await save(learner, tmp_path, 2, tiny_actor)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert await save(learner, tmp_path, 2, tiny_actor) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


async def test_snapshots_of_complete_checkpoints(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    assert saved_snapshots(tmp_path, {7: 70}) == {}
    for step in (1, 2):
        await write(tmp_path, step, {"actor": learner}, {"actor": tiny_actor}, {"bank": 10 * step})
    await save(learner, tmp_path, 3, tiny_actor)  # a run without a bank
    checkpoint(tmp_path, "4", manifest=False)
    assert saved_snapshots(tmp_path, {}) == {1: 10, 2: 20}
    assert saved_snapshots(tmp_path, {2: 99, 7: 70}) == {1: 10, 2: 99}, "only step 1 is read"


@pytest.mark.parametrize("early", [True, False])
async def test_a_failed_save_leaves_no_checkpoint_and_can_be_repeated(
    early: bool, learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    class Broken(LocalLearner):
        def __init__(self) -> None:
            self.saved = learner

        async def prepare_save(
            self, directory: Path, *, optimizer: bool = True
        ) -> Callable[[], None]:  # fmt: skip
            await self.saved.save(directory)
            if early:
                raise LearnerError("the disk is full")

            def write() -> None:
                raise OSError("the disk is full")

            return write

    with pytest.raises(CheckpointError, match=r"3: the checkpoint cannot be written: the disk"):
        await save(Broken(), tmp_path / "run" / "checkpoints", 3, tiny_actor)
    assert not (tmp_path / "run" / "checkpoints" / "3").exists(), (
        "only a complete checkpoint gets the name"
    )
    with pytest.raises(
        ConfigError,
        match=r"run = .*run': has no complete checkpoint\. Wait for the first checkpoint",
    ):
        latest_checkpoint(tmp_path / "run" / "checkpoints", print)
    await save(learner, tmp_path / "run" / "checkpoints", 3, tiny_actor)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"], (
        "the partial directory was removed"
    )


async def test_a_checkpoint_holds_the_models_of_the_time_of_its_preparation(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    """Train while a prepared checkpoint is not written yet."""
    roles = {"actor": learner}, {"actor": tiny_actor}
    before = await save(learner, tmp_path / "before", 1, tiny_actor)
    prepared = await prepare_checkpoint(tmp_path / "prepared", 1, *roles, STATE)
    with torch.no_grad():
        for weight in learner.model.parameters():
            weight.add_(0.125)
            learner._trainer.optimizer.state[weight] = {"exp_avg": weight, "exp_avg_sq": weight}
    after = await save(learner, tmp_path / "after", 1, tiny_actor)
    first, second, third = (
        json.loads((path / "manifest.json").read_text())["files"]
        for path in (before, prepared(), after)
    )
    assert first == second
    for file in ("actor/model.safetensors", "actor/optimizer.safetensors"):
        assert third[file]["sha256"] != first[file]["sha256"]


def checkpoint(root: Path, name: str, *, manifest: bool = True) -> Path:
    (root / name / "actor").mkdir(parents=True)
    if manifest:
        (root / name / "manifest.json").write_text('{"state": {}}')
    return root / name


def test_the_newest_checkpoint_is_the_complete_one_with_the_highest_step(tmp_path: Path) -> None:
    for name in ("2", "9", "10"):
        checkpoint(tmp_path, name)
    lost = checkpoint(tmp_path, "80", manifest=False) / "manifest.json"
    checkpoint(tmp_path, ".90.part")
    checkpoint(tmp_path, "best")
    notes: list[str] = []
    assert latest_checkpoint(tmp_path, notes.append) == tmp_path / "10"
    assert notes == [f"{lost} is missing: the checkpoint of step 80 is not used"]
    assert [path.name for path in later_checkpoints(tmp_path, 9)] == ["10", "80"]


def test_a_run_without_a_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoints", "1", manifest=False)
    for root in (tmp_path / "checkpoints", tmp_path / "none"):
        with pytest.raises(ConfigError) as raised:
            latest_checkpoint(root, print)
        assert raised.value.key == "run"


async def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_begun(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await save(learner, tmp_path, 1, tiny_actor)
    needed = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed - 1))
    with pytest.raises(
        CheckpointError, match=f"it needs {needed:,} bytes, but the disk has {needed - 1:,} free"
    ):
        await save(learner, tmp_path, 2, tiny_actor)
    assert os.listdir(tmp_path) == ["1"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed))
    await save(learner, tmp_path, 2, tiny_actor)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(2, 0, {"9", "12"}), (1, 6, {"6", "12"}), (9, 0, {"3", "6", "9", "12"})],
)
def test_old_checkpoints_are_deleted(
    keep_last: int, keep_every: int, kept: set[str], tmp_path: Path
) -> None:
    for step in (3, 6, 9, 12):
        checkpoint(tmp_path, str(step))
    prune_checkpoints(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert {path.name for path in tmp_path.iterdir()} == kept


async def test_damaged_files_are_found(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    path = await save(learner, tmp_path, 1, tiny_actor)
    assert damage(path) == ""
    file = path / "actor" / "optimizer.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert damage(path) == f"{file} has {len(data) - 1:,} bytes instead of {len(data):,}"
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert damage(path) == f"{file} has changed since it was written (its SHA-256 differs)"
    file.unlink()
    assert damage(path) == f"{file} is missing"
    notes: list[str] = []
    with pytest.raises(ConfigError, match="has no undamaged checkpoint"):
        latest_checkpoint(tmp_path, notes.append)
    assert notes == [f"{file} is missing: the checkpoint of step 1 is not used"]


async def test_a_checkpoint_is_replaced_only_if_asked_for(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    path = await save(learner, tmp_path, 1, tiny_actor)
    models = {"actor": tiny_actor}
    await write(tmp_path, 1, {"actor": learner}, models, {"new": 1})
    assert read_state(path) == STATE
    await write(tmp_path, 1, {"actor": learner}, models, {"new": 1}, replace=True)
    assert read_state(path) == {"new": 1}
    assert os.listdir(tmp_path) == ["1"]


def test_what_a_killed_process_left_is_repaired(tmp_path: Path) -> None:
    checkpoint(tmp_path, "1")
    checkpoint(tmp_path, ".1.old")  # killed after both renames
    checkpoint(tmp_path, ".2.old")  # killed between the two renames
    checkpoint(tmp_path, ".3.part")
    checkpoint(tmp_path, ".4.deleted", manifest=False)  # killed while it was deleted
    checkpoint(tmp_path, "5", manifest=False)  # damaged; its models may still be of use
    repair(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "5"}


def test_a_checkpoint_is_renamed_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in between leaves no directory that looks like a damaged one."""
    for step in (1, 2):
        checkpoint(tmp_path, str(step))
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    prune_checkpoints(tmp_path, keep_last=1, keep_every=0)
    assert {path.name for path in tmp_path.iterdir()} == {".1.deleted", "2"}


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '{"state": 1}', '{"state": {}, "files"'])
def test_a_manifest_without_a_state_is_damaged(text: str, tmp_path: Path) -> None:
    (checkpoint(tmp_path, "1") / "manifest.json").write_text(text)
    assert damage(tmp_path / "1").startswith(f"{tmp_path / '1' / 'manifest.json'} cannot be read (")
    assert saved_snapshots(tmp_path, {}) == {}


async def test_a_changed_manifest_is_damaged(
    learner: LocalLearner, tmp_path: Path, tiny_actor: Path
) -> None:
    path = await write(
        tmp_path, 1, {"actor": learner}, {"actor": tiny_actor}, {"é": [1, None, 0.1]}
    )
    assert damage(path) == ""
    assert read_state(path) == {"é": [1, None, 0.1]}
    text = (path / "manifest.json").read_text("utf-8")
    (path / "manifest.json").write_text(text.replace("0.1", "0.2"), "utf-8")
    assert damage(path) == (
        f"{path / 'manifest.json'} has changed since it was written (its SHA-256 differs)"
    )


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "1")
    (checkpoint(tmp_path, "2") / "manifest.json").write_text('{"step": 2, "mod')
    notes: list[str] = []
    assert latest_checkpoint(tmp_path, notes.append) == tmp_path / "1"
    (note,) = notes
    assert note.startswith(f"{tmp_path / '2' / 'manifest.json'} cannot be read (")
    assert note.endswith("): the checkpoint of step 2 is not used")
    (tmp_path / "1" / "manifest.json").write_text('{"state": {"bank": 7}}')
    assert saved_snapshots(tmp_path, {}) == {1: 7}
