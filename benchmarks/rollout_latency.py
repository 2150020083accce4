"""Cost of experience for rollouts by the number of parallel environments (CRL Fig. 9c, 12, 14b).

    python benchmarks/rollout_latency.py --out benchmarks/results/rollout_latency.json

Engines:

* `latency model`: an engine that only takes the time of a 7B model on eight GPUs
  (latency_model.py), and a game that acts immediately. The bank holds 1,000 experiences at the
  start.
* `tiny model`: the bundled models on the torch engine in the real rooms, on the same cores as the
  bank and its extractor.

All other parts are those of a run: collector, episodes, prompts and the bank on disk, with the
paper's B, t_max and W (C.2). There are no merges and no training.

Arms, which alternate in one process:

* `off`: episodes without experience.
* `on`: experience guides half of every group. At the same time, as in a run that is one step ahead,
  the episodes of the arm's previous rollout are credited, queued, distilled by a separate extractor
  and written to the bank.
* `ask`: as `on`; guided episodes may also ask the extractor (search_and_ask). One in nine answers
  of the latency model is a question, which in other arms is an invalid action.
* `critic`: as `on`; the actor judges retrieved experience.

The first rollout of each arm with experience is a warm-up, whose episodes are those that its first
measured rollout distils. The benchmark raises an error if a rollout does not distil every episode
of the arm's previous one, for example because the bank knows their ids.

No work of an arm remains when the next arm begins. The actor's draws are the same in all arms of a
repetition and differ between repetitions.

Metrics:

* rollout: seconds to collect all episodes of a step, mean ± 95 % over repetitions.
* ratio: rollout of an arm to rollout of `off`, paired.
* search: milliseconds that an episode waits for its experience, without verdicts and answers.
* lag: milliseconds by which a coroutine that sleeps 5 ms is late while rollouts are collected.
* left: seconds that the extractor still needs for the previous rollout after the end of this one.

The output ends with the sections on Figures 9c, 12 and 14b (latency_figures.py) as Markdown.
`coevolution.py --document` writes them to docs/results/speed.md from the stored results. With
--out, a measurement that was interrupted continues with the first number of environments that is
not complete, unless the commit has changed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the other measurements of `crl train`

from common import (
    commit,
    machine,
    mean_and_interval,
    measure_lags,
    quantiles,
    without_evaluations,
    write_results,
)
from latency_figures import FIGURES, section
from latency_model import MOVES, LatencyModel, Walks

from crl.config import load, resolve_model
from crl.embedders.cached import CachedEmbedder
from crl.embedders.hash import HashEmbedder
from crl.envs.base import StreamSettings
from crl.envs.places import PlaceStream
from crl.evaluation.diagnostics import Diagnostics
from crl.manager import ExperienceManager, ManagerSettings, Prompts
from crl.manager.records import Entry, Stamp
from crl.manager.storage.store import Store
from crl.methods.parts.asking import FullRefinePrompt, full_tool
from crl.methods.parts.distilling import EveryEpisode, FullDistilPrompt
from crl.methods.parts.judging import FullCriticPrompt
from crl.methods.parts.merging import FullMergePrompt
from crl.methods.parts.rollouts import ChatContext, GuidedShare, OutcomeReward
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from crl.prompts import fill, prompt
from crl.protocols import Hit, Question, Retriever, SearchRequest, TaskSource
from crl.rollout.collector import Collector
from crl.rollout.critic import Critic
from crl.rollout.decoding import Decoding
from crl.rollout.episode import AcceptAll, EpisodeRunner, Limits, NullRetriever
from crl.rollout.gate import StalenessGate
from crl.rollout.rates import SuccessRates
from crl.rollout.waves import DirectSampler
from crl.run.assemble import open_training_loop
from crl.run.experience import ExperiencePipeline, PipelineSettings
from crl.run.main import frozen_heap
from crl.types import Provenance, Task, Trajectory

ENVIRONMENTS = {"latency model": (16, 64, 256, 512, 1_024), "tiny model": (16, 64, 128)}
QUICK = {"latency model": (32,), "tiny model": (16,)}
GROUP, TURNS, QUICK_TURNS = 8, 12, 2
ENTRIES, LESSONS = 1_000, 64
"""Experiences of the bank at the start, and different lessons of the extractor."""
ACTION_TOKENS, LESSON_TOKENS = 60, 96
"""Median tokens of an actor's and of an extractor's answer."""
GOAL = "Walk: the {place}. Find the exit."
QUESTION = "<search_and_ask>I see no exit. Which way is it?</search_and_ask>"
VERDICTS = [
    "<answer>accept</answer>",
    "<answer>reject</answer>",
    f"<answer>refine: {GOAL}</answer>",
]


@dataclass(frozen=True)
class EngineSetup:
    """Objects that play the episodes of an engine."""

    runner: EpisodeRunner
    """Runner whose guided episodes are judged and may ask."""
    experience: ExperiencePipeline
    """Experience pipeline of the run."""
    tasks: Callable[[], TaskSource]
    """Function that returns the task source, reset to its first task."""
    clear_caches: Callable[[], None]
    """Function that clears the engines' prefix caches."""


