"""Processes that use a manager and are killed by SIGKILL, compared with one that is not killed.

    PYTHONPATH=.:tests python -m support.killed_managers DIR statements STRIDE
    PYTHONPATH=.:tests python -m support.killed_managers DIR random KILLS SEED

* `statements`: processes are killed before every STRIDE-th of their SQL statements. This is done
  for processes that start with a new bank, and for processes that roll back to the snapshot of an
  earlier process.
* `random`: processes are killed at random times, up to three times in a row.

Both use every eviction rule with `drain` to distil, and one rule with `run`. The program prints
JSON: the number of killed processes, the number of banks, the differences, and the content of the
bank after a process that is not killed, for each rule. Each process is a fork of this process,
which opens no bank itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from crl.config.schema import BankSection, EvictionOrder, ExtractorSection, RetrievalSection
from crl.errors import RolloutError, TransientError
from crl.manager import ExperienceManager, GroupSuccess, ManagerSettings, QueueSettings, UnitKey
from crl.protocols import Hit, Question
from crl.types import Completion, Sampling, Segment, Verdict
from support.managers import (
    PROMPTS,
    ScriptedEngine,
    WordEmbedder,
    add,
    hit,
    request,
    search,
    task,
    update,
)

Drain = Callable[[], Coroutine[Any, Any, None]]
"""Function that distils all submitted requests."""

ANSWERS = {
    "three": add("Go west.", "Then go north.", "Mind the trap."),
    "better": update("Go southwest."),
    "late": update("Go southeast."),
    "again": add("Then go north.", "Take the stairs."),
    "elsewhere": add("Swim.", "Climb the mast.", "Wait for low tide."),
    "down": '[{"op": "down", "target": 1}]',
    "up": '[{"op": "up", "target": 1}]',
    "none": "Hm.",
    "lost?": '[{"op": "refine", "text": "Two rooms north."}]',
}

RULES = len(get_args(EvictionOrder))

MERGE = json.dumps(
    [
        {"op": "merge", "targets": [1, 2], "text": "Go south, then west."},
        {"op": "discard", "target": 3},
    ]
)


def reply(prompt: str) -> str:
    return MERGE if prompt.startswith("merge") else ANSWERS[prompt.split()[-1]]


def write_refine(question: Question, found: Hit) -> list[Segment]:
    return [Segment("user", f"{found.text}\n{question.query}", "task")]


class Characters:
    """Renderer and tokenizer that work on characters, so that no tokenizer must be loaded."""

    stop_ids = (0,)

    def text(self, segments: Sequence[Segment]) -> str:
        return "\n".join(segment.text for segment in segments)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Extractor(ScriptedEngine):
    """Extractor whose answer is a function of the prompt.

    It fails for the note `broken`, is always busy for `hopeless`, and is busy once for `late`.
    """

    def __init__(self) -> None:
        super().__init__(Characters(), reply)  # pyright: ignore[reportArgumentType]
        self.refused = False

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        note = Characters().decode(ids).split()[-1]
        if note == "broken":
            raise RolloutError("engine", "the prompt is too long")
        if note == "hopeless" or (note == "late" and not self.refused):
            self.refused = self.refused or note == "late"
            raise TransientError("engine", "busy")
        return await super().generate(ids, sampling, session=session, rng=rng)


SETTINGS = ManagerSettings(
    retrieval=RetrievalSection(margin=2.0, min_similarity=0.0),
    bank=BankSection(
        max_per_goal=3, max_entries=5, evict_votes=2, duplicate_similarity=0.95, key_text_weight=0.5
    ),
    extractor=ExtractorSection(cooldown=0, malformed_reward=-1.0),
    queue=QueueSettings(attempts=6, backoff=0.0),
)


async def run_scenario(path: Path, evict: EvictionOrder, running: bool) -> None:
    """Make every kind of change to a bank, with a checkpoint in between.

    A process that finds the checkpoint continues from there, as a run does. With `running`,
    `manager.run()` distils one request after the other, so that the result does not depend on the
    order of the answers.
    """
    renderer: Any = Characters()
    prompts = replace(PROMPTS, refine=write_refine)
    settings = replace(
        SETTINGS,
        bank=SETTINGS.bank.model_copy(update={"evict": evict}),
        extractor=SETTINGS.extractor.model_copy(update={"concurrency": 1}),
        deterministic=not running,
    )
    manager = await ExperienceManager.open(
        path, Extractor(), WordEmbedder(), renderer, prompts, settings, seed=0
    )
    drain = partial(run_until_settled, manager) if running else manager.drain
    manifest = path.with_name("manifest")
    if manifest.exists():
        await manager.rollback(checkpoint := int(manifest.read_text()))
    else:
        await before_checkpoint(manager, drain)
        draft = path.with_name("draft")
        draft.write_text(str(checkpoint := await manager.snapshot()))
        draft.rename(manifest)
    await after_checkpoint(manager, checkpoint, drain)
    await manager.aclose()


async def run_until_settled(manager: ExperienceManager) -> None:
    running = asyncio.create_task(manager.run())
    while any([(await manager.stats())[f"queue/{state}"] for state in ("pending", "leased")]):
        await asyncio.wait({running}, timeout=0.001)
        if running.done():
            running.result()
    running.cancel()
    await asyncio.wait({running})
    await manager.flush()


GUIDED, BETTER = hit("run/0/0/0#0"), hit("run/0/0/0#0", 2, "Go southwest.", "run/0/0/1")
NORTH, TRAP = hit("run/0/0/0#1", text="Then go north."), hit("run/0/0/0#2", text="Mind the trap.")
STAIRS, SWIM = hit("run/1/0/0#1", text="Take the stairs."), hit("run/1/1/0#0", text="Swim.")
SHORE = task(goal="Reach the shore.")


async def before_checkpoint(manager: ExperienceManager, drain: Drain) -> None:
    """Make the changes before the checkpoint.

    A process may repeat most of them without an effect. The log is checked before the clock
    advances and before a change that must not be repeated.
    """
    if await is_logged(manager, "retrieve"):
        manager.advance(1)
    await asyncio.gather(
        manager.submit(request(member=0, note="three")),
        manager.submit(request(member=1, note="better", shown=(GUIDED,))),
        manager.submit(request(member=2, note="broken")),
        manager.submit(request(member=3, note="hopeless")),
    )
    await drain()
    await credit(manager, "run/0/1/0", True, GUIDED, (TRAP, "accept"))
    await credit(manager, "run/0/1/1", False, BETTER, (NORTH, "reject"))
    await record_lifts(manager, "run/0/1", 1.0, GUIDED, BETTER)
    manager.advance(1)
    if not await is_logged(manager, "retrieve"):
        await manager.search([search("Then go north.")])
        await manager.flush()
    refined = await manager.refine(question(1, "lost?"), NORTH)
    await manager.refine(question(2, "none"), NORTH)
    await credit(manager, "run/1/2/0", True, (refined, "refine"))

    await manager.submit(request(1, 0, note="again"))
    await manager.submit(request(1, 1, note="elsewhere", of=SHORE))
    await drain()
    for member, (note, voted_on) in enumerate(
        [("down", STAIRS), ("down", STAIRS), ("up", SWIM), ("down", GUIDED)]
    ):
        await manager.submit(request(1, 3, member, note=note, shown=(voted_on,)))
    await drain()
    if not await is_logged(manager, "train"):
        await train(manager)
    if not await is_logged(manager, "chunk"):
        await manager.merge()
    await manager.submit(request(1, 4, note="none"))  # open at the checkpoint


async def after_checkpoint(manager: ExperienceManager, checkpoint: int, drain: Drain) -> None:
    """Make the changes after the checkpoint.

    To add an operation, call it here and in `before_checkpoint`, add the extractor's answer to
    `reply`, and add its result to `bank_contents`.
    """
    manager.advance(2)
    await manager.search([search(group=1)])
    await manager.flush()
    for member, note in enumerate(["late", "hopeless", "three"]):
        await manager.submit(request(2, member=member, note=note, shown=(GUIDED,)))
    await manager.snapshot()
    await drain()
    refined = await manager.refine(question(3, "lost?"), GUIDED)
    await credit(manager, "run/2/1/0", False, GUIDED, (refined, "refine"))
    await record_lifts(manager, "run/2/1", 0.0, GUIDED, BETTER)
    await manager.snapshot(kept=[checkpoint])
    await manager.submit(request(2, 3, note="down", shown=(hit("run/2/0/2#0"),)))
    await drain()
    await manager.merge()
    (found,) = await manager.search([search(group=2)])
    assert found
    await credit(manager, "run/2/2/0", True, (found, "accept"))
    while await train(manager):
        pass
    manager.advance(99)
    await manager.flush()


def question(number: int, query: str) -> Question:
    return Question(f"run/train/1/2/0/{number}", task(), query, ())


async def credit(
    manager: ExperienceManager, episode: str, success: bool, *uses: Hit | tuple[Hit, Verdict]
) -> None:
    uses_with_verdicts = [use if isinstance(use, tuple) else (use, None) for use in uses]
    await manager.credit(
        [replace(hit.use, verdict=verdict) for hit, verdict in uses_with_verdicts],
        success,
        episode=episode,
    )


async def record_lifts(
    manager: ExperienceManager, group: str, success: float, *guides: Hit
) -> None:
    await manager.record_lifts(
        {group: [GroupSuccess(UnitKey.credited_by(hit.use), success, 0.25) for hit in guides]}
    )


async def train(manager: ExperienceManager) -> bool:
    samples = await manager.take_batch(1, 3)
    await manager.mark_trained([sample.id for sample in samples or ()], 3)
    return bool(samples)


async def is_logged(manager: ExperienceManager, kind: str) -> bool:
    return bool((await manager.stats()).get(f"ops/{kind}"))


def bank_contents(path: Path) -> dict[str, list[Any]]:
    """Return the content of the bank without the fields that hold only times."""
    queries = {
        "entries": (
            "SELECT uid, version, text, task, goal, parents, status, hex(vector) FROM entries"
        ),
        "units": """SELECT uid, version, generation, start, stop, retrieved, last_returned_step,\
 credited, credit, votes,
                    lift_groups, lift_mean, lift_m2, pending_count, pending_sum,\
 ready IS NULL FROM units""",
        "generations": "SELECT id, hex(sampled), head, c_train, t_last FROM generations",
        "requests": "SELECT id, state, reason, payload FROM requests",
        "facts": "SELECT name, value FROM facts",
        "log": "SELECT extractor, kind, origin, op, data FROM log WHERE kind != 'snapshot'",
    }
    with sqlite3.connect(path) as db:
        return {name: sorted(map(repr, db.execute(sql))) for name, sql in queries.items()}


def run_in_process(
    path: Path,
    evict: EvictionOrder,
    running: bool,
    *,
    before: int | None = None,
    after: float | None = None,
) -> bool:
    """Run the scenario in a new process. Return True if it completed, or False if it was killed.

    The process is killed before the SQL statement number `before`, or after `after` seconds. Raise
    SystemExit if the process ends with an error.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if before is not None:
                arm_kill(before)
            asyncio.run(run_scenario(path, evict, running))
            code = 0
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise SystemExit(f"the process ended with status {status}")
    return True


