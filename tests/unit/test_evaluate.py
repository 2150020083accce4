"""Evaluation: the interval on numbers worked by hand, the names of its figures, and that only the weights make a difference."""

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
from doors import HIT, TASK, Shelf, dice, house, renderer, runner, scripted
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.engines.torch import TorchEngine
from crl.envs.base import StreamSettings
from crl.envs.host import ThreadHost
from crl.envs.room import SPEC
from crl.errors import EngineError
from crl.methods.parts.rollouts import ChatContext
from crl.modeling import load_model
from crl.protocols import Retriever
from crl.rollout.episode import EpisodeRunner, Limits
from crl.rollout.waves import Direct, Waves
from crl.run.evaluate import EvalSet, Evaluation, Evaluator, MeanRate, Rate, Setting, difference, rate_of_visits
from crl.run.playing import EpisodeScheduler
from crl.types import Completion, Sampling, Split, Task, Trajectory

# ── Wilson's interval ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        # z² = 3.8416. 8/10: centre (0.8 + 0.19208) / 1.38416 = 0.716738, half 1.96 / 1.38416 · √(0.016 + 0.009604) = 0.226581
        (8, 10, 0.490157, 0.943319),
        # 1/2: centre 1/2 whatever n; half 1.96 / 2.9208 · √(0.125 + 0.2401) = 0.405471
        (1, 2, 0.094529, 0.905471),
        (0, 10, 0.0, 3.8416 / 13.8416),
        (10, 10, 10 / 13.8416, 1.0),
        (0, 1, 0.0, 3.8416 / 4.8416),
        (141, 256, 0.489545, 0.610516),
    ],
)
def test_wilson_by_hand(successes: int, episodes: int, low: float, high: float) -> None:
    assert Rate(successes, episodes).interval == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_one_of_probabilities_around_the_rate(counts: tuple[int, int]) -> None:
    rate = Rate(*counts)
    low, high = rate.interval
    assert 0.0 <= low <= rate.value <= high <= 1.0
    mirrored = Rate(rate.episodes - rate.successes, rate.episodes).interval
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_rates_as_text() -> None:
    assert str(Rate(8, 10)) == "0.800 [0.490, 0.943]"
    assert str(Rate(0, 8)) == "0.000 [0.000, 0.324]"
    assert str(Rate(8, 8)) == "1.000 [0.676, 1.000]"


def test_a_rate_of_nothing_is_no_number() -> None:
    assert math.isnan(Rate(0, 0).value)
    assert all(map(math.isnan, Rate(0, 0).interval))


# ── several tasks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_mean_of_rates_by_hand() -> None:
    mean = MeanRate((Rate(8, 10), Rate(2, 10)))  # their intervals: 0.8 − 0.309843 + 0.143319, and mirrored
    assert (mean.value, mean.episodes) == (0.5, 20)
    half = math.hypot(0.309843, 0.143319) / 2
    assert mean.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert MeanRate((Rate(8, 10),)).interval == pytest.approx(Rate(8, 10).interval)
    assert str(MeanRate((Rate(0, 8), Rate(0, 8)))) == "0.000 [0.000, 0.229]"  # 0.324411 / √2


