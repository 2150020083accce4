"""The ExperienceManager: between the actor's episodes, the extractor that distils them, and the bank.

The cast: `Store` holds everything on disk and alone decides what has happened. `Bank` is its copy in memory, which searches read;
`Searcher` gathers them, and lets changes in between. `DistilQueue` keeps episodes until `Distiller` has asked the extractor about
them; `Merger` asks it about the bank, `Refiner` for an agent. `credit` chooses what the extractor is trained on. The manager wires
them and keeps the clock; engine and embedder belong to the caller. Searches wait for the embedder alone: never for a model, a write
or the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from crl.errors import EngineError, RolloutError, TransientError
from crl.manager.bank import Bank, Vector
from crl.manager.credit import ExtractorSample, batch_samples, choose_batch
from crl.manager.database import copy_database, remove, to_its_end
from crl.manager.distil import Distiller
from crl.manager.duplicates import DuplicateFilter
from crl.manager.embed import Keys
from crl.manager.extractor import Extractor
from crl.manager.merge import Chunker, Merger, MergeStats
from crl.manager.queue import DistilQueue, Outcome
from crl.manager.records import (
    Applied,
    ApplyRules,
    Credit,
    Distilled,
    DistilRequest,
    Entry,
    GroupSuccess,
    PendingUnit,
    RolledBack,
    Stamp,
    UnitKey,
)
from crl.manager.refine import Refiner
from crl.manager.searching import Searcher
from crl.manager.settings import ManagerSettings, Progress, Prompts, unseen
from crl.manager.store import Store
from crl.protocols import Embedder, Engine, Hit, Question, SearchRequest
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Experience, ExperienceUse, lift_order

T = TypeVar("T")

EMBEDDED = 1024
"""Entries that are embedded in one call when a bank is embedded again."""

TIMES = 4096
"""Durations of a kind that are kept for whoever takes them."""


class ExperienceManager:
    """Made by `open`. Distillation runs in `run` (in the background) or in `drain` (at step boundaries), or both.

    Deterministic runs call `drain` alone: requests are applied in (step, group, member) order, whatever their timing.
    Its methods raise `StoreError` when the bank's file fails.
    """

    def __init__(
        self, store: Store, extractor: Extractor, prompts: Prompts, engine: Engine, embedder: Embedder, settings: ManagerSettings,
        seed: int, on_distilled: Callable[[Distilled], None] | None, progress: Progress,
    ) -> None:  # fmt: skip
        self._store, self._engine, self._embedder = store, engine, embedder
        self._settings, self._seed, self._on_distilled = settings, seed, on_distilled
        self._progress = progress
        self._keys = Keys(embedder, settings.distil.key_text_weight)
        votes = settings.vote_out is not None
        self._distiller = Distiller(
            extractor, self._keys, prompts.distil, settings.distil.limits, votes=votes
        )
        self._queue = DistilQueue(store, settings, self._stamp, self._distil, self._apply)
        self._merger = Merger(extractor, self._keys, prompts.merge, settings.distil.limits)
        self._merging = False
        self._merges_skipped = 0
        self._refiner = (
            Refiner(extractor, prompts.refine, settings.distil.limits) if prompts.refine else None
        )
        self._refines_failed = 0
        self._sampled_tokens = 0
        self._begin_empty()
        self._step = 0
        self._rules = ApplyRules(
            settings.credit.malformed_reward,
            settings.cap,
            settings.size,
            settings.evict,
            settings.vote_out,
        )
        self._places = asyncio.Semaphore(settings.concurrency)
        self._comparing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._offered: dict[str, PendingUnit] = {}
        self._offered_by: dict[str, str] = {}
        self._put_off: dict[UnitKey, tuple[int, int]] = {}
        """Units that were put off: how often, and at which step for the last time."""
        self._search_times: deque[float] = deque(maxlen=TIMES)
        self._refine_times: deque[float] = deque(maxlen=TIMES)

    @classmethod
    async def open(
        cls, path: Path, engine: Engine, embedder: Embedder, renderer: ChatRenderer, prompts: Prompts,
        settings: ManagerSettings, *, seed: int, on_distilled: Callable[[Distilled], None] | None = None,
        progress: Progress = unseen,
    ) -> ExperienceManager:  # fmt: skip
        """Opens or makes the bank at `path`; what was acknowledged and not yet distilled is queued again.

        engine: the extractor's; renderer: of its chat template; seed: root of all draws; on_distilled: told what became of a request,
        after its ops were applied. What is over the bounds of the settings is evicted. A bank that another embedder wrote, or with other
        keys, is embedded again, which `progress` shows. Raises `StoreError`.
        """
        store = await Store.open(path)
        try:
            distil = settings.distil
            extractor = Extractor(
                engine,
                renderer,
                max_tokens=distil.max_tokens,
                temperature=distil.temperature,
                seed=seed,
                threaded=settings.threaded,
            )
            manager = cls(
                store, extractor, prompts, engine, embedder, settings, seed, on_distilled, progress
            )
            await manager._load()
        except BaseException:
            await store.aclose()
            raise
        return manager

    def _begin_empty(self) -> None:
        retrieval = self._settings.retrieval
        self._bank = Bank(self._embedder.dim, self._settings.scope, retrieval, self._seed)
        self._searcher = Searcher(self._bank, self._embedder, retrieval)
        least, with_goals = (
            self._settings.duplicate,
            self._settings.distil.key_text_weight is not None,
        )
        self._duplicates = (
            None
            if least is None
            else DuplicateFilter(self._bank, self._embedder, least, with_goals=with_goals)
        )

    async def _load(self) -> None:
        """Fills the empty bank from the store, as far as there is room."""
        await self._store.fit(self._rules)
        entries = await self._store.entries()
        vectors = [vector for _, vector in entries]
        if await self._store.embedder() != self._keys.name or (
            vectors and len(vectors[0]) != self._embedder.dim
        ):
            vectors = await self._embed_again([entry for entry, _ in entries])
        await self._searcher.change(
            [(entry, vector) for (entry, _), vector in zip(entries, vectors, strict=True)]
        )

    async def _embed_again(self, entries: Sequence[Entry]) -> list[Vector]:
        vectors: list[Vector] = []
        if entries:
            with self._progress(len(entries)) as advance:
                for start in range(0, len(entries), EMBEDDED):
                    part = entries[start : start + EMBEDDED]
                    vectors += list(
                        await self._keys.embed([(entry.goal, entry.text) for entry in part])
                    )
                    advance(len(part))
        await self._store.set_vectors(
            self._keys.name,
            {entry.uid: vector for entry, vector in zip(entries, vectors, strict=True)},
        )
        return vectors

    async def aclose(self) -> None:
        """Writes what is still in memory and closes the bank; engine and embedder stay open. Closing it again does nothing."""
        if not self._ending:
            self._ending = asyncio.create_task(self._end())
        await to_its_end(self._ending)

    async def _end(self) -> None:
        async with (
            AsyncExitStack() as stack
        ):  # each of them, the last one first, whatever becomes of the others
            stack.push_async_callback(self._store.aclose)
            stack.push_async_callback(self._write_counts)
            stack.push_async_callback(self._searcher.aclose)
            while self._changes:
                await asyncio.wait(set(self._changes))

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Completed actor steps: what recency, cooldown and the log count in."""
        return self._step

    def advance(self, step: int) -> None:
        """`step` actor steps are completed now. Raises `ValueError` when that is fewer than before."""
        if step < self._step:
            raise ValueError(f"{self._step} steps were completed already, not {step}")
        self._step = step

    def _stamp(self) -> Stamp:
        return Stamp(self._step, self._engine.version)

    # ── retrieval ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def search(
        self, requests: Sequence[SearchRequest], *, counted: bool = True
    ) -> list[Hit | None]:
        """`Retriever`: at most one experience per request, picked in request order and counted at once.

        counted = False (evaluations): no counter moves and nothing is remembered.
        """
        start = time.perf_counter()
        hits = await self._searcher.search(requests, self._step, counted=counted)
        if counted:
            self._search_times.append(time.perf_counter() - start)
        return hits

    def take_search_times(self) -> list[float]:
        """Seconds that each counted `search` took since the last call of this, the embedder's time included; the last TIMES."""
        times = list(self._search_times)
        self._search_times.clear()
        return times

    async def refine(self, question: Question, hit: Hit, *, counted: bool = True) -> Hit:
        """`Retriever`: the extractor's answer to the question; durable then, and its use is of the generation that wrote it.

        `hit` as it is where nothing is to be fitted, where the answer cannot be used, where the extractor fails, and past `ask_deadline`.
        counted = False (evaluations): nothing is kept, nothing is counted. Raises `EngineError` when the engine is gone.
        """
        if self._refiner is None:
            return hit
        start = time.perf_counter()
        try:
            # Beside the places of `concurrency`: an agent waits, and there are no more of these than episodes in flight.
            refined = await self._served(
                partial(self._refiner.refine, question, hit),
                self._settings.ask_deadline,
                "deadline",
            )
        except RolloutError:
            self._refines_failed += counted
            refined = None
        if refined and counted:
            self._sampled_tokens += len(refined.generation.completion.ids)
            await self._whole(
                self._store.refine(
                    refined, Stamp(self._step, refined.generation.extractor), self._rules
                )
            )
        if counted:
            self._refine_times.append(time.perf_counter() - start)
        if refined is None or refined.text is None:
            return hit
        return replace(
            hit,
            text=refined.text,
            use=replace(hit.use, generation=refined.generation.id, how="ask"),
        )

    def take_refine_times(self) -> list[float]:
        """Seconds that each counted `refine` took since the last call of this; the last TIMES."""
        times = list(self._refine_times)
        self._refine_times.clear()
        return times

    # ── distillation ────────────────────────────────────────────────────────────────────────────────────────────────

    async def submit(self, request: DistilRequest) -> bool:
        """Queues an episode for distillation: durable when it returns True. A repeat of an id changes nothing.

        False: refused, because the queue is full and the settings say so; nothing was stored, and the refusal is counted. Raises
        `UnicodeEncodeError`, and stores nothing, where its texts hold lone surrogates.
        """
        return await self._queue.submit(request)

    async def run(self) -> None:
        """Distils requests as they come, until it is cancelled; lives in the caller's task group, once.

        An engine that is gone ends it, and whatever else but a `RolloutError` ends a distillation. What it had in work is pending again.
        """
        await self._queue.run()

    async def drain(self) -> None:
        """Returns when every request submitted before is distilled and applied, those of this call in request order.

        Flushes at its end.
        """
        await self._queue.drain()
        await self.flush()

    async def flush(self) -> None:
        """Writes retrieval counts down and drops generations that can earn nothing any more; waits for no distillation.

        Searches do not wait for the disk: a crash forgets the counts since the last flush. Raises what went wrong in building an index.
        """
        before = self._step - self._settings.keep_steps
        spent = await self._store.spent(before)
        if self._changes:  # until these are done, searches find what they evict or update, and its count is to be written
            await asyncio.wait(set(self._changes))
        await self._write_counts()
        await self._store.prune(spent, before)
        self._searcher.check()

    async def _write_counts(self) -> None:
        if counts := self._bank.take_counts():
            await self._store.retrieved(counts, self._stamp())

    async def _distil(self, request: DistilRequest) -> Distilled:
        async def ask() -> Distilled:
            distilled = await self._distiller.distil(request)
            self._sampled_tokens += len(distilled.generation.completion.ids)
            if self._duplicates:
                await self._duplicates.prepare(distilled)
            return distilled

        return await self._attempt(ask)

    async def _attempt(self, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._places:
            return await self._served(ask, self._settings.lease, "lease")

    async def _served(
        self, ask: Callable[[], Awaitable[T]], seconds: float | None, bound: str
    ) -> T:
        """Raises `TransientError` also when it takes longer than `seconds`, and when the engine failed and serves again."""
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                try:
                    return await ask()
                except EngineError as error:
                    await self._engine.health()
                    raise TransientError("engine", str(error)) from error
        except TimeoutError as error:  # the deadline's, or the engine's own
            said = (
                f"no answer within the {bound} of {seconds:g} s"
                if deadline.expired()
                else f"it timed out ({error})"
            )
            raise TransientError("engine", said) from error

    async def _apply(self, request: DistilRequest, outcome: Outcome) -> None:
        async def change() -> None:
            if isinstance(outcome, str):
                await self._store.bury(request, outcome, self._stamp())
                await self._queue.count_settled()
                return
            written = await self._write(outcome)
            await self._queue.count_settled()
            if self._on_distilled:
                self._on_distilled(written)

        await self._whole(change())

    async def _write(self, distilled: Distilled) -> Distilled:
        """Applies an answer, without what the bank says already; that is looked for by one answer after the other, or of two that say the
        same at the same time both would get in."""
        async with self._comparing if self._duplicates else nullcontext():
            distilled = self._duplicates.novel(distilled) if self._duplicates else distilled
            applied = await self._store.apply(
                distilled, Stamp(self._step, distilled.generation.extractor), self._rules
            )
            await self._show(applied)
        for vote in applied.votes:
            self._bank.vote(vote.unit, vote.value)
        return distilled

    async def _show(self, applied: Applied) -> None:
        """What was written can be found from now on, and what went no more."""
        await self._searcher.change(
            [(entry, write.vector) for entry, write in applied.changed], applied.evicted
        )

    async def _whole(self, change: Coroutine[Any, Any, None]) -> None:
        """Runs a change of store and memory to its end, also when the caller is cancelled."""
        await asyncio.shield(self._begun(change))

    def _begun(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # it counts as seen when its caller was cancelled meanwhile

    # ── merge ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def merge(self) -> MergeStats | None:
        """One pass of the periodic merge over the entries that are active now; searches and distillation go on meanwhile.

        Entries are merged with those that the same searches may find: in a shared bank with all
        others (CRL §3.2.1), else with those of their task, and with goals in the keys only with
        those of the same goal. A merged entry has the task and the goal of its first source.
        Return None where another merge is under way: nothing was done, and that is counted.
        Raises `EngineError`.
        """
        if self._merging:
            self._merges_skipped += 1
            return None
        self._merging = True
        try:
            stats = MergeStats()
            places: dict[tuple[str, str], list[Entry]] = {}
            for entry in self._bank.entries.values():
                task = "" if self._settings.scope == "shared" else entry.task
                goal = "" if self._settings.distil.key_text_weight is None else entry.goal
                places.setdefault((task, goal), []).append(entry)
            for entries in places.values():
                if len(entries) > 1:
                    await self._merge_place(entries, stats)
        finally:
            self._merging = False
        return stats

    async def _merge_place(self, entries: Sequence[Entry], stats: MergeStats) -> None:
        costs: dict[UnitKey, int] = {}
        for entry in entries:
            costs[entry.unit] = self._merger.cost(entry)
            await asyncio.sleep(0)  # counting tokens takes its time, and a bank may be large
        chunker = Chunker(
            entries,
            self._settings.merge_tokens,
            lambda e: costs.get(e.unit) or self._merger.cost(e),
        )
        survivors: list[Entry] = []
        while chunk := chunker.next(self._still_current(survivors)):
            survivors = self._still_current(chunk)
            if len(survivors) > 1:
                survivors = await self._merge_chunk(survivors, stats)

    def _still_current(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if self._bank.entries.get(entry.uid) is entry]

    async def _merge_chunk(self, chunk: Sequence[Entry], stats: MergeStats) -> list[Entry]:
        """What the next chunk may meet: what this one made, then what it was shown; after a failure nothing, or that would fail too."""
        stats.chunks += 1
        try:
            # So a repeat of one that was not written samples the same, and no entry of another bank, taken in, has the name of its own.
            units = derive_seed(0, "chunk", *(str(entry.unit) for entry in chunk))
            name = f"merge/{await self._store.merges()}-{units % 2**32:08x}"
            merged = await self._attempt(partial(self._merger.merge, name, chunk))
        except RolloutError:
            stats.failed += 1
            return []
        self._sampled_tokens += len(merged.generation.completion.ids)
        stats.failed += merged.malformed
        made: list[Entry] = []

        async def change() -> None:
            applied = await self._store.merge(
                merged, Stamp(self._step, merged.generation.extractor), self._rules
            )
            await self._show(applied)
            made.extend(entry for entry, _ in applied.changed)
            stats.removed += len(applied.evicted)

        await self._whole(change())
        stats.made += len(made)
        return made + list(chunk)

    # ── credit and training ─────────────────────────────────────────────────────────────────────────────────────────

    async def credit(
        self,
        uses: Sequence[ExperienceUse],
        success: bool,
        *,
        episode: str,
        expected: float | None = 0.0,
    ) -> None:
        """r(m) = +1 to every experience that guided a successful episode, −1 otherwise (CRL §2.3); r̃(m) where it was judged (eq. 8).

        uses: the rejected ones too; a verdict changes what the extractor is trained on, and not the record (won of credited), and so does
        `expected`: r of such an episode without experience, in [−1, 1]; None = not known, and then what guided is not trained on.
        episode: the id of its request; a second call for it changes nothing. Episodes with an error are not credited.
        """
        given = [Credit.of(use, success, expected) for use in uses]

        async def change() -> None:
            for credit in await self._store.credit(episode, given, self._stamp()):
                if credit.outcome is not None:
                    self._bank.credit(credit.unit, credit.outcome)

        await self._whole(change())

    async def record_lifts(self, found: Mapping[str, Sequence[GroupSuccess]]) -> None:
        """Add what groups say of units to their lifts, which nothing is trained on.

        found: by the group's id, success with each unit and without any. A second call for a group
        changes nothing.
        """

        async def change() -> None:
            for one in await self._store.record_lifts(found, self._stamp()):
                self._bank.lift(one.unit, one.lift)

        if found:
            await self._whole(change())

    async def take_batch(self, n: int, step: int) -> list[ExtractorSample] | None:
        """The samples of the `n` units that became ready first and are not in cooldown; None when there are not so many.

        step: completed actor steps, t of eq. 7. The units stay pending until `mark_trained`; a batch
        that was not marked is offered again. Units that were put off at this step wait; at later ones
        they come last. Of the generations without an op, of which a batch takes few, the last `n` wait;
        older ones are dropped, and counted as `dropped/too many malformed`. Raises `ValueError` for n < 1.
        """
        if n < 1:
            raise ValueError(f"a batch holds at least one unit, not {n}")
        ready = await self._store.ready()
        if surplus := [unit.pending for unit in ready if unit.pending.malformed][:-n]:
            await self._store.drop_malformed(surplus, self._stamp())
            ready = await self._store.ready()
        never = (0, -1)
        ready = [unit for unit in ready if self._put_off.get(unit.pending.unit, never)[1] < step]
        ready.sort(key=lambda unit: self._put_off.get(unit.pending.unit, never)[0])
        batch = choose_batch(ready, n, step, self._settings.credit)
        if batch is None:
            return None
        generations = await self._store.generations(unit.pending.generation for unit in batch)
        samples = batch_samples(batch, generations, step, self._settings.credit)
        self._offered = {str(unit.pending.unit): unit.pending for unit in batch}
        self._offered_by = {sample.id: sample.generation for sample in samples}
        return samples

    async def mark_trained(self, ids: Sequence[str], step: int) -> None:
        """Samples of the last batch were trained on at `step`: their rewards are spent and their generations' counters move.

        A generation counts once, however many of its samples are among them. Raises `ValueError` for an id that the last
        batch does not hold.
        """
        ids = list(dict.fromkeys(ids))
        if unknown := [name for name in ids if name not in self._offered_by]:
            raise ValueError(f"the last batch holds no {unknown}")
        # No more on offer from here on: a caller that is cancelled, or a second one, must not spend the rewards again.
        trained = [self._offered.pop(name) for name in ids if name in self._offered]
        generations = [self._offered_by.pop(name) for name in ids]
        for pending in trained:
            self._put_off.pop(pending.unit, None)
        await self._store.mark_trained(trained, generations, step, self._stamp())

    def put_off(self, step: int) -> None:
        """Offer the units of the last batch no more at `step`: it could not be trained on.

        Their rewards stay pending and no counter moves. At later steps units that were put off less
        often come first, so that one poisoned unit does not hold up those that shared its batch. This
        is kept in memory alone: a process that opens the bank again starts afresh.
        """
        for pending in self._offered.values():
            times, _ = self._put_off.get(pending.unit, (0, -1))
            self._put_off[pending.unit] = (times + 1, step)
        self._offered.clear()
        self._offered_by.clear()

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, kept: Collection[int] | None = None) -> int:
        """The log's sequence number that `rollback` takes to bring the bank back to what it is now; for a checkpoint's manifest.

        kept: of those before, the ones that somebody may go back to, None = all; the others are forgotten.
        """
        await self._write_counts()
        return await self._store.snapshot(self._stamp(), kept)

    async def rollback(self, seq: int) -> RolledBack:
        """The bank and its clock are what they were at the snapshot `seq`; what was done since is kept in the archive alone.

        Requests that were open then are pending, those submitted since are unknown, as they were. For the start of a run: raises
        `RuntimeError` while `run` or `drain` has requests or `merge` a chunk in work, `StoreError` when there is no such snapshot.
        """
        if self._queue.busy or self._merging or self._changes:
            raise RuntimeError("a bank is not rolled back while requests or a merge are in work")
        return await to_its_end(self._begun(self._go_back(seq)))

    async def _go_back(self, seq: int) -> RolledBack:
        await self._write_counts()
        done = await self._store.rollback(seq)
        before = self._searcher
        self._step = done.step
        self._begin_empty()
        self._offered.clear()
        self._offered_by.clear()
        self._put_off.clear()
        try:
            await self._load()
            self._queue.wake()
        finally:
            await before.aclose()
        return done

    # ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def stats(self) -> dict[str, int]:
        """Figures by name: bank/size, bank/size/TASK, queue/STATE, queue/refused, queue/retried, ops/KIND, dropped/REASON, …

        refine/failed: questions that the extractor did not answer in time, or at all.
        total/sampled_tokens/extractor: tokens of its answers since the bank was opened; evaluations
        are not included.
        """
        sizes: dict[str, int] = {"bank/size": len(self._bank.entries)}
        for entry in self._bank.entries.values():
            sizes[f"bank/size/{entry.task}"] = sizes.get(f"bank/size/{entry.task}", 0) + 1
        figures = {
            "queue/refused": self._queue.refused,
            "queue/retried": self._queue.retried,
            "merge/skipped": self._merges_skipped,
        }
        figures["total/sampled_tokens/extractor"] = self._sampled_tokens
        if self._refiner:
            figures["refine/failed"] = self._refines_failed
        return {**sizes, **await self._store.counts(), **figures}

    def latest(self, n: int) -> list[Experience]:
        """At most `n` active entries as they are now: those that guided an episode last, then the last written."""
        order = sorted(
            reversed(self._bank.entries.values()),
            key=lambda entry: -(entry.last_returned_step or 0),
        )
        return [entry.experience for entry in order[:n]]

    def best(self, n: int) -> list[Experience]:
        """Return at most `n` active entries that guided episodes, in `lift_order`.

        Among equals those of the highest Σ r come first, then the last written.
        """
        guiding = [entry for entry in reversed(self._bank.entries.values()) if entry.credited]
        entries = sorted(guiding, key=lambda entry: (lift_order(entry.lift), -entry.credit))
        return [entry.experience for entry in entries[:n]]

    async def export_copy(self, path: Path) -> None:
        """Copies the bank as it is now to a file of its own, while it is in use, for another run or a scratch copy.

        The copy begins anew: it has the entries with their lineage, credit and lift, and neither the queue nor pending rewards. Raises
        `StoreError`, also when `path` exists.
        """
        await self._write_counts()
        await self._store.backup(path)
        await _begin_anew(path)

    @staticmethod
    async def start_from(source: Path, path: Path) -> None:
        """Makes a bank at `path` that begins anew with the entries of the bank at `source`, which stays as it is.

        Raises `StoreError`, also when `source` is no bank or `path` exists.
        """
        await copy_database(source, path)
        await _begin_anew(path)


async def _begin_anew(path: Path) -> None:
    """Of a fresh copy, which is removed when that does not succeed: it would pass for the bank that it was copied from."""
    try:
        store = await Store.open(path)
        try:
            await store.begin_anew()
        finally:
            await store.aclose()
    except BaseException:
        remove(path)
        raise
