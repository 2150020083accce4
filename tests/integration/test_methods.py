"""Whole runs of the methods of the field, with the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.whole_runs import DETERMINISTIC, arguments, crl, metrics

SETS = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "tasks.room.eval.seen=4",
    "tasks.room.eval.unseen=4",
    *DETERMINISTIC,
)


def trained(run: Path, method: str, *sets: str, steps: int = 2) -> list[dict[str, Any]]:
    """Return the lines of the training steps of a run, without times."""
    result = crl(*arguments(run, "room", (*SETS, *sets), steps, 0, method))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return [
        {key: value for key, value in line.items() if not key.startswith(("time", "perf/"))}
        for line in metrics(run, "train")
    ]


def test_gigpo_is_grpo_with_step_advantages(tmp_path: Path) -> None:
    grpo = trained(tmp_path / "grpo", "grpo")
    without = trained(tmp_path / "without", "gigpo", "gigpo.step_weight=0")
    gigpo = trained(tmp_path / "gigpo", "gigpo")
    assert without == grpo
    assert gigpo[0]["rollout/reward"] == grpo[0]["rollout/reward"], "the same first episodes"
    assert gigpo[0]["actor/grad_norm"] != grpo[0]["actor/grad_norm"]
