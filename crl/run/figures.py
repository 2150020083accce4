"""What a batch of trajectories says, as figures for the monitor: overall, per task where there are several, per condition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from crl.types import Trajectory


def rollout_figures(batch: Sequence[Trajectory], version: int) -> dict[str, float]:
    """`version`: the policy version that is about to be trained; staleness is how many versions older a sampled token is."""
    figures = _success(batch, "rollout")
    names = {t.task.name for t in batch}
    if len(names) > 1:
        for name in sorted(names):
            figures |= _success([t for t in batch if t.task.name == name], f"rollout/{name}")
    rewards: defaultdict[int, set[float]] = defaultdict(set)
    for t in batch:
        if t.error is None:
            rewards[t.group].add(t.reward)
    ages = [version - v for t in batch for trace in t.traces for v in trace.versions if v >= 0]
    return figures | {
        "rollout/episodes": len(batch),
        "rollout/errors": sum(t.error is not None for t in batch),
        "rollout/groups_with_signal": sum(len(different) > 1 for different in rewards.values()),
        "rollout/samples": sum(len(t.traces) for t in batch),
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": max(ages, default=0),
    }


def _success(batch: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    turns = sum(t.turns for t in batch)
    figures = {
        f"{prefix}/success": fmean(t.success for t in batch),
        f"{prefix}/reward": fmean(t.reward for t in batch),
        f"{prefix}/turns": turns / len(batch),
        f"{prefix}/truncated": fmean(t.truncated for t in batch),
        f"{prefix}/invalid_actions": sum(t.invalid_actions for t in batch) / max(turns, 1),
    }
    for condition in sorted({t.condition for t in batch}):
        figures[f"{prefix}/success/{condition}"] = fmean(t.success for t in batch if t.condition == condition)
    return figures
