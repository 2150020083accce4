"""The experience side of a run: credit, distillation, and training of the extractor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from doors import renderer, until
from extractors import Ledger, WordEmbedder, add, dump, logged, manager, request, search, task

from crl.config.schema import OptimizerSection
from crl.engines.scripted import ScriptedEngine
from crl.errors import CrlError, EngineError, LearnerError
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.manager import (
    CachedEmbedder,
    CreditSettings,
    ExperienceManager,
    ExtractorSample,
    GroupSuccess,
    ManagerSettings,
    RetrievalSettings,
    UnitKey,
)
from crl.methods.parts.distilling import EveryEpisode, NoEpisode
from crl.methods.parts.training import CispoLoss
from crl.modeling import load_model
from crl.protocols import DistillationFilter, ExtractorRole
from crl.run.diagnostics import Diagnostics
from crl.run.experience import (
    ExperienceSide,
    ExtractorTrainer,
    ReadOnlyRetriever,
    extractor_minibatches,
    group_successes,
    learn,
    percentiles,
)  # fmt: skip
from crl.types import (
    Completion,
    Condition,
    ExperienceUse,
    Lift,
    Minibatch,
    Sampling,
    Segment,
    StepStats,
    TokenTrace,
    TrainSample,
    Trajectory,
)

SETTINGS = ManagerSettings(
    retrieval=RetrievalSettings(margin=2.0, min_similarity=0.0), credit=CreditSettings(cooldown=0)
)


def says(prompt: str) -> str:
    """Return one lesson for an episode, different for each episode."""
    return add(f"Lesson of {prompt.splitlines()[1]}.")


class Loading(LocalLearner):
    """Real learner on the tiny actor that counts its batches. It fails if `dies` is set."""

    def __init__(self, path: Path) -> None:
        model = load_model(path, torch.device("cpu"))
        settings = TrainSettings(1.0, 8192, 1.0, recompute=False, importance_cap=None)
        super().__init__(model, CispoLoss(0.1, 0.1), OptimizerSection(learning_rate=1e-4), settings)
        self.batches: list[Sequence[Minibatch]] = []
        self.dies = False
        self.poison = TokenTrace()
        """Trace with a non-finite gradient."""

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        if self.dies:
            raise LearnerError("the learner failed")
        self.batches.append(minibatches)
        if any(
            sample.trace == self.poison for minibatch in minibatches for sample in minibatch.samples
        ):
            return StepStats(0, len(minibatches), {"samples": 2})
        return await super().step(minibatches)


@dataclass
class Parts:
    """Experience side and the parts that it consists of."""

    side: ExperienceSide
    bank: ExperienceManager
    engine: ScriptedEngine
    learner: Loading
    ledger: Ledger
    path: Path

    @property
    def trainer(self) -> ExtractorTrainer:
        assert self.side.trainer
        return self.side.trainer


@pytest.fixture(scope="module")
def actor(tiny_actor: Path) -> Path:
    return tiny_actor


@asynccontextmanager
async def parts(
    path: Path, model: Path, *, engine: ScriptedEngine | None = None, batch: int = 2,
    background: bool = False, distiller: DistillationFilter | None = None, merge_every: int = 0,
) -> AsyncIterator[Parts]:  # fmt: skip
    engine, learner, ledger = engine or ScriptedEngine(renderer(), says), Loading(model), Ledger()
    diagnostics = Diagnostics({})
    bank = await manager(path, engine, SETTINGS, on_distilled=diagnostics.distilled)
    trainer = ExtractorTrainer(
        bank, ExtractorRole(learner._trainer.loss, batch), learner, engine, ledger
    )
    cache = CachedEmbedder(WordEmbedder(), 8)
    side = ExperienceSide(
        bank, engine, distiller or EveryEpisode(), trainer, diagnostics, cache, ledger,
        run="run", background=background, merge_every=merge_every,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            yield Parts(side, bank, engine, learner, ledger, path)
    finally:
        await bank.aclose()
        await learner.aclose()


def episode(
    step: int, group: int, member: int, condition: Condition = "free", success: bool = True, *,
    used: Sequence[ExperienceUse] = (), error: str | None = None,
) -> Trajectory:  # fmt: skip
    segments = (Segment("user", "at 2 3", "env"), Segment("assistant", "east", "policy"))
    shown = tuple(f"text of {use.uid}" for use in used)
    return Trajectory(
        task(), step, group, member, condition, segments, success=success, used=tuple(used),
        shown=shown, error=error
    )  # fmt: skip


def guided(step: int, group: int, member: int, success: bool, uid: str, **changes) -> Trajectory:
    use = ExperienceUse(uid, 1, uid.partition("#")[0], "start")
    return episode(step, group, member, "guided", success, used=[use], **changes)


async def filled(made: Parts, groups: int) -> list[str]:
    """Fill the bank with one experience for each group of step 0. Return their uids."""
    await made.side.observe([episode(0, group, 0) for group in range(groups)])
    await made.side.complete(1, [])
    return [f"run/0/{group}/0#0" for group in range(groups)]


# ── credit and queue of a batch ───────────────────────────────────────────────────────────────────


async def test_a_batch_is_credited_and_queued_once(tmp_path: Path, actor: Path) -> None:
    async with parts(tmp_path / "bank.sqlite", actor, batch=99) as made:
        first, second = await filled(made, 2)
        batch = [
            guided(1, 0, 0, True, first), guided(1, 0, 1, False, first),
            guided(1, 0, 2, True, second, error="env: lost"),
            episode(1, 0, 3, "guided", success=False), episode(1, 0, 4, success=True),
            episode(1, 0, 5, success=False), episode(1, 0, 6, error="env: lost"),
        ]  # fmt: skip
        for _ in range(2):  # repeating the call changes nothing
            await made.side.observe(batch)
            metrics = await made.bank.stats()
            assert (metrics["queue/pending"], metrics["queue/done"]) == (5, 2), (
                "both conditions, won and lost, but no errors"
            )
        assert sorted(logged(made.path, "credit")) == [
            ("run/1/0/0", {"uid": first, "version": 1, "reward": 1.0}),
            ("run/1/0/1", {"uid": first, "version": 1, "reward": -1.0}),
        ]
        assert [origin for origin, _ in logged(made.path, "submit")][2:] == [
            f"run/1/0/{member}" for member in (0, 1, 3, 4, 5)
        ]
        await made.side.complete(2, batch)
        counters = {entry.uid: (entry.credited, entry.credit) for entry in made.bank.latest(99)}
        assert (counters[first], counters[second]) == ((2, 0.0), (0, 0.0))
        assert len(counters) == 7


async def test_lessons_may_be_compared_with_what_their_group_came_to_without(
    tmp_path: Path, actor: Path
) -> None:
    """Compare rewards with the unguided members of a group.

    In group 0, one of three unguided members won: −1 − (−1/3). Group 1 has no unguided member, and
    in group 2 no unguided member completed. There is nothing to compare with, so their lessons are
    not trained on.
    """
    for against_free, rewards in ((True, [-2 / 3]), (False, [-1.0, 1.0, 1.0])):
        async with parts(tmp_path / f"{against_free}.sqlite", actor, batch=3) as made:
            uids = await filled(made, 3)
            batch = [
                guided(1, 0, 0, False, uids[0]), episode(1, 0, 1),
                episode(1, 0, 2, success=False), episode(1, 0, 3, success=False),
                guided(1, 1, 0, True, uids[1]),
                guided(1, 2, 0, True, uids[2]), episode(1, 2, 1, error="env: lost"),
            ]  # fmt: skip
            await learn(made.bank, "run", batch, [], against_free=against_free)
            assert [
                unit.pending.reward for unit in await made.bank._store.ready()
            ] == pytest.approx(rewards)
            credits = [
                entry.credit for entry in sorted(made.bank.latest(3), key=lambda entry: entry.uid)
            ]
            assert credits == [-1.0, 1.0, 1.0], "what helped is recorded as it was"


async def test_a_lesson_that_helps_no_more_than_none_has_no_lift(
    tmp_path: Path, actor: Path
) -> None:
    """Compare the lifts of two lessons with lifts worked by hand.

    `first` wins every episode that it guides, and so do the free members. `second` wins 1 of 2 in a
    group in which 1 of 4 won without it. In the last group, both conditions lose.
    """
    async with parts(tmp_path / "bank.sqlite", actor, batch=99) as made:
        first, second = await filled(made, 2)
        batch = [
            *(guided(1, 0, member, True, first) for member in range(4)),
            *(episode(1, 0, 4 + member) for member in range(4)),
            guided(1, 1, 0, True, second), guided(1, 1, 1, False, second),
            guided(1, 1, 2, True, second, error="env: lost"),
            *(episode(1, 1, 4 + member, success=member == 0) for member in range(4)),
            guided(1, 2, 0, False, second), episode(1, 2, 1, success=False),
        ]  # fmt: skip
        for _ in range(2):  # repeating the call changes nothing
            await made.side.observe(batch)
        found = {entry.uid: entry for entry in made.bank.best(9)}
        assert (found[first].credited, found[first].credit, found[first].lift) == (
            4,
            4.0,
            Lift(1, 0.0),
        )
        assert (found[second].credited, found[second].credit, found[second].lift) == (
            3,
            -1.0,
            Lift(2, 0.125, 2 * 0.125**2),
        )
        assert logged(made.path, "lift") == [
            ("run/1/0", {"uid": first, "version": 1, "guided": 1.0, "free": 1.0}),
            ("run/1/1", {"uid": second, "version": 1, "guided": 0.5, "free": 0.25}),
            ("run/1/2", {"uid": second, "version": 1, "guided": 0.0, "free": 0.0}),
        ]
    async with parts(tmp_path / "bank.sqlite", actor, batch=99) as made:
        assert {entry.uid: entry.lift for entry in made.bank.best(9)} == {
            first: Lift(1, 0.0),
            second: Lift(2, 0.125, 2 * 0.125**2),
        }


async def test_a_group_without_free_members_says_nothing_of_lift(
    tmp_path: Path, actor: Path
) -> None:
    """Check groups without a lift.

    No member was free, no free member completed, no member used an experience, or the experience
    was rejected.
    """
    use = ExperienceUse("run/0/0/0#0", 1, "run/0/0/0", "start", verdict="reject")
    batch = [
        guided(1, 0, 0, True, "run/0/0/0#0"),
        guided(1, 1, 0, True, "run/0/0/0#0"), episode(1, 1, 1, error="env: lost"),
        episode(1, 2, 0, "guided"), episode(1, 2, 1),
        replace(episode(1, 3, 0, "guided"), rejected=(use,)), episode(1, 3, 1),
    ]  # fmt: skip
    assert group_successes("run", batch) == {}
    async with parts(tmp_path / "bank.sqlite", actor, batch=99) as made:
        await filled(made, 1)
        await made.side.observe(batch)
        assert [entry.lift for entry in made.bank.best(9)] == [None]


def test_members_of_a_group_may_be_guided_by_different_lessons() -> None:
    """Check lifts of several lessons in one group.

    Each lesson is compared with the group's free members. A success after a refined answer counts
    for the answer. A member that uses a unit twice counts once.
    """
    start, answer = ExperienceUse("e", 2, "g", "start"), ExperienceUse("e", 2, "run/q/1", "ask")
    unrefined = ExperienceUse("e", 2, "run/q/2", "ask_unrefined")
    batch = [
        episode(4, 7, 0, "guided", used=[start, answer]),
        episode(4, 7, 1, "guided", success=False, used=[start, unrefined]),
        guided(4, 7, 2, True, "f"), episode(4, 7, 3), episode(4, 7, 4, success=False),
        guided(5, 7, 0, True, "f"),
    ]  # fmt: skip
    assert group_successes("run", batch) == {
        "run/4/7": [
            GroupSuccess(UnitKey("e", 2), 0.5, 0.5),
            GroupSuccess(UnitKey("run/q/1", 1), 1.0, 0.5),
            GroupSuccess(UnitKey("f", 1), 1.0, 0.5),
        ],
    }  # fmt: skip


async def test_a_request_shows_what_guided_the_episode(tmp_path: Path, actor: Path) -> None:
    async with parts(tmp_path / "bank.sqlite", actor, batch=99) as made:
        (first,) = await filled(made, 1)
        await made.side.observe([guided(1, 0, 0, True, first), episode(1, 0, 1)])
        await made.side.settle()
        prompts = [renderer().decode(ids) for _, ids in made.engine.requests]
        assert [f"1. text of {first}" in prompt for prompt in prompts] == [False, True, False]


async def test_a_frozen_bank_is_given_nothing_to_distil(tmp_path: Path, actor: Path) -> None:
    async with parts(tmp_path / "bank.sqlite", actor, distiller=NoEpisode()) as made:
        await made.side.observe([episode(0, 0, member) for member in range(4)])
        await made.side.settle()
        assert (made.engine.requests, logged(made.path, "submit")) == ([], [])


async def test_a_completed_step_is_logged(tmp_path: Path, actor: Path) -> None:
    async with parts(tmp_path / "bank.sqlite", actor) as made:
        await filled(made, 10)
        ((step, kind, metrics),) = made.ledger.lines
        assert (step, kind) == (1, "bank")
        assert (
            metrics.items()
            >= {
                "bank/size": 10,
                "bank/size/room": 10,
                "queue/done": 10,
                "ops/add": 10,
                "log/seq": 20,
            }.items()
        )
        assert "perf/search_p50_ms" not in metrics, "nobody searched"
        assert [one.uid for one in made.ledger.newest[0]] == [
            f"run/0/{group}/0#0" for group in range(9, 1, -1)
        ], "the newest eight"
        assert made.bank.step == 1
        await made.side.retriever.search([search(), search("x", name="attic")])
        await made.side.complete(2, [])
        assert made.ledger.of("bank")[1]["retrieval/hit_rate"] == 0.5
        assert {"perf/search_p50_ms", "perf/search_p95_ms"} <= made.ledger.of("bank")[1].keys()


def test_percentiles_by_hand() -> None:
    assert percentiles("search", []) == {}
    assert percentiles("search", [0.003]) == {"perf/search_p50_ms": 3.0, "perf/search_p95_ms": 3.0}
    hundred = percentiles("search", [i / 1000 for i in reversed(range(100))])
    assert hundred == {
        "perf/search_p50_ms": pytest.approx(50),
        "perf/search_p95_ms": pytest.approx(95),
    }


# ── the extractor's training ──────────────────────────────────────────────────────────────────────


def sample(name: str, mask: tuple[int, ...], advantage: float) -> ExtractorSample:
    n = len(mask)
    trace = TokenTrace((1,) * n, mask, tuple(-1.0 * m for m in mask), tuple(m - 1 for m in mask))
    return ExtractorSample(name, name, trace, reward=0.0, weight=1.0, advantage=advantage)


def test_minibatches_by_hand() -> None:
    """Compare minibatches with minibatches worked by hand.

    The total of 4 + 2 + 3 sampled tokens includes samples without a signal. These samples are not
    sent to the learner.
    """
    good, flat, bad = (
        sample("a", (0, 1, 1, 1, 1), 0.5),
        sample("b", (0, 0, 1, 1), 0.0),
        sample("c", (1, 1, 1), -0.5),
    )
    empty = sample("d", (0, 0), 0.5)
    assert extractor_minibatches([good, flat, bad, empty]) == (
        Minibatch((TrainSample(good.trace, 0.5, 0.25), TrainSample(bad.trace, -0.5, 0.25)), 9),
    )
    assert extractor_minibatches([flat, empty]) == ()
    assert extractor_minibatches([good], [bad.trace]) == (
        Minibatch((TrainSample(good.trace, 0.5, 1.0),), 4, (bad.trace,)),
    )


async def test_every_full_batch_is_trained_marked_synced_and_logged(
    tmp_path: Path, actor: Path
) -> None:
    """Check that five units make two batches of two. The fifth waits for another unit."""
    async with parts(tmp_path / "bank.sqlite", actor) as made:
        uids = await filled(made, 5)
        before = {name: value.clone() for name, value in made.learner.model.state_dict().items()}
        await made.side.observe(
            [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids)]
        )
        assert made.learner.batches == [], "not before the step is over"
        await made.side.complete(2, [])
        assert [len(batch) for batch in made.learner.batches] == [1, 1], (
            "one optimizer update a batch"
        )
        assert (made.trainer.updates, made.engine.version, made.learner.version) == (2, 2, 2)
        assert any(
            not torch.equal(value, before[name])
            for name, value in made.learner.model.state_dict().items()
        )
        first, second = made.ledger.of("extractor")
        assert [line["extractor/updates"] for line in (first, second)] == [1, 2]
        assert [line["extractor/version"] for line in (first, second)] == [1, 2]
        assert (first["extractor/reward"], first["extractor/samples"]) == (0.0, 4), (
            "two ops, and what came before each"
        )
        assert {"extractor/loss", "time/train", "time/sync"} <= first.keys()
        trained = [(origin, data) for origin, data in logged(made.path, "train") if data]
        assert sorted(origin for origin, _ in trained) == sorted(uids[:4]), "oldest first"
        assert {(data["count"], abs(data["total"])) for _, data in trained} == {(1, 1.0)}
        assert (await made.bank.stats())["buffer/ready"] == 1
        await made.side.settle()
        assert len(made.learner.batches) == 2, "nothing is trained twice"
        await made.side.observe([guided(2, 0, 0, False, uids[0])])
        await made.side.settle()
        assert len(made.learner.batches) == 3, "what waited, and one that is ready anew"


async def test_a_batch_without_signal_is_marked_and_sends_nothing(
    tmp_path: Path, actor: Path
) -> None:
    async with parts(tmp_path / "bank.sqlite", actor) as made:
        uids = await filled(made, 2)
        await made.side.observe([guided(1, 0, i, True, uid) for i, uid in enumerate(uids)])
        await made.side.settle()
        assert (made.learner.batches, made.trainer.updates, made.engine.version) == ([()], 0, 0)
        assert (await made.bank.stats())["buffer/ready"] == 0
        assert made.ledger.of("extractor")[0]["extractor/reward"] == 1.0


async def test_a_skipped_batch_waits_for_the_next_step_and_holds_nothing_up(
    tmp_path: Path, actor: Path
) -> None:
    """Check a skipped batch: the first of six units is poisoned, and batches hold two units.

    The other unit of its batch is trained later, with a new unit. Units that were postponed less
    often come first.
    """
    async with parts(tmp_path / "bank.sqlite", actor) as made:
        uids = await filled(made, 7)
        await made.side.observe(
            [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids[:6])]
        )
        batch = await made.bank.take_batch(2, 1)
        assert batch is not None
        made.learner.poison = batch[0].trace
        await made.side.complete(2, [])
        assert (len(made.learner.batches), made.trainer.updates, made.trainer.skipped) == (3, 2, 1)
        assert ["extractor/reward" in line for line in made.ledger.of("extractor")] == [
            False,
            True,
            True,
        ]
        waiting = await made.bank._store.ready()
        assert [unit.pending.unit.uid for unit in waiting] == uids[:2]
        assert [
            (unit.pending.count, unit.pending.total, unit.c_train, unit.t_last) for unit in waiting
        ] == [
            (1, 1.0, 0, None), (1, -1.0, 0, None)
        ]  # fmt: skip
        await made.side.settle()
        assert len(made.learner.batches) == 3, "not tried again within the step"
        await made.side.complete(3, [])
        assert (len(made.learner.batches), made.trainer.skipped) == (4, 2)
        await made.side.observe([guided(2, 0, 0, False, uids[6])])
        for step, left in ((4, [*uids[:2], uids[6]]), (5, uids[:1])):
            await made.side.complete(step, [])
            assert [unit.pending.unit.uid for unit in await made.bank._store.ready()] == left
            assert made.trainer.skipped == 3


async def test_no_training_step_begins_while_training_is_paused(
    tmp_path: Path, actor: Path
) -> None:
    async with parts(tmp_path / "bank.sqlite", actor, background=True) as made:
        running = asyncio.create_task(made.side.run())
        uids = await filled(made, 2)
        await until_distilled(made, 2)
        async with made.side.paused():
            state = await made.side.state([])
            await made.side.observe(
                [guided(1, 0, 0, True, uids[0]), guided(1, 0, 1, False, uids[1])]
            )
            await asyncio.sleep(0.1)
            assert made.learner.batches == []
        await until(lambda: made.trainer.updates == 1)
        assert state["extractor"] == {"learner": {"version": 0}, "updates": 0, "skipped_updates": 0}
        assert (await made.side.state([]))["extractor"] == {
            "learner": {"version": 1},
            "updates": 1,
            "skipped_updates": 0,
        }
        assert (await made.side.state([]))["bank"] > state["bank"]
        await cancelled(running)


# ── in the background, or at step boundaries ──────────────────────────────────────────────────────


async def until_distilled(made: Parts, n: int) -> None:
    while (await made.bank.stats())["queue/done"] < n:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def cancelled(running: asyncio.Task[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_in_the_background_it_comes_to_the_same(tmp_path: Path, actor: Path) -> None:
    found = []
    for background in (False, True):
        async with parts(tmp_path / f"{background}.sqlite", actor, background=background) as made:
            running = asyncio.create_task(made.side.run())
            await made.side.observe([episode(0, group, 0) for group in range(6)])
            await made.side.complete(1, [])
            await until_distilled(made, 6)
            uids = [f"run/0/{group}/0#0" for group in range(6)]
            await made.side.observe(
                [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids)]
            )
            await made.side.complete(2, [])
            if background:
                await until(lambda made=made: made.trainer.updates == 3)
                await until_distilled(made, 12)
            else:
                assert running.done(), "there is nothing to do in the background"
            await cancelled(running)
            await made.side.settle()
            entries = sorted(
                (one.uid, one.version, one.text, one.credited, one.credit)
                for one in made.bank.latest(99)
            )
            metrics = await made.bank.stats()
            found.append(
                (
                    entries,
                    {name: metrics[name] for name in ("queue/done", "buffer/ready", "log/seq")},
                    made.trainer.updates,
                )
            )
    assert found[0] == found[1]
    assert (len(found[0][0]), found[0][2]) == (12, 3)


class Gated(ScriptedEngine):
    """Engine that answers when the gate is open."""

    def __init__(self) -> None:
        super().__init__(renderer(), says)
        self.gate, self.waiting = asyncio.Event(), 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        self.waiting += 1
        await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_a_step_does_not_wait_for_what_is_distilled_in_the_background(
    tmp_path: Path, actor: Path
) -> None:
    engine = Gated()
    async with parts(tmp_path / "bank.sqlite", actor, engine=engine, background=True) as made:
        running = asyncio.create_task(made.side.run())
        await made.side.observe([episode(0, 0, 0)])
        await made.side.complete(1, [])
        await until(lambda: engine.waiting == 1)
        assert made.bank.latest(1) == []
        engine.gate.set()
        await until_distilled(made, 1)
        await cancelled(running)


async def test_a_deterministic_step_waits_for_all_of_it(tmp_path: Path, actor: Path) -> None:
    engine = Gated()
    async with parts(tmp_path / "bank.sqlite", actor, engine=engine) as made:
        await made.side.observe([episode(0, 0, 0)])
        completing = asyncio.create_task(made.side.complete(1, []))
        await until(lambda: engine.waiting == 1)
        assert not completing.done()
        engine.gate.set()
        await completing
        assert len(made.bank.latest(9)) == 1


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def causes(group: BaseExceptionGroup) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (causes(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


class Dying(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(renderer(), says)

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        await self.health()
        raise AssertionError

    async def health(self) -> None:
        raise EngineError("the engine is gone")


@pytest.mark.parametrize("background", [True, False])
async def test_a_dead_extractor_ends_the_run_with_its_cause(
    background: bool, tmp_path: Path, actor: Path
) -> None:
    async with parts(
        tmp_path / "bank.sqlite", actor, engine=Dying(), background=background
    ) as made:
        running = asyncio.create_task(made.side.run())
        await made.side.observe([episode(0, 0, 0)])
        with pytest.raises(ExceptionGroup) as raised:
            await (running if background else made.side.complete(1, []))
        assert [str(cause) for cause in causes(raised.value)] == ["the engine is gone"]
        assert (await made.bank.stats())["queue/pending"] == 1, "nothing is lost"


@pytest.mark.parametrize("background", [True, False])
async def test_a_dead_learner_ends_the_run_and_spends_no_credit(
    background: bool, tmp_path: Path, actor: Path
) -> None:
    async with parts(tmp_path / "bank.sqlite", actor, background=background) as made:
        running = asyncio.create_task(made.side.run())
        uids = await filled(made, 2)
        await until_distilled(made, 2)
        made.learner.dies = True
        await made.side.observe([guided(1, 0, 0, True, uids[0]), guided(1, 0, 1, False, uids[1])])
        with pytest.raises((ExceptionGroup, CrlError)) as raised:
            await (running if background else made.side.complete(2, []))
        leaves = (
            causes(raised.value) if isinstance(raised.value, ExceptionGroup) else [raised.value]
        )
        assert [type(cause) for cause in leaves] == [LearnerError]
        assert (logged(made.path, "train"), made.engine.version) == ([], 0)


# ── evaluations ───────────────────────────────────────────────────────────────────────────────────


async def test_an_uncounted_search_finds_the_same_and_leaves_no_trace(
    tmp_path: Path, actor: Path
) -> None:
    path = tmp_path / "bank.sqlite"
    async with parts(path, actor) as made:
        await filled(made, 3)
        before, counters = dump(path), [replace(one) for one in made.bank.latest(9)]
        hits = await ReadOnlyRetriever(made.bank).search(
            [search(group=group) for group in range(4)]
        )
        assert all(hits)
        await made.bank.flush()
        assert dump(path) == before
        assert made.bank.latest(9) == counters
        await made.bank.search([search()])
        await made.bank.flush()
        assert dump(path) != before, "a search of the run is counted"


async def test_learning_credits_and_queues_under_a_name(tmp_path: Path, actor: Path) -> None:
    async with parts(tmp_path / "bank.sqlite", actor) as made:
        (first,) = await filled(made, 1)
        batch = [guided(1, 0, 0, True, first), episode(1, 0, 1)]
        await learn(made.bank, "online", batch, batch[1:])
        assert [origin for origin, _ in logged(made.path, "credit")] == ["online/1/0/0"]
        assert [origin for origin, _ in logged(made.path, "submit")][1:] == ["online/1/0/1"]
        assert request().id == "run/0/0/0", "the same address under another name is another episode"


# ── the merge ─────────────────────────────────────────────────────────────────────────────────────


class Discarding(ScriptedEngine):
    """Engine that discards the first entry of every chunk.

    It counts the merges that begin. They wait for the gate.
    """

    def __init__(self) -> None:
        super().__init__(
            renderer(),
            lambda prompt: (
                '[{"op": "discard", "target": 1}]' if "user\nmerge\n" in prompt else says(prompt)
            ),
        )
        self.merges, self.gate = 0, asyncio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        if "user\nmerge\n" in renderer().decode(ids):
            self.merges += 1
            await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_the_bank_is_merged_every_so_many_steps(tmp_path: Path, actor: Path) -> None:
    engine = Discarding()
    engine.gate.set()
    async with parts(tmp_path / "bank.sqlite", actor, engine=engine, merge_every=2) as made:
        for step in range(5):
            await made.side.observe([episode(step, group, 0) for group in range(3)])
            await made.side.complete(step + 1, [])
        assert engine.merges == 2, "after steps 2 and 4"
        sizes = [metrics["bank/size"] for metrics in made.ledger.of("bank")]
        assert sizes == [3, 5, 8, 10, 13], "merged before the step is reported"


async def test_in_the_background_a_step_does_not_wait_for_the_merge(
    tmp_path: Path, actor: Path
) -> None:
    engine = Discarding()
    async with (
        parts(
            tmp_path / "bank.sqlite", actor, engine=engine, background=True, merge_every=1
        ) as made,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(made.side.run())
        await made.side.observe([episode(0, group, 0) for group in range(3)])
        await made.bank.drain()
        await made.side.complete(1, [])
        await until(lambda: engine.merges == 1)
        for skipped in (1, 2):
            await made.side.complete(1 + skipped, [])
            while (await made.bank.stats()).get("merge/skipped") != skipped:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert engine.merges == 1
        engine.gate.set()
        await until(lambda: len(made.bank._bank.entries) == 2)
        running.cancel()
