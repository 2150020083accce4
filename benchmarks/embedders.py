"""Retrieval with each embedder, on 500 goals and right lessons of the environments' own advisors.

    python benchmarks/embedders.py --out benchmarks/results/embedders.json
    python benchmarks/embedders.py --encoder DIR      # also a directory with an encoder

Every place of a task has one lesson, the right advice for it. The query is the goal of a place, as
at the start of an episode. All lessons of a task are candidates. The lessons have three wordings
(lesson_pairs.py): that of the advisor, which does not name the place; a template with the words of
the goal; and the same template in other words, which share no word with the goal.

The keys are made in three ways (`bank.key_text_weight`): from the text of the lesson alone; from
goal and text; and from the goal and a tenth of the text.

Metrics, as means over places with the 95 % interval of Wilson:

* recall@k: share of queries for which the lesson of the place is among the k most similar ones. A
  lesson of another place that is equally similar counts as more similar;
* right: share of queries whose most similar lesson is right advice for the place, which includes
  lessons of other places with the same content;
* kept: share of queries for which the lesson of the place reaches the default of
  `retrieval.min_similarity`;
* own, other: cosine similarity of the lesson of the place, and of the best lesson of another place,
  as 5th and 95th percentile over places.

Differences are paired: metric of an embedder minus that of hash, as mean over places with its 95 %
interval.

Speed: embedded texts per second on one thread, in batches of a search (`retrieval.batch`), and the
lag of the event loop meanwhile (common.py). *short* texts are the goals and lessons, *long* ones
have 2,000 characters, which is the limit of a lesson.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# One thread for encoders and matrix products, as in a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import measure_lags, quantiles, write_results
from lesson_pairs import PLACES, WORDINGS, Pairs, lesson_pairs
from numpy.typing import NDArray

from crl.config.schema import EmbedderSection, RetrievalSection
from crl.embedders import open_embedder
from crl.intervals import Mean, wilson_interval
from crl.protocols import Embedder
from crl.run.main import frozen_heap, short_thread_turns

KEYS: Mapping[str, float | None] = {"text": None, "goal, text": 1.0, "goal, 0.1 text": 0.1}
"""`bank.key_text_weight` by the name of the key."""
RECALLS = (1, 5)
RATES = (*(f"recall@{k}" for k in RECALLS), "right", "kept")
"""Metrics that are 0 or 1 for a place."""
LONG = 2_000
"""Characters of a long text."""
SETTINGS = RetrievalSection()


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


async def cosines(embedder: Embedder, pairs: Pairs) -> dict[tuple[str, str], NDArray[np.float32]]:
    """Return the cosines [query, key] of a task's pairs, by wording and name of the key."""
    goals = await embedder.embed(pairs.goals)
    found = {}
    for wording, (name, weight) in itertools.product(WORDINGS, KEYS.items()):
        texts = await embedder.embed(pairs.lessons[wording])
        keys = texts if weight is None else goals + weight * texts
        found[wording, name] = goals @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T
    return found


def place_metrics(
    cosines: NDArray[np.float32], right: NDArray[np.bool_]
) -> dict[str, NDArray[np.floating]]:
    """Return each metric by place. `right` [place, lesson]: whether the lesson is right."""
    places = np.arange(len(cosines))
    own, others = cosines[places, places], cosines.copy()
    others[places, places] = -np.inf
    nearer = (others >= own[:, None]).sum(1)
    # With `others` first, an equally similar lesson of another place is the most similar one.
    best = np.where(others.max(1) >= own, others.argmax(1), places)
    return {
        **{f"recall@{k}": (nearer < k).astype(float) for k in RECALLS},
        "right": right[places, best].astype(float),
        "kept": (own >= SETTINGS.min_similarity).astype(float),
        "own": own,
        "other": others.max(1),
    }


def row(metrics: Mapping[str, NDArray[np.floating]]) -> dict[str, Any]:
    """Return means and intervals of the rates, and the percentiles of the similarities."""
    rates = {name: float(metrics[name].mean()) for name in RATES}
    return {
        "places": len(metrics["own"]),
        **rates,
        **{
            f"{name}_interval": wilson_interval(rate, len(metrics[name]))
            for name, rate in rates.items()
        },
        "own": float(np.percentile(metrics["own"], 5)),
        "other": float(np.percentile(metrics["other"], 95)),
    }


