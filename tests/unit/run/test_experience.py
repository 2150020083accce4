"""Experience pipeline of a run: credit, distillation, and training of the extractor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from crl.config.schema import ExtractorSection, OptimizerSection, RetrievalSection
from crl.embedders.cached import CachedEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.errors import CrlError, EngineError, LearnerError
from crl.evaluation.diagnostics import Diagnostics
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.manager import (
    ExperienceManager,
    ExtractorSample,
    GroupSuccess,
    ManagerSettings,
    UnitKey,
)
from crl.methods.parts.distilling import EveryEpisode, NoEpisode
from crl.methods.parts.training import CispoLoss
from crl.modeling.loading import load_model
from crl.protocols import DistillationFilter, ExtractorRole
from crl.rollout.crediting import credit_and_submit, group_successes
from crl.run.experience import (
    ExperiencePipeline,
    ExtractorTrainer,
    PipelineSettings,
    ReadOnlyRetriever,
    extractor_minibatches,
    latency_percentiles,
)  # fmt: skip
from crl.types import (
    Completion,
    Condition,
    ExperienceUse,
    Guidance,
    Lift,
    Minibatch,
    RewardBaseline,
    Sampling,
    Segment,
    StepStats,
    TokenTrace,
    TrainSample,
    Trajectory,
)
from support.doors import renderer, until
from support.managers import (
    RecordingMonitor,
    WordEmbedder,
    add,
    dump,
    logged,
    open_manager,
    request,
    search,
    task,
)
from support.trajectories import build_trajectory

SETTINGS = ManagerSettings(
    retrieval=RetrievalSection(margin=2.0, min_similarity=0.0),
    extractor=ExtractorSection(cooldown=0),
)


def lesson_for(prompt: str) -> str:
    """Return one lesson for an episode, different for each episode."""
    return add(f"Lesson of {prompt.splitlines()[1]}.")


class RecordingLearner(LocalLearner):
    """Real learner on the tiny actor that counts its batches. It fails if `fails` is set."""

    def __init__(self, path: Path) -> None:
        model = load_model(path, torch.device("cpu"))
        settings = TrainSettings(1.0, 8192, 1.0, recompute=False, importance_cap=None)
        super().__init__(model, CispoLoss(0.1, 0.1), OptimizerSection(learning_rate=1e-4), settings)
        self.batches: list[Sequence[Minibatch]] = []
        self.fails = False
        self.poisoned_trace = TokenTrace()
        """Trace with a non-finite gradient."""

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        if self.fails:
            raise LearnerError("the learner failed")
        self.batches.append(minibatches)
        if any(
            sample.trace == self.poisoned_trace
            for minibatch in minibatches
            for sample in minibatch.samples
        ):
            return StepStats(0, len(minibatches), {"samples": 2})
        return await super().step(minibatches)


@dataclass
class Parts:
    """Experience pipeline and the parts that it consists of."""

    experience: ExperiencePipeline
    bank: ExperienceManager
    engine: ScriptedEngine
    learner: RecordingLearner
    monitor: RecordingMonitor
    path: Path

    @property
    def trainer(self) -> ExtractorTrainer:
        assert self.experience.trainer
        return self.experience.trainer


@pytest.fixture(scope="module")
def actor(tiny_actor: Path) -> Path:
    return tiny_actor


@asynccontextmanager
async def open_parts(
    path: Path, model: Path, *, engine: ScriptedEngine | None = None, batch: int = 2,
    background: bool = False, distiller: DistillationFilter | None = None, merge_every: int = 0,
) -> AsyncIterator[Parts]:  # fmt: skip
    engine, learner, monitor = (
        engine or ScriptedEngine(renderer(), lesson_for),
        RecordingLearner(model),
        RecordingMonitor(),
    )
    diagnostics = Diagnostics({})
    bank = await open_manager(path, engine, SETTINGS, on_distilled=diagnostics.record_distilled)
    trainer = ExtractorTrainer(
        bank, ExtractorRole(learner._trainer.loss, batch), learner, engine, monitor
    )
    cache = CachedEmbedder(WordEmbedder(), 8)
    experience = ExperiencePipeline(
        bank, engine, distiller or EveryEpisode(), trainer, diagnostics, cache, monitor,
        PipelineSettings("run", background=background, merge_every=merge_every),
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            yield Parts(experience, bank, engine, learner, monitor, path)
    finally:
        await bank.aclose()
        await learner.aclose()


def episode(
    step: int, group: int, member: int, condition: Condition = "free", success: bool = True, *,
    used: Sequence[ExperienceUse] = (), error: str | None = None,
) -> Trajectory:  # fmt: skip
    segments = (Segment("user", "at 2 3", "env"), Segment("assistant", "east", "policy"))
    shown = tuple(f"text of {use.uid}" for use in used)
    return build_trajectory(
        task(), step, group, member, condition, segments=segments, success=success,
        used=tuple(used), shown=shown, error=error,
    )  # fmt: skip


def guided(step: int, group: int, member: int, success: bool, uid: str, **changes) -> Trajectory:
    use = ExperienceUse(uid, 1, uid.partition("#")[0], "start")
    return episode(step, group, member, "guided", success, used=[use], **changes)


async def fill(parts: Parts, groups: int) -> list[str]:
    """Fill the bank with one experience for each group of step 0. Return their uids."""
    await parts.experience.observe([episode(0, group, 0) for group in range(groups)])
    await parts.experience.complete(1, [])
    return [f"run/0/{group}/0#0" for group in range(groups)]


# ── credit and queue of a batch ───────────────────────────────────────────────────────────────────


async def test_a_batch_is_credited_and_queued_once(tmp_path: Path, actor: Path) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        first, second = await fill(parts, 2)
        batch = [
            guided(1, 0, 0, True, first), guided(1, 0, 1, False, first),
            guided(1, 0, 2, True, second, error="env: lost"),
            episode(1, 0, 3, "guided", success=False), episode(1, 0, 4, success=True),
            episode(1, 0, 5, success=False), episode(1, 0, 6, error="env: lost"),
        ]  # fmt: skip
        for _ in range(2):  # repeating the call changes nothing
            await parts.experience.observe(batch)
            metrics = await parts.bank.stats()
            assert (metrics["queue/pending"], metrics["queue/done"]) == (5, 2), (
                "both conditions, won and lost, but no errors"
            )
        assert sorted(logged(parts.path, "credit")) == [
            ("run/1/0/0", {"uid": first, "version": 1, "reward": 1.0}),
            ("run/1/0/1", {"uid": first, "version": 1, "reward": -1.0}),
        ]
        assert [origin for origin, _ in logged(parts.path, "submit")][2:] == [
            f"run/1/0/{member}" for member in (0, 1, 3, 4, 5)
        ]
        await parts.experience.complete(2, batch)
        counters = {
            entry.uid: (entry.counters.credited, entry.counters.credit)
            for entry in parts.bank.latest(99)
        }
        assert (counters[first], counters[second]) == ((2, 0.0), (0, 0.0))
        assert len(counters) == 7


async def test_rewards_can_be_compared_with_the_free_members(tmp_path: Path, actor: Path) -> None:
    """Compare rewards with the unguided members of a group.

    In group 0, one of three unguided members won: −1 − (−1/3). Group 1 has no unguided member, and
    in group 2 no unguided member completed. There is nothing to compare with, so their lessons are
    not trained on.
    """
    rewards_by_baseline: dict[RewardBaseline, list[float]] = {
        "group": [-2 / 3],
        "batch": [-1.0, 1.0, 1.0],
    }
    for baseline, rewards in rewards_by_baseline.items():
        async with open_parts(tmp_path / f"{baseline}.sqlite", actor, batch=3) as parts:
            uids = await fill(parts, 3)
            batch = [
                guided(1, 0, 0, False, uids[0]), episode(1, 0, 1),
                episode(1, 0, 2, success=False), episode(1, 0, 3, success=False),
                guided(1, 1, 0, True, uids[1]),
                guided(1, 2, 0, True, uids[2]), episode(1, 2, 1, error="env: lost"),
            ]  # fmt: skip
            await credit_and_submit(parts.bank, "run", batch, [], baseline=baseline)
            assert [
                unit.pending.reward for unit in await parts.bank._store.ready_units()
            ] == pytest.approx(rewards)
            credits = [
                entry.counters.credit
                for entry in sorted(parts.bank.latest(3), key=lambda entry: entry.uid)
            ]
            assert credits == [-1.0, 1.0, 1.0], "the counters record the plain rewards"


async def test_rewards_can_be_compared_with_the_guided_members(tmp_path: Path, actor: Path) -> None:
    """Compare lessons that were tried in one group.

    Three members had a lesson, and two of them won: the mean reward is 1/3. The free member, the
    guided member without a lesson, the failed member and the other group do not count. The third
    lesson was tried alone: 1 − 1.
    """
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=3) as parts:
        uids = await fill(parts, 3)
        batch = [
            guided(1, 0, 0, True, uids[0]), guided(1, 0, 1, True, uids[0]),
            guided(1, 0, 2, False, uids[1]), episode(1, 0, 3, "guided", success=False),
            episode(1, 0, 4, success=False), guided(1, 0, 5, False, uids[1], error="env: lost"),
            guided(1, 1, 0, True, uids[2]),
        ]  # fmt: skip
        await credit_and_submit(parts.bank, "run", batch, [], baseline="guided")
        rewards = {
            unit.pending.unit.uid: unit.pending.reward
            for unit in await parts.bank._store.ready_units()
        }
        assert rewards == pytest.approx({uids[0]: 2 / 3, uids[1]: -4 / 3, uids[2]: 0.0})


async def test_a_bonus_is_added_to_the_reward_but_not_to_the_record(
    tmp_path: Path, actor: Path
) -> None:
    """Add bonuses to the rewards of three experiences.

    The first guided two episodes: (1 + 0.25 − 1 + 0.25) / 2. The second reached its episode through
    a question, so it earns no bonus. The third was rejected: r̃ = 0, without a bonus.
    """
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        first, second, third = await fill(parts, 3)
        asked = ExperienceUse(second, 1, second.partition("#")[0], "ask_unrefined")
        rejected = ExperienceUse(third, 1, third.partition("#")[0], "start", verdict="reject")
        batch = [
            guided(1, 0, 0, True, first), guided(1, 0, 1, False, first),
            episode(1, 0, 2, "guided", used=[asked]),
            replace(episode(1, 0, 3, "guided"), guidance=Guidance(rejected=(rejected,))),
        ]  # fmt: skip
        bonuses = {t.address: 0.25 for t in batch}
        await credit_and_submit(parts.bank, "run", batch, [], bonuses=bonuses)
        rewards = {
            unit.pending.unit.uid: unit.pending.reward
            for unit in await parts.bank._store.ready_units()
        }
        assert rewards == pytest.approx({first: 0.25, second: 1.0, third: 0.0})
        credits = {entry.uid: entry.counters.credit for entry in parts.bank.latest(3)}
        assert credits == {first: 0.0, second: 1.0, third: 0.0}


async def test_a_bonus_does_not_replace_an_unknown_baseline(tmp_path: Path, actor: Path) -> None:
    """Let a group have no free member: its lesson is not trained on, with or without a bonus."""
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        (uid,) = await fill(parts, 1)
        alone, compared = guided(1, 0, 0, True, uid), guided(1, 1, 0, True, uid)
        batch = [alone, compared, episode(1, 1, 1)]
        bonuses = {alone.address: 0.5, compared.address: 0.25}
        await credit_and_submit(parts.bank, "run", batch, [], baseline="group", bonuses=bonuses)
        (unit,) = await parts.bank._store.ready_units()
        assert (unit.pending.count, unit.pending.reward) == (1, 0.25)


async def test_lifts_by_hand(tmp_path: Path, actor: Path) -> None:
    """Compare the lifts of two lessons with lifts worked by hand.

    `first` wins every episode that it guides, and so do the free members. `second` wins 1 of 2 in a
    group in which 1 of 4 won without it. In the last group, both conditions lose.
    """
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        first, second = await fill(parts, 2)
        batch = [
            *(guided(1, 0, member, True, first) for member in range(4)),
            *(episode(1, 0, 4 + member) for member in range(4)),
            guided(1, 1, 0, True, second), guided(1, 1, 1, False, second),
            guided(1, 1, 2, True, second, error="env: lost"),
            *(episode(1, 1, 4 + member, success=member == 0) for member in range(4)),
            guided(1, 2, 0, False, second), episode(1, 2, 1, success=False),
        ]  # fmt: skip
        for _ in range(2):  # repeating the call changes nothing
            await parts.experience.observe(batch)
        found = {entry.uid: entry.counters for entry in parts.bank.best(9)}
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
        assert logged(parts.path, "lift") == [
            ("run/1/0", {"uid": first, "version": 1, "guided": 1.0, "free": 1.0}),
            ("run/1/1", {"uid": second, "version": 1, "guided": 0.5, "free": 0.25}),
            ("run/1/2", {"uid": second, "version": 1, "guided": 0.0, "free": 0.0}),
        ]
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        assert {entry.uid: entry.counters.lift for entry in parts.bank.best(9)} == {
            first: Lift(1, 0.0),
            second: Lift(2, 0.125, 2 * 0.125**2),
        }


async def test_groups_without_a_lift(tmp_path: Path, actor: Path) -> None:
    """Check groups without a lift.

    No member was free, no free member completed, no member used an experience, or the experience
    was rejected.
    """
    use = ExperienceUse("run/0/0/0#0", 1, "run/0/0/0", "start", verdict="reject")
    batch = [
        guided(1, 0, 0, True, "run/0/0/0#0"),
        guided(1, 1, 0, True, "run/0/0/0#0"), episode(1, 1, 1, error="env: lost"),
        episode(1, 2, 0, "guided"), episode(1, 2, 1),
        replace(episode(1, 3, 0, "guided"), guidance=Guidance(rejected=(use,))), episode(1, 3, 1),
    ]  # fmt: skip
    assert group_successes("run", batch) == {}
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        await fill(parts, 1)
        await parts.experience.observe(batch)
        assert [entry.counters.lift for entry in parts.bank.best(9)] == [None]


def test_lifts_of_several_lessons_in_one_group() -> None:
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


async def test_a_distillation_request_shows_the_experience_of_the_episode(
    tmp_path: Path, actor: Path
) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor, batch=99) as parts:
        (first,) = await fill(parts, 1)
        await parts.experience.observe([guided(1, 0, 0, True, first), episode(1, 0, 1)])
        await parts.experience.finish_pending()
        prompts = [renderer().decode(ids) for _, ids in parts.engine.requests]
        assert [f"1. text of {first}" in prompt for prompt in prompts] == [False, True, False]


async def test_a_frozen_bank_distils_nothing(tmp_path: Path, actor: Path) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor, distiller=NoEpisode()) as parts:
        await parts.experience.observe([episode(0, 0, member) for member in range(4)])
        await parts.experience.finish_pending()
        assert (parts.engine.requests, logged(parts.path, "submit")) == ([], [])


async def test_a_completed_step_is_logged(tmp_path: Path, actor: Path) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor) as parts:
        await fill(parts, 10)
        ((step, kind, metrics),) = parts.monitor.lines
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
        assert "perf/search_p50_ms" not in metrics, "there was no search"
        assert [one.uid for one in parts.monitor.newest[0]] == [
            f"run/0/{group}/0#0" for group in range(9, -1, -1)
        ], "the newest first"
        assert parts.bank.step == 1
        await parts.experience.retriever.search([search(), search("x", name="attic")])
        await parts.experience.complete(2, [])
        assert parts.monitor.of_kind("bank")[1]["retrieval/hit_rate"] == 0.5
        assert {"perf/search_p50_ms", "perf/search_p95_ms"} <= parts.monitor.of_kind("bank")[
            1
        ].keys()


def test_percentiles_by_hand() -> None:
    assert latency_percentiles("search", []) == {}
    assert latency_percentiles("search", [0.003]) == {
        "perf/search_p50_ms": 3.0,
        "perf/search_p95_ms": 3.0,
    }
    hundred = latency_percentiles("search", [i / 1000 for i in reversed(range(100))])
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
    async with open_parts(tmp_path / "bank.sqlite", actor) as parts:
        uids = await fill(parts, 5)
        before = {name: value.clone() for name, value in parts.learner.model.state_dict().items()}
        await parts.experience.observe(
            [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids)]
        )
        assert parts.learner.batches == [], "not before the step is over"
        await parts.experience.complete(2, [])
        assert [len(batch) for batch in parts.learner.batches] == [1, 1], (
            "one optimizer update a batch"
        )
        assert (parts.trainer.updates, parts.engine.version, parts.learner.version) == (2, 2, 2)
        assert any(
            not torch.equal(value, before[name])
            for name, value in parts.learner.model.state_dict().items()
        )
        first, second = parts.monitor.of_kind("extractor")
        assert [line["extractor/updates"] for line in (first, second)] == [1, 2]
        assert [line["extractor/version"] for line in (first, second)] == [1, 2]
        lengths = [batch[0].sequence_tokens for batch in parts.learner.batches]
        totals = [line["total/trained_tokens/extractor"] for line in (first, second)]
        assert totals == [lengths[0], sum(lengths)]
        assert (first["extractor/reward"], first["extractor/samples"]) == (0.0, 4), (
            "two ops, each with the tokens before it"
        )
        assert {"extractor/loss", "time/train", "time/sync"} <= first.keys()
        trained = [(origin, data) for origin, data in logged(parts.path, "train") if data]
        assert sorted(origin for origin, _ in trained) == sorted(uids[:4]), "oldest first"
        assert {(data["count"], abs(data["total"])) for _, data in trained} == {(1, 1.0)}
        assert (await parts.bank.stats())["buffer/ready"] == 1
        await parts.experience.finish_pending()
        assert len(parts.learner.batches) == 2, "nothing is trained twice"
        await parts.experience.observe([guided(2, 0, 0, False, uids[0])])
        await parts.experience.finish_pending()
        assert len(parts.learner.batches) == 3, "the waiting unit and the newly credited one"


async def test_a_batch_without_signal_is_marked_and_sends_nothing(
    tmp_path: Path, actor: Path
) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor) as parts:
        uids = await fill(parts, 2)
        await parts.experience.observe([guided(1, 0, i, True, uid) for i, uid in enumerate(uids)])
        await parts.experience.finish_pending()
        assert (parts.learner.batches, parts.trainer.updates, parts.engine.version) == ([()], 0, 0)
        assert (await parts.bank.stats())["buffer/ready"] == 0
        assert parts.monitor.of_kind("extractor")[0]["extractor/reward"] == 1.0


async def test_a_skipped_batch_is_postponed_to_the_next_step(tmp_path: Path, actor: Path) -> None:
    """Check a skipped batch: the first of six units is poisoned, and batches hold two units.

    The other unit of its batch is trained later, with a new unit. Units that were postponed less
    often come first.
    """
    async with open_parts(tmp_path / "bank.sqlite", actor) as parts:
        uids = await fill(parts, 7)
        await parts.experience.observe(
            [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids[:6])]
        )
        batch = await parts.bank.take_batch(2, 1)
        assert batch is not None
        parts.learner.poisoned_trace = batch[0].trace
        await parts.experience.complete(2, [])
        assert (
            len(parts.learner.batches),
            parts.trainer.updates,
            parts.trainer.skipped_updates,
        ) == (3, 2, 1)
        assert ["extractor/reward" in line for line in parts.monitor.of_kind("extractor")] == [
            False,
            True,
            True,
        ]
        waiting = await parts.bank._store.ready_units()
        assert [unit.pending.unit.uid for unit in waiting] == uids[:2]
        assert [
            (unit.pending.count, unit.pending.total, unit.c_train, unit.t_last) for unit in waiting
        ] == [
            (1, 1.0, 0, None), (1, -1.0, 0, None)
        ]  # fmt: skip
        await parts.experience.finish_pending()
        assert len(parts.learner.batches) == 3, "not tried again within the step"
        await parts.experience.complete(3, [])
        assert (len(parts.learner.batches), parts.trainer.skipped_updates) == (4, 2)
        await parts.experience.observe([guided(2, 0, 0, False, uids[6])])
        for step, left in ((4, [*uids[:2], uids[6]]), (5, uids[:1])):
            await parts.experience.complete(step, [])
            assert [unit.pending.unit.uid for unit in await parts.bank._store.ready_units()] == left
            assert parts.trainer.skipped_updates == 3


async def test_no_training_step_begins_while_training_is_paused(
    tmp_path: Path, actor: Path
) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor, background=True) as parts:
        running = asyncio.create_task(parts.experience.run())
        uids = await fill(parts, 2)
        await until_distilled(parts, 2)
        async with parts.experience.paused():
            state = await parts.experience.state([])
            await parts.experience.observe(
                [guided(1, 0, 0, True, uids[0]), guided(1, 0, 1, False, uids[1])]
            )
            await asyncio.sleep(0.1)
            assert parts.learner.batches == []
        await until(lambda: parts.trainer.updates == 1)
        assert state["extractor"] == {
            "learner": {"version": 0},
            "updates": 0,
            "skipped_updates": 0,
            "trained_tokens": 0,
        }
        (batch,) = parts.learner.batches
        assert (await parts.experience.state([]))["extractor"] == {
            "learner": {"version": 1},
            "updates": 1,
            "skipped_updates": 0,
            "trained_tokens": sum(minibatch.sequence_tokens for minibatch in batch),
        }
        assert (await parts.experience.state([]))["bank"] > state["bank"]
        await cancel(running)


# ── in the background, or at step boundaries ──────────────────────────────────────────────────────


async def until_distilled(parts: Parts, n: int) -> None:
    while (await parts.bank.stats())["queue/done"] < n:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def cancel(running: asyncio.Task[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_background_and_step_boundaries_give_the_same_result(
    tmp_path: Path, actor: Path
) -> None:
    found = []
    for background in (False, True):
        async with open_parts(
            tmp_path / f"{background}.sqlite", actor, background=background
        ) as parts:
            running = asyncio.create_task(parts.experience.run())
            await parts.experience.observe([episode(0, group, 0) for group in range(6)])
            await parts.experience.complete(1, [])
            await until_distilled(parts, 6)
            uids = [f"run/0/{group}/0#0" for group in range(6)]
            await parts.experience.observe(
                [guided(1, 0, i, success=i % 2 == 0, uid=uid) for i, uid in enumerate(uids)]
            )
            await parts.experience.complete(2, [])
            if background:
                await until(lambda parts=parts: parts.trainer.updates == 3)
                await until_distilled(parts, 12)
            else:
                assert running.done(), "there is nothing to do in the background"
            await cancel(running)
            await parts.experience.finish_pending()
            entries = sorted(
                (one.uid, one.version, one.text, one.counters.credited, one.counters.credit)
                for one in parts.bank.latest(99)
            )
            metrics = await parts.bank.stats()
            found.append(
                (
                    entries,
                    {name: metrics[name] for name in ("queue/done", "buffer/ready", "log/seq")},
                    parts.trainer.updates,
                )
            )
    assert found[0] == found[1]
    assert (len(found[0][0]), found[0][2]) == (12, 3)


class GatedEngine(ScriptedEngine):
    """Engine that answers when the gate is open."""

    def __init__(self) -> None:
        super().__init__(renderer(), lesson_for)
        self.gate, self.waiting = asyncio.Event(), 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        self.waiting += 1
        await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_a_step_does_not_wait_for_background_distillation(
    tmp_path: Path, actor: Path
) -> None:
    engine = GatedEngine()
    async with open_parts(tmp_path / "bank.sqlite", actor, engine=engine, background=True) as parts:
        running = asyncio.create_task(parts.experience.run())
        await parts.experience.observe([episode(0, 0, 0)])
        await parts.experience.complete(1, [])
        await until(lambda: engine.waiting == 1)
        assert parts.bank.latest(1) == []
        engine.gate.set()
        await until_distilled(parts, 1)
        await cancel(running)


async def test_a_deterministic_step_waits_for_distillation(tmp_path: Path, actor: Path) -> None:
    engine = GatedEngine()
    async with open_parts(tmp_path / "bank.sqlite", actor, engine=engine) as parts:
        await parts.experience.observe([episode(0, 0, 0)])
        completing = asyncio.create_task(parts.experience.complete(1, []))
        await until(lambda: engine.waiting == 1)
        assert not completing.done()
        engine.gate.set()
        await completing
        assert len(parts.bank.latest(9)) == 1


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def causes(group: BaseExceptionGroup) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (causes(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


class FailingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(renderer(), lesson_for)

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        await self.health()
        raise AssertionError

    async def health(self) -> None:
        raise EngineError("the engine is gone")


@pytest.mark.parametrize("background", [True, False])
async def test_a_dead_extractor_ends_the_run_with_its_cause(
    background: bool, tmp_path: Path, actor: Path
) -> None:
    async with open_parts(
        tmp_path / "bank.sqlite", actor, engine=FailingEngine(), background=background
    ) as parts:
        running = asyncio.create_task(parts.experience.run())
        await parts.experience.observe([episode(0, 0, 0)])
        with pytest.raises(ExceptionGroup) as raised:
            await (running if background else parts.experience.complete(1, []))
        assert [str(cause) for cause in causes(raised.value)] == ["the engine is gone"]
        assert (await parts.bank.stats())["queue/pending"] == 1, "nothing is lost"


@pytest.mark.parametrize("background", [True, False])
async def test_a_dead_learner_ends_the_run_and_spends_no_credit(
    background: bool, tmp_path: Path, actor: Path
) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor, background=background) as parts:
        running = asyncio.create_task(parts.experience.run())
        uids = await fill(parts, 2)
        await until_distilled(parts, 2)
        parts.learner.fails = True
        await parts.experience.observe(
            [guided(1, 0, 0, True, uids[0]), guided(1, 0, 1, False, uids[1])]
        )
        with pytest.raises((ExceptionGroup, CrlError)) as raised:
            await (running if background else parts.experience.complete(2, []))
        leaves = (
            causes(raised.value) if isinstance(raised.value, ExceptionGroup) else [raised.value]
        )
        assert [type(cause) for cause in leaves] == [LearnerError]
        assert (logged(parts.path, "train"), parts.engine.version) == ([], 0)


# ── evaluations ───────────────────────────────────────────────────────────────────────────────────


async def test_a_read_only_search_changes_nothing(tmp_path: Path, actor: Path) -> None:
    path = tmp_path / "bank.sqlite"
    async with open_parts(path, actor) as parts:
        await fill(parts, 3)
        before, counters = dump(path), [replace(one) for one in parts.bank.latest(9)]
        hits = await ReadOnlyRetriever(parts.bank).search(
            [search(group=group) for group in range(4)]
        )
        assert all(hits)
        await parts.bank.flush()
        assert dump(path) == before
        assert parts.bank.latest(9) == counters
        await parts.bank.search([search()])
        await parts.bank.flush()
        assert dump(path) != before, "a search of the run is counted"


async def test_credit_and_submit_use_the_run_name(tmp_path: Path, actor: Path) -> None:
    async with open_parts(tmp_path / "bank.sqlite", actor) as parts:
        (first,) = await fill(parts, 1)
        batch = [guided(1, 0, 0, True, first), episode(1, 0, 1)]
        await credit_and_submit(parts.bank, "online", batch, batch[1:])
        assert [origin for origin, _ in logged(parts.path, "credit")] == ["online/1/0/0"]
        assert [origin for origin, _ in logged(parts.path, "submit")][1:] == ["online/1/0/1"]
        assert request().id == "run/0/0/0", "the run name is part of the id"


# ── the merge ─────────────────────────────────────────────────────────────────────────────────────


class DiscardingEngine(ScriptedEngine):
    """Engine that discards the first entry of every chunk.

    It counts the merges that begin. They wait for the gate.
    """

    def __init__(self) -> None:
        super().__init__(
            renderer(),
            lambda prompt: (
                '[{"op": "discard", "target": 1}]'
                if "user\nmerge\n" in prompt
                else lesson_for(prompt)
            ),
        )
        self.merges, self.gate = 0, asyncio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        if "user\nmerge\n" in renderer().decode(ids):
            self.merges += 1
            await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_the_bank_is_merged_periodically(tmp_path: Path, actor: Path) -> None:
    engine = DiscardingEngine()
    engine.gate.set()
    async with open_parts(tmp_path / "bank.sqlite", actor, engine=engine, merge_every=2) as parts:
        for step in range(5):
            await parts.experience.observe([episode(step, group, 0) for group in range(3)])
            await parts.experience.complete(step + 1, [])
        assert engine.merges == 2, "after steps 2 and 4"
        sizes = [metrics["bank/size"] for metrics in parts.monitor.of_kind("bank")]
        assert sizes == [3, 5, 8, 10, 13], "merged before the step is reported"


async def test_a_step_does_not_wait_for_a_background_merge(tmp_path: Path, actor: Path) -> None:
    engine = DiscardingEngine()
    async with (
        open_parts(
            tmp_path / "bank.sqlite", actor, engine=engine, background=True, merge_every=1
        ) as parts,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(parts.experience.run())
        await parts.experience.observe([episode(0, group, 0) for group in range(3)])
        await parts.bank.drain()
        await parts.experience.complete(1, [])
        await until(lambda: engine.merges == 1)
        for skipped in (1, 2):
            await parts.experience.complete(1 + skipped, [])
            while (await parts.bank.stats()).get("merge/skipped") != skipped:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert engine.merges == 1
        engine.gate.set()
        await until(lambda: len(parts.bank._bank.entries) == 2)
        running.cancel()
