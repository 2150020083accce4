"""Whole runs of a task from `crl new-task`, with the bundled models."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.whole_runs import DETERMINISTIC, arguments, crl, episodes, metrics

SETS = (
    "rollout.groups=8",
    "rollout.group_size=8",
    "tasks.my_field.eval.seen=8",
    "tasks.my_field.eval.unseen=8",
    *DETERMINISTIC,
)


@pytest.mark.parametrize("method", ["grpo", "complementary"])
def test_a_new_task_trains(tmp_path: Path, method: str) -> None:
    assert crl("new-task", "my_field", "--dir", tmp_path).exit_code == 0
    run, task = tmp_path / "run", str(tmp_path / "my_field" / "my_field.toml")
    result = crl(*arguments(run, task, SETS, 2, 0, method))
    assert (result.exit_code, result.stderr) == (0, ""), result.output

    played = episodes(run)
    assert len(played) == 2 * 64
    assert {(record["task"], record["error"]) for record in played} == {("my_field", None)}
    assert any(record["success"] for record in played), "the bundled actor finds some treasures"
    assert sum(line["actor/updates"] for line in metrics(run, "train")) > 0
    assert crl("eval", run).exit_code == 0
