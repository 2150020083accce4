"""Learning of SmolLM2-135M-Instruct in rooms, from demonstrations to RL.

    crl models get smollm2
    python benchmarks/smollm2.py --arm grpo frozen complementary --set learner.precision=bfloat16

The option --set, which may be repeated, changes a setting of the supervised starts and of the runs.
The stored runs have bfloat16, which is fast on GPUs and on CPUs with AMX or AVX-512 BF16 only. The
default is float32.

Every run starts from its own supervised start (`crl sft`, with the seed of the run) and has the
settings of the preset smollm2:

* grpo: the actor alone, from drills.
* frozen: the same with a learning rate of 0. Differences show the noise of the evaluation.
* lora: as grpo, with an adapter of rank 16 instead of all weights, at ten times the learning rate.
* complementary: with a bank and a trained extractor, which starts from drills too. Both starts have
  more drills and a higher learning rate.
* short start: as complementary, but the actor has the start of grpo, and the extractor half of the
  drills at the same low learning rate.
* grpo full, frozen full: as grpo and frozen, but in the full rendering, from scripted players.
  Episodes have 8 turns, since any walk finds the exit in 30. These runs are meant for a GPU.

Finished runs are stored in benchmarks/results/smollm2/ARM/SEED.json.xz with config and metrics, and
are not repeated, whatever --set says. Interrupted ones are resumed. The output is Markdown: the
evaluations before the first and after the last step, and means over the first and the last steps of
the training; those of lessons are weighted by the number of answers of a step.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from common import commit, machine, train_run

from crl.intervals import plus_minus

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "smollm2"
SEEDS = (20, 21, 22)
"""Seeds that nothing was tuned on."""
WINDOW = 5
"""Number of first and of last training steps over which training metrics are averaged."""

SHORT, LONG, FULL_START = "short", "long", "full"
"""Names of the supervised starts."""
SLOW, FAST = ("--learning-rate", "5e-5"), ("--learning-rate", "2e-4", "--decay")
DRILLS = ("--from", "drills", "--batch-tokens", "1024", "--demonstrations")
FULL = (
    "--set", "actor.profile=full", "--set", "actor.max_context_tokens=4096",
    "--set", "tasks.room.max_turns=8", "--set", "tasks.room.max_response_tokens=32",
)  # fmt: skip
"""Options of a supervised start and of a run in the full rendering."""
START = ("--preset", "smollm2", "--tasks", "room", "--epochs", "1")
"""Options of all supervised starts."""
STARTS: Mapping[tuple[str, str], Sequence[str]] = {
    (SHORT, "actor"): (*DRILLS, "200", *SLOW),
    (SHORT, "extractor"): (*DRILLS, "1000", *SLOW),
    (LONG, "actor"): (*DRILLS, "1000", *FAST),
    (LONG, "extractor"): (*DRILLS, "2000", *FAST),
    (FULL_START, "actor"): (
        "--from", "scripted", "--steps", "2", "--batch-tokens", "4096", *SLOW, *FULL,
    ),
}  # fmt: skip
"""Options of the supervised starts, by name and role.

A short start leaves much to learn for RL. After it, an actor hardly follows lessons, so the reward
does not show which ones are right; and few lessons of an extractor are right, so RL has little to
reinforce.
"""
COMMON = (
    "--tasks", "room", "--preset", "smollm2", "--plain",
    "--set", "tasks.room.eval.seen=256", "--set", "tasks.room.eval.unseen=512",
    "--set", "eval.probe_every=0", "--set", "run.keep_last=1", "--set", "run.keep_episodes=1",
)  # fmt: skip
FULL_RL = ("--set", "actor.optimizer.learning_rate=4e-5", "--set", "actor.optimizer.warmup_steps=4")
"""Learning rate of the preset's compact profile, for the full one."""
BOTH = ("--set", "tasks.room.eval.online_places=32")
ARMS: Mapping[str, Sequence[str]] = {
    "grpo": ("--method", "grpo"),
    "frozen": ("--method", "grpo", "--set", "actor.optimizer.learning_rate=0"),
    "lora": (
        "--method", "grpo", "--set", "actor.lora.rank=16",
        "--set", "actor.optimizer.learning_rate=4e-4",
    ),
    "complementary": BOTH,
    "short start": BOTH,
    "grpo full": ("--method", "grpo", *FULL, *FULL_RL),
    "frozen full": (
        "--method", "grpo", *FULL, *FULL_RL, "--set", "actor.optimizer.learning_rate=0",
    ),
}  # fmt: skip
"""Options of each arm besides those of all runs."""


def is_full(arm: str) -> bool:
    """Return whether the runs of an arm have the full rendering."""
    return FULL[1] in ARMS[arm]


def trains_both(arm: str) -> bool:
    """Return whether the runs of an arm train both models."""
    return "--method" not in ARMS[arm]


def start_of(arm: str) -> str:
    """Return the name of the supervised start of an arm."""
    return FULL_START if is_full(arm) else LONG if arm == "complementary" else SHORT


def start_folder(arm: str, role: str, seed: int, folder: Path) -> Path:
    """Return the run of the supervised start of a role."""
    return folder / f"start-{start_of(arm)}-{role}-{seed}"


