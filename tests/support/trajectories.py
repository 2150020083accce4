"""Builder of trajectories for tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from crl.types import (
    Activity,
    Condition,
    EpisodeAddress,
    Guidance,
    Outcome,
    Segment,
    Task,
    TokenTrace,
    Trajectory,
)

PARTS = {"outcome": Outcome, "activity": Activity, "guidance": Guidance}


def build_trajectory(
    task: Task, step: int = 0, group: int = 0, member: int = 0, condition: Condition = "free",
    *, segments: tuple[Segment, ...] = (), traces: tuple[TokenTrace, ...] = (), **facts: Any,
) -> Trajectory:  # fmt: skip
    """Return a trajectory. `facts` are fields of its parts, by name.

    `turns=n` stands for n turns without reward, and `reward=r` for a single channel with reward r.
    """
    if "turns" in facts:
        facts["turn_rewards"] = (0.0,) * facts.pop("turns")
    if "reward" in facts:
        facts["rewards"] = {"outcome": facts.pop("reward")}
    parts = {
        part: type(**{f.name: facts.pop(f.name) for f in fields(type) if f.name in facts})
        for part, type in PARTS.items()
    }
    address = EpisodeAddress(step, group, member)
    return Trajectory(task, address, condition, segments, traces, **parts, **facts)
