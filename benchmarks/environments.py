"""Cost of the environments: steps per second, reset time and memory, for 16 to 512 episodes.

    python benchmarks/environments.py --out benchmarks/results/environments.json
    python benchmarks/environments.py scienceworld --episodes 16 64

Every task of `crl` is measured in the rendering for language models and in the host of a run. Each
number of episodes runs in a fresh process. Another row has 512 rooms, 512 visits to the shop and 64
households in one process and its workers. All episodes acquire a game. Then all are reset together
and played together, several times. They replay the scripted player's actions in 32 tasks of the
unseen split, in turn. A worker stores the translations of 64 household games, so it
translates each of these tasks only once. No other work runs, and no model computes; in a run, the
environments wait for the actor most of the time.

* make: milliseconds per game until all games are made, imports included.
* reset: milliseconds per reset when all episodes are reset together.
* steps/s: steps per second of all episodes together.
* memory: MiB of the process and its workers beyond the MiB before the first game was made; shared
  pages are counted once.
* per episode: memory added per additional episode, compared with the row before.
* in all: total MiB, with the interpreter and everything imported before.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_results

from crl.config import RunConfig, TaskConfig, load
from crl.config.catalog import mixture, task_file, tasks
from crl.config.load import task_settings
from crl.envs.base import StreamSettings, play_episode
from crl.envs.registry import get_spec
from crl.planning.tasks import environment_pool, specs
from crl.protocols import Environment
from crl.types import Task

EPISODES = (16, 64, 256, 512)
QUICK_EPISODES = (2, 4)
MIXTURE_EPISODES = {"room": 512, "webshop": 512, "alfworld": 64}
"""Episodes of each task in the row of the mixture."""
TASKS = 32
"""Tasks whose actions are recorded, per environment."""
MIN_EPISODES = 128
"""Minimal number of episodes of a row, over all rounds."""

Row = dict[str, Any]
Script = tuple[Task, tuple[str, ...]]
"""Task and the actions to replay."""


def full_rendering_config(names: Sequence[str]) -> RunConfig:
    """Return the config of a run of these tasks in their full rendering."""
    task_configs = {
        name: TaskConfig.model_validate(task_settings(task_file(name), "full")) for name in names
    }
    return load(["room"]).model_copy(update={"tasks": task_configs})


def record_scripts(name: str, n: int) -> list[Script]:
    """Return the scripted player's actions in n eval tasks."""
    task = full_rendering_config([name]).tasks[name]
    spec = get_spec(task.env)
    game = spec.make_game(task.rendering)
    try:
        eval_tasks = spec.tasks.eval_tasks(
            "unseen", n, 0, StreamSettings(**task.stream.model_dump())
        )
        make_player = spec.curriculum.scripted_player
        assert make_player is not None
        players = (make_player(random.Random(i)) for i in range(n))
        return [
            (t, play_episode(game, t, player, task.max_turns).actions)
            for t, player in zip(eval_tasks, players, strict=True)
        ]
    finally:
        game.close()


def measure(
    scripts: Mapping[str, Sequence[Script]], episodes: Mapping[str, int], min_episodes: int
) -> Row:
    """Return the measurements of one row. `scripts` and `episodes` are keyed by task name."""
    return asyncio.run(_measure(scripts, episodes, min_episodes))