def start(arm: str, role: str, seed: int, folder: Path, sets: Sequence[str] = ()) -> Path:
    """Return the model of the supervised start of a role. Train it if it does not exist.

    `sets` are the options --set. The remains of an interrupted training are removed.
    """
    run = start_folder(arm, role, seed, folder)
    model = run / role
    if not (model / "config.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        options = (*START, *STARTS[start_of(arm), role])
        command = ["crl", "sft", *options, "--role", role, "--seed", str(seed)]
        command += [*sets, "--run-dir", str(run)]
        print(" ".join(command), file=sys.stderr)
        subprocess.run([sys.executable, "-m", *command], check=True)
    return model


def make(arm: str, seed: int, folder: Path, sets: Sequence[str]) -> None:
    """Train one run and store it. `sets` are the options --set."""
    import torch  # noqa: F401  (`machine` names the GPU if torch is imported)

    roles = ("actor", "extractor") if trains_both(arm) else ("actor",)
    models = [f"{role}.model={start(arm, role, seed, folder, sets)}" for role in roles]
    options = [*COMMON, *ARMS[arm], *sets, "--seed", str(seed)]
    options += [word for text in models for word in ("--set", text)]
    run = folder / f"{arm.replace(' ', '-')}-{seed}"
    metrics = train_run(options, run)
    result = {
        "command": " ".join(["crl", "train", *options]).replace(str(folder), "build/smollm2"),
        "commit": commit(),
        "machine": machine(),
        "seconds": metrics[-1]["time"],
        "start": {
            role: [
                json.loads(line)
                for line in (start_folder(arm, role, seed, folder) / "metrics.jsonl")
                .read_text("utf-8")
                .splitlines()
            ]
            for role in roles
        },
        "config": json.loads((run / "config.json").read_text("utf-8")),
        "metrics": metrics,
    }
    path = RESULTS / arm / f"{seed}.json.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with lzma.open(temporary, "wt", encoding="utf-8") as file:
        json.dump(result, file)
    temporary.rename(path)


def stored(arm: str, seed: int) -> Mapping[str, Any] | None:
    """Return a finished run, or None."""
    path = RESULTS / arm / f"{seed}.json.xz"
    if not path.exists():
        return None
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def success(line: Mapping[str, Any], name: str) -> str:
    """Return a success rate of an evaluation with its 95 % interval, or a dash."""
    key = f"eval/room/{name.replace(' ', '/success/', 1)}"
    if key not in line:
        return "–"
    return f"{line[key]:.3f} [{line[f'{key}/low']:.3f}, {line[f'{key}/high']:.3f}]"


def evaluations(metrics: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return a success rate in the first and in the last evaluation; only the last if it is new."""
    first, *_, last = (line for line in metrics if line["kind"] == "eval")
    ends = [text for line in (first, last) if (text := success(line, name)) != "–"]
    return " → ".join(ends) or "–"


def lift(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return what the bank built online adds in unseen places at the end, ± half its interval."""
    last = [line for line in metrics if line["kind"] == "eval"][-1]
    key = "eval/room/unseen/lift"
    return plus_minus(last[key], last[f"{key}/half_width"]) if key in last else "–"


def ends(metrics: Sequence[Mapping[str, Any]], name: str, count: str = "") -> str:
    """Return the means of a metric over the first and the last training steps, or a dash.

    `count`: metric by which the steps are weighted; empty for equal weights.
    """
    found = [(line[name], line.get(count, 1)) for line in metrics if line.get(name) is not None]
    if not found:
        return "–"
    first, last = (
        fmean([value for value, _ in steps], [weight for _, weight in steps])
        for steps in (found[:WINDOW], found[-WINDOW:])
    )
    return f"{first:.3f} → {last:.3f}"


COLUMNS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    **{
        name: partial(evaluations, name=name)
        for name in ("unseen free", "unseen online", "unseen alone", "seen free", "seen guided")
    },
    "online − alone": lift,
    "training": partial(ends, name="rollout/success"),
    "right lessons": partial(ends, name="lessons/correct", count="lessons/answers"),
}
"""Columns of the table: functions of the metrics of a run."""


def table(arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Return the stored runs as a Markdown table, without columns that no run has."""
    found = [(arm, seed, run) for arm in arms for seed in seeds if (run := stored(arm, seed))]
    columns = {
        name: [column(run["metrics"]) for _, _, run in found] for name, column in COLUMNS.items()
    }
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"–"}}
    minutes = [f"{run['seconds'] / 60:.0f}" for _, _, run in found]
    lines = [[f"{arm}, {seed}" for arm, seed, _ in found], *columns.values(), minutes]
    rows = [["arm, seed", *columns, "minutes"], ["---"] * len(lines), *zip(*lines, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", nargs="*", choices=[*ARMS], default=["grpo"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[*SEEDS])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    arguments = parser.parse_args()
    sets = [word for text in arguments.sets for word in ("--set", text)]
    for seed in arguments.seeds:
        for arm in arguments.arm:
            if stored(arm, seed) is None:
                make(arm, seed, arguments.folder.resolve(), sets)
    print(table(arguments.arm, arguments.seeds))


if __name__ == "__main__":
    main()
