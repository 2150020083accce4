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
* complementary full: as complementary, but in the full rendering with these episodes. Both models
  start from `demonstrations.py`. It is meant for a GPU, too, and was never run as a whole.
* three tasks: three steps of complementary in the full rendering of room, webshop and alfworld,
  with merges, questions and critic. Two vLLM engines sample, from the 20 most probable tokens, and
  two ranks train each model, in float32. Both models start from `demonstrations.py`, and the bank
  with right and wrong advice of the environments' advisors. The arm shows whether all parts work
  together, and how many replies parse. It needs the environment of `make setup-engines` with the
  extra alfworld.

Finished runs are stored in benchmarks/results/smollm2/ARM/SEED.json.xz with config and metrics, and
are not repeated, whatever --set says. Interrupted ones are resumed. The output is Markdown: the
evaluations before the first and after the last step, and means over the first and the last steps of
the training; those of lessons are weighted by the number of answers of a step. For three tasks, the
output is the share of replies of each kind that parse, and the KL between engine and trainer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from common import commit, machine, set_options, train_run

from crl.intervals import plus_minus
from crl.types import RoleName

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "smollm2"
SEEDS = (20, 21, 22)
"""Seeds that nothing was tuned on."""
OPERATIONS = frozenset({"add", "update", "return", "up", "down", "merge", "discard"})
"""Kinds of operations of the extractor in the bank's log."""
WINDOW = 5
"""Number of first and of last training steps over which training metrics are averaged."""

THREE_TASKS = "three tasks"
SHORT, LONG, FULL_START = "short", "long", "full"
BOTH_FULL_START, THREE_START = "both-full", "three-tasks"
"""Names of the supervised starts."""
SLOW, FAST = ("--learning-rate", "5e-5"), ("--learning-rate", "2e-4", "--decay")
DRILLS = (
    "--tasks", "room", "--from", "drills", "--batch-tokens", "1024", "--demonstrations",
)  # fmt: skip
FULL_ROOM = (
    "--set", "tasks.room.max_turns=8", "--set", "tasks.room.max_response_tokens=32",
)  # fmt: skip
FULL = ("--set", "actor.profile=full", "--set", "actor.max_context_tokens=4096", *FULL_ROOM)
"""Options of a supervised start and of a run in the full rendering."""
TASKS = ("room", "webshop", "alfworld")
STEPS, GROUP = 3, 4
"""Steps of the arm three tasks, and members of its groups. A step has one group of each task."""
FULL_RENDERING = (
    *(
        f"{role}.{setting}"
        for role in ("actor", "extractor")
        for setting in ("profile=full", "max_context_tokens=8192")
    ),
    "extractor.max_response_tokens=256",
)
"""Settings of the arms three tasks and complementary full, and of their starts."""
DEMONSTRATED = ("--batch-tokens", "2048", *FAST, *set_options(FULL_RENDERING))
PLACES: Mapping[tuple[str, str], Mapping[str, int]] = {
    (THREE_START, "actor"): {"room": 32, "webshop": 4, "alfworld": 4},
    (THREE_START, "extractor"): {"room": 2, "webshop": 2},
    (BOTH_FULL_START, "actor"): {"room": 64},
    (BOTH_FULL_START, "extractor"): {"room": 2},
}
"""Number of the places of the demonstrations of these arms, by start and role, and task.

Each place has four episodes. Those of the room are short, and 24 of them were too few to win.
"""
START = ("--preset", "smollm2", "--epochs", "1")
"""Options of all supervised starts."""
STARTS: Mapping[tuple[str, str], Sequence[str]] = {
    (SHORT, "actor"): (*DRILLS, "200", *SLOW),
    (SHORT, "extractor"): (*DRILLS, "1000", *SLOW),
    (LONG, "actor"): (*DRILLS, "1000", *FAST),
    (LONG, "extractor"): (*DRILLS, "2000", *FAST),
    (FULL_START, "actor"): (
        "--tasks", "room", "--from", "scripted", "--steps", "2", "--batch-tokens", "4096",
        *SLOW, *FULL,
    ),
    **{
        (name, role): ("--tasks", tasks, *DEMONSTRATED)
        for name, tasks in ((THREE_START, ",".join(TASKS)), (BOTH_FULL_START, "room"))
        for role in ("actor", "extractor")
    },
}  # fmt: skip
"""Options of the supervised starts, by name and role.

A short start leaves much to learn for RL. After it, an actor hardly follows lessons, so the reward
does not show which ones are right; and few lessons of an extractor are right, so RL has little to
reinforce.
"""
COMMON = (
    "--preset", "smollm2", "--plain",
    "--set", "eval.probe_every=0", "--set", "run.keep_last=1", "--set", "run.keep_episodes=1",
)  # fmt: skip
ROOM = (
    "--tasks", "room",
    "--set", "tasks.room.eval.seen=256", "--set", "tasks.room.eval.unseen=512",
)  # fmt: skip
FULL_RL = ("--set", "actor.optimizer.learning_rate=4e-5", "--set", "actor.optimizer.warmup_steps=4")
"""Learning rate of the preset's compact profile, for the full one."""
FULL_BANK = (
    "extractor.optimizer.learning_rate=4e-5", "bank.scope=goal", "bank.max_per_goal=8",
)  # fmt: skip
"""Settings of the compact profile for extractor and bank, for the full one."""
BOTH = (*ROOM, "--set", "tasks.room.eval.online_places=32")
ENGINES = (
    *FULL_RENDERING, f"run.steps={STEPS}",
    f"rollout.groups={len(TASKS)}", f"rollout.group_size={GROUP}",
    "engine.kind=vllm", "learner.kind=deepspeed", "learner.ranks=2",
    "learner.activation_checkpointing=true",
    "ask.enabled=true", "critic.enabled=true", "extractor.merge_every=1", "extractor.batch=2",
    f"bank.queue_size={len(TASKS) * GROUP}", "actor.top_k=20", "extractor.top_k=20",
    "extractor.malformed_reward=-1",
    *(
        f"tasks.{task}.{setting}"
        for task in TASKS
        for setting in (
            "max_response_tokens=64", "eval.seen=0", "eval.unseen=0", "eval.online_places=0",
        )
    ),
    "tasks.webshop.max_turns=8", "tasks.alfworld.max_turns=8",
)  # fmt: skip
"""Settings of the arm three tasks.

A step waits until the episodes of the last one are distilled, so that their lessons can earn
credit in the run. In the 30 turns of the room, members of a group can find the exit by chance.
"""
ARMS: Mapping[str, Sequence[str]] = {
    "grpo": (*ROOM, "--method", "grpo"),
    "frozen": (*ROOM, "--method", "grpo", "--set", "actor.optimizer.learning_rate=0"),
    "lora": (
        *ROOM, "--method", "grpo", "--set", "actor.lora.rank=16",
        "--set", "actor.optimizer.learning_rate=4e-4",
    ),
    "complementary": BOTH,
    "short start": BOTH,
    "grpo full": (*ROOM, "--method", "grpo", *FULL, *FULL_RL),
    "frozen full": (
        *ROOM, "--method", "grpo", *FULL, *FULL_RL, "--set", "actor.optimizer.learning_rate=0",
    ),
    "complementary full": (
        *BOTH, *set_options((*FULL_RENDERING, *FULL_BANK)), *FULL_ROOM, *FULL_RL,
    ),
    THREE_TASKS: ("--tasks", ",".join(TASKS), *set_options(ENGINES)),
}  # fmt: skip
"""Options of each arm besides those of all runs."""


