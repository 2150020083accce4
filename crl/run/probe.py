"""The advice probe: success on fixed places with no advice, with right and with wrong advice. It tells whether the actor listens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from crl.envs.base import Advisor
from crl.intervals import Mean
from crl.protocols import Hit, Question, SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.run.playing import play_all
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

    def __init__(self, runner: EpisodeRunner, tasks: Mapping[str, ProbeTask], *, concurrency: int) -> None:
        self._runner, self._tasks, self._concurrency = runner, tasks, concurrency

    async def measure(self) -> dict[str, float]:
        """probe/TASK/{none,right,wrong}, and right minus none with its half width; the draws are the same under all three."""
        figures: dict[str, float] = {}
        for name, task in self._tasks.items():
            won = {advice: await self._play(name, task, advice) for advice in ADVICE}
            figures |= {f"probe/{name}/{advice}": fmean(successes) for advice, successes in won.items()}
            gains = [right - none for right, none in zip(won["right"], won["none"], strict=True)]
            gain = Mean.of(gains, [place.goal for place in task.places])
            figures |= {f"probe/{name}/right_minus_none": gain.value, f"probe/{name}/right_minus_none/half_width": gain.half}
        return figures

    async def _play(self, name: str, task: ProbeTask, advice: str) -> list[bool]:
        keys = [EpisodeKey(f"probe/{name}", 0, i, 0) for i in range(len(task.places))]
        runner, condition = self._runner, "free"
        if advice != "none":
            texts = await asyncio.to_thread(advice_texts, task, advice)  # its truth comes from playing the game
            runner, condition = replace(runner, retriever=Told(texts)), "guided"
        played = await play_all(runner, condition, keys, task.places, concurrency=self._concurrency)
        return [trajectory.success for trajectory in played]


def advice_texts(task: ProbeTask, advice: str) -> dict[str, str]:
    """By goal: the advice for each place."""
    if advice == "right":
        return {place.goal: task.advisor.right(place) for place in task.places}
    return {place.goal: task.advisor.wrong(place, generator(0, "probe", i)) for i, place in enumerate(task.places)}
