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
from extractors import RETURN, Scribe, add, hit, manager, request, search, update

from crl.manager import CreditSettings, ExperienceManager, ManagerSettings, RetrievalSettings
from crl.manager.records import UnitKey
from crl.manager.upkeep import evict
from crl.types import ExperienceUse

COOLDOWN, ALPHA, KEPT, MALFORMED = 2, 0.5, 2, -1.0
SETTINGS = ManagerSettings(
    keep_steps=KEPT, retrieval=RetrievalSettings(margin=2.0, min_similarity=-1.0),
    credit=CreditSettings(COOLDOWN, ALPHA, MALFORMED),
)  # fmt: skip

ANSWERS = {
    "one": add("Go west."),
    "two": add("Go west.", "Go east."),
    "better": update("Go southwest."),
    "both": f"[{update('Go southwest.')[1:-1]}, {add('Go east.')[1:-1]}]",
    "none": RETURN,
    "bad": "Hm.",
}

MEMORY = Path("/dev/shm")
"""Folder for thousands of banks that need not wait for a disk."""

# ── the model ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Unit:
    generation: str
    credited: int = 0
    credit: float = 0.0
    pending: list[float] = field(default_factory=list)
    returned: int | None = None
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
    told: dict[str, tuple[list[UnitKey], bool]] = field(default_factory=dict)
    """Uses and outcome of each credited episode."""

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

    def tell(self, units: list[UnitKey], success: bool) -> None:
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

    def may_earn(self, key: UnitKey) -> bool:
        unit = self.units[key]
        recent = unit.returned is not None and unit.returned >= self.step - KEPT
        return bool(unit.pending) or self.active.get(key.uid) == key.version or recent


# ── the schedules ─────────────────────────────────────────────────────────────────────────────────


class Schedule:
    """Schedule that draws operations by the weights of `OPERATIONS`.

    It applies each operation to the bank and to the model, and then compares them.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.engine, self.model = Scribe(ANSWERS), Model()
        self.numbers = itertools.count()
        self.guiding: list[UnitKey] = []
        self.offered: dict[UnitKey, int] = {}
        self.ids: list[str] = []
        self.taken_at = self.trainings = 0
        self.snapshots: dict[int, Model] = {}

    async def play(self, operations: int) -> None:
        await self.open()
        for name in self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=operations):
            await getattr(self, name)()
            await self.compare()
        await self.made.aclose()

    async def open(self) -> None:
        self.made: ExperienceManager = await manager(self.path, self.engine, SETTINGS)
        self.made.advance(self.model.step)
        self.offered = {}

    def any_unit(self) -> UnitKey | None:
        """Return a random unit, or None if there is none.

        Units that guided recently or are in training are more likely.
        """
        keys = [key for key in self.model.units if key.version]
        busy = [key for key in (*self.offered, *self.guiding[-3:]) if key in keys]
        return self.rng.choice(busy if busy and self.rng.random() < 0.7 else keys) if keys else None

    async def distil(self) -> None:
        shown = self.any_unit()
        note = self.rng.choice(list(ANSWERS) if shown else ["one", "two", "none", "bad"])
        episode = request(
            self.model.step, next(self.numbers), note=note, shown=(hit(*shown),) if shown else ()
        )
        await self.made.submit(episode)
        await self.made.drain()
        self.model.distil(episode.id, note, shown)
        self.model.prune()

    async def retrieve(self) -> None:
        (found,) = await self.made.search([search(group=next(self.numbers))])
        assert bool(found) == bool(self.model.active)
        if found:
            assert self.model.active[found.use.uid] == found.use.version
            self.guiding.append(UnitKey(found.use.uid, found.use.version))
            self.model.units[self.guiding[-1]].returned = self.model.step

    async def credit(self) -> None:
        drawn = [self.any_unit() for _ in range(self.rng.randint(1, 3))]
        units, success = [unit for unit in drawn if unit], self.rng.random() < 0.5
        episode = f"episode {next(self.numbers)}"
        await self._tell(episode, units, success)
        self.model.told[episode] = (units, success)
        self.model.tell(units, success)

    async def credit_again(self) -> None:
        if self.model.told:
            episode = self.rng.choice(list(self.model.told))
            await self._tell(episode, *self.model.told[episode])

    async def _tell(self, episode: str, units: list[UnitKey], success: bool) -> None:
        uses = [ExperienceUse(*key, self.model.units[key].generation, "start") for key in units]
        await self.made.credit(uses, success, episode=episode)

    async def take(self) -> None:
        n = self.rng.choice([1, 1, 2, 3, 4, 8])
        samples, batch = await self.made.take_batch(n, self.model.step), self.model.batch(n)
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
            self.offered, self.ids = (
                {key: len(self.model.units[key].pending) for key in batch},
                list(expected),
            )
            self.taken_at = self.model.step

    async def mark(self) -> None:
        if self.offered:
            await self.made.mark_trained(self.ids, self.taken_at)
            self.model.train(self.offered, self.taken_at)
            self.offered = {}
            self.trainings += 1

    async def train(self) -> None:
        """Train as the trainer does, while episodes are credited."""
        await self.take()
        for _ in range(self.rng.randrange(3)):
            await self.credit()
        await self.mark()

    async def advance(self) -> None:
        self.model.step += self.rng.randint(1, 2)
        self.made.advance(self.model.step)
        await self.made.flush()
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
        await self.made.merge()
        del self.model.active[first], self.model.active[second]
        made = list(self.made._bank.entries.values())[-1]
        assert made.parents[0].startswith(f"{first}@")
        self.model.write(made.unit, made.generation)

    async def evict(self) -> None:
        """Evict an entry as `crl bank prune` does between two runs."""
        if self.model.active:
            uid = self.rng.choice(list(self.model.active))
            await self.made.aclose()
            assert await evict(self.path, [UnitKey(uid, self.model.active.pop(uid))]) == 1
            await self.open()

    async def reopen(self) -> None:
        """Reopen the bank, which then offers taken but unmarked samples again."""
        await self.made.aclose()
        await self.open()

    async def snapshot(self) -> None:
        self.snapshots[await self.made.snapshot()] = copy.deepcopy(self.model)

    async def go_back(self) -> None:
        if self.snapshots:
            seq = self.rng.choice(list(self.snapshots))
            await self.made.rollback(seq)
            self.model, self.offered = copy.deepcopy(self.snapshots[seq]), {}
            self.snapshots = {
                known: model for known, model in self.snapshots.items() if known <= seq
            }

    async def compare(self) -> None:
        model, store = self.model, self.made._store
        pending = [
            (
                unit.pending.unit,
                unit.pending.generation,
                unit.pending.count,
                unit.pending.total,
                unit.c_train,
                unit.t_last,
            )
            for unit in await store.ready()
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
            (*entry.unit, entry.credited, entry.credit)
            for entry in self.made._bank.entries.values()
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
    "advance": 3, "merge": 0.5, "evict": 0.5, "reopen": 0.5, "snapshot": 0.7, "go_back": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 400))]
)
def test_every_reward_is_trained_on_once_or_pending_whatever_happens_between(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        schedule = Schedule(Path(folder) / "bank.sqlite", seed)
        asyncio.run(schedule.play(150))
    assert schedule.trainings
