"""Metrics of a batch that is small enough to count by hand."""

from __future__ import annotations

from typing import Any

from crl.evaluation.metrics import rollout_metrics
from crl.types import Condition, ExperienceUse, Task, TokenTrace, Trajectory
from support.trajectories import build_trajectory


def trajectory(
    group: int,
    member: int,
    reward: float,
    *,
    name: str = "room",
    condition: Condition = "free",
    versions: tuple[int, ...] = (),
    **fields: Any,
) -> Trajectory:
    n = len(versions)
    traces = (
        (TokenTrace((5,) * (n + 1), (0,) + (1,) * n, (0.0,) * (n + 1), (-1, *versions)),)
        if versions
        else ()
    )
    task = Task(name, group, "train", "goal")
    return build_trajectory(
        task,
        0,
        group,
        member,
        condition,
        traces=traces,
        reward=reward,
        success=reward == 1.0,
        **fields,
    )


BATCH = [
    trajectory(0, 0, 1.0, turns=2, invalid_actions=1, versions=(3, 3)),
    trajectory(
        0, 1, 0.0, turns=4, overtime_turns=3, invalid_actions=2, truncated=True, versions=(2,)
    ),
    trajectory(1, 0, 0.0, turns=2, versions=(4,)),
    trajectory(1, 1, 0.0, turns=2, error="env: broken"),
]


def test_metrics_by_hand() -> None:
    assert rollout_metrics(BATCH, version=4) == {
        "rollout/success": 0.25,
        "rollout/success/free": 0.25,
        "rollout/reward": 0.25,
        "rollout/turns": 2.5,
        "rollout/truncated": 0.25,
        "rollout/invalid_actions": 0.3,
        "rollout/episodes": 4,
        "rollout/errors": 1,
        "rollout/env_turns": 13,
        "rollout/samples": 3,
        "staleness/mean": 1.0,  # ages 1, 1, 2, 0
        "staleness/max": 2,
    }


def test_several_tasks_have_separate_metrics() -> None:
    metrics = rollout_metrics([trajectory(0, 0, 1.0), trajectory(1, 0, 0.0, name="maze")], 0)
    assert (
        metrics["rollout/room/success"],
        metrics["rollout/maze/success"],
        metrics["rollout/success"],
    ) == (1.0, 0.0, 0.5)
    assert "rollout/room/success" not in rollout_metrics([trajectory(0, 0, 1.0)], 0)


def test_experience_metrics_by_task() -> None:
    use = ExperienceUse("e", 1, "g", "start")
    batch = [
        trajectory(0, 0, 1.0, condition="guided", used=(use,), shown=("x",)), trajectory(0, 1, 0.0),
        trajectory(1, 0, 0.0, condition="guided", name="maze"),
        trajectory(1, 1, 0.0, name="maze", turns=7, error="env: broken"),
    ]  # fmt: skip
    metrics = rollout_metrics(batch, 0)
    assert [metrics[f"rollout{name}/used"] for name in ("", "/room", "/maze")] == [0.5, 1.0, 0.0]
    assert (
        metrics["rollout/room/success/used"],
        metrics["rollout/room/gap"],
        metrics["rollout/gap/groups"],
    ) == (1.0, 1.0, 1)
    assert not {"rollout/maze/success/used", "rollout/maze/gap"} & metrics.keys(), (
        "no episode of this task was guided"
    )
    assert [metrics[f"rollout/maze/{name}"] for name in ("turns", "episodes", "errors")] == [
        3.5,
        2,
        1,
    ]


def test_scores_include_only_graded_episodes() -> None:
    batch = [
        trajectory(0, 0, 1.0, score=1.0),
        trajectory(0, 1, 0.0, score=0.25),
        trajectory(1, 0, 0.0, name="room"),
    ]
    assert rollout_metrics(batch, 0)["rollout/score"] == 62.5
    shop = [trajectory(0, 0, 0.0, name="shop", score=0.4), trajectory(1, 0, 1.0)]
    metrics = rollout_metrics(shop, 0)
    assert (metrics["rollout/shop/score"], metrics["rollout/score"]) == (40.0, 40.0)
    assert "rollout/room/score" not in metrics


def test_a_batch_of_failed_episodes() -> None:
    metrics = rollout_metrics([trajectory(0, m, 0.0, error="x") for m in range(2)], 7)
    assert (
        metrics["staleness/mean"],
        metrics["staleness/max"],
        metrics["rollout/invalid_actions"],
    ) == (0.0, 0, 0.0)
    assert metrics["rollout/errors"] == 2
