"""Statistics of `crl eval`: pass@k and intervals worked by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from crl.evaluation.report import Estimate, mean_estimate, pass_at_k, report_rows, reported_ks
from support.evaluations import episode


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 2, 1, 1 / 2),
        (4, 2, 2, 5 / 6),  # 1 − C(2, 2) / C(4, 2) = 1 − 1/6
        (4, 1, 2, 1 / 2),  # 1 − C(3, 2) / C(4, 2) = 1 − 3/6
        (4, 2, 3, 1.0),  # two failures cannot fill three draws
        (5, 0, 5, 0.0),
        (200, 1, 100, 1 / 2),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    outcomes = [True, False, False, True, False, False]
    for k in range(1, 7):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (10, [1, 2, 4, 8, 10])],
)
def test_reported_ks_are_powers_of_two_and_the_number_of_samples(
    samples: int, ks: list[int]
) -> None:
    assert reported_ks(samples) == ks


def test_a_row_by_hand() -> None:
    # Two games in separate places: the first one is won twice, the second one never.
    episodes = [
        episode(game, sample, success=game == 0, score=100.0 if game == 0 else 50.0, turns=1 + game)
        for game in range(2)
        for sample in range(2)
    ]
    (row,) = report_rows(episodes)
    assert (row.key, row.games, row.episodes, row.errors) == (("room", "unseen", "free"), 2, 4, 0)
    # Variance between places: 2/1 · 2 · (2 · 1/2)² / 4² = 1/4, so 1/4 / 1/4 = 1, at least 2 places.
    # t of one degree of freedom is 12.7062, so 2 · (1.96 / t)² = 0.0475903.
    n, z2 = 0.0475903, 1.96**2
    half = 1.96 / (1 + z2 / n) * math.sqrt(0.25 / n + z2 / (4 * n * n))
    assert row.success.value == 0.5
    assert (row.success.low, row.success.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert row.pass_at == {2: row.success}, "both samples of a game agree"
    assert row.means["score"].value == 75.0
    # The mean of two places differs from each by 0.5, so its variance is 0.25, and t is 12.7062.
    assert row.means["turns"].text(2) == "1.50 ± 6.35"
    assert row.means["tokens"].text(1) == "10.0 ± 0.0"


def test_places_and_not_episodes_decide_the_width() -> None:
    same = [episode(game, 0, success=game < 8, goal=f"place {game % 2}") for game in range(16)]
    other = [episode(game, 0, success=game < 8, goal=f"place {game}") for game in range(16)]
    clustered, independent = report_rows(same)[0].success, report_rows(other)[0].success
    assert clustered.value == independent.value == 0.5
    assert clustered.high - clustered.low > 1.5 * (independent.high - independent.low)


def test_pass_at_k_is_clustered_by_goal_by_hand() -> None:
    # Two goals with two games each: the games of the first goal are won, the others never.
    episodes = [
        episode(game, sample, success=game < 2, goal=f"place {game // 2}")
        for game in range(4)
        for sample in range(2)
    ]
    (row,) = report_rows(episodes)
    # Variance between goals: 2/1 · 2 · (2 · 1/2)² / 4² = 1/4, so 1/4 / 1/4 = 1, at least 2 goals.
    # t of one degree of freedom is 12.7062, so 2 · (1.96 / t)² = 0.0475903.
    n, z2 = 0.0475903, 1.96**2
    half = 1.96 / (1 + z2 / n) * math.sqrt(0.25 / n + z2 / (4 * n * n))
    estimate = row.pass_at[2]
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_overall_is_the_unweighted_mean_of_the_tasks() -> None:
    episodes = [episode(game, 0, task="room", success=True) for game in range(8)]
    episodes += [episode(game, 0, task="maze", success=False) for game in range(2)]
    episodes += [episode(0, 0, task="maze", split="seen", success=True)]
    rows = {row.key: row for row in report_rows(episodes)}
    overall = rows["overall", "unseen", "free"]
    assert (overall.success.value, overall.games, overall.episodes) == (0.5, 10, 10)
    assert ("overall", "seen", "free") not in rows, "only one task has it"
    room, maze = rows["room", "unseen", "free"].success, rows["maze", "unseen", "free"].success
    assert overall.success.low == pytest.approx(
        0.5 - math.hypot(room.value - room.low, maze.value - maze.low) / 2
    )


def test_a_mean_of_estimates_by_hand() -> None:
    mean = mean_estimate([Estimate(0.2, 0.1, 0.6), Estimate(0.6, 0.6, 0.9)])
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.4, 0.35, 0.65))


def test_visits_of_the_online_evaluation_are_no_samples() -> None:
    episodes = [episode(0, sample, condition="online") for sample in range(4)]
    (row,) = report_rows(episodes)
    assert row.pass_at == {}
    assert str(row.success) == "1.000 [–, –]", "one place has no interval of its own"
    assert row.means["turns"].text(1) == "3.0 ± –"


def test_errors_are_counted() -> None:
    (row,) = report_rows([episode(0, 0, success=False, error="broken"), episode(1, 0)])
    assert (row.errors, row.success.value) == (1, 0.5)