def test_a_difference_as_published() -> None:
    assert difference(Rate(48, 80), Rate(56, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)  # Newcombe 1998, table II (a), method 10


def test_overall_is_over_the_settings_that_all_tasks_have() -> None:
    rates: dict[Setting, Rate] = {
        ("room", "known", "free"): Rate(1, 4), ("room", "new", "free"): Rate(8, 10), ("shop", "new", "free"): Rate(2, 10),
    }  # fmt: skip
    evaluation = Evaluation(rates, {}, errors=0)
    assert evaluation.overall == {("overall", "new", "free"): MeanRate((Rate(8, 10), Rate(2, 10)))}
    figures = evaluation.figures()
    assert (figures["eval/overall/new/success/free"], figures["eval/overall/new/episodes/free"]) == (0.5, 20)
    assert {"eval/overall/new/success/free/low", "eval/overall/new/success/free/high"} <= figures.keys()
    assert Evaluation({("room", "new", "free"): Rate(8, 10)}, {}, errors=0).overall == {}, "one task is no mixture"


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_names_of_the_figures() -> None:
    settings: list[Setting] = [("room", "known", "free"), ("room", "new", "free"), ("room", "known", "guided")]
    known, new, guided = settings
    rates: dict[Setting, Rate] = {known: Rate(8, 10), new: Rate(0, 10), guided: Rate(1, 2)}
    evaluation = Evaluation(
        rates, {known: 2.5, new: 4.0, guided: 1.0}, errors=1, scores={new: 12.5},
        visits={"room": [Rate(0, 4), Rate(3, 4)]}, lessons={"room": Rate(3, 4)}, untrained_lessons={"room": Rate(1, 4)},
    )  # fmt: skip
    figures = evaluation.figures()
    assert figures == {
        "eval/room/known/success/free": 0.8,
        "eval/room/known/success/free/low": pytest.approx(0.490157, abs=1e-6),
        "eval/room/known/success/free/high": pytest.approx(0.943319, abs=1e-6),
        "eval/room/known/episodes/free": 10,
        "eval/room/known/turns/free": 2.5,
        "eval/room/new/success/free": 0.0,
        "eval/room/new/success/free/low": 0.0,
        "eval/room/new/success/free/high": pytest.approx(0.277540, abs=1e-6),
        "eval/room/new/episodes/free": 10,
        "eval/room/new/turns/free": 4.0,
        "eval/room/new/score/free": 12.5,
        "eval/room/known/success/guided": 0.5,
        "eval/room/known/success/guided/low": pytest.approx(0.094529, abs=1e-6),
        "eval/room/known/success/guided/high": pytest.approx(0.905471, abs=1e-6),
        "eval/room/known/episodes/guided": 2,
        "eval/room/known/turns/guided": 1.0,
        "eval/room/new/success/online/visit1": 0.0,
        "eval/room/new/success/online/visit2": 0.75,
        "eval/room/lessons/correct": 0.75,
        "eval/room/lessons/correct/untrained": 0.25,
        "eval/errors": 1,
    }


# ── the evaluator ───────────────────────────────────────────────────────────────────────────────────────────────────


def tasks(n: int, split: Split = "new") -> tuple[Task, ...]:
    return tuple(replace(TASK, seed=seed, split=split) for seed in range(n))


class Crowd(ScriptedEngine):
    """Counts how many requests are under way at a time."""

    def __init__(self) -> None:
        super().__init__(renderer(), dice)
        self.most = self._now = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None, rng: int | None = None) -> Completion:
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.005)
        self._now -= 1
        return await super().generate(ids, sampling, session=session, rng=rng)


@pytest.mark.parametrize(
    ("won", "effective"),
    [
        # p = 1/2 of 16 in four places, so p(1−p) = 1/4; the variance of p between places is 4/3 · Σ (1/4 · (pᵢ − 1/2))²;
        # t of 3 degrees of freedom is 3.182446, (1.96 / t)² = 0.3793062
        ((4, 2, 2, 0), 2.275837),  # 4/3 · 2 · (1/8)² = 1/24: 6
        ((3, 2, 2, 1), 6.0689),  # 4/3 · 2 · (1/16)² = 1/96: 24, and no more than there are
        ((4, 4, 0, 0), 1.517225),  # 4/3 · 4 · (1/8)² = 1/12: 3, and no fewer than places
        ((2, 2, 2, 2), 6.0689),
        ((0, 0, 0, 0), 4.0),
        ((4, 4, 4, 4), 4.0),
        ((2,), 1.0),
    ],
)
def test_episodes_of_one_place_count_for_fewer(won: tuple[int, ...], effective: float) -> None:
    played = [
        Trajectory(replace(TASK, goal=f"place {place}"), 0, 0, i, "guided", (), (), {}, success=i < wins)
        for place, wins in enumerate(won)
        for i in range(4)
    ]
    rate = rate_of_visits(played)
    assert rate == Rate(sum(won), 4 * len(won), pytest.approx(effective, abs=1e-6))  # pyright: ignore[reportArgumentType]
    if won == (4, 2, 2, 0):  # z²/n = 3.8416/2.275837: half = 1.96 / 2.687995 · √(1/4 / 2.275837 + 3.8416 / (4 · 2.275837²))
        assert rate.interval == pytest.approx((0.5 - 0.396224, 0.5 + 0.396224), abs=1e-6)


