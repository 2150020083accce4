"""Runs that train adapters (LoRA): checkpoints, resume, evaluation, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crl.config.models import adapter_base, resolve_model
from crl.config.schema import LoraSection
from crl.errors import ConfigError
from crl.modeling.adapters import BaseModel
from crl.modeling.files import copy_model_files
from crl.modeling.gguf import converted
from crl.modeling.loading import load_model, named_weights
from crl.modeling.lora import Adapter, adapter_parameters, add_adapter
from crl.planning.model_checks import require_model
from support.complementary_runs import SIZES
from support.gguf_files import write_gguf
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
    assert "\nlibrary_name: peft\n" in (adapter / "README.md").read_text("utf-8")
    assert "This model was trained from" in (merged / "README.md").read_text("utf-8")
    assert "does not apply to --bank" in one_line(crl("export", run, whole, "--bank", "--merge"))
    plain = tmp_path / "run"
    sets = (*SIZES, "tasks.room.eval.online_places=0", "eval.probe_every=0")
    assert crl(*arguments(plain, "room", sets, 1, 0, "grpo")).exit_code == 0
    assert "the actor has no adapter" in one_line(crl("export", plain, whole, "--merge"))
    assert not whole.exists()


def test_an_adapter_of_an_adapter_is_exported_and_merged(run: Path, tmp_path: Path) -> None:
    start, again, adapter, merged, own = (
        tmp_path / name for name in ("start", "again", "adapter", "merged", "own")
    )
    assert crl("export", run, start).exit_code == 0
    sets = (*SIZES, "eval.probe_every=0", f"actor.model={start}", "actor.lora.rank=2",
            "actor.optimizer.learning_rate=0.01")  # fmt: skip
    assert crl(*arguments(again, "room", sets, 1, 0, "grpo")).exit_code == 0
    assert crl("export", again, adapter).exit_code == 0
    card = (adapter / "README.md").read_text("utf-8")
    assert "from_pretrained" not in card
    assert "is an adapter itself, so other programs cannot load this adapter" in card
    assert crl("export", again, merged, "--merge").exit_code == 0
    result = crl("export", adapter, own, "--merge")
    assert result.exit_code == 0, result.output
    assert f"merged the adapter {adapter} into its base model: {own}" in result.output
    assert_equal(own, merged)
    assert "does not apply to the directory of an adapter" in one_line(
        crl("export", adapter, tmp_path / "none", "--merge", "--step", 1)
    )
    unmerged = one_line(crl("export", adapter, tmp_path / "none"))
    assert "is the directory of an adapter and not of a run. Add --merge" in unmerged
    assert not (tmp_path / "none").exists()


def test_an_export_has_the_precision_of_its_run(tmp_path: Path) -> None:
    """A run on the CPU trains a base model in bfloat16 in float32."""
    base, run = tmp_path / "base", tmp_path / "run"
    half = load_model(resolve_model("tiny-actor"), CPU, torch.bfloat16)
    half.save_pretrained(base)
    copy_model_files(resolve_model("tiny-actor"), base)
    sets = (*SIZES, "eval.probe_every=0", "actor.lora.rank=2", f"actor.model={base}")
    assert crl(*arguments(run, "room", sets, 1, 0, "grpo")).exit_code == 0
    cards = []
    for name, options in (("adapter", ()), ("merged", ("--merge",))):
        assert crl("export", run, tmp_path / name, *options).exit_code == 0
        cards.append((tmp_path / name / "README.md").read_text("utf-8"))
    assert "- precision: float32 (adapter), float32 (base model)\n" in cards[0]
    assert "- precision: float32\n" in cards[1]
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    changed = [name for name, t in merged.items() if not torch.equal(t, t.bfloat16().float())]
    assert changed, "rounding to bfloat16 would change the adapted weights"


@pytest.fixture(scope="module")
def homeless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps, and with its base model after it was moved.

    The directory `other` has a model of the same shape with other weights.
    """
    folder = tmp_path_factory.mktemp("homeless")
    base = folder / "base"
    shutil.copytree(resolve_model("tiny-actor"), base)
    sets = (*(name for name in SIZES if "eval." in name), *DETERMINISTIC, "eval.probe_every=0",
            "rollout.groups=2", "rollout.group_size=4", "run.checkpoint_every=1",
            "actor.lora.rank=2", f"actor.model={base}",
            "actor.optimizer.learning_rate=0.01")  # fmt: skip
    result = crl(*arguments(folder / "run", "room", sets, 2, 0, "grpo"))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert adapter_base(folder / "run" / "checkpoints" / "2" / "actor") == base
    shutil.copytree(base, folder / "other")
    model = load_model(base, CPU)
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    model.save_pretrained(folder / "other")
    base.rename(folder / "moved")
    return folder


