"""Episodes of `crl eval`: every game exactly once per sample, whatever the batch size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.evaluation.evaluate import EvalSet, Evaluator
from crl.evaluation.online import UNCOUNTED_VISITS, VISITS, OnlineResult
from crl.evaluation.samples import Source, play_samples
from crl.evaluation.scheduling import EpisodeScheduler
from crl.rollout.waves import SequentialSampler
from crl.types import Split, Task, Trajectory
from support.doors import TASK, RecordingRetriever, dice, open_host, renderer, runner, scripted
from support.trajectories import build_trajectory


def games(n: int, split: Split) -> tuple[Task, ...]:
    return tuple(replace(TASK, seed=i, split=split, goal=f"door {i}") for i in range(n))


SETS: dict[EvalSet, tuple[Task, ...]] = {
    ("doors", "seen"): games(7, "seen"),
    ("doors", "unseen"): games(10, "unseen"),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("limit", [1, 7, 64])
async def test_every_game_is_played_once_per_sample(limit: int, samples: int) -> None:
    results = []
    for in_order in (False, True):
        engine = ScriptedEngine(renderer(), dice)
        async with open_host() as hosted:
            player = runner(engine, hosted.host)
            if in_order:
                player = runner(engine, hosted.host, sampler=SequentialSampler(engine))
            evaluator = Evaluator(player, SETS, EpisodeScheduler(limit, in_order=in_order))
            episodes = await play_samples(evaluator, Source.none, samples)
        played = Counter((e.game.split, e.game.number, e.sample) for e in episodes)
        expected = {
            (split, number, sample)
            for (_, split), tasks in SETS.items()
            for number in range(len(tasks))
            for sample in range(samples)
        }
        assert played == Counter(expected)
        assert {(e.game.goal, e.condition) for e in episodes if e.game.number == 3} == {
            ("door 3", "free")
        }
        results.append(episodes)
    assert results[0] == results[1], "scheduling changes no result"


async def test_a_bank_guides_both_splits() -> None:
    async with open_host() as hosted:
        evaluator = Evaluator(
            runner(scripted("open"), hosted.host),
            SETS,
            EpisodeScheduler(8),
            bank=(bank := RecordingRetriever()),
        )
        episodes = await play_samples(evaluator, Source.bank, 1)
    assert {e.condition for e in episodes} == {"guided"}
    assert len(bank.requests) == len(episodes) == 17


class Visits:
    """Online evaluation with given results."""

    def __init__(self, *visits: list[Trajectory]) -> None:
        self.result = OnlineResult([[]] * UNCOUNTED_VISITS + list(visits), list(visits))

    async def evaluate(self, *, compare_lessons: bool) -> dict[str, OnlineResult]:
        return {"doors": self.result}


async def test_games_with_the_same_goal_are_told_apart_in_online_evaluations() -> None:
    places = [replace(TASK, split="unseen", params={"variation": n}) for n in (7, 3)]
    visits = [
        [build_trajectory(place, 0, n, 0, "guided") for n, place in enumerate(places)]
        for _ in range(VISITS - UNCOUNTED_VISITS)
    ]
    async with open_host() as hosted:
        evaluator = Evaluator(
            runner(scripted("open"), hosted.host),
            SETS,
            EpisodeScheduler(1),
            online=Visits(*visits),  # pyright: ignore[reportArgumentType]
        )
        episodes = await play_samples(evaluator, Source.online, 1)
    played = [(e.game.number, e.sample) for e in episodes if e.condition == "online"]
    assert played == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


async def test_results_of_an_episode() -> None:
    async with open_host(broken={1}) as hosted:
        player = runner(scripted("polish", "open"), hosted.host)
        evaluator = Evaluator(
            player, {("doors", "unseen"): games(2, "unseen")}, EpisodeScheduler(1)
        )
        good, broken = await play_samples(evaluator, Source.none, 1)
    assert (good.success, good.turns, good.error) == (True, 2, None)
    assert good.tokens > 0
    assert not broken.success
    assert "the hinges are rusty" in str(broken.error)
