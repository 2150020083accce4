"""`new` places with a bank that is built on the way: what experience is worth where nothing was known before.

Every place is visited VISITS times by MEMBERS guided episodes. After a visit its episodes are distilled and credited in a scratch
copy of the bank, which is thrown away at the end. Success counts from the third visit on, when there is something to know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from statistics import fmean

from crl.envs.base import Advisor
from crl.manager import Distilled, ExperienceManager
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.run.diagnostics import verdict
from crl.run.experience import learn
from crl.run.playing import play_all
from crl.types import Condition, Task, Trajectory

VISITS = 5
MEMBERS = 4
UNCOUNTED_VISITS = 2

MARK = "online"
"""The run's name in the requests of these episodes; a copied bank may have others in its queue."""

Scratch = Callable[[Callable[[Distilled], None]], AbstractAsyncContextManager[ExperienceManager]]
"""Opens a scratch bank that tells what was distilled, and throws it away."""

LessonCount = tuple[int, int]
"""(right lessons, answers)."""


@dataclass(frozen=True)
class OnlineTask:
    """places: of `new`; revisit(place, visit): the place under other dynamics; advisor: None where nobody knows the truth."""

    places: Sequence[Task]
    revisit: Callable[[Task, int], Task]
    advisor: Advisor | None


@dataclass
class OnlineResult:
    """visits: the trajectories of each; alone: the same episodes from the third visit on without experience; lessons: of the first
    visit, which nothing guided; None without an advisor."""

    visits: list[list[Trajectory]] = field(default_factory=list)
    alone: list[list[Trajectory]] = field(default_factory=list)
    lessons: LessonCount | None = None
    untrained_lessons: LessonCount | None = None

    @property
    def settled(self) -> Sequence[Sequence[Trajectory]]:
        return self.visits[UNCOUNTED_VISITS:]

    @property
    def lift(self) -> list[float]:
        """Success with the bank minus success without, by place, from the third visit on.

        Both are of the same episodes, with the same draws.
        """
        won: defaultdict[str, list[int]] = defaultdict(list)
        for guided, free in zip(self.settled, self.alone, strict=True):
            for one, other in zip(guided, free, strict=True):
                won[one.task.goal].append(one.success - other.success)
        return [fmean(differences) for differences in won.values()]


class OnlineBank:
    """scratch: copies the run's bank, with the run's extractor; untrained: an empty bank with the extractor that the run started with."""

    def __init__(
        self, runner: EpisodeRunner, tasks: Mapping[str, OnlineTask], scratch: Scratch, untrained: Scratch, *, concurrency: int
    ) -> None:
        self._runner, self._tasks, self._scratch, self._untrained = runner, tasks, scratch, untrained
        self._concurrency = concurrency

    async def evaluate(self, *, compare_lessons: bool) -> dict[str, OnlineResult]:
        """By task name."""
        return {name: await self._evaluate(name, task, compare_lessons) for name, task in self._tasks.items()}

    async def _evaluate(self, name: str, task: OnlineTask, compare_lessons: bool) -> OnlineResult:
        result, tally = OnlineResult(), Tally(task.advisor)
        async with self._scratch(tally) as bank:
            runner = replace(self._runner, retriever=bank)
            for visit in range(VISITS):
                played = await play_visit(runner, "guided", name, task, visit, concurrency=self._concurrency)
                result.visits.append(played)
                if visit >= UNCOUNTED_VISITS:
                    result.alone.append(await play_visit(self._runner, "free", name, task, visit, concurrency=self._concurrency))
                if visit < VISITS - 1:
                    await take_in(bank, played)
                if visit == 0:
                    result.lessons = tally.count
        if compare_lessons and task.advisor:
            tally = Tally(task.advisor)
            async with self._untrained(tally) as bank:
                await take_in(bank, result.visits[0])
            result.untrained_lessons = tally.count
        return result


async def play_visit(
    runner: EpisodeRunner, condition: Condition, name: str, task: OnlineTask, visit: int, *, concurrency: int
) -> list[Trajectory]:
    """Visit number `visit` (from 0) of every place. Its members share what they are guided by, and each has dynamics of its own."""
    first = visit * len(task.places)
    keys = [EpisodeKey(f"online/{name}", visit, first + i, m) for i in range(len(task.places)) for m in range(MEMBERS)]
    tasks = [task.revisit(place, visit * MEMBERS + member) for place in task.places for member in range(MEMBERS)]
    return await play_all(runner, condition, keys, tasks, concurrency=concurrency)


class Tally:
    """Counts the right ones among the answers of an extractor; `count` is None without an advisor."""

    def __init__(self, advisor: Advisor | None) -> None:
        self._advisor = advisor
        self.count: LessonCount | None = (0, 0) if advisor else None

    def __call__(self, distilled: Distilled) -> None:
        if self._advisor and self.count and distilled.request.run == MARK:
            right, answers = self.count
            self.count = (right + verdict(self._advisor, distilled).correct, answers + 1)


async def take_in(bank: ExperienceManager, played: Sequence[Trajectory]) -> None:
    """Credits and distils a visit's episodes; one step of the bank's clock."""
    await learn(bank, MARK, played, [t for t in played if t.error is None])
    await bank.drain()
    bank.advance(bank.step + 1)
