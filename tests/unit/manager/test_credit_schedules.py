"""Random schedules of operations on credit in a real bank, compared with a model in Python.

The operations earn, spend or delete credit.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from crl.config.schema import ExtractorSection, RetrievalSection
from crl.manager import ExperienceManager, ManagerSettings
from crl.manager.inspection.upkeep import evict
from crl.manager.records import UnitKey
from crl.types import ExperienceUse
from support.managers import RETURN, NoteEngine, add, hit, open_manager, request, search, update

COOLDOWN, ALPHA, WINDOW_STEPS, MALFORMED = 2, 0.5, 2, -1.0
SETTINGS = ManagerSettings(
    retrieval=RetrievalSection(margin=2.0, min_similarity=-1.0),
    extractor=ExtractorSection(cooldown=COOLDOWN, alpha=ALPHA, malformed_reward=MALFORMED),
    credit_window_steps=WINDOW_STEPS,
)

ANSWERS = {
    "one": add("Go west."),
    "two": add("Go west.", "Go east."),
    "better": update("Go southwest."),
    "both": f"[{update('Go southwest.')[1:-1]}, {add('Go east.')[1:-1]}]",
    "none": RETURN,
    "bad": "Hm.",
}

RAM_FOLDER = Path("/dev/shm")
"""Folder for thousands of banks that need not wait for a disk."""

# ── the model ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Unit:
    generation: str
    credited: int = 0
    credit: float = 0.0
    pending: list[float] = field(default_factory=list)
    last_returned: int | None = None
    """Last step that returned the unit from a search."""


@dataclass
class Generation:
    trained: int = 0
    last: int | None = None


@dataclass
class Model:
    """Expected content of a bank."""

    step: int = 0
    active: dict[str, int] = field(default_factory=dict)
    """Current versions by uid. The version that was written last is last."""
    units: dict[UnitKey, Unit] = field(default_factory=dict)
    generations: dict[str, Generation] = field(default_factory=dict)
    waiting: list[UnitKey] = field(default_factory=list)
    """Units with pending rewards, in order."""
    credited_episodes: dict[str, tuple[list[UnitKey], bool]] = field(default_factory=dict)
    """Uses and outcome of each credited episode."""
    unflushed: dict[UnitKey, int | None] = field(default_factory=dict)
    """Units that were returned since the last flush, with their `last_returned` before it."""

    def write(self, unit: UnitKey, generation: str) -> None:
        self.active.pop(unit.uid, None)
        self.active[unit.uid] = unit.version
        self.units[unit] = Unit(generation)
        self.generations.setdefault(generation, Generation())

    def distil(self, name: str, note: str, shown: UnitKey | None) -> None:
        if note == "bad":
            self.units[UnitKey(name, 0)] = Unit(name, pending=[MALFORMED])
            self.generations[name] = Generation()
            self.waiting.append(UnitKey(name, 0))
        elif note != "none":
            updates = (
                note in ("better", "both") and shown and self.active.get(shown.uid) == shown.version
            )
            self.write(
                UnitKey(shown.uid, shown.version + 1)
                if shown and updates
                else UnitKey(f"{name}#0", 1),
                name,
            )
            if note in ("two", "both"):
                self.write(UnitKey(f"{name}#1", 1), name)

    def credit(self, units: list[UnitKey], success: bool) -> None:
        reward = 1.0 if success else -1.0
        for key in dict.fromkeys(units):
            unit = self.units[key]
            unit.credited += 1
            unit.credit += reward
            if unit.generation in self.generations:
                unit.pending.append(reward)
                if key not in self.waiting:
                    self.waiting.append(key)

    def batch(self, n: int) -> list[UnitKey]:
        for key in [key for key in self.waiting if key.version == 0][:-n]:
            self.waiting.remove(key)
            self.units[key].pending.clear()
        chosen: list[UnitKey] = []
        for key in self.waiting:
            malformed = key.version == 0 and sum(other.version == 0 for other in chosen) == n // 4
            if len(chosen) < n and self.weight(key) and not malformed:
                chosen.append(key)
        return chosen if len(chosen) == n else []

    def weight(self, key: UnitKey) -> float:
        generation = self.generations[self.units[key].generation]
        cooling = generation.last is not None and self.step - generation.last < COOLDOWN
        return 0.0 if cooling else (1 + generation.trained) ** -ALPHA

    def samples(self, batch: list[UnitKey]) -> dict[str, tuple[float, float, float]]:
        """Return (r̄, w, A) of each sample by id."""
        means = {key: fmean(self.units[key].pending) for key in batch}
        weights = {key: self.weight(key) for key in batch}
        baseline = sum(weights[key] * means[key] for key in batch) / sum(weights.values())
        rows = {str(key): (means[key], weights[key]) for key in batch}
        for name in dict.fromkeys(self.units[key].generation for key in batch):
            ops = [key for key in batch if self.units[key].generation == name and key.version]
            if ops:
                rows[f"{name}@head"] = (fmean(means[key] for key in ops), weights[ops[0]])
        return {
            name: (mean, weight, weight * (mean - baseline))
            for name, (mean, weight) in rows.items()
        }

    def train(self, spent: dict[UnitKey, int], step: int) -> None:
        """Record a training step.

        `spent` is the number of rewards of each unit, oldest first, that were trained on.
        """
        for name in {self.units[key].generation for key in spent}:
            self.generations[name].trained += 1
            self.generations[name].last = step
        for key, count in spent.items():
            del self.units[key].pending[:count]
            self.waiting.remove(key)
            if self.units[key].pending:
                self.waiting.append(key)

    def prune(self) -> None:
        for name in list(self.generations):
            if not any(
                unit.generation == name and self.may_earn(key) for key, unit in self.units.items()
            ):
                del self.generations[name]

    def snapshot(self) -> Model:
        """Return a copy without the returns since the last flush, which no snapshot contains."""
        saved = copy.deepcopy(self)
        for key, last_returned in saved.unflushed.items():
            saved.units[key].last_returned = last_returned
        saved.unflushed.clear()
        return saved

    def may_earn(self, key: UnitKey) -> bool:
        unit = self.units[key]
        recent = unit.last_returned is not None and unit.last_returned >= self.step - WINDOW_STEPS
        return bool(unit.pending) or self.active.get(key.uid) == key.version or recent


# ── the schedules ─────────────────────────────────────────────────────────────────────────────────


class Schedule:
    """Schedule that draws operations by the weights of `OPERATIONS`.

    It applies each operation to the bank and to the model, and then compares them.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.engine, self.model = NoteEngine(ANSWERS), Model()
        self.numbers = itertools.count()
        self.retrieved_units: list[UnitKey] = []
        self.batch_counts: dict[UnitKey, int] = {}
        self.ids: list[str] = []
        self.batch_step = self.trainings = 0
        self.snapshots: dict[int, Model] = {}

    async def play(self, operations: int) -> None:
        await self.open()
        for name in self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=operations):
            await getattr(self, name)()
            await self.compare()
        await self.manager.aclose()

    async def open(self) -> None:
        self.manager: ExperienceManager = await open_manager(self.path, self.engine, SETTINGS)
        self.manager.advance(self.model.step)
        self.batch_counts = {}
        self.model.unflushed.clear()  # a closed bank is flushed

    def any_unit(self) -> UnitKey | None:
        """Return a random unit, or None if there is none.

        Units that guided recently or are in training are more likely.
        """
        keys = [key for key in self.model.units if key.version]
        recent_units = [
            key for key in (*self.batch_counts, *self.retrieved_units[-3:]) if key in keys
        ]
        return (
            self.rng.choice(recent_units if recent_units and self.rng.random() < 0.7 else keys)
            if keys
            else None
        )

    async def distil(self) -> None:
        shown = self.any_unit()
        note = self.rng.choice(list(ANSWERS) if shown else ["one", "two", "none", "bad"])
        episode = request(
            self.model.step, next(self.numbers), note=note, shown=(hit(*shown),) if shown else ()
        )
        await self.manager.submit(episode)
        await self.manager.drain()
        self.model.unflushed.clear()
        self.model.distil(episode.id, note, shown)
        self.model.prune()

    async def retrieve(self) -> None:
        (found,) = await self.manager.search([search(group=next(self.numbers))])
        assert bool(found) == bool(self.model.active)
        if found:
            assert self.model.active[found.use.uid] == found.use.version
            self.retrieved_units.append(UnitKey(found.use.uid, found.use.version))
            unit = self.model.units[self.retrieved_units[-1]]
            self.model.unflushed.setdefault(self.retrieved_units[-1], unit.last_returned)
            unit.last_returned = self.model.step

    async def credit(self) -> None:
        drawn = [self.any_unit() for _ in range(self.rng.randint(1, 3))]
        units, success = [unit for unit in drawn if unit], self.rng.random() < 0.5
        episode = f"episode {next(self.numbers)}"
        await self._credit(episode, units, success)
        self.model.credited_episodes[episode] = (units, success)
        self.model.credit(units, success)

    async def credit_again(self) -> None:
        if self.model.credited_episodes:
            episode = self.rng.choice(list(self.model.credited_episodes))
            await self._credit(episode, *self.model.credited_episodes[episode])

    async def _credit(self, episode: str, units: list[UnitKey], success: bool) -> None:
        uses = [ExperienceUse(*key, self.model.units[key].generation, "start") for key in units]
        await self.manager.credit(uses, success, episode=episode)

    async def take(self) -> None:
        n = self.rng.choice([1, 1, 2, 3, 4, 8])
        samples, batch = await self.manager.take_batch(n, self.model.step), self.model.batch(n)
        assert (samples is None) == (not batch)
        if samples:
            expected = self.model.samples(batch)
            assert list(expected) == [sample.id for sample in samples]
            found = [
                value
                for sample in samples
                for value in (sample.reward, sample.weight, sample.advantage)
            ]
            assert found == pytest.approx([value for row in expected.values() for value in row])
            self.batch_counts, self.ids = (
                {key: len(self.model.units[key].pending) for key in batch},
                list(expected),
            )
            self.batch_step = self.model.step

    async def mark(self) -> None:
        if self.batch_counts:
            await self.manager.mark_trained(self.ids, self.batch_step)
            self.model.train(self.batch_counts, self.batch_step)
            self.batch_counts = {}
            self.trainings += 1

    async def train(self) -> None:
        """Train as the trainer does, while episodes are credited."""
        await self.take()
        for _ in range(self.rng.randrange(3)):
            await self.credit()
        await self.mark()

    async def advance(self) -> None:
        self.model.step += self.rng.randint(1, 2)
        self.manager.advance(self.model.step)
        await self.manager.flush()
        self.model.unflushed.clear()
        self.model.prune()

    async def merge(self) -> None:
        if len(self.model.active) < 2:
            return
        ops: list[dict[str, Any]] = [
            {"op": "merge", "targets": [1, 2], "text": "Go west, then east."}
        ]
        first, second, *rest = self.model.active
        if rest and self.rng.random() < 0.5:
            ops.insert(0, {"op": "discard", "target": 3})
            del self.model.active[rest[0]]
        self.engine.merging = json.dumps(ops)
        await self.manager.merge()
        del self.model.active[first], self.model.active[second]
        merged = list(self.manager._bank.entries.values())[-1]
        assert merged.provenance.parents[0].startswith(f"{first}@")
        self.model.write(merged.unit, merged.provenance.generation)

    async def evict(self) -> None:
        """Evict an entry as `crl bank prune` does between two runs."""
        if self.model.active:
            uid = self.rng.choice(list(self.model.active))
            await self.manager.aclose()
            assert await evict(self.path, [UnitKey(uid, self.model.active.pop(uid))]) == 1
            await self.open()

    async def reopen(self) -> None:
        """Reopen the bank, which then offers taken but unmarked samples again."""
        await self.manager.aclose()
        await self.open()

    async def snapshot(self) -> None:
        self.snapshots[await self.manager.snapshot()] = self.model.snapshot()

    async def roll_back(self) -> None:
        if self.snapshots:
            seq = self.rng.choice(list(self.snapshots))
            await self.manager.rollback(seq)
            self.model, self.batch_counts = copy.deepcopy(self.snapshots[seq]), {}
            self.snapshots = {
                known: model for known, model in self.snapshots.items() if known <= seq
            }

    async def compare(self) -> None:
        model, store = self.model, self.manager._store
        pending = [
            (
                unit.pending.unit,
                unit.pending.generation,
                unit.pending.count,
                unit.pending.total,
                unit.c_train,
                unit.t_last,
            )
            for unit in await store.ready_units()
        ]
        expected = [
            (key, model.units[key], model.generations[model.units[key].generation])
            for key in model.waiting
        ]
        assert pending == [
            (k, u.generation, len(u.pending), sum(u.pending), g.trained, g.last)
            for k, u, g in expected
        ]
        rows = await store._database.rows("SELECT id, c_train, t_last FROM generations")
        assert {row["id"]: (row["c_train"], row["t_last"]) for row in rows} == {
            n: (g.trained, g.last) for n, g in model.generations.items()
        }
        rows = await store._database.rows(
            "SELECT uid, version, generation, credited, credit FROM units"
        )
        units = {UnitKey(uid, version): tuple(rest) for uid, version, *rest in rows}
        assert units == {
            key: (unit.generation, unit.credited, unit.credit) for key, unit in model.units.items()
        }
        entries = [
            (*entry.unit, entry.counters.credited, entry.counters.credit)
            for entry in self.manager._bank.entries.values()
        ]
        current = [
            (uid, version, model.units[UnitKey(uid, version)])
            for uid, version in model.active.items()
        ]
        assert entries == [
            (uid, version, unit.credited, unit.credit) for uid, version, unit in current
        ]


OPERATIONS = {
    "distil": 4, "retrieve": 4, "credit": 8, "credit_again": 1, "take": 2, "mark": 2, "train": 6,
    "advance": 3, "merge": 0.5, "evict": 0.5, "reopen": 0.5, "snapshot": 0.7, "roll_back": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 400))]
)
def test_every_reward_is_pending_or_trained_on_once(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=RAM_FOLDER if RAM_FOLDER.is_dir() else None) as folder:
        schedule = Schedule(Path(folder) / "bank.sqlite", seed)
        asyncio.run(schedule.play(150))
    assert schedule.trainings
