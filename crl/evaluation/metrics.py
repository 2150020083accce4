"""Metrics of a batch of trajectories: overall, per condition, and per task if there are several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from crl.intervals import Mean
from crl.types import Place, Trajectory


class GroupGap(NamedTuple):
    """Gap of one group: mean success of its guided members minus that of its free members."""

    place: Place
    value: float
    """Gap, in [−1, 1]."""


def mean_score(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the mean score × 100 of the graded episodes; None if no episode was graded."""
    scores = [t.outcome.score for t in trajectories if t.outcome.score is not None]
    return 100 * fmean(scores) if scores else None


def mean_gap(gaps: Sequence[GroupGap]) -> Mean:
    """Return the mean of `gaps` with its 95 % interval.

    Places are the clusters, because groups of one place share its lessons.
    """
    return Mean.of([gap.value for gap in gaps], [gap.place for gap in gaps])


def group_gaps(batch: Sequence[Trajectory]) -> list[GroupGap]:
    """Return the gap of each group that has guided members with experience, and free members.

    The two halves of a group are paired: they play the same task. Guided members that used no
    experience are left out, and so are episodes with an error.
    """
    groups: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in batch:
        if trajectory.error is None:
            groups[trajectory.task.name, trajectory.group].append(trajectory)
    gaps = []
    for members in groups.values():
        guided, free = (
            [
                t.success
                for t in members
                if t.condition == condition and (condition == "free" or t.used)
            ]
            for condition in ("guided", "free")
        )
        if guided and free:
            task = members[0].task
            gaps.append(GroupGap(task.place, fmean(guided) - fmean(free)))
    return gaps


def rollout_metrics(batch: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the rollout metrics of `batch`.

    `version` is the policy version that is trained next. The staleness of a sampled token is
    `version` minus the version that sampled it.
    """
    metrics = _episode_metrics(batch, "rollout")
    names = {t.task.name for t in batch}
    if len(names) > 1:
        for name in sorted(names):
            metrics |= _episode_metrics(
                [t for t in batch if t.task.name == name], f"rollout/{name}"
            )
    metrics |= _question_metrics(batch)
    sampled = Counter[int]()
    for t in batch:
        for trace in t.traces:
            sampled.update(trace.versions)
    ages = {version - v: tokens for v, tokens in sampled.items() if v >= 0}
    tokens = sum(ages.values())
    return metrics | {
        "rollout/env_turns": sum(t.turns + t.activity.overtime_turns for t in batch),
        "rollout/samples": sum(len(t.traces) for t in batch),
        "staleness/mean": sum(age * n for age, n in ages.items()) / tokens if tokens else 0.0,
        "staleness/max": max(ages, default=0),
    }


def solved_within(batch: Sequence[Trajectory], attempts: int) -> list[int]:
    """Return for each number of attempts from 1 how many groups of a step succeeded within it."""
    first: dict[int, int] = {}
    for t in batch:
        if t.success:
            first.setdefault(t.group, t.address.member + 1)
    return [sum(won <= n for won in first.values()) for n in range(1, attempts + 1)]


def _question_metrics(batch: Sequence[Trajectory]) -> dict[str, float]:
    """Return the questions per episode with the tool, and the shares that were found and refined.

    Empty if no episode had the tool.
    """
    with_tool = [t for t in batch if any(s.origin == "tool_spec" for s in t.segments)]
    if not with_tool:
        return {}
    questions = sum(s.origin == "tool_call" for t in with_tool for s in t.segments)
    answers = Counter(use.how for t in with_tool for use in t.used)
    metrics = {"rollout/asks": questions / len(with_tool)}
    if questions:
        found = answers["ask"] + answers["ask_unrefined"]
        metrics |= {
            "rollout/asks/found": found / questions,
            "rollout/asks/refined": answers["ask"] / questions,
        }
    return metrics


def _episode_metrics(batch: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Return the metrics of `batch`: a whole batch, or the episodes of one task."""
    return {**_success_metrics(batch, prefix), **_guidance_metrics(batch, prefix)} | {
        f"{prefix}/episodes": len(batch),
        f"{prefix}/errors": sum(t.error is not None for t in batch),
    }


def _guidance_metrics(batch: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Return the share of guided episodes with experience, their success, and their mean gap."""
    metrics = {}
    if guided := [t for t in batch if t.condition == "guided"]:
        metrics[f"{prefix}/used"] = fmean(bool(t.used) for t in guided)
    if used := [t.success for t in batch if t.used]:
        metrics[f"{prefix}/success/used"] = fmean(used)
    if gaps := group_gaps(batch):
        gap = mean_gap(gaps)
        metrics |= {f"{prefix}/gap": gap.value, f"{prefix}/gap/half_width": gap.half_width}
        metrics |= {f"{prefix}/gap/groups": gap.n, f"{prefix}/gap/places": gap.clusters}
    return metrics


def _success_metrics(batch: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    turns = sum(t.turns for t in batch)
    metrics = {
        f"{prefix}/success": fmean(t.success for t in batch),
        f"{prefix}/reward": fmean(t.reward for t in batch),
        f"{prefix}/turns": turns / len(batch),
        f"{prefix}/truncated": fmean(t.truncated for t in batch),
        f"{prefix}/invalid_actions": sum(t.activity.invalid_actions for t in batch) / max(turns, 1),
    }
    if (score := mean_score(batch)) is not None:
        metrics[f"{prefix}/score"] = score
    for condition in sorted({t.condition for t in batch}):
        metrics[f"{prefix}/success/{condition}"] = fmean(
            t.success for t in batch if t.condition == condition
        )
    return metrics
