"""What the environments cost: steps per second, time of a reset and memory, and how they grow from 16 to 512 episodes in flight.

    python benchmarks/environments.py --out benchmarks/results/environments.json

Every environment that comes with `crl` and is installed, in the host that a run has, each number of episodes in a process of its own.
All episodes are lent a game, then reset together and played together, again and again: they replay what the scripted player did in
16 tasks of the `new` eval, in the rendering of the run. Nothing else runs, no model thinks: a run waits for its actor most of the time.

make: milliseconds per game, until all are made, imports included. reset: milliseconds per reset, of all together, so also what one
costs when many want one. steps/s: of all together. memory: MiB that the process and its workers hold more than before the first game
was made (shared pages counted once); per episode: what each of the episodes beyond the row before it added.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_results

from crl.config import load
from crl.envs.base import StreamSettings, play
from crl.envs.registry import get_spec, names
from crl.errors import ConfigError
from crl.protocols import Environment
from crl.run.tasks import environment_pool, specs
from crl.types import Task

EPISODES = (16, 64, 256, 512)
QUICK_EPISODES = (2, 4)
TASKS = 16
CALLS = 1024
"""Episodes that a row plays at least, over its rounds."""

Row = dict[str, Any]
Script = tuple[Task, tuple[str, ...]]


def scripts(name: str, n: int) -> list[Script]:
    """What the scripted player does in n eval tasks. Raises `ConfigError` where the environment lacks something."""
    config = load([name])
    spec, task = get_spec(config.tasks[name].env), config.tasks[name]
    game = spec.make_game(task.rendering)
    try:
        tasks = spec.eval_tasks("new", n, 0, StreamSettings(**task.stream.model_dump()))
        players = (spec.scripted_player(random.Random(i)) for i in range(n))
        return [(t, play(game, t, player, task.turns).actions) for t, player in zip(tasks, players, strict=True)]
    finally:
        game.close()


def measure(name: str, played: Sequence[Script], episodes: int, calls: int) -> Row:
    return asyncio.run(_measure(name, played, episodes, calls))


async def _measure(name: str, played: Sequence[Script], episodes: int, calls: int) -> Row:
    config = load([name])
    mine = [played[i % len(played)] for i in range(episodes)]
    async with AsyncExitStack() as stack:
        pool = environment_pool(config, specs(config), stack)
        before = memory()
        made, games = await timed(lambda i: pool.acquire(mine[i][0]), episodes)
        resets, steps, count = [], [], 0
        for _ in range(-(-calls // episodes)):
            resets.append((await timed(lambda i: games[i].reset(mine[i][0]), episodes))[0])
            seconds, taken = await timed(lambda i: replay(games[i], mine[i][1]), episodes)
            steps.append(sum(taken) / seconds)
            count += sum(taken)
        held = memory() - before
        for game in games:
            await pool.release(game)
    milliseconds = 1e3 / episodes
    return {
        "environment": name,
        "rendering": config.tasks[name].rendering,
        "episodes": episodes,
        "make_ms": made * milliseconds,
        "reset_ms": statistics.median(resets) * milliseconds,
        "steps_per_s": statistics.median(steps),
        "steps": count,
        "memory_mib": held,
    }


async def replay(game: Environment, actions: Sequence[str]) -> int:
    """Plays the actions; their number."""
    for action in actions:
        result = await game.step(action)
        assert result.valid, f"{action!r} was valid when it was recorded: {result.text!r}"
    return len(actions)


async def timed(call: Callable[[int], Awaitable[Any]], n: int) -> tuple[float, list[Any]]:
    """Seconds until n calls at a time are done, and what they returned."""
    start = time.perf_counter()
    results = await asyncio.gather(*(call(i) for i in range(n)))
    return time.perf_counter() - start, results


def memory() -> float:
    """MiB of this process and its descendants, as Linux counts them: pages shared among them once."""
    return sum(_proportional_kib(pid) for pid in _tree(os.getpid())) / 1024


def _tree(pid: int) -> list[int]:
    children = [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]
    return [pid, *(descendant for child in children for descendant in _tree(child))]


def _proportional_kib(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':<14}{'episodes':>9}{'make ms':>10}{'reset ms':>10}{'steps/s':>10}{'memory MiB':>12}{'per episode':>13}"]
    previous: Row | None = None
    for row in rows:
        more = previous if previous and previous["environment"] == row["environment"] else {"memory_mib": 0.0, "episodes": 0}
        each = (row["memory_mib"] - more["memory_mib"]) / (row["episodes"] - more["episodes"])
        lines.append(
            f"{row['environment']:<14}{row['episodes']:>9}{row['make_ms']:>10.1f}{row['reset_ms']:>10.2f}{row['steps_per_s']:>10,.0f}"
            f"{row['memory_mib']:>12,.0f}{each:>13.2f}"
        )
        previous = row
    return "\n".join(lines)


def measured(environments: Sequence[str], episodes: Sequence[int], calls: int) -> list[Row]:
    """A row for every environment and number of episodes, each measured in a fresh process."""
    rows = []
    for name in environments:
        try:
            played = scripts(name, min(TASKS, max(episodes)))
        except ConfigError as error:
            print(f"{name} is left out: {error}")
            continue
        for n in episodes:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                rows.append(fresh.submit(measure, name, played, n, calls).result())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", default=names(), help="default: all")
    parser.add_argument("--quick", action="store_true", help="2 and 4 episodes, once: shows that it runs")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    episodes, calls = (QUICK_EPISODES, 1) if arguments.quick else (EPISODES, CALLS)
    rows = measured(arguments.environments, episodes, calls)
    print(table(rows))
    if arguments.out:
        write_results(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