MEASURED = ("--tasks", "room", "--set", "tasks.room.eval.seen=8",
            "--set", "tasks.room.eval.unseen=4")  # fmt: skip
REMEDY = "Add --set actor.model=DIR with its new path to crl eval, crl resume or crl fork"


def test_a_run_whose_base_model_has_moved_is_evaluated(homeless: Path, tmp_path: Path) -> None:
    run, moved = homeless / "run", homeless / "moved"
    for options in (["eval", run], ["eval", run, *MEASURED], ["resume", run, "--steps", 3]):
        error = one_line(crl(*options))
        assert f"{homeless / 'base'}" in error
        assert REMEDY in error, options
    assert REMEDY in one_line(crl("export", run, tmp_path / "export", "--merge"))
    given = ("--set", f"actor.model={moved}")
    result = crl("eval", run, *MEASURED, *given, "--out", tmp_path / "own")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    saved = json.loads((tmp_path / "own" / "step2-no-experience.json").read_text("utf-8"))
    actor = str((run / "checkpoints" / "2" / "actor").resolve())
    assert saved["about"]["model"] == saved["about"]["settings"]["actor"]["model"] == actor
    last = metrics(run, "eval")[-1]
    assert f"{last['eval/room/seen/success/free']:.3f}" in result.output
    error = one_line(crl("eval", run, *MEASURED, "--set", f'actor={{model="{moved}", nope=1}}'))
    assert "actor.nope" in error, "other settings of the table count too"
    for command in (["eval", run, *MEASURED], ["resume", run, "--steps", 3]):
        error = one_line(crl(*command, "--set", f"actor.model={homeless / 'other'}"))
        assert f"is not the base model of {run / 'checkpoints' / '2' / 'actor'}" in error
        assert "their weights differ" in error


def test_a_run_whose_base_model_has_moved_continues(homeless: Path, tmp_path: Path) -> None:
    """All commands on the run use the new place after one of them has recorded it."""
    moved, run, copied = homeless / "moved", tmp_path / "run", tmp_path / "fork"
    shutil.copytree(homeless / "run", run)
    result = crl("fork", run, copied, "--set", f"actor.model={moved}")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    result = crl("resume", run, "--steps", 3, "--set", f"actor.model={moved}", "--plain")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert f"actor.model: {homeless / 'base'} → {moved}" in result.output
    for folder in (run, copied):
        assert crl("eval", folder).exit_code == 0
        assert crl("eval", folder, *MEASURED, "--step", 2).exit_code == 0
        whole, adapter = (tmp_path / f"{folder.name}-{kind}" for kind in ("whole", "adapter"))
        assert crl("export", folder, whole, "--merge", "--step", 2).exit_code == 0
        assert crl("export", folder, adapter, "--step", 2).exit_code == 0
        assert adapter_base(adapter) == moved
        assert_equal(adapter, whole)
    error = one_line(crl("eval", run, *MEASURED, "--step", 3, "--set", f"actor.model={moved}"))
    assert "has no effect: the checkpoint has the models" in error


