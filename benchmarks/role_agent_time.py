"""Time of the parts of Role-Agent in a step (Figure 6 of the paper), with SmolLM2 in rooms.

    crl models get smollm2
    python benchmarks/role_agent_time.py --out benchmarks/results/role_agent_time.json

The model starts from demonstrations in the full rendering (`crl sft`): won episodes of the scripted
player, half of them with the right prediction in every reply, and notes on lost ones. Then it is
trained by Role-Agent, and by GiGPO, which has neither predictions nor analyses. Both runs have the
same number of steps and no evaluations.

The table has means over the steps after the second one, in seconds. Rollouts are one step ahead, so
on one core the steps alternate: the number of steps should be even. *Step* is the time from one
step to the next. *Predictions* is their share of the time in which replies were sampled, estimated
by characters. *Rewards of predictions* are computed once for the metrics, as measured here, and
once for the advantages. Predictions, analysis and retrieval may overlap with training.

The option --set, which may be repeated, changes a setting of the start and of both runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common import saved_rows, set_options, train_run, without_evaluations, write_results
from demonstrations import OTHER_SEED, Conversation, conversation, right_advice
from prompt_episodes import Episode, record
from verdicts import markdown_row

from crl.config import RunConfig, load
from crl.manager import DistilRequest
from crl.manager.failure_notes import FailureNote
from crl.methods.parts.predicting import horizons
from crl.methods.role_agent import RoleAgentSection
from crl.planning import tasks
from crl.planning.context import bank_prompts
from crl.planning.methods import build_method
from crl.run.models import actor_model
from crl.types import Observation, Segment, states

METHODS = ("role_agent", "gigpo")
SETTINGS = (
    "actor.profile=full", "actor.max_context_tokens=4096", "tasks.room.max_turns=8",
    "tasks.room.max_response_tokens=128", "extractor.max_response_tokens=192",
    *without_evaluations("room"),
)  # fmt: skip
"""Settings of the start and of both runs."""
LEARNING_RATE = 4e-5
"""Learning rate of both runs."""
GROUPS, MEMBERS = 4, 4
PLACES = 64
"""Number of the places of the demonstrations. Each has four episodes."""
MAX_WON = 64
"""Maximum number of won episodes among the demonstrations."""


def config_of(method: str, sets: Sequence[str], groups: int = GROUPS) -> RunConfig:
    """Return the config of a step with so many groups."""
    sizes = ["run.steps=1", f"rollout.groups={groups}", f"rollout.group_size={MEMBERS}"]
    return load(
        ["room"], preset="smollm2", options={"method": method}, sets=[*SETTINGS, *sizes, *sets]
    )


def conversations(
    config: RunConfig, plain: RunConfig, episodes: Sequence[Episode]
) -> Iterator[Conversation]:
    """Yield the demonstrations of both methods, of the episodes of their task.

    `config` is that of Role-Agent, `plain` that of GiGPO.
    """
    specs, right = tasks.specs(config), right_advice(episodes)
    write = bank_prompts(config, specs, actor_model(config).renderer).distil
    openings = [build_method(method, specs).context.opening for method in (config, plain)]
    (horizon,) = horizons(config.tasks, RoleAgentSection().horizon).values()
    won = 0
    for episode in episodes:
        trajectory, lesson = episode.trajectory, right.get(episode.task.goal)
        if trajectory.success and won < MAX_WON:
            first = next(s.text for s in trajectory.segments if s.origin == "env")
            opening = openings[won % 2](episode.task, Observation(first), [])
            predicted = 0 if won % 2 else horizon
            *played, last = with_predictions(trajectory.segments, predicted)
            yield conversation([*opening, *played], last.text)
            won += 1
        elif not trajectory.success and lesson:
            note = FailureNote(
                mode="wrong_target_location",
                detail="The agent walked in a direction in which the stairs are not.",
                critical_step="Step 1, it went in the wrong direction.",
                lesson=lesson.text,
                query="stairs down, wrong direction from the start",
            )
            asked = DistilRequest.from_trajectory("demonstration", trajectory)
            yield conversation(write(asked), f"<reflection>\n{note.text}\n</reflection>")


def with_predictions(segments: Sequence[Segment], horizon: int) -> list[Segment]:
    """Return the segments from the first reply to the last one, with right predictions."""
    shown, played = states(segments), []
    turn = 0
    for segment in segments:
        if segment.origin == "policy":
            turn += 1
            later = shown[turn : turn + horizon]
            predicted = "".join(f"<prediction>{state}</prediction>\n" for state in later)
            text = f"{predicted}<answer>{segment.text}</answer>"
            played.append(Segment("assistant", text, "policy"))
        elif turn:
            played.append(segment)
    while played[-1].origin != "policy":
        played.pop()
    return played


def started(folder: Path, seed: int, sets: Sequence[str]) -> Path:
    """Return the model of the supervised start. Train it if it does not exist."""
    run = folder / "start"
    if (run / "actor" / "config.json").exists():
        return run / "actor"
    seeds = [*sets, f"run.seed={seed + OTHER_SEED}"]
    played = config_of("grpo", seeds, PLACES)
    (episodes,) = record(played, tasks.specs(played), PLACES * MEMBERS)
    path = folder / "demonstrations.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    config, plain = (config_of(method, seeds) for method in METHODS)
    lines = [json.dumps(found) for found in conversations(config, plain, episodes)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    command = ["crl", "sft", "--preset", "smollm2", "--tasks", "room", "--from", str(path)]
    command += ["--role", "actor", "--epochs", "2", "--batch-tokens", "2048"]
    command += ["--learning-rate", "2e-4", "--decay", "--seed", str(seed)]
    command += [*set_options([*SETTINGS, *sets]), "--run-dir", str(run)]
    print(" ".join(command), file=sys.stderr)
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr)
    return run / "actor"


def parts(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of the parts of a step in seconds, over the steps after the second one."""
    _, second, *steps = [line for line in metrics if line["kind"] == "train"]
    times = [line["time"] for line in (second, *steps)]
    walls = [end - begin for begin, end in pairwise(times)]
    shares = [line.get("perf/distil_share") or 0.0 for line in steps]

    def mean(name: str) -> float:
        return fmean(line.get(name) or 0.0 for line in steps)

    return {
        "step": fmean(walls),
        "waiting for episodes": mean("time/wait"),
        "training": mean("time/train"),
        "predictions": mean("time/predictions"),
        "rewards of predictions": mean("perf/measure_s"),
        "analysis and retrieval": fmean(s * wall for s, wall in zip(shares, walls, strict=True)),
        "success": mean("rollout/success"),
        "sampled tokens": mean("rollout/sampled_tokens"),
        "missing predictions": mean("rollout/prediction/missing"),
        "similarity of predictions": mean("rollout/prediction/similarity"),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the parts of a step as a Markdown table, with the ratio to the step of GiGPO."""
    by = {row["method"]: row["parts"] for row in rows}
    step = by.get("gigpo", {}).get("step")
    lines = [("", *by), ("---",) * (len(by) + 1)]
    for part in next(iter(by.values())):
        cells = []
        for values in by.values():
            value = values[part]
            ratio = f" ({value / step:.3f}×)" if step and part in TIMED else ""
            cells.append(f"{value:,.0f}" if value >= 1000 else f"{value:.3f}{ratio}")
        lines.append((part, *cells))
    return "\n".join(markdown_row(*line) for line in lines)


TIMED = (
    "step", "waiting for episodes", "training", "predictions", "rewards of predictions",
    "analysis and retrieval",
)  # fmt: skip
"""Parts in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("build/role-agent-time"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    given = parser.parse_args()
    folder = given.folder.resolve()
    settings = {"steps": given.steps, "seed": given.seed, "set": given.sets}
    rows = saved_rows(given.out, settings)
    for method in METHODS:
        if method in [row["method"] for row in rows]:
            continue
        model = started(folder, given.seed, given.sets)
        sets = [
            *SETTINGS, f"rollout.groups={GROUPS}", f"rollout.group_size={MEMBERS}",
            f"actor.model={model}", f"actor.optimizer.learning_rate={LEARNING_RATE}", *given.sets,
        ]  # fmt: skip
        options = ["--tasks", "room", "--preset", "smollm2", "--method", method]
        options += ["--steps", str(given.steps), "--seed", str(given.seed), *set_options(sets)]
        metrics = train_run(options, folder / method)
        rows.append({"method": method, "parts": parts(metrics)})
        write_results(given.out, {"settings": settings, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
