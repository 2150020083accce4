"""Stored skills of the bundled models: none is lost that the models had before, but for known ones.

`benchmarks/results/warm_start_before.json` has the skills of the models that were not trained on
search_qa and ScienceWorld.
"""

from __future__ import annotations

import json

from crl.intervals import wilson_interval
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
LOWER_IS_BETTER = ("asks", "malformed", "truncated")
NEITHER_IS_BETTER = "wrong advice"
KNOWN = {
    # In rooms, the actor now wins without advice as often as the players that it imitates.
    "tiny-actor, success, no advice",
    "tiny-actor, shop: success, no advice",
    "tiny-actor, maze_small: success, no advice",
    "tiny-actor, asks without an offer",
    "tiny-actor, asks after an offer, no advice",
    "tiny-actor, asks after an offer, right advice",
}
"""Skills that are worse than before (docs/results/tiny-models.md, Bundled models)."""


def intervals(name: str) -> dict[str, tuple[float, float]]:
    """Return the 95 % Wilson interval of each skill of a file that was measured at all."""
    models = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return {
        f"{model}, {skill}": wilson_interval(counts["true"] / counts["n"], counts["n"])
        for model, skills in models.items()
        for skill, counts in skills.items()
        if counts["n"]
    }


def test_only_known_skills_are_worse_than_before():
    before, now = intervals("warm_start_before"), intervals("warm_start")
    compared = {name for name in before.keys() & now.keys() if NEITHER_IS_BETTER not in name}
    assert len(compared) > 70
    worse = {
        name
        for name in compared
        if (
            now[name][0] > before[name][1]
            if any(word in name for word in LOWER_IS_BETTER)
            else now[name][1] < before[name][0]
        )
    }
    assert worse == KNOWN
