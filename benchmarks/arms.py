"""One training run of an arm, in this process, and what is measured at its end.

An arm is `crl train` with a few settings, or with an adviser in the place of the bank. Benchmarks
that compare arms share this module.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    sets: tuple[str, ...] = ()
    """Settings beside those that all arms share."""
    advised: bool = False
    """Whether guided episodes are told the truth instead of what a bank holds."""


ARMS: Mapping[str, Arm] = {
    "none": Arm(("method=grpo",)),
    "static": Arm(("extractor.train=false",)),
    "co-evolved": Arm(),
    "experience only": Arm(("actor.optimizer.learning_rate=0.0",)),
    "always right": Arm(advised=True),
}
"""none: the actor alone. static: the extractor is not trained. experience only: the actor is not.
always right: guided by the truth, the ceiling of what lessons can be worth."""


def run_arm(arm: Arm, tasks: Sequence[str], seed: int, steps: int | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Train one arm with one seed and return its measurements.

    Returns the metrics of the last evaluation (`eval/…`, for all arms in the same episodes), the
    advice probe's at the start (`start/probe/…`) and at the end (`end/probe/…`), the run's totals
    and the curves of training success and of right lessons.
    """
    from crl.config import load

    options = {"run.seed": seed} | ({"run.steps": steps} if steps is not None else {})
    config = load(list(tasks), options=options, sets=["eval.probe_every=1000000", *arm.sets, *sets])
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(arm, config, Path(folder)))


class AlwaysRight:
    """A `Retriever` that knows the truth about every place. specs: `EnvSpec` by task."""

    def __init__(self, specs: Mapping[str, Any]) -> None:
        self._specs = specs

    async def search(self, requests: Sequence[Any]) -> list[Any]:
        from crl.protocols import Hit
        from crl.types import ExperienceUse

        use = ExperienceUse("told", 1, "told", "start")
        tasks = [request.task for request in requests]
        # The truth may come from playing the game, which takes its time.
        texts = await asyncio.to_thread(lambda: [self._specs[t.name].advisor.right(t) for t in tasks])
        return [Hit(text, use, task.goal) for text, task in zip(texts, tasks, strict=True)]

    async def refine(self, question: Any, hit: Any) -> Any:
        return hit


class Recorder:
    """A `Monitor` that keeps the metrics in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, step: int, kind: str, figures: Mapping[str, Any]) -> None:
        self.lines.append({"step": step, "kind": kind, **figures})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def trajectories(self, trajectories: Sequence[Any]) -> None: ...
    def experiences(self, experiences: Sequence[Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


async def _train(arm: Arm, config: Any, folder: Path) -> dict[str, Any]:
    from crl.monitor.run_dir import RunDir
    from crl.run.assemble import training
    from crl.run.evaluate import Evaluation
    from crl.run.tasks import online_tasks
    from crl.run.tasks import specs as specs_of

    begin, recorder, specs = time.monotonic(), Recorder(), specs_of(config)
    adviser = AlwaysRight(specs) if arm.advised else None
    async with training(config, RunDir(folder), recorder, adviser=adviser) as loop:
        loop.evaluations[0] = Evaluation({}, {}, 0)  # the start is the same in all arms
        await loop.run()
        trained = time.monotonic()
        last = loop.evaluations[loop.completed].figures()
        if loop.experience is None:
            for name, task in online_tasks(config, specs).items():
                last |= await _online_places(loop.evaluator, adviser, name, task)
    probes = {"start": loop.probes[0], "end": loop.probes[loop.completed]}
    return {
        "steps": loop.completed,
        "metrics": last | {f"{end}/{name}": v for end, probe in probes.items() for name, v in probe.items()},
        "curves": {
            **{f"success/{c}": [line.get(f"rollout/success/{c}") for line in recorder.of("train")] for c in ("free", "guided")},
            "lessons/correct": [line.get("lessons/correct") for line in recorder.of("bank")],
        },
        "totals": {
            name: value
            for kind in ("train", "bank")
            for line in recorder.of(kind)[-1:]
            for name, value in line.items()
            if name.startswith("total/")
        },
        "extractor updates": max((line["extractor/updates"] for line in recorder.of("extractor")), default=0),
        "seconds": trained - begin,  # of the start and the evaluations too, and beside other runs
    }


async def _online_places(evaluator: Any, adviser: AlwaysRight | None, name: str, task: Any) -> dict[str, float]:
    """The online set without a bank: success alone, and with an adviser in the bank's place.

    The episodes and their draws are those that the arms with a bank play.
    """
    from crl.run.evaluate import rate_of_visits
    from crl.run.online import UNCOUNTED_VISITS, VISITS, visited

    settled = [visited(name, task, visit) for visit in range(UNCOUNTED_VISITS, VISITS)]
    keys, tasks = [key for keys, _ in settled for key in keys], [task for _, tasks in settled for task in tasks]
    alone = await evaluator.scheduler.play(evaluator.runner, "free", keys, tasks)
    online = alone
    if adviser:
        online = await evaluator.scheduler.play(replace(evaluator.runner, retriever=adviser), "guided", keys, tasks)
    played = {"alone": alone, "online": online}
    return {f"eval/{name}/new/success/{setting}": rate_of_visits(ts).value for setting, ts in played.items()}
