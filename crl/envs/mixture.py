"""Mixture of several task streams. Every batch takes an equal share of each (CRL C.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crl.envs.base import named_for_run
from crl.protocols import State, TaskSource
from crl.types import Task, Trajectory


class Mixture:
    """`TurnSource` that draws from its sources in turn, one group at a time.

    If a batch cannot be divided equally, the next batch continues with the next source, so the
    difference evens out. `sources` maps the run's name of each task to its source. Drawn tasks have
    that name.
    """

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self._sources = dict(sources)
        self._drawn = 0

    def draw(self, n: int) -> Sequence[Task]:
        return [self._draw_next() for _ in range(n)]

    def _draw_next(self) -> Task:
        name = self.next_name()
        self.skip()
        return named_for_run(self._sources[name].draw(1)[0], name)

    def next_name(self) -> str:
        names = list(self._sources)
        return names[self._drawn % len(names)]

    def skip(self) -> None:
        self._drawn += 1

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        for name, source in self._sources.items():
            source.observe([t for t in trajectories if t.task.name == name])

    def state(self) -> State:
        return {
            "drawn": self._drawn,
            "sources": {name: source.state() for name, source in self._sources.items()},
        }

    def load_state(self, state: State) -> None:
        self._drawn = state["drawn"]
        for name, source in self._sources.items():
            source.load_state(state["sources"][name])
