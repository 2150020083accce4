"""Lives of one manager that end by SIGKILL, compared with a life that is never killed.

    python manager_victim.py DIR statements STRIDE
    python manager_victim.py DIR storm KILLS SEED

* `statements`: lives are killed before every STRIDE-th of their SQL statements. This is done for
  lives from the start, and for lives that go back to the snapshot of an earlier life.
* `storm`: lives are killed at random instants, up to three times in a row.

Both use every eviction rule with `drain` to distil, and one rule with `run`. The program prints
JSON: the number of killed lives, the number of banks, the differences, and the content of the bank
after a life that is never killed, for each rule. Each life is a fork of this process, which opens
no bank itself.
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

from extractors import (
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

from crl.errors import RolloutError, TransientError
from crl.manager import (
    CreditSettings,
    DistilSettings,
    ExperienceManager,
    GroupSuccess,
    ManagerSettings,
    RetrievalSettings,
    UnitKey,
)
from crl.manager.records import Evict
from crl.protocols import Hit, Question
from crl.types import Completion, Sampling, Segment, Verdict

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

RULES = len(get_args(Evict))

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
    cap=3, size=5, vote_out=2, duplicate=0.95, attempts=6, backoff=0.0,
    credit=CreditSettings(cooldown=0, malformed_reward=-1.0),
    distil=DistilSettings(key_text_weight=0.5),
    retrieval=RetrievalSettings(margin=2.0, min_similarity=0.0),
)  # fmt: skip


async def life(path: Path, evict: Evict, running: bool) -> None:
    """Make every kind of change to a bank, with a checkpoint in between.

    A life that finds the checkpoint continues from there, as a run does. With `running`,
    `manager.run()` distils one request after the other, so that the result does not depend on the
    order of the answers.
    """
    renderer: Any = Characters()
    prompts, settings = (
        replace(PROMPTS, refine=write_refine),
        replace(SETTINGS, evict=evict, concurrency=1 if running else SETTINGS.concurrency),
    )
    manager = await ExperienceManager.open(
        path, Extractor(), WordEmbedder(), renderer, prompts, settings, seed=0
    )
    drain = partial(run_until_settled, manager) if running else manager.drain
    manifest = path.with_name("manifest")
    if manifest.exists():
        await manager.rollback(checkpoint := int(manifest.read_text()))
    else:
        await until_the_checkpoint(manager, drain)
        draft = path.with_name("draft")
        draft.write_text(str(checkpoint := await manager.snapshot()))
        draft.rename(manifest)
    await after_it(manager, checkpoint, drain)
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


async def until_the_checkpoint(manager: ExperienceManager, drain: Drain) -> None:
    """Make the changes before the checkpoint.

    A life may repeat most of them without an effect. The log is checked before the clock advances
    and before a change that must not be repeated.
    """
    if await has_done(manager, "retrieve"):
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
    await compare(manager, "run/0/1", 1.0, GUIDED, BETTER)
    manager.advance(1)
    if not await has_done(manager, "retrieve"):
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
    if not await has_done(manager, "train"):
        await train(manager)
    if not await has_done(manager, "chunk"):
        await manager.merge()
    await manager.submit(request(1, 4, note="none"))  # open at the checkpoint


async def after_it(manager: ExperienceManager, checkpoint: int, drain: Drain) -> None:
    """Make the changes after the checkpoint.

    To add an operation, call it here and in `until_the_checkpoint`, add the extractor's answer to
    `reply`, and add its result to `left_behind`.
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
    await compare(manager, "run/2/1", 0.0, GUIDED, BETTER)
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
    judged = [one if isinstance(one, tuple) else (one, None) for one in uses]
    await manager.credit(
        [replace(hit.use, verdict=verdict) for hit, verdict in judged], success, episode=episode
    )


async def compare(manager: ExperienceManager, group: str, success: float, *guides: Hit) -> None:
    await manager.record_lifts(
        {group: [GroupSuccess(UnitKey.earning(hit.use), success, 0.25) for hit in guides]}
    )


