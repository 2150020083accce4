"""Drills of the bundled models: kinds of demonstrations that the models learn before RL.

Each task has a module with its drills. New drills can be added to the lists.
"""

from __future__ import annotations

from crl.tiny.drills import alfworld, grids, room, webshop
from crl.tiny.drills.drill import Drill

TASK_MODULES = (room, webshop, alfworld, grids)

ACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.ACTOR_DRILLS
)
EXTRACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for module in TASK_MODULES for drill in module.EXTRACTOR_DRILLS
)
