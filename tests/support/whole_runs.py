"""Helpers for tests of whole runs: start a run through the command line and read its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.records.reader import read_episodes
from crl.records.shards import COLUMNS, episode_record
from support.documented_metrics import undocumented

SETS = (
    "tasks.room.eval.seen=8",
    "tasks.room.eval.unseen=8",
    "tasks.room.eval.online_places=0",
    "eval.probe_every=0",
)
SMALL = ("rollout.groups=2", "rollout.group_size=4", *SETS)
WIDER = ("rollout.groups=4", "rollout.group_size=8", *SETS)
DETERMINISTIC = ("run.deterministic=true", "rollout.max_staleness=0")


def crl(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def arguments(
    run: Path, tasks: str, sets: tuple[str, ...], steps: int, seed: int, method: str = "grpo"
) -> list[str]:
    options = [
        "train",
        "--tasks",
        tasks,
        "--run-dir",
        str(run),
        "--steps",
        str(steps),
        "--seed",
        str(seed),
        "--method",
        method,
    ]
    return [*options, *(part for setting in sets for part in ("--set", setting))]


def train(
    run: Path, *sets: str, tasks: str = "room", steps: int = 1, seed: int = 0, code: int = 0
) -> Result:
    """Train the actor alone and check that the run ends with the exit code `code`.

    Output is on stdout. Only errors are on stderr. All metrics are documented.
    """
    result = crl(
        *arguments(
            run,
            tasks,
            (*(SMALL if tasks == "room" else (*SMALL[:2], "eval.probe_every=0")), *sets),
            steps,
            seed,
        )
    )
    assert result.exit_code == code, result.output + "".join(map(str, [result.exception]))
    assert code or result.stderr == ""
    assert code or undocumented(run) == set()
    return result


def one_line(result: Result) -> str:
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def episodes(run: Path) -> list[dict[str, Any]]:
    """Return the training episodes of a run with their token columns.

    The columns are lists. If an episode has several samples, they are lists of lists.
    """
    played = []
    for t in read_episodes(run):
        samples = [{name: list(getattr(trace, name)) for name in COLUMNS} for trace in t.traces]
        columns = (
            samples[0]
            if len(samples) == 1
            else {name: [sample[name] for sample in samples] for name in COLUMNS}
        )
        played.append(episode_record(t) | columns)
    return played


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(run / "metrics.jsonl") if line["kind"] == kind]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}


def weights(actor: Path) -> dict[str, torch.Tensor]:
    return load_file(actor / "model.safetensors")


def equal_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def episode_files(run: Path) -> dict[str, bytes]:
    """Return the contents of the files with a run's episodes, by name."""
    return {path.name: path.read_bytes() for path in sorted((run / "episodes").iterdir())}


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
