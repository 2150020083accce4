"""Experience manager: the link between the actor's episodes, the extractor and the bank.

Parts:

* `Store` holds the bank on disk. It is the source of truth.
* `Bank` is the copy of the active entries in memory. Searches read it.
* `Searcher` groups searches into batches and applies changes to the `Bank` between them.
* `DistilQueue` keeps submitted episodes until `Distiller` has asked the extractor about them.
* `Merger` asks the extractor about chunks of the bank.
* `Refiner` asks the extractor on behalf of an agent.
* `credit` chooses the samples that the extractor is trained on.

`ExperienceManager` connects these parts and holds the clock (completed actor steps). The engine and
the embedder belong to the caller. Apart from other searches and changes in memory, a search waits
only for the embedder. It never waits for the extractor, a write or the disk.
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

from crl.config.schema import GOAL_SCOPES
from crl.errors import EngineError, RolloutError, TransientError
from crl.manager.calls import CallClock
from crl.manager.credit import ExtractorSample, ReadyUnit, batch_samples, choose_batch
from crl.manager.distillation.distil import Distiller
from crl.manager.distillation.extractor import Extractor
from crl.manager.distillation.merge import Chunker, Merger
from crl.manager.distillation.queue import DistilQueue, Outcome
from crl.manager.distillation.refine import Refiner
from crl.manager.keys import KeyEmbedder
from crl.manager.records import (
    Applied,
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
from crl.manager.retrieval.duplicates import DuplicateFilter
from crl.manager.retrieval.entries import Bank, Vector, start_hit
from crl.manager.retrieval.searching import Searcher
from crl.manager.settings import ManagerSettings, Progress, Prompts, no_progress
from crl.manager.storage.database import copy_database, delete_bank, finish_then_cancel
from crl.manager.storage.store import Store
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Embedder, Engine, Hit, Question, SearchRequest, State
from crl.seeds import derive_seed
from crl.types import Experience, ExperienceUse, Place, Segment, Task, lift_order

T = TypeVar("T")

EMBED_BATCH = 1024
"""Maximum number of entries per embedder call when a whole bank is embedded again."""

MAX_DURATIONS = 4096
"""Maximum number of stored durations of each kind. Older durations are dropped."""


class ExperienceManager:
    """Manager of the experience bank. Create it with `open`.

    Distillation runs in the background (`run`), at step boundaries (`drain`), or both. A
    deterministic run uses only `drain`, which applies requests in (step, group, member) order,
    independent of their timing. The methods raise `StoreError` if the bank's file fails.
    """

    def __init__(
        self, store: Store, extractor: Extractor, prompts: Prompts, embedder: Embedder,
        settings: ManagerSettings, seed: int, on_distilled: Callable[[Distilled], None] | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._store, self._engine, self._embedder = store, extractor.engine, embedder
        self._settings, self._seed, self._on_distilled = settings, seed, on_distilled
        self._progress = progress
        weight = settings.bank.key_text_weight
        self._keys = KeyEmbedder(embedder, weight, state=prompts.state)
        self._distiller = Distiller(
            extractor,
            self._keys,
            prompts.distil,
            votes=settings.asks_for_votes,
            notes=prompts.notes,
            read_note=prompts.read_note,
            guidance=prompts.guidance,
        )
        self._extractor = extractor
        self.calls = CallClock()
        """Clock of distillations and of the calls of `ask`."""
        self._queue = DistilQueue(store, settings, self._stamp, self._distil, self._settle)
        self._merger = Merger(extractor, self._keys, prompts.merge)
        self._merging = False
        self._merges_skipped = 0
        self._refiner = Refiner(extractor, prompts.refine) if prompts.refine else None
        self._refines_failed = 0
        self._sampled_tokens = 0
        self._create_empty_bank()
        self._step = 0
        self._rules = replace(settings.rules, distinct_texts=prompts.state is not None)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._duplicate_lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._closing_task: asyncio.Task[None] | None = None
        self._awaited: dict[str, asyncio.Future[list[Hit]]] = {}
        """Calls of `distil` that wait, by the id of their request."""
        self._batch_units: dict[str, PendingUnit] = {}
        """Units of the last batch that are not trained on yet, by sample id."""
        self._batch_generations: dict[str, str] = {}
        """Generations of the last batch that are not trained on yet, by sample id."""
        self._postponed: dict[UnitKey, tuple[int, int]] = {}
        """Postponed units: number of postponements, and step of the last one."""
        self._search_times: deque[float] = deque(maxlen=MAX_DURATIONS)
        self._refine_times: deque[float] = deque(maxlen=MAX_DURATIONS)

    @classmethod
    async def open(
        cls, path: Path, engine: Engine, embedder: Embedder, renderer: ChatRenderer,
        prompts: Prompts, settings: ManagerSettings, *, seed: int,
        on_distilled: Callable[[Distilled], None] | None = None, progress: Progress = no_progress,
    ) -> ExperienceManager:  # fmt: skip
        """Open or create the bank at `path`. Episodes that are not distilled yet are queued again.

        * `engine`: the extractor's engine.
        * `renderer`: renderer of the extractor's chat template.
        * `seed`: root seed of all random draws.
        * `on_distilled`: called with the result of a request after its operations are applied. It
          is not called for a dead request.
        * `progress`: shows the progress if the bank is embedded again.

        Entries over the bounds in `settings` are evicted. A bank whose vectors were made by another
        embedder or with other keys is embedded again.

        Raise `StoreError` if the bank cannot be opened.
        """
        store = await Store.open(path)
        try:
            extractor = Extractor(
                engine,
                renderer,
                settings.extractor,
                seed=seed,
                threaded=not settings.deterministic,
            )
            manager = cls(
                store, extractor, prompts, embedder, settings, seed, on_distilled, progress
            )
            await manager._load()
        except BaseException:
            await store.aclose()
            raise
        return manager

    def _create_empty_bank(self) -> None:
        settings, embedder = self._settings, self._embedder
        self._bank = Bank(
            embedder.dim, settings.bank.scope, settings.retrieval, self._seed,
            exact=settings.deterministic,
        )  # fmt: skip
        self._searcher = Searcher(self._bank, embedder, settings.retrieval)
        min_cosine = settings.bank.duplicate_similarity
        with_goals = settings.goals_in_keys or self._keys.state is not None
        self._duplicates = (
            None
            if min_cosine is None
            else DuplicateFilter(self._bank, embedder, min_cosine, with_goals=with_goals)
        )

    async def _load(self) -> None:
        """Evict entries over the bounds, then fill the empty bank in memory from the store.

        The entries are embedded again if the stored vectors were made with other keys or have
        another dimension.
        """
        await self._store.evict_to_bounds(self._rules)
        entries = await self._store.entries()
        vectors = [vector for _, vector in entries]
        before = await self._store.embedder()
        if before != self._keys.name or (vectors and len(vectors[0]) != self._embedder.dim):
            change = f"{before} → {self._keys.name}" if before else ""
            vectors = await self._reembed([entry for entry, _ in entries], change)
        await self._searcher.change(
            [(entry, vector) for (entry, _), vector in zip(entries, vectors, strict=True)]
        )

    async def _reembed(self, entries: Sequence[Entry], change: str) -> list[Vector]:
        """Embed the entries again, store the vectors, and return them in the same order.

        `change`: embedders before and now, for the progress display.
        """
        vectors: list[Vector] = []
        if entries:
            with self._progress(len(entries), change) as advance:
                for start in range(0, len(entries), EMBED_BATCH):
                    part = entries[start : start + EMBED_BATCH]
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
        """Wait for changes in progress, write the retrieval counts, and close the bank.

        The engine and the embedder stay open. Further calls have no effect.
        """
        if not self._closing_task:
            self._closing_task = asyncio.create_task(self._close())
        await finish_then_cancel(self._closing_task)

    async def _close(self) -> None:
        # The stack runs all callbacks, the last one first, even if one of them raises.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._store.aclose)
            stack.push_async_callback(self._write_counts)
            stack.push_async_callback(self._searcher.aclose)
            while self._changes:
                await asyncio.wait(set(self._changes))

    # ── the clock ─────────────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Completed actor steps. Recency, cooldown and the log use this clock."""
        return self._step

    def advance(self, step: int) -> None:
        """Set the number of completed actor steps. Raise `ValueError` if the number decreases."""
        if step < self._step:
            raise ValueError(
                f"the number of completed actor steps cannot decrease from {self._step} to {step}"
            )
        self._step = step

    def _stamp(self) -> Stamp:
        return Stamp(self._step, self._engine.version)

    # ── retrieval ─────────────────────────────────────────────────────────────────────────────────

    async def search(
        self, requests: Sequence[SearchRequest], *, counted: bool = True
    ) -> list[Hit | None]:
        """Return at most one experience per request.

        This method implements `Retriever.search`. Experiences are picked in request order, and each
        retrieval is counted immediately. With counted = False (evaluations) no counter changes, and
        no pick is remembered for a group.
        """
        start = time.perf_counter()
        hits = await self._searcher.search(requests, self._step, counted=counted)
        if counted:
            self._search_times.append(time.perf_counter() - start)
        return hits

    def count(self, hits: Sequence[Hit]) -> None:
        """Count a retrieval of each experience that guides an episode without a search."""
        for hit in hits:
            self._bank.count(UnitKey(hit.use.uid, hit.use.version), self._step)

    async def similar(
        self, task: str, goal: str, query: str, accept: Callable[[str], bool]
    ) -> list[tuple[Experience, float]]:
        """Return the entries that may guide episodes of a task with `goal`, and their similarities.

        These are the `retrieval.candidates` entries whose keys are most similar to `query`, the
        most similar first, among those whose uid `accept` accepts. No counter changes.
        """
        found = await self._searcher.nearest(Task(task, 0, "train", goal), query, accept)
        return [(entry.experience, similarity) for entry, similarity in found]

    async def tokens(self, prompt: Sequence[Segment]) -> int:
        """Return the number of tokens of a prompt for the model that writes the bank."""
        return await self._extractor.run_blocking(partial(self._extractor.tokens, prompt))

    async def ask(self, name: str, prompt: Sequence[Segment]) -> str:
        """Return the answer of the model that writes the bank, without its thinking.

        `name` seeds the sampling. The answer is not stored. It is counted and timed like a
        distillation. Raise `RolloutError` if the model gives no answer, and `EngineError` if the
        engine can no longer serve.
        """

        async def ask() -> tuple[str, int]:
            with self.calls():
                return await self._extractor.text("ask", name, prompt)

        text, tokens = await self._attempt(ask)
        self._sampled_tokens += tokens
        return text

    def take_search_times(self) -> list[float]:
        """Return the seconds that each counted `search` took, and clear them.

        A duration includes the embedder's time. At most `MAX_DURATIONS` durations, the last ones
        since the previous call, are returned.
        """
        times = list(self._search_times)
        self._search_times.clear()
        return times

    async def refine(self, question: Question, hit: Hit, *, counted: bool = True) -> Hit:
        """Return the experience, refined by the extractor for the agent's question.

        This method implements `Retriever.refine`. The refinement is durable when it returns. The
        use in the returned hit names the generation that wrote the refinement, so that this
        generation earns the credit.

        Return `hit` unchanged in these cases:

        * Agents do not ask, because there is no refine prompt.
        * The answer leaves the experience unchanged or cannot be used.
        * The extractor fails, or its answer takes longer than `ask.timeout`.

        With counted = False (evaluations) nothing is stored or counted. Raise `EngineError` if the
        engine can no longer serve.
        """
        if self._refiner is None:
            return hit
        start = time.perf_counter()
        try:
            # `concurrency` does not limit these calls: an agent is waiting, and the number of
            # episodes in flight bounds them.
            refined = await self._with_timeout(
                partial(self._refiner.refine, question, hit),
                self._settings.ask_timeout,
                "ask.timeout",
            )
        except RolloutError:
            self._refines_failed += counted
            refined = None
        if refined and counted:
            self._sampled_tokens += len(refined.generation.completion.ids)
            await self._run_shielded(
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
        """Return the seconds that each counted `refine` took, and clear them.

        At most `MAX_DURATIONS` durations, the last ones since the previous call, are returned.
        """
        times = list(self._refine_times)
        self._refine_times.clear()
        return times

    # ── distillation ──────────────────────────────────────────────────────────────────────────────

    async def submit(self, request: DistilRequest) -> None:
        """Queue an episode for distillation. Return when the request is durable.

        A repeated id changes nothing. If the queue is full, wait for space. Raise
        `UnicodeEncodeError`, and store nothing, if a text of the request holds lone surrogates.
        """
        await self._queue.submit(request)

    async def distil(self, request: DistilRequest, *, background: bool) -> list[Hit]:
        """Distil an episode and return the experiences that were written about it.

        The list is empty if the answer has no usable operation or the request is dead. With
        `background`, the task `run` distils it.

        If the id is known, a run played an episode with this id before it was resumed from an
        earlier step. The new request then gets another run name, because its episode differs.
        """
        request = await self._with_new_id(request)
        written = self._awaited[request.id] = asyncio.get_running_loop().create_future()
        try:
            await self.submit(request)
            if not background:
                await self.drain()
            return await written
        finally:
            del self._awaited[request.id]

    async def _with_new_id(self, request: DistilRequest) -> DistilRequest:
        episode, number = request.episode, 0
        while await self._store.knows(request.id):
            number += 1
            renamed = replace(episode, run=f"{episode.run}.{number}")
            request = replace(request, episode=renamed)
        return request

    async def run(self) -> None:
        """Distil requests as they arrive, until cancelled.

        Call this method once, in the caller's task group. A failed engine ends it, and so does any
        other error except a `RolloutError`. Errors are raised in an `ExceptionGroup`. At the end,
        requests in progress become pending again.
        """
        await self._queue.run()

    async def drain(self) -> None:
        """Distil and apply every request that was submitted before this call, then `flush`.

        The requests that this call distils are applied in request order.
        """
        await self._queue.drain()
        await self.flush()

    async def flush(self) -> None:
        """Write the retrieval counts, and delete generations that can no longer earn credit.

        This method does not wait for distillation. Searches do not wait for the disk, so a crash
        loses the counts since the last flush. Raise the error of an index build that failed.
        """
        before = self._step - self._settings.credit_window_steps
        spent = await self._store.spent_generations(before)
        # Until these changes are done, searches still find entries that the changes evict or
        # update. The counts of these retrievals must be written too.
        if self._changes:
            await asyncio.wait(set(self._changes))
        await self._write_counts()
        await self._store.delete_generations(spent, before)
        self._searcher.check()

    async def _write_counts(self) -> None:
        if counts := self._bank.take_counts():
            await self._store.set_retrieval_counts(counts, self._stamp())

    async def _distil(self, request: DistilRequest) -> Distilled:
        async def ask() -> Distilled:
            with self.calls():
                distilled = await self._distiller.distil(request)
            self._sampled_tokens += len(distilled.generation.completion.ids)
            if self._duplicates:
                await self._duplicates.prepare(distilled)
            return distilled

        return await self._attempt(ask)

    async def _attempt(self, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await self._with_timeout(
                ask, self._settings.answer_timeout, "extractor.answer_timeout"
            )

    async def _with_timeout(
        self, ask: Callable[[], Awaitable[T]], seconds: float | None, setting: str
    ) -> T:
        """Return the result of `ask`. The time limit is `seconds` (None: no limit).

        `setting` is the config key of the limit, for the error message. Raise `TransientError` if
        the limit expires, if the engine reports a timeout, or if the engine failed and is healthy
        again. Raise `EngineError` if the engine can no longer serve.
        """
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                try:
                    return await ask()
                except EngineError as error:
                    await self._engine.health()
                    raise TransientError("engine", str(error)) from error
        except TimeoutError as error:  # raised by `timeout` or by the engine
            reason = (
                f"no answer within {seconds:g} s ({setting})"
                if timeout.expired()
                else f"timed out ({error})"
            )
            raise TransientError("engine", reason) from error

    async def _settle(self, request: DistilRequest, outcome: Outcome) -> None:
        async def change() -> None:
            if isinstance(outcome, str):
                await self._store.mark_dead(request, outcome, self._stamp())
                await self._queue.count_settled()
                self._report_written(request, ())
                return
            written, entries = await self._apply(outcome)
            await self._queue.count_settled()
            self._report_written(request, entries)
            if self._on_distilled:
                self._on_distilled(written)

        await self._run_shielded(change())

    def _report_written(self, request: DistilRequest, entries: Sequence[Entry]) -> None:
        """Answer the call of `distil` that waits for the request, if any."""
        written = self._awaited.get(request.id)
        if written and not written.done():
            written.set_result([start_hit(entry) for entry in entries])

    async def _apply(self, distilled: Distilled) -> tuple[Distilled, list[Entry]]:
        """Apply an answer without its near-duplicate adds.

        Return the answer as applied, and the entries that it wrote.

        Only one answer at a time is checked for duplicates. Otherwise two similar answers that
        arrive at the same time would both be added.
        """
        async with self._duplicate_lock if self._duplicates else nullcontext():
            distilled = (
                self._duplicates.without_duplicates(distilled) if self._duplicates else distilled
            )
            applied = await self._store.apply(
                distilled, Stamp(self._step, distilled.generation.extractor), self._rules
            )
            await self._update_index(applied)
        for vote in applied.votes:
            self._bank.add_vote(vote.unit, vote.value)
        return distilled, [entry for entry, _ in applied.changed]

    async def _update_index(self, applied: Applied) -> None:
        """Make the written entries searchable, and remove the evicted entries from searches."""
        await self._searcher.change(
            [(entry, write.vector) for entry, write in applied.changed], applied.evicted
        )

    async def _run_shielded(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change of store and memory to completion, even if the caller is cancelled."""
        await asyncio.shield(self._start_change(change))

    def _start_change(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a change as a task that `aclose` and `flush` wait for."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._change_done)
        return task

    def _change_done(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved if the caller was cancelled

    # ── merge ─────────────────────────────────────────────────────────────────────────────────────

    async def merge(self) -> None:
        """Run one pass of the periodic merge over the entries that are active now.

        Searches and distillation continue during the pass. Entries are merged only with entries
        that the same searches can find. In a shared bank these are all entries (CRL §3.2.1),
        otherwise the entries of the same task. If goals are part of the keys or of the scope, the
        goal must be the same too; with bank.scope=variation also the variation. A merged entry has
        the task, the goal and the variation of its first source.

        If another merge is in progress, nothing is done, and the skipped merge is counted. Raise
        `EngineError` if the engine can no longer serve.
        """
        if self._merging:
            self._merges_skipped += 1
            return
        self._merging = True
        try:
            partitions: dict[Place, list[Entry]] = {}
            scope = self._settings.bank.scope
            of_goal = self._settings.goals_in_keys or scope in GOAL_SCOPES
            for entry in self._bank.entries.values():
                task = "" if scope == "shared" else entry.task
                goal = entry.goal if of_goal else ""
                variation = entry.place.variation if scope == "variation" else ""
                partitions.setdefault(Place(task, goal, variation), []).append(entry)
            for entries in partitions.values():
                if len(entries) > 1:
                    await self._merge_partition(entries)
        finally:
            self._merging = False

    async def _merge_partition(self, entries: Sequence[Entry]) -> None:
        costs: dict[UnitKey, int] = {}
        for entry in entries:
            costs[entry.unit] = self._merger.cost(entry)
            await asyncio.sleep(0)  # counting the tokens of a large bank must not block the loop
        chunker = Chunker(
            entries,
            self._settings.extractor.merge_tokens,
            lambda e: costs.get(e.unit) or self._merger.cost(e),
        )
        survivors: list[Entry] = []
        while chunk := chunker.next(self._still_current(survivors)):
            survivors = self._still_current(chunk)
            if len(survivors) > 1:
                survivors = await self._merge_chunk(survivors)

    def _still_current(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if self._bank.entries.get(entry.uid) is entry]

    async def _merge_chunk(self, chunk: Sequence[Entry]) -> list[Entry]:
        """Merge one chunk. Return the entries that may be carried into the next chunk.

        These are the entries made from this chunk, followed by the chunk itself. Return an empty
        list if the extractor fails. Carried entries could make the next chunk fail too.
        """
        try:
            # The name seeds the sampling: a chunk that was not written samples the same answer
            # again. The hash keeps the name distinct from names in an imported bank.
            units = derive_seed(0, "chunk", *(str(entry.unit) for entry in chunk))
            name = f"merge/{await self._store.chunk_count()}-{units % 2**32:08x}"
            merged = await self._attempt(partial(self._merger.merge, name, chunk))
        except RolloutError:
            return []
        self._sampled_tokens += len(merged.generation.completion.ids)
        new_entries: list[Entry] = []

        async def change() -> None:
            applied = await self._store.merge(
                merged, Stamp(self._step, merged.generation.extractor), self._rules
            )
            await self._update_index(applied)
            new_entries.extend(entry for entry, _ in applied.changed)

        await self._run_shielded(change())
        return new_entries + list(chunk)

    # ── credit and training ───────────────────────────────────────────────────────────────────────

    async def credit(
        self,
        uses: Sequence[ExperienceUse],
        success: bool,
        *,
        episode: str,
        expected: float | None = 0.0,
        bonus: float = 0.0,
    ) -> None:
        """Credit the experiences that were found for one episode.

        An experience m that guided the episode receives r(m) = +1 if the episode succeeded, else −1
        (CRL §2.3). If the actor judged m, the extractor is trained on r̃(m) instead (eq. 8).

        * `uses`: all experiences found for the episode, rejected ones included.
        * `episode`: id of the episode's request. A second call with the same id changes nothing.
        * `expected`: expected r of the episode without experience, in [−1, 1]. It is subtracted
          from the training reward of each experience that guided the episode. None: unknown; these
          experiences are not trained on.
        * `bonus`: auxiliary reward b (CRL B.2), added to the training reward of the experience that
          guided the episode from its start.

        Verdicts, `expected` and `bonus` change the training reward of the extractor. They do not
        change the record of an entry (episodes won and credited). The caller must not credit
        episodes that ended with an error.
        """
        credits = [Credit.from_use(use, success, expected, bonus) for use in uses]

        async def change() -> None:
            for credit in await self._store.credit(episode, credits, self._stamp()):
                if credit.outcome is not None:
                    self._bank.add_credit(credit.unit, credit.outcome)

        await self._run_shielded(change())

    async def record_lifts(self, results: Mapping[str, Sequence[GroupSuccess]]) -> None:
        """Add the results of groups to the lifts of their units. Lifts are not used for training.

        `results` maps the id of a group to the success of its members with each unit and without
        any. A second call for a group changes nothing.
        """

        async def change() -> None:
            for result in await self._store.record_lifts(results, self._stamp()):
                self._bank.add_lift(result.unit, result.lift)

        if results:
            await self._run_shielded(change())

    async def take_batch(self, n: int, step: int) -> list[ExtractorSample] | None:
        """Return the samples of the first `n` ready units, or None if there are fewer than `n`.

        Units are taken in the order in which they became ready. Units in cooldown are skipped.
        `step` is the number of completed actor steps, t of eq. 7. The units stay pending until
        `mark_trained`, so a batch that was not marked is offered again.

        Units that were postponed (`postpone`) at this step are skipped. At later steps they come
        last. A batch takes at most n // 4 generations without an op. Only the last `n` ready
        generations without an op stay pending. Older ones are dropped and counted as `dropped/too
        many malformed`.

        Raise `ValueError` if n < 1.
        """
        if n < 1:
            raise ValueError(f"a batch must hold at least one unit, not {n}")
        ready = await self._store.ready_units()
        if surplus := [unit.pending for unit in ready if unit.pending.malformed][:-n]:
            await self._store.drop_malformed(surplus, self._stamp())
            ready = await self._store.ready_units()
        never_postponed = (0, -1)

        def postponed(unit: ReadyUnit) -> tuple[int, int]:
            return self._postponed.get(unit.pending.unit, never_postponed)

        ready = [unit for unit in ready if postponed(unit)[1] < step]
        ready.sort(key=lambda unit: postponed(unit)[0])
        batch = choose_batch(ready, n, step, self._settings.extractor)
        if batch is None:
            return None
        generations = await self._store.generations(unit.pending.generation for unit in batch)
        samples = batch_samples(
            batch, generations, step, self._settings.extractor, centred=self._settings.centred
        )
        self._batch_units = {str(unit.pending.unit): unit.pending for unit in batch}
        self._batch_generations = {sample.id: sample.generation for sample in samples}
        return samples

    async def mark_trained(self, ids: Sequence[str], step: int) -> None:
        """Record that samples of the last batch were trained on at `step`.

        Their rewards are spent, and the counters of their generations advance. A generation counts
        once, even if `ids` holds several of its samples. Raise `ValueError` if an id is not in the
        last batch.
        """
        ids = list(dict.fromkeys(ids))
        if unknown := [name for name in ids if name not in self._batch_generations]:
            raise ValueError(f"these samples are not in the last batch: {unknown}")
        # Withdraw the samples before the write. After a cancellation, or in a second call, the
        # rewards must not be spent again.
        trained = [self._batch_units.pop(name) for name in ids if name in self._batch_units]
        generations = [self._batch_generations.pop(name) for name in ids]
        for pending in trained:
            self._postponed.pop(pending.unit, None)
        await self._store.mark_trained(trained, generations, step, self._stamp())

    def postpone(self, step: int) -> None:
        """Postpone the units of the last batch, which could not be trained on at `step`.

        Their rewards stay pending, and no counter changes. At later steps, units that were
        postponed less often come first. One bad unit therefore does not block the other units of
        its batch. Postponements are part of `state`, not of the bank.
        """
        for pending in self._batch_units.values():
            times, _ = self._postponed.get(pending.unit, (0, -1))
            self._postponed[pending.unit] = (times + 1, step)
        self._batch_units.clear()
        self._batch_generations.clear()

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────

    def state(self) -> State:
        """Return the counters of this run that the bank does not store."""
        return {
            "sampled_tokens": self._sampled_tokens,
            "merges_skipped": self._merges_skipped,
            "refines_failed": self._refines_failed,
            "retried": self._queue.retried,
            "postponed": [[*unit, *times] for unit, times in self._postponed.items()],
        }

    def load_state(self, state: State) -> None:
        """Load the counters. The bank itself is restored by `rollback`, which comes first."""
        self._sampled_tokens = state["sampled_tokens"]
        self._merges_skipped = state["merges_skipped"]
        self._refines_failed = state["refines_failed"]
        self._queue.retried = state["retried"]
        self._postponed = {
            UnitKey(uid, version): (times, step) for uid, version, times, step in state["postponed"]
        }

    async def snapshot(self, kept: Collection[int] | None = None) -> int:
        """Record a snapshot of the bank. Return its sequence number in the log.

        A checkpoint's manifest stores this number, and `rollback` takes it to restore the current
        state. `kept` lists the earlier snapshots that are still needed (None: all). The others are
        deleted.

        Retrievals since the last `flush` are not in the snapshot: they belong to episodes that a
        resumed run plays again.

        Each answer in the snapshot was passed to `on_distilled` before this method returns.
        """
        seq = await self._store.snapshot(self._stamp(), kept)
        if self._changes:
            await asyncio.wait(set(self._changes))
        return seq

    async def rollback(self, seq: int) -> RolledBack:
        """Restore the bank and its clock to the snapshot `seq`.

        Later changes exist only in the archive copy. Requests that were open at the snapshot are
        pending again. Requests that were submitted later are unknown again. Call this method only
        at the start of a run. Raise `RuntimeError` while requests, a merge or another change are in
        progress. Raise `StoreError` if there is no snapshot `seq`.
        """
        if self._queue.busy or self._merging or self._changes:
            raise RuntimeError(
                "the bank cannot be rolled back while requests, a merge or another change are in "
                "progress"
            )
        return await finish_then_cancel(self._start_change(self._rollback(seq)))

    async def _rollback(self, seq: int) -> RolledBack:
        await self._write_counts()
        rolled_back = await self._store.rollback(seq)
        old_searcher = self._searcher
        self._step = rolled_back.step
        self._create_empty_bank()
        self._batch_units.clear()
        self._batch_generations.clear()
        self._postponed.clear()
        try:
            await self._load()
            self._queue.notify_pending()
        finally:
            await old_searcher.aclose()
        return rolled_back

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────

    async def stats(self) -> dict[str, int]:
        """Return metrics by name.

        Examples are bank/size, bank/size/TASK, queue/STATE, queue/retried, ops/KIND and
        dropped/REASON. See also `Store.counts`.

        * bank/with_lift: entries that have a lift.
        * merge/skipped: merges that did not start because another merge was in progress.
        * refine/failed: questions that the extractor did not answer in time or at all.
        * total/sampled_tokens/extractor: tokens of the extractor's answers since the bank was
          opened, without evaluations.
        """
        sizes: dict[str, int] = {"bank/size": len(self._bank.entries)}
        for entry in self._bank.entries.values():
            sizes[f"bank/size/{entry.task}"] = sizes.get(f"bank/size/{entry.task}", 0) + 1
        with_lift = sum(entry.counters.lift is not None for entry in self._bank.entries.values())
        metrics = {
            "bank/with_lift": with_lift,
            "queue/retried": self._queue.retried,
            "merge/skipped": self._merges_skipped,
        }
        metrics["total/sampled_tokens/extractor"] = self._sampled_tokens
        if self._refiner:
            metrics["refine/failed"] = self._refines_failed
        return {**sizes, **await self._store.counts(), **metrics}

    def entry(self, uid: str) -> Experience | None:
        """Return the active entry `uid`, or None."""
        entry = self._bank.entries.get(uid)
        return entry.experience if entry else None

    def entries(self) -> list[Experience]:
        """Return the active entries in the order in which they were last written."""
        return [entry.experience for entry in self._bank.entries.values()]

    def uids(self) -> Collection[str]:
        """Return the uids of the active entries in the order in which they were last written."""
        return self._bank.entries.keys()

    def latest(self, n: int) -> list[Experience]:
        """Return at most `n` active entries, the most recently retrieved first.

        Among equals, the last written entry comes first. An entry that was never retrieved counts
        as retrieved at step 0.
        """
        order = sorted(
            reversed(self._bank.entries.values()),
            key=lambda entry: -(entry.counters.last_returned_step or 0),
        )
        return [entry.experience for entry in order[:n]]

    def best(self, n: int) -> list[Experience]:
        """Return at most `n` active entries that have credited episodes, in `lift_order`.

        Among equals, the highest Σ r comes first, then the last written entry.
        """
        entries = reversed(self._bank.entries.values())
        credited = [entry for entry in entries if entry.counters.credited]
        credited.sort(key=lambda e: (lift_order(e.counters.lift), -e.counters.credit))
        return [entry.experience for entry in credited[:n]]

    async def export_copy(self, path: Path) -> None:
        """Copy the bank to the new file `path`, for another run or a scratch copy.

        The bank may be in use. The copy is reset for a new run: it holds the entries with their
        lineage, credit and lift, but neither the queue nor pending rewards. Raise `StoreError` if
        the copy fails or `path` exists.
        """
        await self._write_counts()
        await self._store.backup(path)
        await _reset_for_new_run(path)

    @staticmethod
    async def start_from(source: Path, path: Path) -> None:
        """Create a bank at `path`, for a new run, with the entries of the bank at `source`.

        The bank at `source` is not changed. Raise `StoreError` if `source` is not a bank, if `path`
        exists or if the copy fails.
        """
        await copy_database(source, path)
        await _reset_for_new_run(path)


async def _reset_for_new_run(path: Path) -> None:
    """Reset a fresh copy for a new run, and remove the copy if this fails.

    A copy that was not reset could be mistaken for the original bank.
    """
    try:
        store = await Store.open(path)
        try:
            await store.reset_for_new_run()
        finally:
            await store.aclose()
    except BaseException:
        delete_bank(path)
        raise
