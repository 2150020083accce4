"""Evaluation: intervals worked by hand and names of the metrics.

Only the weights may change the result of an evaluation.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.engines.torch import TorchEngine
from crl.envs.base import StreamSettings
from crl.envs.hosting.threads import ThreadHost
from crl.envs.room import SPEC
from crl.errors import EngineError
from crl.evaluation.evaluate import (
    EvalKey,
    EvalSet,
    Evaluation,
    Evaluator,
    MeanSuccessRate,
    SuccessRate,
    clustered_success_rate,
    difference_interval,
)
from crl.evaluation.scheduling import EpisodeScheduler
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.loading import load_model
from crl.protocols import Retriever
from crl.rollout.episode import EpisodeRunner, Limits
from crl.rollout.waves import DirectSampler, LockstepSampler
from crl.types import Completion, Sampling, Split, Task
from support.doors import HIT, TASK, RecordingRetriever, dice, open_host, renderer, runner, scripted
from support.trajectories import build_trajectory

# ── Wilson's interval ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        # z² = 3.8416. 8/10: centre (0.8 + 0.19208) / 1.38416 = 0.716738,
        # half 1.96 / 1.38416 · √(0.016 + 0.009604) = 0.226581
        (8, 10, 0.490157, 0.943319),
        # 1/2: centre 1/2 for any n; half 1.96 / 2.9208 · √(0.125 + 0.2401) = 0.405471
        (1, 2, 0.094529, 0.905471),
        (0, 10, 0.0, 3.8416 / 13.8416),
        (10, 10, 10 / 13.8416, 1.0),
        (0, 1, 0.0, 3.8416 / 4.8416),
        (141, 256, 0.489545, 0.610516),
    ],
)
def test_wilson_by_hand(successes: int, episodes: int, low: float, high: float) -> None:
    assert SuccessRate(successes, episodes).interval == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_contains_the_rate_and_is_symmetric(counts: tuple[int, int]) -> None:
    rate = SuccessRate(*counts)
    low, high = rate.interval
    assert 0.0 <= low <= rate.value <= high <= 1.0
    mirrored = SuccessRate(rate.episodes - rate.successes, rate.episodes).interval
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_rates_as_text() -> None:
    assert str(SuccessRate(8, 10)) == "0.800 [0.490, 0.943]"
    assert str(SuccessRate(0, 8)) == "0.000 [0.000, 0.324]"
    assert str(SuccessRate(8, 8)) == "1.000 [0.676, 1.000]"


def test_a_rate_without_episodes_is_nan() -> None:
    assert math.isnan(SuccessRate(0, 0).value)
    assert all(map(math.isnan, SuccessRate(0, 0).interval))


# ── several tasks ─────────────────────────────────────────────────────────────────────────────────


def test_a_mean_of_rates_by_hand() -> None:
    # Their intervals: 0.8 − 0.309843 + 0.143319, and mirrored.
    mean = MeanSuccessRate((SuccessRate(8, 10), SuccessRate(2, 10)))
    assert (mean.value, mean.episodes) == (0.5, 20)
    half = math.hypot(0.309843, 0.143319) / 2
    assert mean.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert MeanSuccessRate((SuccessRate(8, 10),)).interval == pytest.approx(
        SuccessRate(8, 10).interval
    )
    assert (
        str(MeanSuccessRate((SuccessRate(0, 8), SuccessRate(0, 8)))) == "0.000 [0.000, 0.229]"
    )  # 0.324411 / √2


def test_a_difference_matches_published_numbers() -> None:
    # Newcombe 1998, table II (a), method 10
    assert difference_interval(SuccessRate(48, 80), SuccessRate(56, 70)) == pytest.approx(
        (0.0524, 0.3339), abs=5e-5
    )


def test_overall_covers_the_conditions_that_all_tasks_have() -> None:
    rates: dict[EvalKey, SuccessRate] = {
        ("room", "seen", "free"): SuccessRate(1, 4),
        ("room", "unseen", "free"): SuccessRate(8, 10),
        ("shop", "unseen", "free"): SuccessRate(2, 10),
    }  # fmt: skip
    evaluation = Evaluation(rates, {}, errors=0)
    assert evaluation.overall == {
        ("overall", "unseen", "free"): MeanSuccessRate((SuccessRate(8, 10), SuccessRate(2, 10)))
    }
    metrics = evaluation.metrics()
    assert (
        metrics["eval/overall/unseen/success/free"],
        metrics["eval/overall/unseen/episodes/free"],
    ) == (0.5, 20)
    assert {
        "eval/overall/unseen/success/free/low",
        "eval/overall/unseen/success/free/high",
    } <= metrics.keys()
    assert (
        Evaluation({("room", "unseen", "free"): SuccessRate(8, 10)}, {}, errors=0).overall == {}
    ), "overall needs at least two tasks"


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────


def test_metric_names() -> None:
    settings: list[EvalKey] = [
        ("room", "seen", "free"),
        ("room", "unseen", "free"),
        ("room", "seen", "guided"),
    ]
    seen, unseen, guided = settings
    rates: dict[EvalKey, SuccessRate] = {
        seen: SuccessRate(8, 10),
        unseen: SuccessRate(0, 10),
        guided: SuccessRate(1, 2),
    }
    evaluation = Evaluation(
        rates, {seen: 2.5, unseen: 4.0, guided: 1.0}, errors=1, scores={unseen: 12.5},
        visits={"room": [SuccessRate(0, 4), SuccessRate(3, 4)]},
        lessons={"room": SuccessRate(3, 4)},
        untrained_lessons={"room": SuccessRate(1, 4)},
    )  # fmt: skip
    metrics = evaluation.metrics()
    assert metrics == {
        "eval/room/seen/success/free": 0.8,
        "eval/room/seen/success/free/low": pytest.approx(0.490157, abs=1e-6),
        "eval/room/seen/success/free/high": pytest.approx(0.943319, abs=1e-6),
        "eval/room/seen/episodes/free": 10,
        "eval/room/seen/turns/free": 2.5,
        "eval/room/unseen/success/free": 0.0,
        "eval/room/unseen/success/free/low": 0.0,
        "eval/room/unseen/success/free/high": pytest.approx(0.277540, abs=1e-6),
        "eval/room/unseen/episodes/free": 10,
        "eval/room/unseen/turns/free": 4.0,
        "eval/room/unseen/score/free": 12.5,
        "eval/room/seen/success/guided": 0.5,
        "eval/room/seen/success/guided/low": pytest.approx(0.094529, abs=1e-6),
        "eval/room/seen/success/guided/high": pytest.approx(0.905471, abs=1e-6),
        "eval/room/seen/episodes/guided": 2,
        "eval/room/seen/turns/guided": 1.0,
        "eval/room/unseen/success/online/visit1": 0.0,
        "eval/room/unseen/success/online/visit2": 0.75,
        "eval/room/lessons/correct": 0.75,
        "eval/room/lessons/correct/untrained": 0.25,
        "eval/errors": 1,
    }


# ── the evaluator ─────────────────────────────────────────────────────────────────────────────────


def tasks(n: int, split: Split = "unseen") -> tuple[Task, ...]:
    return tuple(replace(TASK, seed=seed, split=split) for seed in range(n))


class CountingEngine(ScriptedEngine):
    """Engine that counts simultaneous requests. `max_active` is the maximum."""

    def __init__(self) -> None:
        super().__init__(renderer(), dice)
        self.max_active = self._active = 0

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        self._active += 1
        self.max_active = max(self.max_active, self._active)
        await asyncio.sleep(0.005)
        self._active -= 1
        return await super().generate(ids, sampling, session=session, rng=rng)


@pytest.mark.parametrize(
    ("won", "effective"),
    [
        # p = 1/2 of 16 in four places, so p(1−p) = 1/4.
        # The variance of p between places is 4/3 · Σ (1/4 · (pᵢ − 1/2))².
        # t of 3 degrees of freedom is 3.182446, so (1.96 / t)² = 0.3793062.
        ((4, 2, 2, 0), 2.275837),  # 4/3 · 2 · (1/8)² = 1/24: 6
        ((3, 2, 2, 1), 6.0689),  # 4/3 · 2 · (1/16)² = 1/96: 24, but at most the episodes
        ((4, 4, 0, 0), 1.517225),  # 4/3 · 4 · (1/8)² = 1/12: 3, but at least the places
        ((2, 2, 2, 2), 6.0689),
        ((0, 0, 0, 0), 4.0),
        ((4, 4, 4, 4), 4.0),
        ((2,), 0.0),  # one place says nothing about others
    ],
)
def test_episodes_of_one_place_are_not_independent(won: tuple[int, ...], effective: float) -> None:
    played = [
        build_trajectory(replace(TASK, goal=f"place {place}"), 0, 0, i, "guided", success=i < wins)
        for place, wins in enumerate(won)
        for i in range(4)
    ]
    games = [replace(TASK, params={"variation": place}) for place in range(len(won))]
    of_games = [replace(t, task=games[n // 4]) for n, t in enumerate(played)]
    rate = clustered_success_rate(played)
    assert clustered_success_rate(of_games) == rate, "games may have the same goal"
    assert rate == SuccessRate(
        sum(won),
        4 * len(won),
        pytest.approx(effective, abs=1e-6),  # pyright: ignore[reportArgumentType]
    )
    if won == (4, 2, 2, 0):
        # With z²/n = 3.8416/2.275837:
        # half = 1.96 / 2.687995 · √(1/4 / 2.275837 + 3.8416 / (4 · 2.275837²))
        assert rate.interval == pytest.approx((0.5 - 0.396224, 0.5 + 0.396224), abs=1e-6)


async def test_every_task_is_played_once_within_the_limit() -> None:
    engine = CountingEngine()
    async with open_host() as hosted:
        evaluator = Evaluator(
            runner(engine, hosted.host),
            {("doors", "seen"): tasks(3, "seen"), ("doors", "unseen"): tasks(10)},
            EpisodeScheduler(4),
        )
        result = await evaluator.evaluate()
    assert {key: rate.episodes for key, rate in result.rates.items()} == {
        ("doors", "seen", "free"): 3,
        ("doors", "unseen", "free"): 10,
    }
    # the draws depend on the sessions, which therefore keep the old names of the splits
    sessions = {session for session, _ in engine.requests}
    assert sessions == {f"eval/doors/known/00000000/{i:08d}/0000" for i in range(3)} | {
        f"eval/doors/new/00000000/{i:08d}/0000" for i in range(10)
    }
    assert engine.max_active <= 4


@pytest.mark.parametrize(
    ("reply", "value", "turns"), [("open", 1.0, 1.0), ("lose", 0.0, 1.0), ("wait", 0.0, 3.0)]
)
async def test_success_is_decided_by_the_environment(
    reply: str, value: float, turns: float
) -> None:
    async with open_host() as hosted:
        player = runner(scripted(reply), hosted.host)
        evaluator = Evaluator(player, {("doors", "unseen"): tasks(2)}, EpisodeScheduler(8))
        result = await evaluator.evaluate()
    assert (
        result.rates["doors", "unseen", "free"].value,
        result.turns["doors", "unseen", "free"],
        result.errors,
    ) == (value, turns, 0)


async def test_an_episode_with_an_error_counts_as_a_failure() -> None:
    async with open_host(broken={1}) as hosted:
        player = runner(scripted("open"), hosted.host)
        evaluator = Evaluator(player, {("doors", "unseen"): tasks(4)}, EpisodeScheduler(2))
        result = await evaluator.evaluate()
    assert (result.rates["doors", "unseen", "free"], result.errors) == (SuccessRate(3, 4), 1)


async def test_a_dead_engine_ends_the_evaluation() -> None:
    class DeadEngine(ScriptedEngine):
        async def generate(self, ids, sampling, *, session=None, rng=None) -> Completion:
            raise EngineError("gone")

    async with open_host() as hosted:
        for sampler_of in (DirectSampler, LockstepSampler):
            engine = DeadEngine(renderer(), dice)
            player = runner(engine, hosted.host, sampler=sampler_of(engine))
            scheduler = EpisodeScheduler(4, in_order=sampler_of is LockstepSampler)
            with pytest.raises(ExceptionGroup, match="unhandled errors") as raised:
                await Evaluator(player, {("doors", "unseen"): tasks(4)}, scheduler).evaluate()
            assert raised.value.split(EngineError)[1] is None, "nothing else went wrong"
            assert not hosted.host._acquired


class RecordingEngine(TorchEngine):
    """Engine that records its samples by session."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampled: defaultdict[str | None, tuple[list[tuple[int, ...]], list[float]]]
        self.sampled = defaultdict(lambda: ([], []))

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        completion = await super().generate(ids, sampling, session=session, rng=rng)
        ids_, logprobs = self.sampled[session]
        ids_.append(completion.ids)
        logprobs += completion.logprobs
        return completion


