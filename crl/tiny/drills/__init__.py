"""Drills: kinds of demonstrations in the compact rendering, which models learn before RL.

Each task has a module with its drills. New drills can be added to the lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from crl.modeling.demonstrations import Demonstration
from crl.seeds import generator
from crl.tiny.drills import alfworld, grids, room, scienceworld, search_qa, webshop
from crl.tiny.drills.drill import Drill, Part
from crl.types import RoleName

TASK_MODULES = (room, webshop, alfworld, grids)
"""Modules whose drills are in the recipes of the bundled models."""

UNUSED_MODULES = (scienceworld, search_qa)
"""Modules with drills that the bundled models have not learnt.

To add one to the recipes, move it to `TASK_MODULES` and make the models again.
"""

ACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.ACTOR_DRILLS
)
"""Drills of the bundled actor."""
EXTRACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.EXTRACTOR_DRILLS
)
"""Drills of the bundled extractor."""


def drills_of(role: RoleName, envs: Collection[str], parts: Collection[Part]) -> list[Drill]:
    """Return the drills of a role in some environments that some parts of a run need.

    They include drills that the bundled models have not learnt.
    """
    drills = [
        drill
        for module in (*TASK_MODULES, *UNUSED_MODULES)
        for drill in (module.ACTOR_DRILLS if role == "actor" else module.EXTRACTOR_DRILLS)
    ]
    return [drill for drill in drills if drill.env in envs and drill.part in parts]


def demonstrations(
    drills: Sequence[Drill], n: int, seed: int
) -> Iterator[tuple[str, Demonstration]]:
    """Yield about `n` demonstrations with their places, at least one of each drill.

    The shares of the drills are those in the recipes of the bundled models.
    """
    total = sum(drill.count for drill in drills)
    for drill in drills:
        count = max(1, round(n * drill.count / total))
        for demonstration in drill.make(generator(seed, "drill", drill.name), count):
            yield _place(drill, demonstration), demonstration


def _place(drill: Drill, demonstration: Demonstration) -> str:
    """Return the goal of a demonstration: the first line of its first message.

    The prompt of a merge has no goal; it is its own place.
    """
    text = next(segment.text for segment in demonstration if segment.role == "user")
    return text if drill.part == "merge" else text.partition("\n")[0]
