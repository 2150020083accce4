"""What the bundled models are taught before RL: an extensible list of drills for each, a drill being a kind of demonstration.

One module a task holds what is particular to it.
"""

from __future__ import annotations

from crl.models.drills import alfworld, grids, room, webshop
from crl.models.drills.drill import Drill

TAUGHT = (room, webshop, alfworld, grids)

ACTOR_DRILLS: tuple[Drill, ...] = tuple(drill for task in TAUGHT for drill in task.ACTOR_DRILLS)
EXTRACTOR_DRILLS: tuple[Drill, ...] = tuple(
    drill for task in TAUGHT for drill in task.EXTRACTOR_DRILLS
)