async def _measure(
    scripts: Mapping[str, Sequence[Script]], episodes: Mapping[str, int], min_episodes: int
) -> Row:
    config = full_rendering_config(list(episodes))
    assigned = [
        scripts[name][i % len(scripts[name])] for name, n in episodes.items() for i in range(n)
    ]
    async with AsyncExitStack() as stack:
        pool = environment_pool(config, specs(config), stack)
        before = memory()
        make_seconds, games = await time_calls(
            lambda i: pool.acquire(assigned[i][0]), len(assigned)
        )
        resets, steps, count = [], [], 0
        for _ in range(-(-min_episodes // len(assigned))):
            resets.append(
                (await time_calls(lambda i: games[i].reset(assigned[i][0]), len(assigned)))[0]
            )
            seconds, steps_taken = await time_calls(
                lambda i: replay(games[i], assigned[i][1]), len(assigned)
            )
            steps.append(sum(steps_taken) / seconds)
            count += sum(steps_taken)
        after = memory()
        for game in games:
            await pool.release(game)
    milliseconds = 1e3 / len(assigned)
    return {
        "tasks": dict(episodes),
        "episodes": len(assigned),
        "make_ms": make_seconds * milliseconds,
        "reset_ms": statistics.median(resets) * milliseconds,
        "steps_per_s": statistics.median(steps),
        "steps": count,
        "memory_mib": after - before,
        "in_all_mib": after,
    }


async def replay(game: Environment, actions: Sequence[str]) -> int:
    """Play the actions and return their number."""
    for action in actions:
        result = await game.step(action)
        assert result.valid, f"{action!r} was valid when it was recorded: {result.text!r}"
    return len(actions)


async def time_calls(call: Callable[[int], Awaitable[Any]], n: int) -> tuple[float, list[Any]]:
    """Await n concurrent calls. Return the seconds until all are done, and their results."""
    start = time.perf_counter()
    results = await asyncio.gather(*(call(i) for i in range(n)))
    return time.perf_counter() - start, results


def memory() -> float:
    """Return the MiB of this process and its descendants on Linux.

    Shared pages are counted once.
    """
    return sum(_proportional_kib(pid) for pid in _tree(os.getpid())) / 1024


def _tree(pid: int) -> list[int]:
    children = [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]
    return [pid, *(descendant for child in children for descendant in _tree(child))]


def _proportional_kib(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'':<12}{'episodes':>9}{'make ms':>10}{'reset ms':>10}{'steps/s':>10}{'memory MiB':>12}"
        f"{'per episode':>13}{'in all MiB':>12}"
    ]
    previous: Row | None = None
    for row in rows:
        base = (
            previous
            if previous and previous["tasks"].keys() == row["tasks"].keys()
            else {"memory_mib": 0.0, "episodes": 0}
        )
        per_episode = (row["memory_mib"] - base["memory_mib"]) / (
            row["episodes"] - base["episodes"]
        )
        name = next(iter(row["tasks"])) if len(row["tasks"]) == 1 else "together"
        lines.append(
            f"{name:<12}{row['episodes']:>9}{row['make_ms']:>10.1f}{row['reset_ms']:>10.2f}"
            f"{row['steps_per_s']:>10,.0f}"
            f"{row['memory_mib']:>12,.0f}{per_episode:>13.2f}{row['in_all_mib']:>12,.0f}"
        )
        previous = row
    return "\n".join(lines)


def measure_rows(
    names: Sequence[str], rows: Sequence[Mapping[str, int]], min_episodes: int
) -> list[Row]:
    """Return the measurements of each row (episodes by task name), each from a fresh process."""
    scripts = {name: record_scripts(name, TASKS) for name in names}
    results = []
    for episodes in rows:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            results.append(
                executor.submit(
                    measure, {name: scripts[name] for name in episodes}, episodes, min_episodes
                ).result()
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", help="tasks to measure (default: all)")
    parser.add_argument(
        "--episodes", type=int, nargs="+", metavar="N", help="numbers of episodes of the rows"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 and 4 episodes, once, to test that the benchmark works",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    names = arguments.tasks or [name for name in tasks() if not mixture(task_file(name))]
    counts, min_episodes = (QUICK_EPISODES, 1) if arguments.quick else (EPISODES, MIN_EPISODES)
    rows = [{name: n} for name in names for n in arguments.episodes or counts]
    if MIXTURE_EPISODES.keys() <= set(names):
        rows.append({name: 1 for name in MIXTURE_EPISODES} if arguments.quick else MIXTURE_EPISODES)
    results = measure_rows(names, rows, min_episodes)
    print(table(results))
    if arguments.out:
        write_results(arguments.out, {"rows": results})


if __name__ == "__main__":
    main()