Samples = dict[str | None, tuple[list[tuple[int, ...]], list[float]]]
"""Completions of each session, and the log-probs of their tokens."""


EvalSets = Mapping[EvalSet, Sequence[Task]]


async def evaluate(
    engine: RecordingEngine, player: EpisodeRunner, eval_sets: EvalSets
) -> tuple[Evaluation, Samples]:
    engine.sampled.clear()
    engine._decoder._prefixes.clear()  # prefixes of the last evaluation; new weights clear them too
    scheduler = EpisodeScheduler(8, in_order=isinstance(player.decoding.sampler, LockstepSampler))
    return await Evaluator(player, eval_sets, scheduler).evaluate(), dict(engine.sampled)


@asynccontextmanager
async def room_evaluation(
    tiny_actor: Path, *, exact: bool = False
) -> AsyncIterator[tuple[RecordingEngine, EpisodeRunner, dict[EvalSet, Sequence[Task]]]]:
    """Yield the real tiny model, a runner for the room, and two eval sets.

    The runner has a `LockstepSampler`.

    With `exact`, the model computes in float64.
    """
    model = load_model(tiny_actor, torch.device("cpu"))
    if exact:
        model.double()
    engine = RecordingEngine(model, max_batch=64, max_context=512)
    host = ThreadHost({"room": (SPEC, "compact")}, threads=2)
    settings = StreamSettings()
    eval_sets: dict[EvalSet, Sequence[Task]] = {
        ("room", "seen"): SPEC.tasks.eval_tasks("seen", 12, 0, settings),
        ("room", "unseen"): SPEC.tasks.eval_tasks("unseen", 12, 0, settings),
    }
    parts = {"context": ChatContext({"room": ""}), "limits": {"room": Limits(4, 4)}}
    try:
        yield engine, runner(engine, host, sampler=LockstepSampler(engine), **parts), eval_sets
    finally:
        await engine.aclose()
        await host.aclose()


