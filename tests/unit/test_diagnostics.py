"""Diagnostics: metrics of a step for hand-made episodes, searches and answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from doors import TASK
from extractors import hit, request

from crl.envs.base import LessonVerdict
from crl.manager import Distilled
from crl.manager.records import Generation, Write
from crl.protocols import Hit, SearchRequest
from crl.run.diagnostics import Diagnostics, verdict
from crl.run.metrics import group_gaps, rollout_figures
from crl.types import Completion, Condition, ExperienceUse, Segment, Task, Trajectory


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


def played(
    group: int,
    condition: Condition,
    success: bool,
    *,
    told: str = "",
    error: str | None = None,
    of: str = "doors",
) -> Trajectory:
    used = (ExperienceUse(told, 1, "g", "start"),) if told else ()
    shown = (told,) if told else ()
    task = replace(TASK, name=of)
    return Trajectory(
        task, 0, group, 0, condition, success=success, used=used, shown=shown, error=error
    )


def distilled(*texts: str, returned: int = 0, seen: bool = False, of: str = "doors") -> Distilled:
    asked = request(of=replace(TASK, name=of), note="*" if seen else "")
    generation = Generation(asked.id, 0, (1,), Completion((2,), (-1.0,), (0,), "stop"), 0)
    writes = tuple(
        Write(op, text, (0, 1), np.zeros(2, np.float32)) for op, text in enumerate(texts)
    )
    return Distilled(asked, generation, writes, returned, {})


# ── guided and free in the same groups ────────────────────────────────────────────────────────────


def test_gaps_by_hand() -> None:
    batch = [
        # 2/2 guided against 1/2 free
        played(0, "guided", True, told="x"), played(0, "guided", True, told="x"),
        played(0, "free", True), played(0, "free", False),
        # Episodes without a hit and episodes with an error are left out: 0/1 against 1/1.
        played(1, "guided", False, told="x"), played(1, "guided", True),
        played(1, "guided", True, told="x", error="env: lost"),
        played(1, "free", True), played(1, "free", False, error="env: lost"),
        # no episode used an experience
        played(2, "guided", True), played(2, "free", False),
        # no episode was free
        played(3, "guided", True, told="x"),
        # the same group number in another task
        played(0, "guided", False, told="x", of="maze"), played(0, "free", False, of="maze"),
    ]  # fmt: skip
    gaps = [(("doors", TASK.goal), 0.5), (("doors", TASK.goal), -1.0), (("maze", TASK.goal), 0.0)]
    assert group_gaps(batch) == gaps
    metrics = rollout_figures(batch, 0)
    # m = −1/6. Sums less n_c · m: doors −1/2 + 1/3, maze 0 + 1/6. V = 2 · (2/36) / 9 = 1/81.
    # half = t(1) / 9 = 12.706205 / 9
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/gap")} == {
        "rollout/gap": pytest.approx(-1 / 6),
        "rollout/gap/half_width": pytest.approx(1.411800, abs=1e-6),
        "rollout/gap/groups": 3,
        "rollout/gap/places": 2,
    }
    assert math.isnan(metrics["rollout/doors/gap/half_width"]), "one place tells nothing of others"
    assert metrics["rollout/success/used"] == pytest.approx(4 / 6)
    diagnostics = Diagnostics({})
    assert diagnostics.take(batch) == diagnostics.take([]) == {}
    assert diagnostics.gaps == [gaps, []]


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


def test_hits_and_those_of_the_right_place() -> None:
    diagnostics = Diagnostics({})
    hits: list[Hit | None] = [
        hit("a", goal=TASK.goal),
        hit("b", goal="Another place."),
        None,
        hit("c", goal=TASK.goal),
    ]
    requests = [SearchRequest("query", TASK, 0, member) for member in range(4)]
    diagnostics.searched(requests[:2], hits[:2])
    diagnostics.searched(requests[2:], hits[2:])
    assert diagnostics.take([]) == {
        "retrieval/hit_rate": 0.75,
        "retrieval/right_place": pytest.approx(2 / 3),
    }
    diagnostics.searched(requests[:1], [None])
    assert diagnostics.take([]) == {"retrieval/hit_rate": 0.0}, "a step counts for itself"


def test_questions_are_no_part_of_what_episodes_begin_with() -> None:
    diagnostics = Diagnostics({})
    start, question = (
        SearchRequest("query", TASK, 0, 0),
        SearchRequest("Where?", TASK, 0, 0, asked=1),
    )
    diagnostics.searched([start, question], [hit("a", goal=TASK.goal), None])
    diagnostics.searched([question], [hit("b", goal="Another place.")])
    assert diagnostics.take([]) == {"retrieval/hit_rate": 1.0, "retrieval/right_place": 1.0}
    diagnostics.searched([question], [None])
    assert diagnostics.take([]) == {}


def test_several_tasks_are_told_apart() -> None:
    diagnostics = Diagnostics({"doors": Judge(), "maze": Judge()})
    maze = replace(TASK, name="maze")
    requests = [SearchRequest("query", task, 0, 0) for task in (TASK, TASK, maze)]
    diagnostics.searched(requests, [hit("a", goal=TASK.goal), None, None])
    for one in (distilled("right"), distilled("right"), distilled("wrong", of="maze")):
        diagnostics.distilled(one)
    metrics = diagnostics.take([])
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
    assert diagnostics.lessons == [(2, 3)]


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


def test_the_verdict_on_an_answer() -> None:
    assert verdict(Judge(), distilled("wrong way", "right way")) == LessonVerdict("wrong", False), (
        "by its first lesson"
    )
    assert verdict(Judge(), distilled(returned=1)) == LessonVerdict("return", False)
    assert verdict(Judge(), distilled()) == LessonVerdict("malformed", False)


def test_lessons_by_kind() -> None:
    diagnostics = Diagnostics({"doors": Judge()})
    for one in (
        distilled("right"),
        distilled("right", seen=True),
        distilled("wrong", seen=True),
        distilled(),
        distilled("x", of="maze"),
    ):
        diagnostics.distilled(one)
    assert diagnostics.take([]) == {
        "lessons/kind/right": 0.5, "lessons/kind/wrong": 0.25, "lessons/kind/malformed": 0.25,
        "lessons/answers": 4, "lessons/correct": 0.5, "lessons/correct_when_seen": 0.5,
    }  # fmt: skip
    diagnostics.distilled(distilled(returned=1))
    assert diagnostics.take([]) == {
        "lessons/kind/return": 1.0,
        "lessons/answers": 1,
        "lessons/correct": 0.0,
    }
    assert diagnostics.lessons == [(2, 4), (0, 1)]


def test_success_by_what_guided() -> None:
    diagnostics = Diagnostics({"doors": Judge()})
    batch = [
        played(0, "guided", True, told="right"), played(0, "guided", False, told="right"),
        played(1, "guided", False, told="wrong"),
        played(1, "guided", True, told="wrong", error="env: lost"), played(2, "guided", True),
        played(2, "guided", True, told="x", of="maze"),
    ]  # fmt: skip
    assert diagnostics.take(batch) == {
        "guided/right/success": 0.5, "guided/right/episodes": 2,
        "guided/wrong/success": 0.0, "guided/wrong/episodes": 1,
    }  # fmt: skip


def test_success_by_what_guided_is_told_of_each_of_several_tasks() -> None:
    diagnostics = Diagnostics({"doors": Judge(), "maze": Judge()})
    batch = [
        played(0, "guided", True, told="right"), played(0, "guided", True, told="wrong"),
        played(1, "guided", False, told="right", of="maze"),
        played(1, "guided", False, told="right", of="maze"),
    ]  # fmt: skip
    assert diagnostics.take(batch) == {
        "guided/right/success": pytest.approx(1 / 3), "guided/right/episodes": 3,
        "guided/wrong/success": 1.0, "guided/wrong/episodes": 1,
        "guided/doors/right/success": 1.0, "guided/doors/right/episodes": 1,
        "guided/doors/wrong/success": 1.0, "guided/doors/wrong/episodes": 1,
        "guided/maze/right/success": 0.0, "guided/maze/right/episodes": 2,
    }  # fmt: skip
