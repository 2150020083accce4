"""Drills: kinds of demonstrations in the compact rendering, which models learn before RL.

Each task has a module with its drills. New drills can be added to the lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from crl.envs.registry import require_extra
from crl.envs.scienceworld import SMALL_SPEC as SCIENCEWORLD
from crl.modeling.demonstrations import Demonstration, PlacedDemonstration
from crl.seeds import generator
from crl.tiny.drills import alfworld, grids, room, scienceworld, search_qa, webshop
from crl.tiny.drills.drill import Drill, Part
from crl.types import RoleName

TASK_MODULES = (room, webshop, alfworld, grids, search_qa, scienceworld)
"""Modules with drills."""

ACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.ACTOR_DRILLS
)
"""Drills of the bundled actor."""
EXTRACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.EXTRACTOR_DRILLS
)
"""Drills of the bundled extractor."""


def drills_of(role: RoleName, envs: Collection[str], parts: Collection[Part]) -> list[Drill]:
    """Return the drills of a role in some environments that some parts of a run need."""
    drills = ACTOR_DRILLS if role == "actor" else EXTRACTOR_DRILLS
    return [drill for drill in drills if drill.env in envs and drill.part in parts]


def require_simulators(drills: Iterable[Drill]) -> None:
    """Raise `ConfigError` if an extra or a program is missing that demonstrations need."""
    if any(drill.env == SCIENCEWORLD.name for drill in drills):
        require_extra(SCIENCEWORLD, "environment")


def scaled(drills: Sequence[Drill], n: int) -> list[Drill]:
    """Return the drills with about `n` demonstrations together, at least one of each drill.

    Their shares are those in the recipes of the bundled models.
    """
    total = sum(drill.count for drill in drills)
    return [replace(drill, count=max(1, round(n * drill.count / total))) for drill in drills]


def demonstrations(drills: Iterable[Drill], seed: int) -> Iterator[PlacedDemonstration]:
    """Yield the demonstrations of the drills with their places."""
    for drill in drills:
        for demonstration in drill.make(generator(seed, "drill", drill.name), drill.count):
            yield _place(drill, demonstration), demonstration


def _place(drill: Drill, demonstration: Demonstration) -> str:
    """Return the goal of a demonstration: the first line of its first message.

    The prompt of a merge has no goal; it is its own place.
    """
    text = next(segment.text for segment in demonstration if segment.role == "user")
    return text if drill.part == "merge" else text.partition("\n")[0]