@dataclass(frozen=True)
class Arm:
    """Use of experience in rollouts."""

    share: float
    """Guided share of a group. With 0 the bank is not used or updated."""
    asks: bool = False
    """True if guided episodes may ask."""
    critic: bool = False
    """True if the actor judges retrieved experience."""

    def runner(self, setup: EngineSetup, retriever: Retriever) -> EpisodeRunner:
        """Return the stage's runner with this use of experience."""
        runner = setup.runner
        if not self.asks:
            runner = replace(
                runner,
                limits={
                    name: replace(limits, max_questions=0) for name, limits in runner.limits.items()
                },
            )
        return replace(
            runner, retriever=retriever, judge=runner.judge if self.critic else AcceptAll()
        )


ARMS = {
    "off": Arm(0.0),
    "on": Arm(0.5),
    "ask": Arm(0.5, asks=True),
    "critic": Arm(0.5, critic=True),
}


class TimedRetriever:
    """`crl.protocols.Retriever` that measures the searches of another one."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.seconds: list[float] = []

    async def search(self, requests: Sequence[SearchRequest]) -> Sequence[Hit | None]:
        begin = time.perf_counter()
        hits = await self._retriever.search(requests)
        self.seconds.append(time.perf_counter() - begin)
        return hits

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return await self._retriever.refine(question, hit)


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def latency_model(turns: int, folder: Path) -> AsyncIterator[EngineSetup]:
    """Yield the stage with the latency model."""
    path = resolve_model("tiny-actor")
    tokenizer = load_tokenizer(path)
    renderer = ChatRenderer(tokenizer, stop_ids(path, tokenizer))
    run = RunDir.create(folder / "run")
    monitor, embedder = FileMonitor(run), CachedEmbedder(HashEmbedder(), 65_536)
    tasks = partial(PlaceStream, "walk", GOAL, 0, StreamSettings())
    await fill_bank(run.bank, tasks().draw(ENTRIES))
    actor, extractor = (
        LatencyModel(renderer, actor_answers, median=ACTION_TOKENS),
        LatencyModel(renderer, extractor_answers, median=LESSON_TOKENS),
    )
    budget = 65_536 - 4_096
    manager = await ExperienceManager.open(
        run.bank, extractor, embedder, renderer,
        Prompts(
            FullDistilPrompt(prompt("distil"), renderer, budget),
            FullMergePrompt(prompt("merge")),
            FullRefinePrompt(prompt("refine"), renderer, budget),
        ),
        ManagerSettings(), seed=0,
    )  # fmt: skip
    instructions = fill(prompt("actor"), turns=turns, actions=", ".join(MOVES), example="north")
    decoding = Decoding(DirectSampler(actor), renderer, max_context=32_768, temperature=1.0, seed=0)
    runner = EpisodeRunner(
        decoding=decoding,
        pool=Walks(),
        context=ChatContext(
            {"walk": instructions},
            {"walk": prompt("experience")},
            {"walk": full_tool(prompt("ask"))},
        ),
        shaper=OutcomeReward(),
        retriever=NullRetriever(),
        limits={"walk": Limits(turns, max_response_tokens=4_096, max_questions=3)},
        judge=Critic(
            decoding,
            FullCriticPrompt(prompt("critic")),
            SuccessRates(min_episodes=8, window=64),
            {"walk": 4_096},
        ),
    )
    experience = ExperiencePipeline(
        manager,
        extractor,
        EveryEpisode(),
        None,
        Diagnostics({}),
        embedder,
        monitor,
        PipelineSettings("bench", background=True),
    )
    try:

        def clear_caches() -> None:
            actor.clear_cache()
            extractor.clear_cache()

        yield EngineSetup(runner, experience, tasks, clear_caches)
    finally:
        await manager.aclose()
        await actor.aclose()
        await extractor.aclose()
        monitor.close()


@asynccontextmanager
async def tiny_model(turns: int, folder: Path) -> AsyncIterator[EngineSetup]:
    """Yield the parts of `crl train --tasks room`, with an extractor that is not trained.

    `turns` is ignored: the task's limit applies.
    """
    switches = [
        "ask.enabled=true", "critic.enabled=true", "critic.warmup=0", "extractor.train=false"
    ]  # fmt: skip
    config = load(["room"], sets=[*without_evaluations("room"), *switches])
    run = RunDir.create(folder / "run")
    monitor = FileMonitor(run)
    async with open_training_loop(config, run, monitor) as loop:
        assert loop.experience
        start = loop.rollouts.source.state()

        def tasks() -> TaskSource:
            loop.rollouts.source.load_state(start)
            return loop.rollouts.source

        # No prefix is shared between episodes, so there is no cache to clear.
        yield EngineSetup(
            loop.rollouts.collector._runner, loop.experience, tasks, clear_caches=lambda: None
        )
    monitor.close()


async def fill_bank(path: Path, tasks: Sequence[Task]) -> None:
    """Write one lesson per task. The manager embeds the lessons when it opens the bank."""
    store = await Store.open(path)
    source = Provenance("seed", (0, 1))
    entries = [
        Entry(f"seed#{i}", 1, f"{t.goal} {lesson_text(i)}", t.place, source)
        for i, t in enumerate(tasks)
    ]
    await store.import_entries(entries, Stamp(0, 0))
    await store.aclose()


def actor_answers(session: str) -> list[str]:
    """Return the possible answers of the actor in this session."""
    return VERDICTS if "/critic/" in session else [*MOVES, *MOVES, QUESTION]


def extractor_answers(session: str) -> list[str]:
    """Return the possible answers of the extractor.

    Each contains an op for distillation and an op for a question. A reader uses one of them.
    """
    return [
        f'[{{"op": "add", "text": "{text}"}}, {{"op": "refine", "text": "{text}"}}]'
        for text in map(lesson_text, range(LESSONS))
    ]


def lesson_text(number: int) -> str:
    """Return a lesson."""
    steps = [list(MOVES)[number // 4**i % 4] for i in range(6)]
    return f"From the start walk {', then '.join(steps)}; the exit is near where the corridor ends."


# ── one rollout ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Measurements:
    """Measurements of one arm. The lists hold one value per repetition."""

    rollout: list[float] = field(default_factory=list)
    """Seconds to collect the episodes."""
    searches: list[list[float]] = field(default_factory=list)
    """Seconds of every search."""
    lags: list[list[float]] = field(default_factory=list)
    """Seconds of lag of the event loop, for every probe."""
    remaining: list[float] = field(default_factory=list)
    """Seconds of distillation after the end of the rollout."""
    distilled: list[int] = field(default_factory=list)
    """Number of distilled episodes."""
    failed: int = 0
    """Episodes with an error."""


async def rollout(
    setup: EngineSetup,
    arm: Arm,
    environments: int,
    step: int,
    number: int,
    previous: Sequence[Trajectory],
    results: Measurements,
) -> list[Trajectory]:
    """Play the episodes of one step and return them.

    In an arm with experience, the episodes of its previous rollout are distilled at the same time.

    * `step`: step from which the random draws are derived, the same for all arms of a repetition.
    * `number`: number of the rollout. It rises with every rollout of a bank, and is the step of the
      returned episodes, so that their ids are new to the bank.

    Raise `RuntimeError` if not all episodes of `previous` were distilled.
    """
    retriever = TimedRetriever(setup.experience.retriever)
    gate = StalenessGate(environments // GROUP, 0, step)
    runner = arm.runner(setup, retriever if arm.share else NullRetriever())
    collector = Collector(
        runner, setup.tasks(), GuidedShare(arm.share), gate, group_size=GROUP, steps=step + 1
    )

    async def distil() -> None:
        await setup.experience.observe(previous)
        await setup.experience.complete(number, previous)

    distilled_before = await distilled_requests(setup)
    gc.collect()  # the garbage of one arm must not affect the next one
    setup.clear_caches()
    async with asyncio.TaskGroup() as tasks:
        if arm.share:
            tasks.create_task(distil())
        async with measure_lags() as lags:
            begin = time.perf_counter()
            await collector.run()
            end = time.perf_counter()
    await setup.experience.manager.drain()
    results.rollout.append(end - begin)
    results.remaining.append(time.perf_counter() - end)
    distilled = await distilled_requests(setup) - distilled_before
    if distilled != len(previous):
        raise RuntimeError(
            f"rollout {number} distilled {distilled} episodes instead of {len(previous)}: the bank "
            "knew the others, or they failed"
        )
    batch = await collector.batch(step)
    results.searches.append(retriever.seconds)
    results.lags.append(lags)
    results.distilled.append(distilled)
    results.failed += sum(t.error is not None for t in batch)
    return [replace(t, address=replace(t.address, step=number)) for t in batch]


async def distilled_requests(setup: EngineSetup) -> int:
    """Return the number of requests that the bank has distilled since it was created."""
    return (await setup.experience.manager.stats())["queue/done"]


async def measure(
    setup: EngineSetup, environments: int, repetitions: int
) -> dict[str, Measurements]:
    """Measure all arms and return the results by name, without the warm-ups."""
    results = {name: Measurements() for name in ARMS}
    previous: dict[str, Sequence[Trajectory]] = {name: () for name in ARMS}
    numbers = count()
    with frozen_heap():
        async with asyncio.TaskGroup() as tasks:
            background = tasks.create_task(setup.experience.run())
            for step in range(repetitions + 1):
                for name, arm in list(ARMS.items())[:: 1 if step % 2 else -1]:
                    is_warmup = step == 0
                    if is_warmup and not arm.share:
                        continue
                    batch = await rollout(
                        setup,
                        arm,
                        environments,
                        step,
                        next(numbers),
                        previous[name],
                        Measurements() if is_warmup else results[name],
                    )
                    previous[name] = batch if arm.share else ()
            background.cancel()
    return results


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def row(
    engine: str, environments: int, name: str, results: Mapping[str, Measurements]
) -> dict[str, Any]:
    """Return the result row of one arm. Lists hold one value per repetition."""
    measured = results[name]
    return {
        "engine": engine,
        "environments": environments,
        "arm": name,
        "rollout_s": measured.rollout,
        "ratio": [
            seconds / off
            for seconds, off in zip(measured.rollout, results["off"].rollout, strict=True)
        ],
        "left_s": measured.remaining,
        "distilled": measured.distilled,
        "failed": measured.failed,
        "searches": sum(map(len, measured.searches)),
        "search_ms": quantiles(list(chain(*measured.searches)), (50, 95, 100)),
        "lag_ms": quantiles(list(chain(*measured.lags)), (50, 99, 100)),
        "search_ms_each": [
            {**quantiles(seconds, (50, 95, 100)), "mean": 1000 * fmean(seconds)}
            for seconds in measured.searches
            if seconds
        ],
        "lag_ms_each": [quantiles(seconds, (50, 99, 100)) for seconds in measured.lags],
    }


def print_head() -> None:
    columns = "".join(
        f"{name:>10}" for name in ("search p50", "p95", "max", "lag p50", "p99", "max", "left (s)")
    )
    print(f"{'engine':<15}{'envs':>6}  {'arm':<7}{'rollout (s)':>17}{'ratio':>17} {columns}")


def print_row(row: Mapping[str, Any]) -> None:
    values = [row["search_ms"].get(name) for name in ("p50", "p95", "max")] + list(
        row["lag_ms"].values()
    )
    values.append(fmean(row["left_s"]))
    cells = "".join(f"{'–' if value is None else f'{value:.2f}':>10}" for value in values)
    ratio = "–" if row["arm"] == "off" else mean_and_interval(row["ratio"])
    head = f"{row['engine']:<15}{row['environments']:>6,}  {row['arm']:<7}"
    print(f"{head}{mean_and_interval(row['rollout_s']):>17}{ratio:>17} {cells}", flush=True)


SETUPS: dict[str, Callable[[int, Path], AbstractAsyncContextManager[EngineSetup]]] = {
    "latency model": latency_model,
    "tiny model": tiny_model,
}


async def measure_engine(
    engine: str, environments: int, turns: int, repetitions: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        async with SETUPS[engine](turns, Path(folder)) as setup:
            results = await measure(setup, environments, repetitions)
    return [row(engine, environments, name, results) for name in ARMS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few environments, short episodes")
    parser.add_argument("--engines", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument(
        "--environments",
        type=int,
        nargs="+",
        help=f"numbers of parallel environments, multiples of {GROUP}",
    )
    parser.add_argument(
        "--repetitions", type=int, help="an even number balances the order of the arms"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    turns, repetitions = (QUICK_TURNS, 2) if arguments.quick else (TURNS, 4)
    repetitions = arguments.repetitions or repetitions
    sizes = [
        (engine, environments)
        for engine in arguments.engines
        for environments in (
            arguments.environments or (QUICK if arguments.quick else ENVIRONMENTS)[engine]
        )
    ]
    part = arguments.out and arguments.out.with_suffix(".part")
    settings = {"repetitions": repetitions, "turns": turns, "sizes": [list(s) for s in sizes]}
    results = {**settings, "seconds": 0.0, "rows": []}
    if part and part.exists():
        stored = json.loads(part.read_text("utf-8"))
        if all(stored[name] == value for name, value in {**settings, "commit": commit()}.items()):
            results |= {name: stored[name] for name in results}
    print_head()
    for number, (engine, environments) in enumerate(sizes):
        place = slice(number * len(ARMS), (number + 1) * len(ARMS))
        if not results["rows"][place]:
            begin = time.perf_counter()
            results["rows"] += asyncio.run(measure_engine(engine, environments, turns, repetitions))
            results["seconds"] += time.perf_counter() - begin
            if part:
                write_results(part, results)
        for row in results["rows"][place]:
            print_row(row)
    if part:
        part.rename(arguments.out)
    for figure in FIGURES:
        print("\n" + section(figure, {"machine": machine(), **results}), end="")


if __name__ == "__main__":
    main()