async def test_the_same_weights_give_the_same_evaluation(tiny_actor: Path) -> None:
    """Check that equal seeds give equal evaluations of the real tiny model in the room.

    Another seed must give other episodes.
    """
    async with room_evaluation(tiny_actor) as (engine, player, eval_sets):
        players = [
            replace(player, decoding=replace(player.decoding, seed=seed)) for seed in (0, 0, 1)
        ]
        first, again, other = [await evaluate(engine, one, eval_sets) for one in players]
    assert again == first, "token for token"
    assert other[1] != first[1]


async def separate_and_joint(
    engine: RecordingEngine, player: EpisodeRunner, eval_sets: EvalSets
) -> tuple[dict[EvalKey, SuccessRate], dict[EvalKey, SuccessRate], list[Samples]]:
    """Evaluate the sets one by one and then together.

    Return the rates of the separate evaluations, the rates of the joint evaluation, and the samples
    of both.
    """
    alone: dict[EvalKey, SuccessRate] = {}
    sampled: Samples = {}
    for of, tasks in eval_sets.items():
        evaluation, joint_samples = await evaluate(engine, player, {of: tasks})
        alone |= evaluation.rates
        sampled |= joint_samples
    together, joint_samples = await evaluate(engine, player, eval_sets)
    return alone, dict(together.rates), [sampled, joint_samples]


