"""Diagnostics of the experience pipeline of a run.

They count kinds and correctness of lessons, retrievals from the right place, success by the kind of
lesson that guided, and the gain of guided over free episodes. An environment's `Advisor` provides
the ground truth for lessons. No diagnostic value is used in a rollout or a loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from pydantic import ConfigDict, TypeAdapter

from crl.envs.curriculum import Advisor, LessonVerdict
from crl.evaluation.metrics import GroupGap, group_gaps
from crl.manager import Distilled, Generation
from crl.protocols import Hit, SearchRequest, State
from crl.types import Place, Trajectory

_GENERATIONS = TypeAdapter(
    list[Generation],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"),  # of kept sets
)

MISMATCH_ANSWERS = 4
"""Latest extractor answers on which the trainer's log-probs are compared with the engine's."""


class Diagnostics:
    """Collector of a step's diagnostics; `take_metrics` returns the step's metrics.

    `advisors` maps task names to advisors, for the tasks that have one.
    """

    def __init__(self, advisors: Mapping[str, Advisor]) -> None:
        self._advisors = advisors
        self._lessons: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by task
        self._retrieval: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.gaps: list[list[GroupGap]] = []
        """Gap (guided minus free success) of each group, by step."""
        self.answers: deque[Generation] = deque(maxlen=MISMATCH_ANSWERS)
        """Latest answers of the extractor, at most `MISMATCH_ANSWERS`."""

    def record_search(self, requests: Sequence[SearchRequest], hits: Sequence[Hit | None]) -> None:
        """Count the searches at the start of episodes and before turns.

        Equal requests that follow each other are one search. Its best hit counts. Searches for
        agents' questions are skipped: they have separate metrics (`rollout/asks`).
        """
        pairs = zip(requests, hits, strict=True)
        for request, group in groupby(pairs, key=lambda pair: pair[0]):
            if request.question:
                continue
            _, hit = next(group)
            counts = self._retrieval[request.task.name]
            counts["searches"] += 1
            counts["hits"] += hit is not None
            counts["same_goal"] += hit is not None and hit.goal == request.task.goal

    def record_distilled(self, distilled: Distilled) -> None:
        """Count one answer of the extractor, by its verdict (see `lesson_verdict`).

        Store the answer in `answers` too. A task without an advisor is not counted.
        """
        self.answers.append(distilled.generation)
        advisor = self._advisors.get(distilled.request.task.name)
        if advisor is None:
            return
        verdict = lesson_verdict(advisor, distilled)
        counts = self._lessons[distilled.request.task.name]
        counts["all"] += 1
        counts[f"kind/{verdict.kind}"] += 1
        counts["correct"] += verdict.correct
        if advisor.informative(distilled.request.segments):
            counts["informative"] += 1
            counts["informative_correct"] += verdict.correct

    def take_metrics(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Return the metrics since the last call. `batch` holds the step's episodes."""
        self.gaps.append(group_gaps(batch))
        metrics = _by_task("retrieval", self._retrieval, _retrieval_metrics)
        metrics |= _by_task("lessons", self._lessons, _lesson_metrics)
        metrics |= _by_task("guided", self._guided(batch), _guided_metrics)
        self._lessons.clear()
        self._retrieval.clear()
        return metrics

    def state(self) -> State:
        """Return the gaps and answers. Counts since the last `take_metrics` are not included."""
        return {
            "gaps": [[(*gap.place, gap.value) for gap in gaps] for gaps in self.gaps],
            "answers": _GENERATIONS.dump_python(list(self.answers), mode="json"),
        }

    def load_state(self, state: State) -> None:
        self.gaps = [
            [GroupGap(Place(*place), value) for *place, value in gaps] for gaps in state["gaps"]
        ]
        self.answers.clear()
        self.answers.extend(_GENERATIONS.validate_python(state["answers"], strict=False))

    def _guided(self, batch: Sequence[Trajectory]) -> dict[str, Counter[str]]:
        """Return per task the number of guided episodes and of successes, by kind of lesson.

        An episode counts once for each experience that guided it. Only tasks with an advisor
        appear.
        """
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for t in batch:
            advisor = self._advisors.get(t.task.name)
            if advisor and t.error is None:
                for text in t.guidance.shown:
                    kind = advisor.judge(t.task, text).kind
                    counts[t.task.name] += Counter(
                        {f"{kind}/episodes": 1, f"{kind}/won": int(t.success)}
                    )
        return counts


def _by_task(
    prefix: str,
    counts: Mapping[str, Counter[str]],
    task_metrics: Callable[[str, Counter[str]], dict[str, float]],
) -> dict[str, float]:
    """Return the metrics of the summed counts and, if several tasks have counts, of each task."""
    result = task_metrics(prefix, sum(counts.values(), Counter()))
    if len(counts) > 1:
        for task, task_counts in sorted(counts.items()):
            result |= task_metrics(f"{prefix}/{task}", task_counts)
    return result


def _retrieval_metrics(prefix: str, counts: Counter[str]) -> dict[str, float]:
    searches, hits = counts["searches"], counts["hits"]
    metrics = {f"{prefix}/hit_rate": hits / searches} if searches else {}
    return metrics | ({f"{prefix}/same_goal": counts["same_goal"] / hits} if hits else {})


def _lesson_metrics(prefix: str, counts: Counter[str]) -> dict[str, float]:
    total = counts["all"]
    if not total:
        return {}
    metrics = {
        f"{prefix}/{name}": count / total
        for name, count in sorted(counts.items())
        if name.startswith("kind/")
    }
    metrics |= {f"{prefix}/answers": total, f"{prefix}/correct": counts["correct"] / total}
    if counts["informative"]:
        metrics[f"{prefix}/correct_when_informative"] = (
            counts["informative_correct"] / counts["informative"]
        )
    return metrics


def _guided_metrics(prefix: str, counts: Counter[str]) -> dict[str, float]:
    """Return PREFIX/KIND/success and PREFIX/KIND/episodes for each kind of lesson."""
    metrics: dict[str, float] = {}
    for name in sorted(name for name in counts if name.endswith("/episodes")):
        kind, episodes = name.removesuffix("/episodes"), counts[name]
        metrics |= {
            f"{prefix}/{kind}/success": counts[f"{kind}/won"] / episodes,
            f"{prefix}/{name}": episodes,
        }
    return metrics


def lesson_verdict(advisor: Advisor, distilled: Distilled) -> LessonVerdict:
    """Return the verdict on an extractor answer.

    The advisor judges its first lesson. An answer without a lesson is of kind `return` or
    `malformed`, and not correct.
    """
    if distilled.writes:
        return advisor.judge(distilled.request.task, distilled.writes[0].text)
    return LessonVerdict("malformed" if distilled.malformed else "return", correct=False)
