"""Runs that train adapters (LoRA): checkpoints, resume, evaluation, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from crl.config.models import adapter_base, resolve_model
from crl.errors import ConfigError
from crl.modeling.gguf import converted
from crl.modeling.loading import load_model, named_weights
from crl.planning.model_checks import require_model
from support.complementary_runs import SIZES
from support.whole_runs import DETERMINISTIC, arguments, crl, metrics, one_line

SETS = (
    *SIZES, *DETERMINISTIC, "run.checkpoint_every=2",
    "actor.lora.rank=4", "extractor.lora.rank=2", "extractor.lora.targets=q_proj,v_proj",
    "actor.kl_coef=0.01", "actor.optimizer.learning_rate=0.01",
)  # fmt: skip
LATER = "actor.model={}/checkpoints/4/actor"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps. Its checkpoint of step 2 still exists."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    result = crl(*arguments(run, "room", SETS, 4, 0, "complementary"))
    assert (result.exit_code, result.stderr) == (0, "")
    return run


def weights(path: Path) -> dict[str, torch.Tensor]:
    return named_weights(load_model(converted(path, "actor.model", print), CPU))


def assert_equal(first: Path, second: Path) -> None:
    expected, own = weights(first), weights(second)
    assert expected.keys() == own.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, own[name]), name


def test_checkpoints_have_adapters_and_no_other_weights(run: Path) -> None:
    for role, files in (("actor", 2 * 7), ("extractor", 2 * 2)):
        folder, base = run / "checkpoints" / "4" / role, resolve_model(f"tiny-{role}")
        names = {path.name for path in folder.iterdir()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
        assert not names & {"model.safetensors", "config.json"}
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        assert config["base_model_name_or_path"] == str(base)
        trained, plain = weights(folder), named_weights(load_model(base, CPU))
        changed = {name for name in plain if not torch.equal(trained[name], plain[name])}
        layers = json.loads((base / "config.json").read_text("utf-8"))["num_hidden_layers"]
        assert len(changed) == files // 2 * layers
    assert (run / "checkpoints" / "4" / "actor" / "adapter_model.safetensors").stat().st_size < 1e5
    rows = metrics(run, "train")
    assert rows[0]["actor/reference_kl"] == 0 < rows[-1]["actor/reference_kl"]
    assert max(row["actor/mismatch_kl"] for row in rows) < 1e-6, "the engine has the merged weights"


def test_a_run_continues_from_its_adapters(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, copy := tmp_path / "copy")
    result = crl("fork", copy, tmp_path / "fork", "--from", "2")
    assert result.exit_code == 0, result.output
    result = crl("resume", tmp_path / "fork", "--plain")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    for role in ("actor", "extractor"):
        path = Path("checkpoints", "4", role)
        assert_equal(run / path, tmp_path / "fork" / path)
    error = one_line(crl("resume", copy, "--set", "actor.lora.rank=8"))
    assert "the checkpoint has the adapter of the run, or none" in error


def test_evaluation_of_a_run_and_of_an_adapter(run: Path, tmp_path: Path) -> None:
    last = metrics(run, "eval")[-1]
    result = crl("eval", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{last['eval/room/seen/success/free']:.3f}" in result.output
    sizes = [part for name in SIZES if "eval." in name for part in ("--set", name)]
    folders = run / "checkpoints" / "4" / "actor", tmp_path / "merged"
    assert crl("export", run, folders[1], "--merge").exit_code == 0
    tables = []
    for number, folder in enumerate(folders):
        out = tmp_path / str(number)
        result = crl("eval", folder, "--tasks", "room", *sizes, "--out", out)
        assert (result.exit_code, result.stderr) == (0, "")
        tables.append((out / "no-experience.csv").read_text("utf-8"))
    assert tables[0] == tables[1]


def test_exports(run: Path, tmp_path: Path) -> None:
    adapter, merged, whole = (tmp_path / name for name in ("adapter", "merged", "whole"))
    assert crl("export", run, adapter).exit_code == 0
    assert crl("export", run, merged, "--merge").exit_code == 0
    assert_equal(run / "checkpoints" / "4" / "actor", merged)
    assert_equal(adapter, merged)
    assert not (merged / "adapter_config.json").exists()
    assert "This adapter (LoRA) was trained from" in (adapter / "README.md").read_text("utf-8")
    assert "This model was trained from" in (merged / "README.md").read_text("utf-8")
    assert "does not apply to --bank" in one_line(crl("export", run, whole, "--bank", "--merge"))
    plain = tmp_path / "run"
    sets = (*SIZES, "tasks.room.eval.online_places=0", "eval.probe_every=0")
    assert crl(*arguments(plain, "room", sets, 1, 0, "grpo")).exit_code == 0
    assert "the actor has no adapter" in one_line(crl("export", plain, whole, "--merge"))
    assert not whole.exists()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_starts_from_an_adapter(rank: int, run: Path, tmp_path: Path) -> None:
    """The adapter is merged into the initial weights. A new adapter is trained on top of it."""
    sets = (*SIZES, LATER.format(run), "eval.probe_every=0", f"actor.lora.rank={rank}")
    command = arguments(tmp_path / "run", "room", sets, 1, 0, "grpo")
    planned = crl(*command, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert f"(adapter of {resolve_model('tiny-actor')})" in planned.output
    result = crl(*command)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    before, after = (path / "actor" for path in (
        run / "checkpoints" / "4", tmp_path / "run" / "checkpoints" / "1",
    ))  # fmt: skip
    assert (after / "adapter_config.json").exists() == (rank > 0)
    changes = [
        float((tensor - weights(before)[name]).abs().max())
        for name, tensor in weights(after).items()
    ]
    assert 0 < max(changes) < 0.1


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["actor.lora.alpha=2"], "has no effect because actor.lora.rank is 0"),
        (["actor.lora.rank=2", "actor.lora.targets=q_proj,nope"], "nope is not a linear layer"),
        (["actor.lora.rank=2", "learner.kind=deepspeed"], "not supported by learner.kind"),
        (["actor.lora.rank=2", "engine.kind=vllm"], "not supported by engine.kind"),
    ],
)
def test_settings_that_are_refused(sets: list[str], message: str, tmp_path: Path) -> None:
    command = arguments(tmp_path / "run", "room", tuple(sets), 1, 0, "grpo")
    assert message in one_line(crl(*command, "--dry-run"))


def test_adapters_with_wrong_files_are_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(loop)}))
    with pytest.raises(ConfigError, match="names the adapter itself as its base model"):
        adapter_base(loop)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny-actor"}')
    with pytest.raises(ConfigError, match=r"contains no adapter_model\.safetensors"):
        require_model(str(empty), "actor.model")
