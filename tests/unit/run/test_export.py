"""Exports of a checkpoint that the run deletes meanwhile, and of a run without a bank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, ModelCard
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.config.load import dump, load, load_saved
from crl.config.models import resolve_model
from crl.config.resume import changed_config
from crl.evaluation.evaluate import Evaluation, SuccessRate
from crl.evaluation.records import evaluation_record
from crl.run.exporting import export
from crl.run.exporting.cards import bank_card


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint of a run of grpo."""
    path = tmp_path / "run" / "checkpoints" / "3"
    shutil.copytree(resolve_model("tiny-actor"), path / "actor")
    state = {"records": {}, "measurements": {"evaluations": []}}
    (path / "manifest.json").write_text(json.dumps({"step": 3, "state": state}))
    dump(load(["room"], options={"method": "grpo"}), tmp_path / "run" / "config.json")
    return path


def crl_export(checkpoint: Path, *options: object) -> Result:
    arguments = ["export", checkpoint.parent.parent, *options]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_checkpoint_that_the_run_deletes_leaves_nothing(
    moment: str, exists: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "target"
    if exists:
        target.mkdir(parents=True)
    copytree = shutil.copytree

    def deleted_meanwhile(source: Path, *args: Any, **options: Any) -> None:
        if moment == "before":
            shutil.rmtree(checkpoint)
        copytree(source, *args, **options)
        shutil.rmtree(checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(export.shutil, "copytree", deleted_meanwhile)
        result = crl_export(checkpoint, target)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error: checkpoint = '{checkpoint}': was deleted by the run while it was being copied. Exp"
    )
    assert [target.exists(), target.parent.exists()] == [exists, exists]
    assert not exists or not any(target.iterdir())


def test_a_run_of_a_method_without_bank_is_named(checkpoint: Path, tmp_path: Path) -> None:
    result = crl_export(checkpoint, tmp_path / "bank", "--bank")
    assert result.exit_code == 2
    assert "the method grpo of the run has no bank. Leave out --bank" in result.stderr
    assert not (tmp_path / "bank").exists()
    assert crl_export(checkpoint, tmp_path / "actor").exit_code == 0


COMMAND = "crl train --tasks room --method grpo --steps 2"


def card(checkpoint: Path, target: Path) -> str:
    assert crl_export(checkpoint, target).exit_code == 0
    return (target / "README.md").read_text("utf-8")


def test_a_card_names_forks_and_changed_settings(checkpoint: Path, tmp_path: Path) -> None:
    config = checkpoint.parent.parent / "config.json"
    first = load(["room"], options={"method": "grpo", "run.steps": 2, "run.seed": 9})
    dump(first, config, command=COMMAND)
    assert f"- command: `{COMMAND}`\n- versions:" in card(checkpoint, tmp_path / "first")
    changed, _ = changed_config(
        first, options={"run.steps": 3}, sets=["actor.optimizer.learning_rate=1e-6"]
    )
    dump(changed, config, command=COMMAND, lineage=[{"run": "/home/me/runs/parent", "step": 1}])
    text = card(checkpoint, tmp_path / "forked")
    rate = first.actor.optimizer.learning_rate
    assert (
        "- forked from: `parent` at step 1\n"
        "- settings changed after the command:\n"
        "  - `run.steps: 2 → 3`\n"
        f"  - `actor.optimizer.learning_rate: {rate} → 1e-06`\n"
    ) in text
    assert "- steps: 3, of" in text
    dump(changed, config, command="crl train --tasks gone.toml")
    assert "- settings: those of `run/config.json`" in card(checkpoint, tmp_path / "unknown")


def test_a_base_model_is_named_only_if_it_is_on_hugging_face(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = checkpoint.parent.parent / "config.json"
    for name, base in (
        ("local", ""),
        ("models--Qwen--Qwen2.5-0.5B/snapshots/1", "Qwen/Qwen2.5-0.5B"),
    ):
        shutil.copytree(resolve_model("tiny-actor"), model := tmp_path / name)
        (model / "README.md").write_text("---\nlicense: mit\n---\n")
        dump(load(["room"], options={"method": "grpo", "actor.model": str(model)}), config)
        text = card(checkpoint, tmp_path / "cards" / (base or name))
        metadata = ModelCard(text).data.to_dict()
        relation = {"base_model": base, "base_model_relation": "finetune"} if base else {}
        assert metadata == relation | {
            "license": "mit",
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["reinforcement-learning", "llm-agent", "crl", "actor"],
        }
    shutil.rmtree(model)
    text = card(checkpoint, tmp_path / "deleted")
    assert "Licence of the base model: unknown" in text
    assert "\nlicense:" not in text


def test_a_card_has_results_with_intervals_use_and_limits(checkpoint: Path, tmp_path: Path) -> None:
    key, rate = ("room", "unseen", "free"), SuccessRate(3, 4)
    evaluation = Evaluation({key: rate}, turns={key: 2.0}, errors=0)
    state = json.loads((checkpoint / "manifest.json").read_text())
    record = evaluation_record(evaluation)
    state["state"]["measurements"]["evaluations"] = [[2, record]]
    (checkpoint / "manifest.json").write_text(json.dumps(state))
    text = card(checkpoint, tmp_path / "model")
    assert f"| room | unseen | without experience | 4 | {rate} |" in text
    assert "Success after 2 steps, with its 95 % interval." in text
    assert "## Intended use and limits" in text
    assert "acts as an agent in the tasks of the run (room)" in text
    assert "rewarded for the success of its episodes" in text
    assert 'AutoModelForCausalLM.from_pretrained("DIR")' in text


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_a_bank_has_no_role(role: str, checkpoint: Path, tmp_path: Path) -> None:
    result = crl_export(checkpoint, tmp_path / "bank", "--bank", "--role", role)
    assert result.exit_code == 2
    assert f"--role = '{role}': does not apply to --bank" in result.stderr


@pytest.mark.parametrize(
    ("entries", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1_000, "1K<n<10K"), (25_000, "10K<n<100K"), (10**6, "1M<n<10M")],
)
def test_the_card_of_a_bank_has_the_metadata_of_a_dataset(
    entries: int, category: str, checkpoint: Path
) -> None:
    """Licence and language are unknown, and are not named."""
    card = DatasetCard(bank_card(load_saved(checkpoint.parents[1]), checkpoint, entries))
    assert card.data.to_dict() == {
        "size_categories": [category],
        "tags": ["reinforcement-learning", "llm-agent", "crl", "experience-bank", "sqlite"],
        "pretty_name": "Experience bank of room",
    }
    assert card.text.lstrip().startswith("# Experience bank of a run of crl\n")
