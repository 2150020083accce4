"""Counterparts of the paper's figures (`figures.py`), each by one command.

    python benchmarks/coevolution.py --figure 3a --jobs 2

Each run is a process of `crl train` on one core. Its config and all its metrics are stored in
benchmarks/results/coevolution/SETTING/ARM/SEED.json.xz; some figures have a folder of their own.
Stored runs are not repeated, and interrupted ones are resumed. No run is left out because of its
result. With --results FOLDER, the runs are made again and stored in that folder.

Some arms take a bank or a model from a finished run of another arm. The directories of such runs
are kept in --runs. If one is missing there, it is made again, and its stored result stays.

Without a bank, the online set is not part of the evaluation of a run. `crl eval` then plays it with
the trained actor, and only its episodes without experience are stored.

The output is Markdown: for each claim of the paper whether it holds here (`report.py`); for each
task and metric the mean over seeds ± half the 95 % interval by Student's t, and the difference of
the first arm from the others, paired by seed. Over several tasks it has the interquartile mean with
the interval of a stratified bootstrap, and the probability that the first arm is better than
another (`aggregates.py`). Metrics are those of the last steps and of the last checkpoint, never the
best.

With --document, all figures whose runs are stored are written to docs/results, with their
pictures.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from common import commit, processor, set_options, train_command
from figures import ARMS, FIGURES, SETTINGS, Figure, Results, StoredRun
from report import document, section

from crl.run.checkpoint import complete_steps

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "coevolution"
QUICK_SIZES = {"seen": 8, "unseen": 8, "online_places": 2, "probe_places": 0}
COMMON = ("eval.probe_every=0", "run.keep_last=1", "run.keep_episodes=1")
"""Settings of all runs. They change no training step."""


class Run(NamedTuple):
    """One training run."""

    setting: str
    arm: str
    seed: int
    folder: str = ""
    """Folder of the runs of its figure; see `Figure.folder`."""

    @property
    def path(self) -> Path:
        """Relative path of its stored result, without the extension."""
        return Path(self.folder, self.setting, self.arm.replace(" ", "-"), str(self.seed))


SOURCES = {arm.source for arm in ARMS.values() if arm.source}
"""Arms whose finished runs others start from."""
FINISHED = "finished"
"""Name of the file that marks the directory of a finished run."""


def source_of(run: Run) -> Run | None:
    """Return the finished run that a run takes a bank or a model from, if any."""
    arm = ARMS[run.arm]
    return run._replace(arm=arm.source, seed=run.seed + arm.source_seed) if arm.source else None


def last_checkpoint(folder: Path) -> Path:
    """Return the last checkpoint of the run in `folder`."""
    return folder / "checkpoints" / str(max(complete_steps(folder / "checkpoints")))


def relative(path: Path) -> Path:
    """Return a path in this clone relative to its root, so that it is valid in other clones."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def online_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return success without experience, with its interval, in a saved online evaluation."""
    found: dict[str, float] = {}
    for row in evaluation["results"]:
        if row["condition"] == "alone":
            name, success = f"eval/{row['task']}/{row['split']}/success/alone", row["success"]
            found |= {name: success["value"]}
            found |= {f"{name}/{end}": success[end] for end in ("low", "high")}
    return found


