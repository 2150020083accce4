"""Small whole runs of the method `complementary`, and readers of their files."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import Result

from support.documented_metrics import undocumented
from support.whole_runs import arguments, crl

SIZES = (
    "rollout.groups=4", "rollout.group_size=4", "extractor.batch=4", "eval.probe_every=2",
    "tasks.room.stream.places=4", "tasks.room.stream.permanent=2",
    "tasks.room.eval.seen=8", "tasks.room.eval.unseen=4", "tasks.room.eval.online_places=2",
    "tasks.room.eval.probe_places=4",
)  # fmt: skip
"""Settings of small runs.

Every step visits each of the four places. From the second step on, there is something to retrieve.
"""
STEPS = 3


def train(run: Path, *sets: str, steps: int = STEPS, seed: int = 0, code: int = 0) -> Result:
    """Train the bundled models in the room and check that the run ends with the exit code `code`.

    Output is on stdout. Only errors are on stderr. All metrics are documented.
    """
    result = crl(*arguments(run, "room", (*SIZES, *sets), steps, seed, "complementary"))
    assert result.exit_code == code, result.output + "".join(map(str, [result.exception]))
    assert code or result.stderr == ""
    assert code or undocumented(run) == set()
    return result


def rows(bank: Path, sql: str) -> list[tuple]:
    """Return the rows of a bank that no process has open. The file is not changed."""
    with closing(sqlite3.connect(f"file:{bank}?mode=ro&immutable=1", uri=True)) as db:
        return list(db.execute(sql))


def dump(bank: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{bank}?mode=ro&immutable=1", uri=True)) as db:
        return list(db.iterdump())


def log(bank: Path, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (origin, data) of the operations of these kinds, in order."""
    wanted = ", ".join(f"'{kind}'" for kind in kinds)
    sql = f"SELECT origin, data FROM log WHERE kind IN ({wanted}) ORDER BY seq"
    return [(origin, json.loads(data)) for origin, data in rows(bank, sql)]


def address(t: dict[str, Any], run_name: str = "run") -> str:
    return f"{run_name}/{t['step'] - 1}/{t['group']}/{t['member']}"


def manifest(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())
