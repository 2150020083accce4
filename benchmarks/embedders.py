"""Retrieval with each embedder, on goals and right lessons of the environments' own advisors.

    python benchmarks/embedders.py --out benchmarks/results/embedders.json
    python benchmarks/embedders.py --encoder DIR      # also a directory with an encoder

Every place of a task has one lesson, the right advice for it. The query is the goal of a place, as
at the start of an episode. The keys are made in three ways (`bank.key_text_weight`): from the text
of the lesson alone; from goal and text; and from the goal and a tenth of the text. All lessons of
a task are candidates.

Metrics, as means over places:

* recall: share of queries whose most similar lesson is that of the place;
* right: share of queries whose most similar lesson is right advice for the place, which includes
  lessons of other places with the same content;
* own, other: cosine similarity of the lesson of the place, and of the best lesson of another place,
  as 5th and 95th percentile over places. A limit between them (`retrieval.min_similarity`) keeps
  lessons of other places out;
* ms: milliseconds of one text on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import write_results

from crl.config import load
from crl.config.schema import EmbedderSection
from crl.embedders import open_embedder
from crl.planning.tasks import probe_tasks, specs
from crl.protocols import Embedder

TASKS = {"room": 150, "maze": 75, "keyroom": 75, "webshop": 100, "alfworld": 100}
"""Number of places by task; 500 in all."""
KEYS: Mapping[str, float | None] = {"text": None, "goal and text": 1.0, "goal, 0.1 text": 0.1}
"""`bank.key_text_weight` by the name of the key."""


async def measure(
    embedder: Embedder, goals: Sequence[str], lessons: Sequence[str]
) -> tuple[dict[str, np.ndarray], float]:
    """Return the cosines [query, key] by the name of the key, and the seconds of one text."""
    begin = time.perf_counter()
    goal_vectors, text_vectors = [await embedder.embed(texts) for texts in (goals, lessons)]
    seconds = (time.perf_counter() - begin) / (len(goals) + len(lessons))
    cosines = {}
    for name, weight in KEYS.items():
        keys = text_vectors if weight is None else goal_vectors + weight * text_vectors
        keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        cosines[name] = goal_vectors @ keys.T
    return cosines, seconds


def row(cosines: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Return the metrics of one task. `right` [place, lesson]: whether the lesson is right."""
    places = np.arange(len(cosines))
    best = cosines.argmax(1)
    others = cosines.copy()
    others[places, places] = -np.inf
    return {
        "recall": float((best == places).mean()),
        "right": float(right[places, best].mean()),
        "own": float(np.percentile(cosines[places, places], 5)),
        "other": float(np.percentile(others.max(1), 95)),
    }


async def measured(models: Sequence[str], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    sets = [f"tasks.{task}.eval.probe_places={count}" for task, count in sizes.items()]
    config = load([*sizes], sets=sets)
    rows = []
    for task, probe in probe_tasks(config, specs(config)).items():
        goals = [place.goal for place in probe.places]
        lessons = [probe.advisor.right(place) for place in probe.places]
        right = np.array(
            [
                [probe.advisor.judge(place, text).correct for text in lessons]
                for place in probe.places
            ]
        )
        for model in models:
            async with AsyncExitStack() as stack:
                embedder = await stack.enter_async_context(
                    open_embedder(EmbedderSection(model=model), deterministic=True)
                )
                cosines, seconds = await measure(embedder, goals, lessons)
                rows += [
                    {
                        "task": task, "embedder": embedder.name, "key": key, "places": len(goals),
                        **row(values, right), "ms": 1000 * seconds,
                    }
                    for key, values in cosines.items()
                ]  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "task      embedder               key              recall  right    own  other     ms"
    return "\n".join(
        [
            head,
            *(
                f"{r['task']:<9} {r['embedder']:<22} {r['key']:<16} {r['recall']:6.3f} "
                f"{r['right']:6.3f} {r['own']:6.3f} {r['other']:6.3f} {r['ms']:6.2f}"
                for r in rows
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", action="append", default=[], help="directory of an encoder")
    parser.add_argument("--quick", action="store_true", help="a tenth of the places")
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    sizes = {task: max(2, n // 10) if arguments.quick else n for task, n in TASKS.items()}
    rows = asyncio.run(measured(["hash", "wordllama", *arguments.encoder], sizes))
    print(table(rows))
    if arguments.out:
        write_results(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