async def test_an_evaluation_does_not_depend_on_concurrent_sets(tiny_actor: Path) -> None:
    """Compare evaluations of the sets one by one and together.

    In float64, rounding does not change a draw. In deterministic mode, the results are equal bit
    for bit.
    """
    async with room_evaluation(tiny_actor, exact=True) as (engine, player, eval_sets):
        direct = replace(player, decoding=replace(player.decoding, sampler=DirectSampler(engine)))
        alone, together, (sampled, joint_samples) = await separate_and_joint(
            engine, direct, eval_sets
        )
    assert together == alone
    assert {s: ids for s, (ids, _) in joint_samples.items()} == {
        s: ids for s, (ids, _) in sampled.items()
    }
    async with room_evaluation(tiny_actor) as (engine, player, eval_sets):
        alone, together, (sampled, joint_samples) = await separate_and_joint(
            engine, player, eval_sets
        )
    assert together == alone
    assert joint_samples == sampled, "log-probs too"


async def test_seen_places_are_played_once_while_the_bank_is_empty() -> None:
    """Check that only episodes with an experience are played a second time.

    Later, half of the episodes find an experience.
    """

    class HalfFilledShelf(RecordingRetriever):
        async def search(self, requests):
            return [HIT if request.group % 2 else None for request in requests]

    async def played(bank: Retriever) -> tuple[Evaluation, int]:
        engine = ScriptedEngine(renderer(), dice)
        async with open_host() as hosted:
            sets: dict[EvalSet, Sequence[Task]] = {("doors", "seen"): tasks(8, "seen")}
            player = runner(engine, hosted.host)
            evaluator = Evaluator(player, sets, EpisodeScheduler(4), bank=bank)
            found = await evaluator.evaluate()
        prompts = [renderer().decode(ids) for _, ids in engine.requests]
        return found, sum(prompt.count("assistant") == 1 for prompt in prompts)

    empty, once = await played(RecordingRetriever(None))
    half, more = await played(HalfFilledShelf())
    assert (once, more) == (8, 12)
    free, guided = ("doors", "seen", "free"), ("doors", "seen", "guided")
    assert empty.rates[guided] == empty.rates[free] == half.rates[free]
    assert empty.turns[guided] == empty.turns[free] == half.turns[free]
