"""A trained run for tests of reports and pages."""

from __future__ import annotations

from pathlib import Path

from support.whole_runs import crl

SETS = (
    "rollout.groups=4", "rollout.group_size=4", "rollout.max_staleness=0", "eval.probe_every=0",
    "tasks.room.eval.seen=8", "tasks.room.eval.unseen=8", "tasks.room.eval.online_places=2",
    "tasks.room.stream.places=2", "tasks.room.stream.permanent=2", "run.deterministic=true",
)  # fmt: skip
"""Settings with which three steps have measured lessons, guided and free episodes."""


def train_for_report(run: Path) -> Path:
    """Train three steps in two places, so that lessons are used in groups. Return the run."""
    sets = (part for text in SETS for part in ("--set", text))
    result = crl("train", "--tasks", "room", "--steps", "3", "--run-dir", run, *sets)
    assert (result.exit_code, result.stderr) == (0, "")
    return run
