"""Advice probe: success in fixed places with no advice, right advice and wrong advice.

It measures whether the actor follows advice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from crl.envs.curriculum import Advisor
from crl.evaluation.scheduling import EpisodeScheduler
from crl.intervals import Mean
from crl.protocols import Hit, Question, SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.seeds import generator
from crl.types import ExperienceUse, Task

ADVICE_KINDS = ("none", "right", "wrong")


@dataclass(frozen=True)
class FixedRetriever:
    """`Retriever` that returns a fixed text for each place."""

    texts: Mapping[str, str]
    """Texts by the goal of the place."""

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        use = ExperienceUse("told", 1, "told", "start")
        hits = (Hit(self.texts[request.task.goal], use, request.task.goal) for request in requests)
        return list(hits)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


@dataclass(frozen=True)
class ProbeTask:
    """Places of one task in the probe, with the environment's advisor."""

    places: Sequence[Task]
    advisor: Advisor


class AdviceProbe:
    """Advice probe of a run.

    `runner` is that of evaluations, without a bank. `tasks` holds the tasks with an advisor, by
    name.
    """

    def __init__(
        self, runner: EpisodeRunner, tasks: Mapping[str, ProbeTask], scheduler: EpisodeScheduler,
    ) -> None:  # fmt: skip
        self._runner, self._tasks, self._scheduler = runner, tasks, scheduler
        self._cached_texts: dict[tuple[str, str], dict[str, str]] | None = None

    async def measure(self) -> dict[str, float]:
        """Play all places with each kind of advice and return the metrics.

        They are the success rates probe/TASK/{none,right,wrong}, and probe/TASK/right_minus_none
        with the half width of its 95 % interval. The random draws are the same for all kinds of
        advice.
        """
        arms = [(name, advice) for name in self._tasks for advice in ADVICE_KINDS]
        places = sum(len(task.places) for task in self._tasks.values())
        with self._scheduler.expecting(places * len(ADVICE_KINDS)):
            if self._cached_texts is None:  # an advisor may play the game
                self._cached_texts = await asyncio.to_thread(self._texts)
            texts = self._cached_texts
            parts = [partial(self._play, *arm, texts.get(arm)) for arm in arms]
            results = await self._scheduler.gather(parts)
        successes = dict(zip(arms, results, strict=True))
        metrics: dict[str, float] = {}
        for name, task in self._tasks.items():
            metrics |= {
                f"probe/{name}/{advice}": fmean(successes[name, advice]) for advice in ADVICE_KINDS
            }
            pairs = zip(successes[name, "right"], successes[name, "none"], strict=True)
            gains = [right - none for right, none in pairs]
            gain = Mean.of(gains, [place.goal for place in task.places])
            metrics |= {
                f"probe/{name}/right_minus_none": gain.value,
                f"probe/{name}/right_minus_none/half_width": gain.half_width,
            }
        return metrics

    def _texts(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the advice texts by goal, for each (task name, kind of advice) except `none`."""
        return {
            (name, advice): advice_texts(task, advice)
            for name, task in self._tasks.items()
            for advice in ADVICE_KINDS
            if advice != "none"
        }

    async def _play(self, name: str, advice: str, texts: Mapping[str, str] | None) -> list[bool]:
        places = self._tasks[name].places
        keys = [EpisodeKey(f"probe/{name}", 0, i, 0, arm=advice) for i in range(len(places))]
        runner, condition = self._runner, "free"
        if texts is not None:
            runner, condition = replace(runner, retriever=FixedRetriever(texts)), "guided"
        trajectories = await self._scheduler.play(runner, condition, keys, places)
        return [trajectory.success for trajectory in trajectories]


def advice_texts(task: ProbeTask, advice: str) -> dict[str, str]:
    """Return the right or wrong advice for each place of `task`, by goal."""
    if advice == "right":
        return {place.goal: task.advisor.right(place) for place in task.places}
    return {
        place.goal: task.advisor.wrong(place, generator(0, "probe", i))
        for i, place in enumerate(task.places)
    }
