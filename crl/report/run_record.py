"""Content of a run directory for a report. The run may be in progress or killed."""

from __future__ import annotations

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
from crl.monitor.files import read_metrics
from crl.monitor.follow import KILLED, ending_in_log
from crl.monitor.run_dir import RunDir

STATES: Mapping[str, str] = {
    "not started": "It has not started.",
    "under way": "It is under way.",
    "finished": "It is finished.",
    "interrupted": "The run was interrupted.",
    "failed": "The run failed: see its log.",
    "unfinished": KILLED,
}
"""Sentences about the states of a run."""

Line = Mapping[str, Any]
"""Line of metrics.jsonl."""


@dataclass(frozen=True)
class RunRecord:
    """Run, read from its directory."""

    name: str
    """Name for readers; see `unique_names`."""
    dir: RunDir
    saved: SavedRun
    lines: Sequence[Line] = field(repr=False)
    """Lines of metrics.jsonl that are complete."""
    active: bool
    """True if a process trains the run."""
    damaged_lines: int = 0
    """Number of damaged lines of metrics.jsonl, which are left out."""
    ending: str = ""
    """Way in which the run ended, as `ending_in_log`."""

    @classmethod
    def read(cls, name: str, run: RunDir, last_bytes: int | None = None) -> RunRecord:
        """Read a run. Raise `ConfigError` if it is not a run of this version.

        `last_bytes`: size of the end of the metrics that is read; None = all of them.
        """
        metrics = read_metrics(run.metrics, last_bytes)
        saved = load_saved(run.path)
        active, ending = run.is_locked(), ending_in_log(run.log)
        return cls(name, run, saved, metrics.lines, active, metrics.damaged, ending)

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
        """State of the run: a key of `STATES`."""
        planned = self.saved.config.run.steps
        if self.active:
            return "under way"
        if not self.lines:
            return "not started"
        evaluated = any(line["step"] == planned for line in self.of("eval"))
        if self.steps >= planned and evaluated:
            return "finished"
        return self.ending.partition(":")[0] or "unfinished"

    @property
    def state_sentence(self) -> str:
        """Sentence about the state of the run."""
        return STATES[self.state]

    def of(self, kind: str) -> list[Line]:
        """Return the lines of a kind, in their order."""
        return [line for line in self.lines if line["kind"] == kind]

    @cached_property
    def evaluations(self) -> dict[int, dict[EvalKey, Estimate]]:
        """Success rates of the evaluations, by step."""
        return {line["step"]: success_rates(line) for line in self.of("eval")}

    @property
    def result(self) -> RunResult:
        """The run with the evaluation after its last planned step, if it has one."""
        last = self.evaluations.get(self.saved.config.run.steps, {})
        settings, seed = run_settings(self.saved.config)
        return RunResult(self.dir.path, seed, settings, last, self.saved.prompts)

    @cached_property
    def changes(self) -> list[tuple[str, Any, Any]]:
        """Settings that differ from the run's preset with the same tasks and method.

        Each is (key, value of the preset or None, value of the run). Raise `ConfigError` if the
        preset or a task cannot be read any more.
        """
        config = self.saved.config
        preset = load(list(config.tasks), preset=config.preset, options={"method": config.method})
        default = dict(leaves(preset.model_dump(mode="json")))
        own = dict(leaves(config.model_dump(mode="json")))
        return [
            (key, default.get(key), value)
            for key, value in own.items()
            if default.get(key) != value and key != "run.seed"
        ]


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs. Raise `ConfigError` if one is given twice, or is not a run of this version."""
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise ConfigError("run", str(path), "is given twice", "Give each run once")
    return [
        RunRecord.read(name, RunDir(path))
        for name, path in zip(unique_names(resolved), paths, strict=True)
    ]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return a name of each path: its last parts, as many as make the names differ.

    A number, such as a seed, is no name.
    """
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names) and not any(name.isdigit() for name in names):
            return names
    return [str(path) for path in paths]