async def test_every_task_is_played_once_and_no_more_than_some_at_a_time() -> None:
    engine = Crowd()
    async with house() as home:
        evaluator = Evaluator(
            runner(engine, home.host),
            {("doors", "known"): tasks(3, "known"), ("doors", "new"): tasks(10)},
            EpisodeScheduler(4),
        )
        result = await evaluator.evaluate()
    assert {key: rate.episodes for key, rate in result.rates.items()} == {("doors", "known", "free"): 3, ("doors", "new", "free"): 10}
    sessions = {session for session, _ in engine.requests}
    assert sessions == {f"eval/doors/known/00000000/{i:08d}/0000" for i in range(3)} | {
        f"eval/doors/new/00000000/{i:08d}/0000" for i in range(10)
    }
    assert engine.most <= 4


@pytest.mark.parametrize(("says", "value", "turns"), [("open", 1.0, 1.0), ("lose", 0.0, 1.0), ("wait", 0.0, 3.0)])
async def test_success_is_the_environments_verdict(says: str, value: float, turns: float) -> None:
    async with house() as home:
        player = runner(scripted(says), home.host)
        evaluator = Evaluator(player, {("doors", "new"): tasks(2)}, EpisodeScheduler(8))
        result = await evaluator.evaluate()
    assert (result.rates["doors", "new", "free"].value, result.turns["doors", "new", "free"], result.errors) == (value, turns, 0)


async def test_an_episode_that_cannot_be_played_is_a_failure_and_counted() -> None:
    async with house(broken={1}) as home:
        player = runner(scripted("open"), home.host)
        evaluator = Evaluator(player, {("doors", "new"): tasks(4)}, EpisodeScheduler(2))
        result = await evaluator.evaluate()
    assert (result.rates["doors", "new", "free"], result.errors) == (Rate(3, 4), 1)


async def test_a_dead_engine_ends_the_evaluation() -> None:
    class Dead(ScriptedEngine):
        async def generate(self, ids, sampling, *, session=None, rng=None) -> Completion:
            raise EngineError("gone")

    async with house() as home:
        for sampler_of in (Direct, Waves):
            engine = Dead(renderer(), dice)
            player = runner(engine, home.host, sampler=sampler_of(engine))
            scheduler = EpisodeScheduler(4, in_order=sampler_of is Waves)
            with pytest.raises(ExceptionGroup, match="unhandled errors") as raised:
                await Evaluator(player, {("doors", "new"): tasks(4)}, scheduler).evaluate()
            assert raised.value.split(EngineError)[1] is None, "nothing else went wrong"
            assert not home.host._lent


