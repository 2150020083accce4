"""What the bundled models are taught before RL: an extensible list of drills for each, a drill being a kind of demonstration.

One module a task holds what is particular to it; what the shipped models were made with is listed here.
"""

from __future__ import annotations

from crl.models.drills import room
from crl.models.drills.drill import Drill

TAUGHT = (room,)
"""The drills of `webshop`, `alfworld` and `grids` are not among them yet: for `crl make-models` to teach them too, name them here."""

ACTOR_DRILLS: tuple[Drill, ...] = tuple(drill for task in TAUGHT for drill in task.ACTOR_DRILLS)
EXTRACTOR_DRILLS: tuple[Drill, ...] = tuple(drill for task in TAUGHT for drill in task.EXTRACTOR_DRILLS)
