"""What a report reads from a run directory. The run may be under way, or have been killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from crl.config.layers import leaves
from crl.config.load import SavedRun, load, load_saved
from crl.errors import ConfigError
from crl.evaluation.comparison import RunResult, run_settings, success_rates
from crl.evaluation.evaluate import EvalKey
from crl.evaluation.report import Estimate
from crl.monitor.run_dir import RunDir

Line = Mapping[str, Any]
"""Line of metrics.jsonl."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its directory shows it."""

    dir: RunDir
    saved: SavedRun
    lines: Sequence[Line] = field(repr=False)
    """Lines of metrics.jsonl that are complete."""
    active: bool
    """True if a process trains the run."""

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Read the run at `path`. Raise `ConfigError` if it is not a run of this version."""
        run = RunDir(path)
        return cls(run, load_saved(path), read_metrics(run.metrics), run.is_locked())

    @property
    def name(self) -> str:
        """Name of the directory, with its parent's if it is a number, such as a seed."""
        path = self.dir.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name

    @property
    def seed(self) -> int:
        return self.saved.config.run.seed

    @property
    def tasks(self) -> list[str]:
        return list(self.saved.config.tasks)

    @property
    def steps(self) -> int:
        """Completed actor steps."""
        return max((line["step"] for line in self.of("train")), default=0)

    @property
    def seconds(self) -> float | None:
        """Seconds of training until the last line; None in a deterministic run."""
        times = [line["time"] for line in self.lines if line.get("time") is not None]
        return max(times, default=None)

    @property
    def state(self) -> str:
        """State of the run in words."""
        planned = self.saved.config.run.steps
        if self.active:
            return "under way"
        evaluated = any(line["step"] == planned for line in self.of("eval"))
        return "finished" if self.steps >= planned and evaluated else "interrupted"

    def of(self, kind: str) -> list[Line]:
        """Return the lines of a kind, in their order."""
        return [line for line in self.lines if line["kind"] == kind]

    @cached_property
    def evaluations(self) -> dict[int, dict[EvalKey, Estimate]]:
        """Success rates of the evaluations, by step."""
        return {line["step"]: success_rates(line) for line in self.of("eval")}

    @property
    def result(self) -> RunResult:
        """The run with its last evaluation, for comparisons. It may have none."""
        last = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        settings, seed = run_settings(self.saved.config)
        return RunResult(self.dir.path, seed, settings, last)

    @cached_property
    def changes(self) -> list[tuple[str, Any, Any]]:
        """Settings that differ from the run's preset with the same tasks and method.

        Each is (key, value of the preset or None, value of the run). The method itself is listed
        too. Empty if the preset is no longer available.
        """
        config = self.saved.config
        try:
            preset = load(list(config.tasks), preset=config.preset)
        except ConfigError:  # a file of the user that has been moved, or tasks of their own
            return []
        default = dict(leaves(preset.model_dump(mode="json")))
        own = dict(leaves(config.model_dump(mode="json")))
        return [
            (key, default.get(key), value)
            for key, value in own.items()
            if default.get(key) != value and key != "run.seed"
        ]


def read_metrics(path: Path) -> list[Line]:
    """Return the complete lines of a file of metrics. The last line of a killed run may be cut."""
    lines: list[Line] = []
    if not path.is_file():
        return lines
    for text in path.read_text("utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines
