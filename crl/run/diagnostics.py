"""What the experience side of a run is doing, against the truth that an environment's `Advisor` knows: lessons by kind, how they
guide, whether they are of the right place, and what being guided is worth. Nothing here reaches a rollout or a loss.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from crl.envs.base import Advisor, Verdict
from crl.manager import Distilled
from crl.protocols import Hit, SearchRequest
from crl.types import Trajectory


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval from the normal approximation; n values, which need not be independent of one another's group."""

    value: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        if not values:
            return cls(math.nan, math.nan, 0)
        half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(fmean(values), half, len(values))

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.half:.3f}" if self.n > 1 else "unknown"


def group_gaps(batch: Sequence[Trajectory]) -> list[float]:
    """Guided minus free success of each group that was guided by something: paired, since both played the same task."""
    groups: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in batch:
        if trajectory.error is None:
            groups[trajectory.task.name, trajectory.group].append(trajectory)
    gaps = []
    for members in groups.values():
        guided, free = ([t.success for t in members if t.condition == c and (c == "free" or t.used)] for c in ("guided", "free"))
        if guided and free:
            gaps.append(fmean(guided) - fmean(free))
    return gaps


class Diagnostics:
    """Collects over a step; `take` gives the step's figures. advisors: by task name, for the tasks that have one."""

    def __init__(self, advisors: Mapping[str, Advisor]) -> None:
        self._advisors = advisors
        self._lessons: Counter[str] = Counter()
        self._retrieval: Counter[str] = Counter()
        self.gaps: list[list[float]] = []
        """Guided minus free, per step and group."""
        self.lessons: list[tuple[int, int]] = []
        """(correct, all) answers of the extractor, per step."""

    def searched(self, requests: Sequence[SearchRequest], hits: Sequence[Hit | None]) -> None:
        for request, hit in zip(requests, hits, strict=True):
            self._retrieval["asked"] += 1
            self._retrieval["found"] += hit is not None
            self._retrieval["right"] += hit is not None and hit.goal == request.task.goal

    def distilled(self, distilled: Distilled) -> None:
        """One answer of the extractor counts once: by its first lesson, else as `return` or `malformed`."""
        advisor = self._advisors.get(distilled.request.task.name)
        if advisor is None:
            return
        found = verdict(advisor, distilled)
        self._lessons["all"] += 1
        self._lessons[f"kind/{found.kind}"] += 1
        self._lessons["correct"] += found.correct
        if advisor.informative(distilled.request.segments):
            self._lessons["informed"] += 1
            self._lessons["informed correct"] += found.correct

    def take(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """The figures since the last call, `batch` being the step's episodes."""
        gaps = group_gaps(batch)
        self.gaps.append(gaps)
        self.lessons.append((self._lessons["correct"], self._lessons["all"]))
        figures = self._retrieval_figures() | self._lesson_figures() | self._kind_figures(batch)
        if gaps:
            mean = Mean.of(gaps)
            figures |= {"guided/gap": mean.value, "guided/gap/half_width": mean.half, "guided/gap/groups": mean.n}
        self._lessons.clear()
        self._retrieval.clear()
        return figures

    def _retrieval_figures(self) -> dict[str, float]:
        asked, found = self._retrieval["asked"], self._retrieval["found"]
        figures = {"retrieval/hit_rate": found / asked} if asked else {}
        return figures | ({"retrieval/right_place": self._retrieval["right"] / found} if found else {})

    def _lesson_figures(self) -> dict[str, float]:
        counts, total = self._lessons, self._lessons["all"]
        if not total:
            return {}
        figures = {f"lessons/{name}": count / total for name, count in sorted(counts.items()) if name.startswith("kind/")}
        figures |= {"lessons/answers": total, "lessons/correct": counts["correct"] / total}
        if counts["informed"]:
            figures["lessons/correct_when_seen"] = counts["informed correct"] / counts["informed"]
        return figures

    def _kind_figures(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """guided/KIND/success and …/episodes, by the kind of lesson that guided."""
        successes: defaultdict[str, list[bool]] = defaultdict(list)
        for t in batch:
            advisor = self._advisors.get(t.task.name)
            if advisor and t.error is None:
                for text in t.shown:
                    successes[advisor.judge(t.task, text).kind].append(t.success)
        figures: dict[str, float] = {}
        for kind, won in sorted(successes.items()):
            figures |= {f"guided/{kind}/success": fmean(won), f"guided/{kind}/episodes": len(won)}
        return figures


def verdict(advisor: Advisor, distilled: Distilled) -> Verdict:
    """On an answer of the extractor: on its first lesson, else `return` or `malformed`."""
    if distilled.writes:
        return advisor.judge(distilled.request.task, distilled.writes[0].text)
    return Verdict("malformed" if distilled.malformed else "return", correct=False)