class Sweep:
    """Runs of figures.

    * `results`: folder of the stored runs.
    * `folder`: folder of unfinished runs.
    * `quick`: True for tiny runs, which only test the benchmark.
    """

    def __init__(self, results: Path, folder: Path, *, quick: bool) -> None:
        self._results, self._folder, self._quick = results, folder, quick

    def is_stored(self, run: Run) -> bool:
        """Return whether a run is finished."""
        return self._file(run).exists()

    def stored(self, run: Run) -> StoredRun | None:
        """Return a finished run, or None. This takes a while."""
        if not self.is_stored(run):
            return None
        with lzma.open(self._file(run), "rt", encoding="utf-8") as file:
            return json.load(file)

    def _file(self, run: Run) -> Path:
        """Return the path of the stored run."""
        return self._results / run.path.with_suffix(".json.xz")

    def results(self, figure: Figure, seeds: Sequence[int]) -> Results:
        """Return the stored runs of a figure. Raise `KeyError` if one is missing."""
        runs = runs_of(figure, seeds)
        stored = {run: result for run in runs if (result := self.stored(run))}
        return Results(
            figure,
            {
                (setting, arm): [stored[Run(setting, arm, seed, figure.folder)] for seed in seeds]
                for setting in figure.settings
                for arm in figure.arms
            },
        )

    def make(self, runs: Sequence[Run], jobs: int) -> None:
        """Make the runs that are not stored, in the order of seeds and `jobs` at a time.

        A run that starts from another one waits for it. Raise `CalledProcessError`; then the runs
        that have not started are left out.
        """
        made: dict[Run, Future[None]] = {}
        failed = Event()

        def make(run: Run, source: Future[None] | None = None) -> None:
            if source:
                source.result()
            if not failed.is_set():
                try:
                    self._make(run)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(jobs) as pool:
            # A source is submitted before the runs that wait for it, so it is never behind them.
            for run in sorted(runs, key=lambda run: run.seed):
                if run in made or self.is_stored(run):
                    continue
                source = source_of(run)
                if source and source not in made and self._is_unfinished(source):
                    made[source] = pool.submit(make, source)
                made[run] = pool.submit(make, run, made.get(source) if source else None)
        for future in made.values():
            future.result()

    def _is_unfinished(self, run: Run) -> bool:
        """Return whether the directory of a finished run is missing."""
        return not (self._folder / run.path / FINISHED).exists()

    def _make(self, run: Run) -> None:
        folder = self._folder / run.path
        options = self.options(run)
        if command := train_command(options, folder):
            self._crl(*command)
        metrics = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        ]
        if not any("/success/alone" in name for name in metrics[-1]):
            metrics[-1] |= self._online_set(run)
        if not self.is_stored(run):
            self._store(
                run,
                {
                    "command": " ".join(["crl", "train", *options]),
                    "commit": commit(),
                    "processor": processor(),
                    "seconds": metrics[-1]["time"],
                    "config": json.loads((folder / "config.json").read_text("utf-8")),
                    "metrics": metrics,
                },
            )
        if run.arm in SOURCES:
            (folder / FINISHED).touch()
        else:
            shutil.rmtree(folder)
        print(f"{run.setting}, {run.arm}, seed {run.seed}", file=sys.stderr, flush=True)

    def _online_set(self, run: Run) -> Mapping[str, Any]:
        """Return the metrics of the online set without experience, for a run without a bank."""
        folder = self._folder / run.path
        tasks = ",".join(SETTINGS[run.setting])
        self._crl(
            "eval", str(last_checkpoint(folder) / "actor"), "--tasks", tasks,
            "--experience", "online", "--out", str(folder / "online"),
            *self._sets([f"run.seed={run.seed}"], run),
        )  # fmt: skip
        (path,) = (folder / "online").glob("*.json")
        return online_metrics(json.loads(path.read_text("utf-8")))

    def _crl(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "crl", *arguments],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def options(self, run: Run) -> list[str]:
        """Return the options of `crl train` for a run."""
        sets = [*COMMON, *ARMS[run.arm].sets]
        if source := source_of(run):
            folder = self._folder / source.path
            paths = {"source": folder, "checkpoint": last_checkpoint(folder)}
            names = {name: relative(path) for name, path in paths.items()}
            sets = [text.format(**names) for text in sets]
        if self._quick:
            sets += ["run.steps=2", "rollout.groups=6"]
        tasks = ",".join(SETTINGS[run.setting])
        return ["--tasks", tasks, "--seed", str(run.seed), *self._sets(sets, run)]

    def _sets(self, sets: Sequence[str], run: Run) -> list[str]:
        """Return the options of the settings. With `quick`, evaluations are small."""
        sizes = [
            f"tasks.{task}.eval.{name}={count}"
            for task in SETTINGS[run.setting]
            for name, count in QUICK_SIZES.items()
        ]
        given = [*sets, *sizes] if self._quick else sets
        return set_options(given)

    def _store(self, run: Run, result: StoredRun) -> None:
        path = self._file(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        with lzma.open(temporary, "wt", encoding="utf-8") as file:
            json.dump(result, file)
        temporary.rename(path)


def runs_of(figure: Figure, seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a figure, seed by seed."""
    return [
        Run(setting, arm, seed, figure.folder)
        for seed in seeds
        for setting in figure.settings
        for arm in figure.arms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", nargs="*", choices=[*FIGURES], default=[])
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds than those of the figure")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--quick", action="store_true", help="tiny runs, which test the benchmark")
    parser.add_argument("--results", type=Path, help="folder of the stored runs")
    parser.add_argument("--runs", type=Path, help="folder of unfinished runs")
    parser.add_argument(
        "--document", action="store_true", help="also write all stored figures to docs/results"
    )
    arguments = parser.parse_args()
    # Tiny runs must never count as results, or as sources of real runs.
    build = ROOT / "build" / ("coevolution-quick" if arguments.quick else "coevolution")
    results = arguments.results or (build / "results" if arguments.quick else RESULTS)
    folder = arguments.runs or build
    sweep = Sweep(results.resolve(), folder.resolve(), quick=arguments.quick)
    wanted = {
        name: (FIGURES[name], arguments.seeds or FIGURES[name].seeds) for name in arguments.figure
    }
    runs = [run for figure, seeds in wanted.values() for run in runs_of(figure, seeds)]
    sweep.make(runs, arguments.jobs)
    for name, (figure, seeds) in wanted.items():
        print(section(name, sweep.results(figure, seeds)))
    if arguments.document:
        complete = {
            name: sweep.results(figure, figure.seeds)
            for name, figure in FIGURES.items()
            if all(sweep.is_stored(run) for run in runs_of(figure, figure.seeds))
        }
        document(complete, ROOT / "docs" / "results")


if __name__ == "__main__":
    main()
