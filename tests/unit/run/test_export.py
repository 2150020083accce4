"""Exports of a checkpoint that the run deletes meanwhile, and of a run without a bank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.config.load import dump, load
from crl.config.models import resolve_model
from crl.run import export


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


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_a_bank_has_no_role(role: str, checkpoint: Path, tmp_path: Path) -> None:
    result = crl_export(checkpoint, tmp_path / "bank", "--bank", "--role", role)
    assert result.exit_code == 2
    assert f"role = '{role}': does not apply to --bank" in result.stderr
