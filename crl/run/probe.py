"""The advice probe: success on fixed places with no advice, with right and with wrong advice. It tells whether the actor listens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from crl.envs.base import Advisor
from crl.intervals import Mean
from crl.protocols import Hit, Question, SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.run.playing import EpisodeScheduler
from crl.seeds import generator
from crl.types import ExperienceUse, Task

ADVICE = ("none", "right", "wrong")


@dataclass(frozen=True)
class Told:
    """A `Retriever` that says the same in a place whoever asks. texts: by goal."""

    texts: Mapping[str, str]

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        use = ExperienceUse("told", 1, "told", "start")
        hits = (Hit(self.texts[request.task.goal], use, request.task.goal) for request in requests)
        return list(hits)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


@dataclass(frozen=True)
class ProbeTask:
    places: Sequence[Task]
    advisor: Advisor


class AdviceProbe:
    """tasks: by name, those with an advisor. runner: of the evaluations; it is not asked for its bank."""

    def __init__(
        self, runner: EpisodeRunner, tasks: Mapping[str, ProbeTask], scheduler: EpisodeScheduler,
    ) -> None:  # fmt: skip
        self._runner, self._tasks, self._scheduler = runner, tasks, scheduler

    async def measure(self) -> dict[str, float]:
        """probe/TASK/{none,right,wrong}, and right minus none with its half width; the draws are the same under all three."""
        texts = await asyncio.to_thread(self._texts)  # the truth comes from playing the games
        arms = [(name, advice) for name in self._tasks for advice in ADVICE]
        parts = [partial(self._play, *arm, texts.get(arm)) for arm in arms]
        played = await self._scheduler.gather(parts)
        won = dict(zip(arms, played, strict=True))
        figures: dict[str, float] = {}
        for name, task in self._tasks.items():
            figures |= {f"probe/{name}/{advice}": fmean(won[name, advice]) for advice in ADVICE}
            pairs = zip(won[name, "right"], won[name, "none"], strict=True)
            gains = [right - none for right, none in pairs]
            gain = Mean.of(gains, [place.goal for place in task.places])
            figures |= {
                f"probe/{name}/right_minus_none": gain.value,
                f"probe/{name}/right_minus_none/half_width": gain.half,
            }
        return figures

    def _texts(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the advice of each (task, advice) but `none`, by goal."""
        told = [(name, advice) for name in self._tasks for advice in ADVICE if advice != "none"]
        return {(name, advice): advice_texts(self._tasks[name], advice) for name, advice in told}

    async def _play(self, name: str, advice: str, texts: Mapping[str, str] | None) -> list[bool]:
        places = self._tasks[name].places
        keys = [EpisodeKey(f"probe/{name}", 0, i, 0, arm=advice) for i in range(len(places))]
        runner, condition = self._runner, "free"
        if texts is not None:
            runner, condition = replace(runner, retriever=Told(texts)), "guided"
        played = await self._scheduler.play(runner, condition, keys, places)
        return [trajectory.success for trajectory in played]


def advice_texts(task: ProbeTask, advice: str) -> dict[str, str]:
    """By goal: the advice for each place."""
    if advice == "right":
        return {place.goal: task.advisor.right(place) for place in task.places}
    return {
        place.goal: task.advisor.wrong(place, generator(0, "probe", i))
        for i, place in enumerate(task.places)
    }