async def train(manager: ExperienceManager) -> bool:
    samples = await manager.take_batch(1, 3)
    await manager.mark_trained([sample.id for sample in samples or ()], 3)
    return bool(samples)


async def has_done(manager: ExperienceManager, kind: str) -> bool:
    return bool((await manager.stats()).get(f"ops/{kind}"))


def left_behind(path: Path) -> dict[str, list[Any]]:
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


def live(
    path: Path,
    evict: Evict,
    running: bool,
    *,
    before: int | None = None,
    after: float | None = None,
) -> bool:
    """Run one life in its own process. Return True if it completed, or False if it was killed.

    It is killed before the SQL statement number `before`, or after `after` seconds. Raise
    SystemExit if it ends with an error.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if before is not None:
                arm(before)
            asyncio.run(life(path, evict, running))
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
        raise SystemExit(f"a life ended with status {status}")
    return True


def arm(kill_before: int) -> None:
    """Kill this process before the SQL statement number `kill_before`.

    Statements are counted from 1 over all connections that are opened from now on.
    """
    connect, seen = sqlite3.connect, [0]

    def trace(statement: str) -> None:
        seen[0] += not statement.startswith("--")  # a statement of a trigger is not counted
        if seen[0] == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(trace)
        return connection

    sqlite3.connect = connect_traced


class Watch:
    """Counter of kills and comparison of the resulting banks, for one eviction rule."""

    def __init__(self, folder: Path, evict: Evict, running: bool) -> None:
        self._folder = folder
        self.evict: Evict = evict
        self._running = running
        self.killed = self.banks = 0
        self.different: list[Any] = []
        begin = time.monotonic()
        live(path := self.fresh("whole"), evict, running)
        self.seconds = time.monotonic() - begin
        self.expected = left_behind(path)

    def fresh(self, name: str = "killed", start: Path | None = None) -> Path:
        """Return the path of a new bank, or of the bank in a copy of the folder `start`."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        if start:
            shutil.copytree(start, self._folder / name)
        else:
            (self._folder / name).mkdir()
        return self._folder / name / "bank.sqlite"

    def kill(self, path: Path, **when: Any) -> bool:
        killed = not live(path, self.evict, self._running, **when)
        self.killed += killed
        return killed

    def finish(self, path: Path, name: Any) -> None:
        """Run the last life of a bank to its end and compare the result."""
        live(path, self.evict, self._running)
        self.banks += 1
        if left_behind(path) != self.expected:
            self.different.append((self.evict, self._running, name))


def statements(watches: Sequence[Watch], stride: int) -> None:
    def kill_before_each(watch: Watch, first: int, fresh: Callable[[], Path], name: str) -> int:
        before = first
        while watch.kill(path := fresh(), before=before):
            watch.finish(path, (name, before))
            before += stride
        return before - stride

    for i, watch in enumerate(watches):
        # The rules have similar lives, so each rule is killed before different statements.
        first = 1 + i % RULES * stride // RULES
        last = kill_before_each(watch, first, watch.fresh, "at first")
        watch.kill(late := watch.fresh("late"), before=last - 5)
        kill_before_each(watch, first, partial(watch.fresh, start=late.parent), "going back")


def storm(watches: Sequence[Watch], kills: int, seed: int) -> None:
    rng, turns = random.Random(seed), itertools.cycle(watches)
    while sum(watch.killed for watch in watches) < kills:
        watch = next(turns)
        path = watch.fresh()
        delays = [rng.uniform(0, watch.seconds) for _ in range(rng.randint(1, 3))]
        for delay in delays:
            watch.kill(path, after=delay)
        watch.finish(path, delays)


def main(folder: str, how: str, *numbers: str) -> None:
    watches = [Watch(Path(folder), evict, running=False) for evict in get_args(Evict)] + [
        Watch(Path(folder), "credit", running=True)
    ]
    {"statements": statements, "storm": storm}[how](watches, *map(int, numbers))
    report = {
        "killed": sum(watch.killed for watch in watches),
        "banks": sum(watch.banks for watch in watches),
        "different": [one for watch in watches for one in watch.different],
        "left": [(watch.evict, watch.expected) for watch in watches],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
