"""Collection of the tasks' variations and goals: `python -m crl.envs.scienceworld.collect`.

It writes `variations.json` and `small.json` beside this module. A run reads goals from these files,
because the train stream makes tasks in a process without Java.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from crl.envs.scienceworld.engine import Simulator
from crl.envs.scienceworld.text import things

TASK_NAMES = (
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color",
    "find-animal",
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "identify-life-stages-1",
    "identify-life-stages-2",
    "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived",
    "lifespan-shortest-lived",
    "measure-melting-point-known-substance",
    "power-component",
    "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity",
    "test-conductivity-of-unknown-substances",
    "use-thermometer",
)
"""Tasks of EMPO², Table 1. Its text counts 19, and the table lists these 18."""

TRAIN, UNSEEN, PROBE = 5, 20, 22
"""Maximum numbers of variations of a task. Those for training and evaluation are EMPO²'s."""

SMALL_TASK_NAMES = ("find-animal", "find-non-living-thing", "lifespan-longest-lived")

_TARGET = re.compile(r".*find a\(n\) (.+?)\. .* move it to the (.+) in the (.+)\.")


def collect_variations(simulator: Simulator) -> dict[str, Any]:
    """Return the goals by task, split and variation."""
    return {
        task: {
            split: {str(variation): _goal(simulator, task, variation) for variation in chosen}
            for split, chosen in _splits(simulator, task).items()
            if split in ("train", "unseen")
        }
        for task in TASK_NAMES
    }


def collect_small(simulator: Simulator) -> dict[str, Any]:
    """Return short goal and animals outside, by task, use and variation.

    The longest-lived animal comes first if the task asks for it.
    """
    return {
        task: {
            use: {str(variation): _small(simulator, task, variation) for variation in chosen}
            for use, chosen in _splits(simulator, task).items()
        }
        for task in SMALL_TASK_NAMES
    }


def _splits(simulator: Simulator, task: str) -> dict[str, tuple[int, ...]]:
    simulator.load(task, 0)
    train = simulator.variations("Train")
    return {
        "train": train[:TRAIN],
        "unseen": simulator.variations("Test")[:UNSEEN],
        "demonstration": simulator.variations("Dev"),
        "probe": train[TRAIN : TRAIN + PROBE],
    }


def _goal(simulator: Simulator, task: str, variation: int) -> str:
    simulator.load(task, variation)
    return simulator.goal


def _small(simulator: Simulator, task: str, variation: int) -> dict[str, Any]:
    target = _TARGET.fullmatch(_goal(simulator, task, variation))
    simulator.step("teleport to outside")
    animals = [name for name in things(simulator.look()) if re.match(r"baby |.* egg$", name)]
    if target:
        return {"goal": "{} to {} in {}".format(*target.groups()), "animals": animals}
    return {
        "goal": "longest life outside",
        "animals": sorted(
            animals, key=lambda animal: not _wins(simulator, task, variation, animal)
        ),
    }


def _wins(simulator: Simulator, task: str, variation: int, animal: str) -> bool:
    simulator.load(task, variation)
    simulator.step("teleport to outside")
    simulator.step(f"focus on {animal}")
    return simulator.score == 100


def main() -> None:
    simulator, folder = Simulator(), Path(__file__).parent
    for name, content in (
        ("variations", collect_variations(simulator)),
        ("small", collect_small(simulator)),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    simulator.close()


if __name__ == "__main__":
    main()
