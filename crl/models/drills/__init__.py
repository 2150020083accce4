"""What the bundled models are taught before RL: an extensible list of drills for each, a drill being a kind of demonstration.

One module a task holds what is particular to it; what it offers is listed here.
"""

from __future__ import annotations

from crl.models.drills import room, webshop
from crl.models.drills.drill import Drill

ACTOR_DRILLS: tuple[Drill, ...] = (*room.ACTOR_DRILLS, *webshop.ACTOR_DRILLS)
EXTRACTOR_DRILLS: tuple[Drill, ...] = (*room.EXTRACTOR_DRILLS, *webshop.EXTRACTOR_DRILLS)