def arm_kill(kill_before: int) -> None:
    """Make this process kill itself before the SQL statement number `kill_before`.

    Statements are counted from 1 over all connections that are opened from now on.
    """
    connect, count = sqlite3.connect, [0]

    def trace(statement: str) -> None:
        count[0] += not statement.startswith("--")  # a statement of a trigger is not counted
        if count[0] == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(trace)
        return connection

    sqlite3.connect = connect_traced


class KillTest:
    """Counter of kills and comparison of the resulting banks, for one eviction rule."""

    def __init__(self, folder: Path, evict: EvictionOrder, running: bool) -> None:
        self._folder = folder
        self.evict: EvictionOrder = evict
        self._running = running
        self.killed = self.banks = 0
        self.different: list[Any] = []
        begin = time.monotonic()
        run_in_process(path := self.fresh("complete"), evict, running)
        self.seconds = time.monotonic() - begin
        self.expected = bank_contents(path)

    def fresh(self, name: str = "killed", start: Path | None = None) -> Path:
        """Return the path of a new bank, or of the bank in a copy of the folder `start`."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        if start:
            shutil.copytree(start, self._folder / name)
        else:
            (self._folder / name).mkdir()
        return self._folder / name / "bank.sqlite"

    def kill(self, path: Path, **when: Any) -> bool:
        killed = not run_in_process(path, self.evict, self._running, **when)
        self.killed += killed
        return killed

    def finish_and_compare(self, path: Path, name: Any) -> None:
        """Run the scenario of a bank to its end and compare the result."""
        run_in_process(path, self.evict, self._running)
        self.banks += 1
        if bank_contents(path) != self.expected:
            self.different.append((self.evict, self._running, name))


def kill_at_statements(kill_tests: Sequence[KillTest], stride: int) -> None:
    def kill_before_each(
        kill_test: KillTest, first: int, fresh: Callable[[], Path], name: str
    ) -> int:
        before = first
        while kill_test.kill(path := fresh(), before=before):
            kill_test.finish_and_compare(path, (name, before))
            before += stride
        return before - stride

    for i, kill_test in enumerate(kill_tests):
        # The rules run similar statements, so each rule is killed before different ones.
        first = 1 + i % RULES * stride // RULES
        last = kill_before_each(kill_test, first, kill_test.fresh, "new bank")
        kill_test.kill(late := kill_test.fresh("late"), before=last - 5)
        kill_before_each(kill_test, first, partial(kill_test.fresh, start=late.parent), "rollback")


def kill_at_random(kill_tests: Sequence[KillTest], kills: int, seed: int) -> None:
    rng, turns = random.Random(seed), itertools.cycle(kill_tests)
    while sum(kill_test.killed for kill_test in kill_tests) < kills:
        kill_test = next(turns)
        path = kill_test.fresh()
        delays = [rng.uniform(0, kill_test.seconds) for _ in range(rng.randint(1, 3))]
        for delay in delays:
            kill_test.kill(path, after=delay)
        kill_test.finish_and_compare(path, delays)


def main(folder: str, mode: str, *numbers: str) -> None:
    kill_tests = [
        KillTest(Path(folder), evict, running=False) for evict in get_args(EvictionOrder)
    ] + [KillTest(Path(folder), "credit", running=True)]
    run_mode = {"statements": kill_at_statements, "random": kill_at_random}[mode]
    run_mode(kill_tests, *map(int, numbers))
    report = {
        "killed": sum(kill_test.killed for kill_test in kill_tests),
        "banks": sum(kill_test.banks for kill_test in kill_tests),
        "different": [found for kill_test in kill_tests for found in kill_test.different],
        "contents": [(kill_test.evict, kill_test.expected) for kill_test in kill_tests],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
