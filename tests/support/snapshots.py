"""Runs whose dashboard is drawn in tests."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from crl.cli.dashboard.frame import View, draw
from crl.cli.dashboard.screen import TRAIN_KEYS
from crl.monitor.snapshot import RunInfo, Snapshot, SnapshotMonitor
from crl.types import (
    Activity,
    Counters,
    EpisodeAddress,
    Experience,
    ExperienceUse,
    Guidance,
    Lift,
    Outcome,
    Provenance,
    Segment,
    Task,
    Trajectory,
)


def experience(text: str, *, uid: str = "e1", task: str = "room", **counters: Any) -> Experience:
    goal = f"{task.title()}: Amber Hall. Reach the stairs down (>)."
    return Experience(uid, 1, text, task, goal, Provenance("g1", (0, 0)), Counters(**counters))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(method: str, *tasks: str, clock: Clock | None = None) -> SnapshotMonitor:
    monitor = SnapshotMonitor(
        RunInfo(f"{'+'.join(tasks)}-{method}-1", method, tasks, 128), clock=clock or Clock()
    )
    monitor.note(
        f"run runs/{'+'.join(tasks)}-{method}-1\nactor  tiny-actor (bundled)\n       "
        f"156,000 parameters, 0.6 MiB; profile compact\n"
    )
    return monitor


def evaluation(task: str, share: float) -> dict[str, float]:
    metrics: dict[str, float] = {"time/eval": 2.5}
    for split, more in (("seen", 0.1), ("unseen", 0.0)):
        for condition, extra in (("free", 0.0), ("guided", 0.05)):
            name, rate = f"eval/{task}/{split}/success/{condition}", share + more + extra
            metrics |= {name: rate, f"{name}/low": rate - 0.06, f"{name}/high": rate + 0.06}
    return metrics


def training(step: int) -> dict[str, float | None]:
    return {
        "rollout/success": 0.25 + step / 200,
        "rollout/success/free": 0.25 + step / 200,
        "rollout/errors": 0,
        "actor/loss": -0.02 + step / 1000,
        "actor/ratio_mean": 1 + (-1) ** step / 1000,
        "actor/clip_fraction": None if step % 5 == 0 else 0.01 * (step % 3),
        "actor/approx_kl": 0.0011,
        "actor/entropy": 2 / (step + 1),
        "actor/learning_rate": 2e-4,
        "actor/updates": 2,
        "actor/version": step,
        "staleness/mean": 0.875,
        "staleness/max": 1,
        "time/wait": 6.1,
        "time/train": 4.2,
        "time/sync": 0.3,
        "perf/sampled_tokens_per_s": 1234.5,
        "perf/episodes_per_s": 12.25,
    }


def guided(step: int) -> dict[str, float | None]:
    rates = {
        "rollout/success/guided": 0.3 + step / 150,
        "rollout/success/used": 0.55,
        "rollout/gap": 0.05 + step / 600,
    }
    return {**training(step), **rates, "time/submit": 0.4, "time/bank": 2.0}


def update(step: int) -> dict[str, float]:
    return {
        "extractor/loss": 0.01 * step,
        "extractor/ratio_mean": 1.002,
        "extractor/clip_fraction": 0.02,
        "extractor/approx_kl": 0.0023,
        "extractor/entropy": 1.5,
        "extractor/reward": 0.2 + step / 100,
        "extractor/learning_rate": 1e-4,
        "extractor/updates": step,
        "extractor/version": step,
        "time/train": 3.4,
        "time/sync": 0.2,
    }


def bank(step: int) -> dict[str, float | None]:
    return {
        "bank/size": 10 * step,
        "bank/with_lift": 3,
        "bank/size/room": 6 * step,
        "bank/size/maze": 4 * step,
        "ops/add": 12,
        "ops/update": 3,
        "ops/return": 10,
        "ops/drop": 2,
        "queue/pending": 9,
        "queue/leased": 3,
        "queue/done": 5 * step,
        "queue/dead": 1,
        "buffer/ready": 4,
        "retrieval/hit_rate": 0.87,
        "retrieval/same_goal": 0.9,
        "lessons/correct": 0.75,
        "perf/search_p50_ms": 1.25,
        "perf/search_p95_ms": 3.5,
        "perf/embed_cache_hits": 0.93,
    }


LESSONS = [
    experience(
        "In Amber Hall the exit is in the north-east corner; go east along the wall, then north.",
        retrieved=41, credited=30, credit=12, lift=Lift(8, 0.25, 0.375),
    ),
    experience(
        "Doors in the maze open only\nfrom the south.", uid="e2", task="maze",
        retrieved=7, credited=4, credit=-2, lift=Lift(2, -0.25, 0.125),
    ),
    experience("A jackal follows you: fight it in a corridor, never in the open.", uid="e3"),
    *(
        experience(
            f"Lesson {n}: look before you leap.", uid=f"l{n}",
            retrieved=n, credited=n, credit=n / 2,
        )
        for n in range(1, 20)
    ),
    experience("Never go back.", uid="e4", retrieved=9, credited=9, credit=9, lift=Lift(9, 0.0)),
]  # fmt: skip


def group(step: int, *texts: str) -> list[Trajectory]:
    """Return a group of a guided and a free episode in a room."""
    task = Task("room", 7, "train", "Room: the red attic. Reach the stairs down (>).")
    opening = (
        Segment("user", task.goal, "task"),
        Segment("user", "go <east>, then north.", "experience"),
        Segment("user", "| . . |\n| @ . |", "env"),
        Segment("assistant", "north", "policy"),
        *(Segment("user", text, "env") for text in texts),
    )
    use = ExperienceUse("run/1/2/3#0", 1, "go <east>, then north.", "start")
    return [
        Trajectory(
            task, EpisodeAddress(step, 5, 0), "guided", opening,
            outcome=Outcome({"outcome": 1.0}, success=True), activity=Activity((1.0,)),
            guidance=Guidance((use,), ("go <east>, then north.",)),
        ),
        Trajectory(
            task, EpisodeAddress(step, 5, 1), "free",
            tuple(segment for segment in opening if segment.origin != "experience"),
            outcome=Outcome({"outcome": 0.0}), activity=Activity((0.0,)),
        ),
    ]  # fmt: skip


def of_tasks(step: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for task, base in (("room", 0.3), ("maze", 0.1)):
        name = f"rollout/{task}"
        metrics |= {
            f"{name}/success": base + step / 100,
            f"{name}/success/guided": base + step / 80,
            f"{name}/success/free": base + step / 120,
            f"{name}/success/used": base + step / 70,
            f"{name}/gap": step / 240,
            f"{name}/gap/half_width": 0.125,
            f"{name}/turns": 4.5,
            f"{name}/used": 0.75,
            f"{name}/errors": 0,
        }
    return metrics


def complementary() -> Snapshot:
    clock = Clock()
    monitor = started("complementary", "room", "maze", clock=clock)
    clock.now += 5
    monitor.log(0, "eval", evaluation("room", 0.25) | evaluation("maze", 0.1))
    for step in range(1, 38):
        clock.now += 12.6
        monitor.trajectories(group(step, "You see the stairs."))
        monitor.log(step, "train", guided(step) | of_tasks(step))
        monitor.log(step, "extractor", update(step))
        monitor.log(step, "bank", bank(step))
        monitor.experiences(LESSONS)
    monitor.log(
        37,
        "probe",
        {
            "probe/room/none": 0.25,
            "probe/room/right": 0.5,
            "probe/room/wrong": 0.125,
            "time/probe": 0.7,
        },
    )
    monitor.log(37, "eval", evaluation("room", 0.45) | evaluation("maze", 0.2))
    monitor.note("warning: in the last 5 steps no loss had a gradient")
    monitor.note("step 37: the extractor's queue was full")
    monitor.progress("rollouts", 0, 16)
    clock.now += 3
    monitor.progress("rollouts", 4, 16)
    return monitor.snapshot()


def grpo() -> Snapshot:
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    monitor.log(0, "eval", {k: v for k, v in evaluation("room", 0.25).items() if "guided" not in k})
    for step in range(1, 8):
        clock.now += 10
        monitor.log(step, "train", {**training(step), "rollout/errors": step % 2})
    return monitor.snapshot()


def empty() -> Snapshot:
    return started("complementary", "room").snapshot()


def picture(
    snapshot: Snapshot, width: int, height: int, *, view: View | None = None, colour: bool = False
) -> str:
    """Return the drawing of a page, by default of the overview."""
    system, stream = "standard" if colour else None, io.StringIO()
    console = Console(
        file=stream,
        width=width,
        height=height,
        color_system=system,
        force_terminal=colour,
        legacy_windows=False,
        _environ={},
    )  # pyright: ignore[reportArgumentType]
    console.print(draw(snapshot, view or View(), width, height, TRAIN_KEYS)[0])
    return stream.getvalue()
