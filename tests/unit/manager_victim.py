"""Lives of one manager that end by SIGKILL: `python manager_victim.py DIR` kills a life before each of its SQL statements.

Every killed life is followed by one that runs to its end; its bank is compared with that of a life that was never killed.
Prints as JSON how many lives were killed and what differed. Each life is a fork of this process, which opens no bank itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extractors import ScriptedEngine, WordEmbedder, add, hit, request, update, write_prompt

from crl.errors import RolloutError
from crl.manager import CreditSettings, ExperienceManager, ManagerSettings
from crl.types import Completion, Sampling, Segment

ANSWERS = {
    "two": add("Go west.", "Then go north.", "Mind the trap."),
    "better": update("Go southwest."),
    "late": update("Go southeast."),
    "none": "Hm.",
}


class Characters:
    """Renders and tokenises by characters: no tokenizer to load."""

    stop_ids = (0,)

    def text(self, segments: Sequence[Segment]) -> str:
        return "\n".join(segment.text for segment in segments)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Extractor(ScriptedEngine):
    """Its answer is a function of the request; one request it cannot serve."""

    def __init__(self) -> None:
        super().__init__(Characters(), lambda prompt: ANSWERS[prompt.split()[-1]])  # pyright: ignore[reportArgumentType]

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None, rng: int | None = None) -> Completion:
        if Characters().decode(ids).endswith("broken"):
            raise RolloutError("engine", "the prompt is too long")
        return await super().generate(ids, sampling, session=session, rng=rng)


async def life(path: Path) -> None:
    """Every kind of change once. It may be lived again on what an earlier life left."""
    settings = ManagerSettings(cap=3, credit=CreditSettings(cooldown=0, malformed_reward=-1.0))
    renderer: Any = Characters()
    manager = await ExperienceManager.open(path, Extractor(), WordEmbedder(), renderer, write_prompt, settings, seed=0)
    guided = hit("run/0/0/0#0")
    await manager.submit(request(member=0, note="two"))
    await manager.submit(request(member=1, note="better", shown=(guided,)))
    await manager.submit(request(member=2, note="late", shown=(guided,)))
    await manager.submit(request(member=3, note="none"))
    await manager.submit(request(member=4, note="broken"))
    await manager.drain()
    for member, success in ((1, True), (2, False)):
        await manager.credit([guided.use], success, episode=f"run/0/0/{member}")
    while samples := await manager.take_batch(1, 3):
        await manager.mark_trained([sample.id for sample in samples], 3)
    await manager.aclose()


def left_behind(path: Path) -> dict[str, list[Any]]:
    """The bank's content, without what only says when."""
    queries = {
        "entries": "SELECT uid, version, text, task, goal, parents, status, hex(vector) FROM entries",
        "units": "SELECT uid, version, generation, start, stop, credited, credit, pending_count, pending_sum, ready IS NULL FROM units",
        "generations": "SELECT id, hex(sampled), head, c_train, t_last FROM generations",
        "requests": "SELECT id, state, reason, payload FROM requests",
        "log": "SELECT step, extractor, kind, origin, op, data FROM log",
    }
    with sqlite3.connect(path) as db:
        return {name: sorted(map(repr, db.execute(sql))) for name, sql in queries.items()}


def live(path: Path, kill_before: int | None) -> bool:
    """One life in a process of its own; True when it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kill_before is not None:
                arm(kill_before)
            asyncio.run(life(path))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise SystemExit(f"a life ended with status {status}")
    return True


def arm(kill_before: int) -> None:
    """From now on this process is killed before the statement of that number, counted from 1 over all connections."""
    connect, seen = sqlite3.connect, [0]

    def trace(statement: str) -> None:
        seen[0] += 1
        if seen[0] == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(trace)
        return connection

    sqlite3.connect = connect_traced


def main(folder: Path) -> None:
    def fresh(name: str) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        return folder / name / "bank.sqlite"

    whole = fresh("whole")
    live(whole, None)
    expected = left_behind(whole)
    killed, different = 0, []
    while not live(path := fresh("killed"), killed + 1):
        killed += 1
        live(path, None)
        if left_behind(path) != expected:
            different.append(killed)
    print(json.dumps({"killed": killed, "different": different, "left": expected}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