def test_another_model_at_the_path_of_the_base_model_is_refused(
    homeless: Path, tmp_path: Path
) -> None:
    run, base = tmp_path / "run", homeless / "base"
    shutil.copytree(homeless / "run", run)
    adapter = run / "checkpoints" / "2" / "actor"
    shutil.copytree(homeless / "other", base)
    try:
        for command in (
            ["eval", run],
            ["eval", run, *MEASURED],
            ["eval", adapter, *MEASURED],
            ["resume", run, "--steps", 3],
            ["export", run, tmp_path / "export", "--merge"],
        ):
            error = one_line(crl(*command))
            assert f"actor.model = '{base}': is not the base model of" in error, command
            assert "their weights differ" in error
            assert "Restore the base model at this path" in error
    finally:
        shutil.rmtree(base)


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
        (
            ["actor.lora.rank=33"],
            "actor.lora.rank = 33: is above the smallest dimension of k_proj, which is 32 × 64: a "
            "larger rank only adds useless parameters. Choose at most 32, or leave out "
            "k_proj and v_proj with --set actor.lora.targets=A,B, or train all weights with "
            "actor.lora.rank=0",
        ),
        (
            ["actor.lora.rank=65", "actor.lora.targets=down_proj"],
            "of down_proj, which is 64 × 192: a larger rank only adds useless parameters. "
            "Choose at most 64, or train all weights with actor.lora.rank=0",
        ),
        (["actor.lora.rank=513", "engine.kind=vllm"], "vLLM supports ranks up to 512"),
        (
            ["actor.lora.rank=2", "engine.kind=vllm", "engine.load_format=dummy"],
            "engine.load_format = 'dummy': starts with random weights",
        ),
        (
            [
                "actor.lora.rank=2",
                "engine.kind=vllm",
                "engine.transfer=nccl",
                "learner.kind=deepspeed",
            ],
            "engine.transfer = 'nccl': sends whole weights",
        ),
    ],
)
def test_settings_that_are_refused(sets: list[str], message: str, tmp_path: Path) -> None:
    command = arguments(tmp_path / "run", "room", tuple(sets), 1, 0, "grpo")
    assert message in one_line(crl(*command, "--dry-run"))


@pytest.mark.parametrize("targets", ["", "q_proj,down_proj"])
def test_the_plan_shows_adapters(targets: str, tmp_path: Path) -> None:
    sets = (f"actor.lora.targets={targets}", "actor.lora.rank=32", "extractor.lora.rank=2")
    arguments_ = arguments(tmp_path / "run", "room", sets, 1, 0, "complementary")
    result = crl(*arguments_, "--dry-run")
    assert result.exit_code == 0, result.output
    counts = []
    for role, section in (
        ("actor", LoraSection(rank=32, targets=targets)),
        ("extractor", LoraSection(rank=2)),
    ):
        path = resolve_model(f"tiny-{role}")
        add_adapter(model := load_model(path, CPU), Adapter(section, BaseModel.of(path), 0))
        count = sum(p.numel() for p in adapter_parameters(model).values())
        counts.append(f"; adapter of rank {section.rank} with {count:,} trainable parameters\n")
    models = result.output.partition("── models ──")[2]
    assert all(text in models for text in counts), models
    untrained = crl(*arguments_, "--dry-run", "--set", "extractor.train=false")
    assert "extractor.lora.rank = 2: has no effect" in one_line(untrained)


def test_the_rank_for_a_gguf_file_is_checked(
    tiny_actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of the file has the sizes. Its weights are not read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tiny_actor, file := tmp_path / "tiny.gguf")
    sets = (f"actor.model={file}", "actor.profile=compact", "actor.lora.rank=33")
    error = one_line(crl(*arguments(tmp_path / "run", "room", sets, 1, 0, "grpo"), "--dry-run"))
    assert "is above the smallest dimension of k_proj, which is 32 × 64" in error


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
    save_file({"a": torch.zeros(8)}, weights := empty / "adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors': is incomplete: it has"):
        require_model(str(empty), "actor.model")