def started_roles(arm: str) -> Sequence[RoleName]:
    """Return the roles whose models have a supervised start."""
    return ("actor",) if "--method" in ARMS[arm] else ("actor", "extractor")


def start_of(arm: str) -> str:
    """Return the name of the supervised start of an arm."""
    starts = {
        "complementary": LONG, "grpo full": FULL_START, "frozen full": FULL_START,
        "complementary full": BOTH_FULL_START, THREE_TASKS: THREE_START,
    }  # fmt: skip
    return starts.get(arm, SHORT)


def start_folder(arm: str, role: str, seed: int, folder: Path) -> Path:
    """Return the run of the supervised start of a role."""
    return folder / f"start-{start_of(arm)}-{role}-{seed}"


def start(arm: str, role: RoleName, seed: int, folder: Path, sets: Sequence[str] = ()) -> Path:
    """Return the model of the supervised start of a role. Train it if it does not exist.

    `sets` are the options --set. The remains of an interrupted training are removed.
    """
    run = start_folder(arm, role, seed, folder)
    model = run / role
    if not (model / "config.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        name = start_of(arm)
        options = (*START, *STARTS[name, role])
        if (name, role) in PLACES:
            options = (*options, "--from", str(demonstrated(name, role, seed, folder)))
        command = ["crl", "sft", *options, "--role", role, "--seed", str(seed)]
        command += [*sets, "--run-dir", str(run)]
        print(" ".join(command), file=sys.stderr)
        subprocess.run([sys.executable, "-m", *command], check=True)
    return model


def demonstrated(name: str, role: RoleName, seed: int, folder: Path) -> Path:
    """Write the demonstrations of a supervised start with this name. Return their file."""
    from demonstrations import write

    from crl.config import load

    path = folder / f"demonstrations-{name}-{role}-{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    sets = [
        *FULL_RENDERING, "ask.enabled=true", "run.steps=1", f"rollout.group_size={GROUP}",
        f"run.seed={seed}",
    ]  # fmt: skip
    configs = [
        load([task], preset="smollm2", sets=[*sets, f"rollout.groups={places}"])
        for task, places in PLACES[name, role].items()
    ]
    write(path, role, configs)
    return path


