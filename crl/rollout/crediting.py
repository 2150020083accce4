"""Credit of experiences after their episodes, and the queueing of episodes for distillation."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

from crl.manager import DistilRequest, ExperienceManager, GroupSuccess, UnitKey
from crl.types import EpisodeAddress, RewardBaseline, Trajectory


async def credit_and_submit(
    bank: ExperienceManager,
    run_name: str,
    trajectories: Sequence[Trajectory],
    to_distil: Sequence[Trajectory],
    *,
    baseline: RewardBaseline = "batch",
    bonuses: Mapping[EpisodeAddress, float] = MappingProxyType({}),
) -> None:
    """Credit experiences, record lifts, and queue episodes for distillation.

    * `run_name`: name that marks the episodes in the bank
    * `trajectories`: whole groups, whose experiences are credited; episodes with an error earn
      nothing
    * `to_distil`: episodes to distil
    * `baseline`: members of the group with whose mean reward an episode's reward is compared:
      "group" for the free members, "guided" for those that an experience guided, "batch" for none
    * `bonuses`: auxiliary rewards of the experiences that guided episodes from their start, by
      the address of the episode

    With "group", a group may have no finished free member to compare with. The experiences of such
    a group are credited in their record, but the extractor is not trained on them.
    """
    compared = _COMPARED_MEMBERS.get(baseline)
    baselines = mean_rewards(trajectories, compared) if compared else {}
    default = None if compared else 0.0
    credited = [t for t in trajectories if t.error is None and (t.used or t.guidance.rejected)]
    await asyncio.gather(
        *(
            bank.credit(
                [*t.used, *t.guidance.rejected],
                t.success,
                episode=DistilRequest.from_trajectory(run_name, t).id,
                expected=baselines.get((t.address.step, t.group), default),
                bonus=bonuses.get(t.address, 0.0),
            )
            for t in credited
        ),
        bank.record_lifts(group_successes(run_name, trajectories)),
    )
    await asyncio.gather(
        *(bank.submit(DistilRequest.from_trajectory(run_name, t)) for t in to_distil)
    )


def group_successes(
    run_name: str, trajectories: Iterable[Trajectory]
) -> dict[str, list[GroupSuccess]]:
    """Return by group id the success with each experience that guided members, and without any.

    A group without guided members or without a finished free member is left out: it has no lift.
    """
    groups: defaultdict[tuple[int, int], list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        if t.error is None:
            groups[t.address.step, t.group].append(t)
    successes: dict[str, list[GroupSuccess]] = {}
    for (step, group), members in groups.items():
        guided: defaultdict[UnitKey, list[bool]] = defaultdict(list)
        for t in members:
            for unit in dict.fromkeys(map(UnitKey.credited_by, t.used)):
                guided[unit].append(t.success)
        free = [t.success for t in members if t.condition == "free"]
        if guided and free:
            successes[f"{run_name}/{step}/{group}"] = [
                GroupSuccess(unit, fmean(won), fmean(free)) for unit, won in guided.items()
            ]
    return successes


def mean_rewards(
    trajectories: Iterable[Trajectory], compared: Callable[[Trajectory], bool]
) -> dict[tuple[int, int], float]:
    """Return the mean reward r = ±1 of the finished members that `compared` selects.

    The keys are (step, group). Groups without such a member are absent.
    """
    rewards: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for t in trajectories:
        if compared(t) and t.error is None:
            rewards[t.address.step, t.group].append(1.0 if t.success else -1.0)
    return {group: fmean(of_group) for group, of_group in rewards.items()}


def _is_free(trajectory: Trajectory) -> bool:
    return trajectory.condition == "free"


def _has_experience(trajectory: Trajectory) -> bool:
    return bool(trajectory.used)


_COMPARED_MEMBERS: Mapping[RewardBaseline, Callable[[Trajectory], bool]] = {
    "group": _is_free,
    "guided": _has_experience,
}
"""Function that selects the members of a group whose mean reward is the baseline."""
