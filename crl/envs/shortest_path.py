"""Breadth-first search, for scripted players and for the analysis of layouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


def shortest_path(
    start: S, is_goal: Callable[[S], bool], moves: Callable[[S], Iterable[tuple[str, S]]]
) -> list[str] | None:
    """Return the actions of a shortest path from `start` to the nearest goal.

    Return an empty list if `start` is a goal, and None if no goal can be reached. `moves(state)`
    returns (action, next state) pairs. Among equally short paths, the pairs that come first win.
    """
    parents: dict[S, tuple[S, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if is_goal(state):
            return _path(state, parents)
        for action, successor in moves(state):
            if successor not in parents:
                parents[successor] = (state, action)
                queue.append(successor)
    return None


def _path(state: S, parents: dict[S, tuple[S, str] | None]) -> list[str]:
    actions = []
    while step := parents[state]:
        state, action = step
        actions.append(action)
    return actions[::-1]