def start_bank(seed: int, folder: Path) -> Path:
    """Return a bank with the advice of the environments' advisors for the training episodes.

    Right and wrong advice take turns, as in `prompts.py`. Make the bank if it does not exist.
    """
    from prompt_episodes import bank, record

    from crl.config import load
    from crl.manager.inspection.upkeep import create_bank
    from crl.planning.tasks import specs

    path = folder / f"bank-three-tasks-{seed}.sqlite"
    if not path.exists():
        config = load(TASKS, preset="smollm2", sets=[*ENGINES, f"run.seed={seed}"])
        episodes = record(config, specs(config), STEPS * GROUP)
        create_bank(path, [entry for of_task in episodes for entry in bank(of_task)])
    return path


def make(arm: str, seed: int, folder: Path, sets: Sequence[str]) -> None:
    """Train one run and store it. `sets` are the options --set."""
    import torch  # noqa: F401  (`machine` names the GPU if torch is imported)

    roles = started_roles(arm)
    models = [f"{role}.model={start(arm, role, seed, folder, sets)}" for role in roles]
    if arm == THREE_TASKS:
        models += [f"bank.init={start_bank(seed, folder)}", "learner.precision=float32"]
    options = [*COMMON, *ARMS[arm], *sets, "--seed", str(seed), *set_options(models)]
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
    if arm == THREE_TASKS:
        result["answers"] = answers(run / "bank.sqlite")
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


def answers(bank: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of usable and of all answers of the extractor, by their kind.

    An answer is not usable if all its operations were refused, other than as near duplicates. The
    log has no operation `keep`, so a merge with only this one and a refused one is not usable.
    """
    rows: defaultdict[str, set[str]] = defaultdict(set)
    with closing(sqlite3.connect(f"file:{bank}?mode=ro", uri=True)) as database:
        for kind, origin, data in database.execute("SELECT kind, origin, data FROM log"):
            duplicate = kind == "drop" and json.loads(data)["reason"] == "near duplicate"
            rows["used" if duplicate or kind in OPERATIONS else kind].add(origin)
            if kind == "refine" and json.loads(data)["text"] is not None:
                rows["used"].add(origin)
    asked = {
        "distillations": rows["submit"] - rows["dead"],
        "merges": rows["chunk"],
        "answers to questions": rows["refine"],
    }
    refused = rows["drop"] - rows["used"]
    return {kind: (len(names - refused), len(names)) for kind, names in asked.items()}


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


def parsed_table(seeds: Sequence[int]) -> str:
    """Return the parsed replies and the KL between engine and trainer of each run, as Markdown."""
    rows = ["| seed | replies | usable | of | share |", "| --- | --- | --- | --- | --- |"]
    lines = []
    for seed in seeds:
        if not (run := stored(THREE_TASKS, seed)):
            continue
        found = {**actor_replies(run["metrics"]), **run["answers"]}
        for kind, (usable, total) in found.items():
            share = f"{usable / total:.3f}" if total else "–"
            rows.append(f"| {seed} | {kind} | {usable} | {total} | {share} |")
        for role in ("actor", "extractor"):
            values = [line.get(f"{role}/mismatch_kl") for line in run["metrics"]]
            numbers = ", ".join(f"{value:.1e}" for value in values if value is not None)
            lines.append(f"seed {seed}, KL between engine and trainer of the {role}: {numbers}")
    return "\n".join([*rows, "", *lines])


def actor_replies(metrics: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the numbers of usable and of all replies of the actor, by their kind."""
    steps = [line for line in metrics if line["kind"] == "train"]
    turns, valid, critiques, verdicts, before = 0, 0.0, 0.0, 0.0, 0
    for line in steps:
        played = line["total/env_turns"] - before
        before = line["total/env_turns"]
        turns += played
        valid += played * (1 - line["rollout/invalid_actions"])
        critiques += line.get("critic/critiques", 0)
        verdicts += line.get("critic/critiques", 0) * (1 - (line.get("critic/malformed") or 0))
    return {
        "actions": (round(valid), turns), "verdicts": (round(verdicts), round(critiques)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", nargs="*", choices=[*ARMS], default=["grpo"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[*SEEDS])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    arguments = parser.parse_args()
    sets = set_options(arguments.sets)
    for seed in arguments.seeds:
        for arm in arguments.arm:
            if stored(arm, seed) is None:
                make(arm, seed, arguments.folder.resolve(), sets)
    if arms := [arm for arm in arguments.arm if arm != THREE_TASKS]:
        print(table(arms, arguments.seeds))
    if THREE_TASKS in arguments.arm:
        print(parsed_table(arguments.seeds))


if __name__ == "__main__":
    main()
