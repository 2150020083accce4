"""States of an environment that count as equal in step advantages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def similarity(first: str, second: str, at_least: float = 0.0) -> float:
    """Return 2·m / (len(first) + len(second)), with m the length of the longest common subsequence.

    The value is in [0, 1] and the same in both directions. It is 1 for equal texts only. A value
    below `at_least` may be returned as 0, which takes less time.
    """
    from rapidfuzz.distance import LCSseq

    length = len(first) + len(second)
    needed = math.floor(at_least * length / 2)
    return 2 * LCSseq.similarity(first, second, score_cutoff=needed) / length if length else 1.0


def similar_states(
    states: Sequence[str], groups: Sequence[Hashable], threshold: float
) -> list[str]:
    """Return for each state the text that represents it within its group.

    States with the same representative count as equal. A representative is at least `threshold`
    similar to its states (`similarity`). With 1, only equal texts are.

    The distinct states of a group are taken in alphabetical order, and each joins the first
    representative that is similar enough, or becomes one itself. Therefore the result does not
    depend on the order of the arguments. A chain of similar states does not join its ends.

    Raise `ValueError` if the lengths differ or the threshold is not in (0, 1].
    """
    if len(states) != len(groups):
        raise ValueError(f"there are {len(states)} states, but {len(groups)} groups")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be in (0, 1], not {threshold}")
    if threshold == 1:
        return list(states)
    representatives: dict[tuple[Hashable, str], str] = {}
    of_group: dict[Hashable, list[str]] = {}
    for state, group in sorted(set(zip(states, groups, strict=True)), key=lambda pair: pair[0]):
        known = of_group.setdefault(group, [])
        near = (text for text in known if similarity(text, state, threshold) >= threshold)
        representative = next(near, state)
        if representative is state:
            known.append(state)
        representatives[group, state] = representative
    return [representatives[group, state] for state, group in zip(states, groups, strict=True)]