class Noting(TorchEngine):
    """Notes what it samples, by session."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampled: defaultdict[str | None, tuple[list[tuple[int, ...]], list[float]]]
        self.sampled = defaultdict(lambda: ([], []))

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None, rng: int | None = None) -> Completion:
        completion = await super().generate(ids, sampling, session=session, rng=rng)
        ids_, logprobs = self.sampled[session]
        ids_.append(completion.ids)
        logprobs += completion.logprobs
        return completion


Noted = dict[str | None, tuple[list[tuple[int, ...]], list[float]]]
"""Completions of a session, and the log-probs of their tokens."""


Rooms = Mapping[EvalSet, Sequence[Task]]


async def evaluated(engine: Noting, player: EpisodeRunner, rooms: Rooms) -> tuple[Evaluation, Noted]:
    engine.sampled.clear()
    engine._decoder._prefixes.clear()  # of the evaluation before, as new weights do
    scheduler = EpisodeScheduler(8, in_order=isinstance(player.sampler, Waves))
    return await Evaluator(player, rooms, scheduler).evaluate(), dict(engine.sampled)


@asynccontextmanager
async def sampled_rooms(
    tiny_actor: Path, *, exact: bool = False
) -> AsyncIterator[tuple[Noting, EpisodeRunner, dict[EvalSet, Sequence[Task]]]]:
    """The real tiny model, a runner with `Waves` that plays real rooms, and two sets of them.

    exact: in float64.
    """
    model = load_model(tiny_actor, torch.device("cpu"))
    if exact:
        model.double()
    engine = Noting(model, max_batch=64, max_context=512)
    host = ThreadHost({"room": (SPEC, "compact")}, threads=2)
    settings = StreamSettings()
    rooms: dict[EvalSet, Sequence[Task]] = {
        ("room", "known"): SPEC.eval_tasks("known", 12, 0, settings),
        ("room", "new"): SPEC.eval_tasks("new", 12, 0, settings),
    }
    parts = {"context": ChatContext({"room": ""}), "limits": {"room": Limits(4, 4)}}
    try:
        yield engine, runner(engine, host, sampler=Waves(engine), **parts), rooms
    finally:
        await engine.aclose()
        await host.aclose()


async def test_the_same_weights_give_the_same_evaluation(tiny_actor: Path) -> None:
    """The real tiny model samples in real rooms; another root of draws gives other episodes."""
    async with sampled_rooms(tiny_actor) as (engine, player, rooms):
        players = [replace(player, seed=seed) for seed in (0, 0, 1)]
        first, again, other = [await evaluated(engine, one, rooms) for one in players]
    assert again == first, "token for token"
    assert other[1] != first[1]


async def alone_and_together(
    engine: Noting, player: EpisodeRunner, rooms: Rooms
) -> tuple[dict[Setting, Rate], dict[Setting, Rate], list[Noted]]:
    """Rates of the sets evaluated one by one, and all at once, and what was sampled both times."""
    alone: dict[Setting, Rate] = {}
    sampled: Noted = {}
    for of, tasks in rooms.items():
        evaluation, noted = await evaluated(engine, player, {of: tasks})
        alone |= evaluation.rates
        sampled |= noted
    together, noted = await evaluated(engine, player, rooms)
    return alone, dict(together.rates), [sampled, noted]


async def test_an_evaluation_does_not_depend_on_what_is_played_beside_it(tiny_actor: Path) -> None:
    """In float64, where rounding does not reach a draw. In deterministic mode, bit for bit."""
    async with sampled_rooms(tiny_actor, exact=True) as (engine, player, rooms):
        direct = replace(player, sampler=Direct(engine))
        alone, together, (sampled, noted) = await alone_and_together(engine, direct, rooms)
    assert together == alone
    assert {s: ids for s, (ids, _) in noted.items()} == {s: ids for s, (ids, _) in sampled.items()}
    async with sampled_rooms(tiny_actor) as (engine, player, rooms):
        alone, together, (sampled, noted) = await alone_and_together(engine, player, rooms)
    assert together == alone
    assert noted == sampled, "log-probs too"


async def test_known_places_are_played_once_while_the_bank_is_empty() -> None:
    """Half of the episodes are shown something later, and those alone are played twice."""

    class Half(Shelf):
        async def search(self, requests):
            return [HIT if request.group % 2 else None for request in requests]

    async def played(bank: Retriever) -> tuple[Evaluation, int]:
        engine = ScriptedEngine(renderer(), dice)
        async with house() as home:
            sets: dict[EvalSet, Sequence[Task]] = {("doors", "known"): tasks(8, "known")}
            player = runner(engine, home.host)
            evaluator = Evaluator(player, sets, EpisodeScheduler(4), bank=bank)
            found = await evaluator.evaluate()
        prompts = [renderer().decode(ids) for _, ids in engine.requests]
        return found, sum(prompt.count("assistant") == 1 for prompt in prompts)

    empty, once = await played(Shelf(None))
    half, more = await played(Half())
    assert (once, more) == (8, 12)
    free, guided = ("doors", "known", "free"), ("doors", "known", "guided")
    assert empty.rates[guided] == empty.rates[free] == half.rates[free]
    assert empty.turns[guided] == empty.turns[free] == half.turns[free]