def joined(
    parts: Sequence[Mapping[str, NDArray[np.floating]]],
) -> dict[str, NDArray[np.floating]]:
    """Return the metrics of the places of several tasks."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


Measured = dict[tuple[str, str, str], dict[str, dict[str, NDArray[np.floating]]]]
"""Metrics by place: (embedder, wording, key) → task or "all" → metric → [place]."""


async def measure_retrieval(embedder: Embedder, pairs: Mapping[str, Pairs]) -> Measured:
    found: Measured = {}
    for task, of_task in pairs.items():
        for (wording, key), values in (await cosines(embedder, of_task)).items():
            by_task = found.setdefault((embedder.name, wording, key), {})
            by_task[task] = place_metrics(values, of_task.right)
    return {names: {"all": joined([*by.values()]), **by} for names, by in found.items()}


def rows(measured: Measured) -> list[dict[str, Any]]:
    return [
        {"task": task, "embedder": embedder, "wording": wording, "key": key, **row(metrics)}
        for (embedder, wording, key), by_task in measured.items()
        for task, metrics in by_task.items()
    ]


def differences(measured: Measured, reference: str) -> list[dict[str, Any]]:
    """Return the paired differences of all places to the embedder `reference`."""
    found = []
    for (embedder, wording, key), by_task in measured.items():
        if embedder != reference:
            base = measured[reference, wording, key]["all"]
            gaps = {name: Mean.of(list(by_task["all"][name] - base[name])) for name in RATES[:-1]}
            names = {"embedder": embedder, "wording": wording, "key": key}
            found.append(
                names | {name: [mean.value, mean.half_width] for name, mean in gaps.items()}
            )
    return found


# ── speed ─────────────────────────────────────────────────────────────────────────────────────────


async def measure_speed(
    embedder: Embedder, pairs: Mapping[str, Pairs], long_texts: int
) -> list[dict[str, Any]]:
    short = [
        text
        for of_task in pairs.values()
        for text in (*of_task.goals, *of_task.lessons["other words"])
    ]
    repeated = " ".join(short)
    starts = range(0, long_texts * 100, 100)
    long = [(repeated * 9)[start : start + LONG] for start in starts]
    return [
        {"embedder": embedder.name, "texts": name, **await speed(embedder, texts)}
        for name, texts in (("short", short), ("long", long))
    ]


async def speed(embedder: Embedder, texts: Sequence[str]) -> dict[str, Any]:
    """Return the texts per second, and the lag of the event loop in milliseconds."""
    await embedder.embed(texts[:1])
    seconds = []
    async with measure_lags() as lags:
        await asyncio.sleep(0.05)
        lags.clear()
        for start in range(0, len(texts), SETTINGS.batch):
            begin = time.perf_counter()
            await embedder.embed(texts[start : start + SETTINGS.batch])
            seconds.append(time.perf_counter() - begin)
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)  # the lag of the end
    return {
        "per_second": len(texts) / sum(seconds),
        "batch_ms": 1_000 * float(np.median(seconds)),
        **{f"lag_{name}": value for name, value in quantiles(lags, (50, 99, 100)).items()},
    }


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of all tasks together, and those of single tasks for keys from the text."""
    print(f"{'task':<9}{'wording':<13}{'key':<16}{'embedder':<24}", end="")
    print("".join(f"{name:>22}" for name in RATES[:-1]), f"{'kept':>6}{'own':>7}{'other':>7}")
    for row in rows:
        if row["task"] != "all" and row["key"] != "text":
            continue
        print(f"{row['task']:<9}{row['wording']:<13}{row['key']:<16}{row['embedder']:<24}", end="")
        for name in RATES[:-1]:
            low, high = row[f"{name}_interval"]
            print(f"{f'{row[name]:.3f} [{low:.3f}, {high:.3f}]':>22}", end="")
        print(f" {row['kept']:6.3f}{row['own']:7.3f}{row['other']:7.3f}")


def print_differences(rows: Sequence[Mapping[str, Any]]) -> None:
    print("\ndifference to hash, all tasks")
    for row in rows:
        cells = (f"{name} {row[name][0]:+.3f} ± {row[name][1]:.3f}" for name in RATES[:-1])
        print(f"{row['wording']:<13}{row['key']:<16}{row['embedder']:<24}", *cells, sep="  ")


def print_speed(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'embedder':<24}{'texts':<7}{'texts/s':>10}{'batch ms':>10}", end="")
    print("".join(f"{name:>10}" for name in ("lag p50", "p99", "max")))
    for row in rows:
        numbers = (row[name] for name in ("batch_ms", "lag_p50", "lag_p99", "lag_max"))
        print(f"{row['embedder']:<24}{row['texts']:<7}{row['per_second']:10,.0f}", end="")
        print("".join(f"{number:10.2f}" for number in numbers))


async def measured(
    models: Sequence[str], sizes: Mapping[str, int], long_texts: int
) -> dict[str, Any]:
    pairs, found, speeds = lesson_pairs(sizes), {}, []
    for model in models:
        section = EmbedderSection(model=model, device="cpu")
        async with open_embedder(section, deterministic=True) as embedder:
            found |= await measure_retrieval(embedder, pairs)
        async with open_embedder(section) as embedder:
            speeds += await measure_speed(embedder, pairs, long_texts)
    reference = next(iter(found))[0]
    return {
        "rows": rows(found),
        "differences": differences(found, reference),
        "speed": speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", action="append", default=[], help="directory of an encoder")
    parser.add_argument("--quick", action="store_true", help="a tenth of the places")
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    sizes = {task: n // 10 if arguments.quick else n for task, n in PLACES.items()}
    models = ["hash", "wordllama", *arguments.encoder]
    with frozen_heap(), short_thread_turns():
        results = asyncio.run(measured(models, sizes, 16 if arguments.quick else 320))
    print_rows(results["rows"])
    print_differences(results["differences"])
    print_speed(results["speed"])
    if arguments.out:
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
