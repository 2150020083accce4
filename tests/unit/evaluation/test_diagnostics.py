"""Diagnostics: metrics of a step for hand-made episodes, searches and answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from crl.envs.curriculum import LessonVerdict
from crl.evaluation.diagnostics import Diagnostics, lesson_verdict
from crl.evaluation.metrics import group_gaps, rollout_metrics
from crl.protocols import Hit, SearchRequest
from crl.types import Condition, ExperienceUse, Place, Segment, Task, Trajectory
from support.doors import TASK
from support.kept_sets import kept_set
from support.managers import distilled, hit
from support.trajectories import build_trajectory


class Judge:
    """`Advisor` that reads the first word of a lesson as its claim.

    Only "right" is correct. An episode with a star in a text shows the truth.
    """

    def right(self, task: Task) -> str:
        return "right"

    def wrong(self, task: Task, rng: random.Random) -> str:
        return "wrong"

    def judge(self, task: Task, text: str) -> LessonVerdict:
        return LessonVerdict(text.split()[0], text.startswith("right"))

    def informative(self, segments: Sequence[Segment]) -> bool:
        return any("*" in segment.text for segment in segments)


def trajectory(
    group: int,
    condition: Condition,
    success: bool,
    *,
    lesson: str = "",
    error: str | None = None,
    task_name: str = "doors",
) -> Trajectory:
    used = (ExperienceUse(lesson, 1, "g", "start"),) if lesson else ()
    shown = (lesson,) if lesson else ()
    task = replace(TASK, name=task_name)
    return build_trajectory(
        task, 0, group, 0, condition, success=success, used=used, shown=shown, error=error
    )


# ── guided and free in the same groups ────────────────────────────────────────────────────────────


def test_gaps_by_hand() -> None:
    batch = [
        # 2/2 guided against 1/2 free
        trajectory(0, "guided", True, lesson="x"), trajectory(0, "guided", True, lesson="x"),
        trajectory(0, "free", True), trajectory(0, "free", False),
        # Episodes without a hit and episodes with an error are left out: 0/1 against 1/1.
        trajectory(1, "guided", False, lesson="x"), trajectory(1, "guided", True),
        trajectory(1, "guided", True, lesson="x", error="env: lost"),
        trajectory(1, "free", True), trajectory(1, "free", False, error="env: lost"),
        # no episode used an experience
        trajectory(2, "guided", True), trajectory(2, "free", False),
        # no episode was free
        trajectory(3, "guided", True, lesson="x"),
        # the same group number in another task
        trajectory(0, "guided", False, lesson="x", task_name="maze"),
        trajectory(0, "free", False, task_name="maze"),
    ]  # fmt: skip
    gaps = [
        (Place("doors", TASK.goal), 0.5),
        (Place("doors", TASK.goal), -1.0),
        (Place("maze", TASK.goal), 0.0),
    ]
    assert group_gaps(batch) == gaps
    metrics = rollout_metrics(batch, 0)
    # m = −1/6. Sums less n_c · m: doors −1/2 + 1/3, maze 0 + 1/6. V = 2 · (2/36) / 9 = 1/81.
    # half = t(1) / 9 = 12.706205 / 9
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/gap")} == {
        "rollout/gap": pytest.approx(-1 / 6),
        "rollout/gap/half_width": pytest.approx(1.411800, abs=1e-6),
        "rollout/gap/groups": 3,
        "rollout/gap/places": 2,
    }
    assert math.isnan(metrics["rollout/doors/gap/half_width"]), "one place has no interval"
    assert metrics["rollout/success/used"] == pytest.approx(4 / 6)
    diagnostics = Diagnostics({})
    assert diagnostics.take_metrics(batch) == diagnostics.take_metrics([]) == {}
    assert diagnostics.gaps == [gaps, []]


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


def test_hit_rate_and_same_goal() -> None:
    diagnostics = Diagnostics({})
    hits: list[Hit | None] = [
        hit("a", goal=TASK.goal),
        hit("b", goal="Another place."),
        None,
        hit("c", goal=TASK.goal),
    ]
    requests = [SearchRequest("query", TASK, 0, member) for member in range(4)]
    diagnostics.record_search(requests[:2], hits[:2])
    diagnostics.record_search(requests[2:], hits[2:])
    assert diagnostics.take_metrics([]) == {
        "retrieval/hit_rate": 0.75,
        "retrieval/same_goal": pytest.approx(2 / 3),
    }
    diagnostics.record_search(requests[:1], [None])
    assert diagnostics.take_metrics([]) == {"retrieval/hit_rate": 0.0}, "metrics cover one step"


def test_questions_are_not_counted_as_searches() -> None:
    diagnostics = Diagnostics({})
    start, question = (
        SearchRequest("query", TASK, 0, 0),
        SearchRequest("Where?", TASK, 0, 0, question=1),
    )
    diagnostics.record_search([start, question], [hit("a", goal=TASK.goal), None])
    diagnostics.record_search([question], [hit("b", goal="Another place.")])
    assert diagnostics.take_metrics([]) == {"retrieval/hit_rate": 1.0, "retrieval/same_goal": 1.0}
    diagnostics.record_search([question], [None])
    assert diagnostics.take_metrics([]) == {}


def test_several_experiences_of_one_search_count_once() -> None:
    diagnostics = Diagnostics({})
    one, other = (SearchRequest("query", TASK, 0, member) for member in range(2))
    diagnostics.record_search(
        [one, one, one, other, other], [hit("a", goal=TASK.goal), None, None, None, None]
    )
    assert diagnostics.take_metrics([]) == {"retrieval/hit_rate": 0.5, "retrieval/same_goal": 1.0}


def test_metrics_by_task() -> None:
    diagnostics = Diagnostics({"doors": Judge(), "maze": Judge()})
    maze = replace(TASK, name="maze")
    requests = [SearchRequest("query", task, 0, m) for m, task in enumerate((TASK, TASK, maze))]
    diagnostics.record_search(requests, [hit("a", goal=TASK.goal), None, None])
    for answer in (distilled("right"), distilled("right"), distilled("wrong", task_name="maze")):
        diagnostics.record_distilled(answer)
    metrics = diagnostics.take_metrics([])
    assert [metrics[f"retrieval{task}/hit_rate"] for task in ("", "/doors", "/maze")] == [
        pytest.approx(1 / 3),
        0.5,
        0.0,
    ]
    assert [metrics[f"lessons{task}/correct"] for task in ("", "/doors", "/maze")] == [
        pytest.approx(2 / 3),
        1.0,
        0.0,
    ]
    assert (
        metrics["lessons/answers"],
        metrics["lessons/doors/answers"],
        metrics["lessons/maze/kind/wrong"],
    ) == (3, 2, 1.0)


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


def test_the_verdict_on_an_answer() -> None:
    assert lesson_verdict(Judge(), distilled("wrong way", "right way")) == LessonVerdict(
        "wrong", False
    ), "by its first lesson"
    assert lesson_verdict(Judge(), distilled(returned=1)) == LessonVerdict("return", False)
    assert lesson_verdict(Judge(), distilled()) == LessonVerdict("malformed", False)


def test_lessons_by_kind() -> None:
    diagnostics = Diagnostics({"doors": Judge()})
    for answer in (
        distilled("right"),
        distilled("right", informative=True),
        distilled("wrong", informative=True),
        distilled(),
        distilled("x", task_name="maze"),
    ):
        diagnostics.record_distilled(answer)
    assert diagnostics.take_metrics([]) == {
        "lessons/kind/right": 0.5, "lessons/kind/wrong": 0.25, "lessons/kind/malformed": 0.25,
        "lessons/answers": 4, "lessons/correct": 0.5, "lessons/correct_when_informative": 0.5,
    }  # fmt: skip
    diagnostics.record_distilled(distilled(returned=1))
    assert diagnostics.take_metrics([]) == {
        "lessons/kind/return": 1.0,
        "lessons/answers": 1,
        "lessons/correct": 0.0,
    }


def test_success_by_kind_of_lesson() -> None:
    diagnostics = Diagnostics({"doors": Judge()})
    batch = [
        trajectory(0, "guided", True, lesson="right"),
        trajectory(0, "guided", False, lesson="right"),
        trajectory(1, "guided", False, lesson="wrong"),
        trajectory(1, "guided", True, lesson="wrong", error="env: lost"),
        trajectory(2, "guided", True),
        trajectory(2, "guided", True, lesson="x", task_name="maze"),
    ]  # fmt: skip
    assert diagnostics.take_metrics(batch) == {
        "guided/right/success": 0.5, "guided/right/episodes": 2,
        "guided/wrong/success": 0.0, "guided/wrong/episodes": 1,
    }  # fmt: skip


def test_success_by_kind_of_lesson_and_task() -> None:
    diagnostics = Diagnostics({"doors": Judge(), "maze": Judge()})
    batch = [
        trajectory(0, "guided", True, lesson="right"),
        trajectory(0, "guided", True, lesson="wrong"),
        trajectory(1, "guided", False, lesson="right", task_name="maze"),
        trajectory(1, "guided", False, lesson="right", task_name="maze"),
    ]  # fmt: skip
    assert diagnostics.take_metrics(batch) == {
        "guided/right/success": pytest.approx(1 / 3), "guided/right/episodes": 3,
        "guided/wrong/success": 1.0, "guided/wrong/episodes": 1,
        "guided/doors/right/success": 1.0, "guided/doors/right/episodes": 1,
        "guided/doors/wrong/success": 1.0, "guided/doors/wrong/episodes": 1,
        "guided/maze/right/success": 0.0, "guided/maze/right/episodes": 2,
    }  # fmt: skip


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


def test_the_latest_answers_survive_a_checkpoint() -> None:
    answered = distilled("Go.")
    kept = (kept_set(2, 187),)
    completion = replace(answered.generation.completion, kept=kept)
    diagnostics, restored = Diagnostics({}), Diagnostics({})
    diagnostics.record_distilled(answered)
    diagnostics.record_distilled(
        replace(answered, generation=replace(answered.generation, completion=completion))
    )
    restored.load_state(json.loads(json.dumps(diagnostics.state())))
    assert restored.answers == diagnostics.answers
