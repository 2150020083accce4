"""Rival methods: values and scores worked by hand, candidates of a source, settings of the arms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from crl.config import RunConfig, load
from crl.config.schema import RetrievalSection
from crl.envs.registry import get_spec
from crl.errors import ConfigError
from crl.manager import DistilRequest
from crl.manager.records import Entry
from crl.manager.retrieval.choice import Candidate, choose_entries
from crl.planning.methods import build_method
from crl.protocols import Method
from crl.types import (
    Condition,
    Counters,
    EpisodeAddress,
    Outcome,
    Place,
    Provenance,
    Task,
    Trajectory,
)
from support.paths import ROOT, benchmark

coevolution = benchmark("coevolution")
figures = benchmark("figures")
rivals = benchmark("rivals")

WON, LOST = 1.0, -1.0
SETTINGS = RetrievalSection(margin=2.0, min_similarity=-1.0)


def candidate(uid: str, similarity: float, *outcomes: float, retrieved: int = 0) -> Candidate:
    counters = Counters(
        retrieved=retrieved, credited=len(outcomes), credit=sum(outcomes), outcomes=outcomes
    )
    entry = Entry(uid, 1, "Go west.", Place("room", "goal"), Provenance("g", (0, 1)), counters)
    return Candidate(entry, similarity)


def chosen(policy: str, found: Sequence[Candidate], *, seed: int = 0, trial: bool = False) -> str:
    reference = f"{ROOT / 'benchmarks' / 'rivals.py'}:{policy}"
    settings = SETTINGS.model_copy(update={"choice": reference})
    (entry,) = choose_entries(found, 0, partial(random.Random, seed), settings, trial=trial)
    return entry.uid


# ── MemRL ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcomes", "value"),
    [
        ((), 0.0),
        ((WON,), 0.3),
        ((WON, WON), 0.51),  # 0.3 + 0.3 · (1 − 0.3)
        ((WON, LOST), -0.09),  # 0.3 + 0.3 · (−1 − 0.3)
        ((LOST, WON), 0.09),  # the last outcome weighs most
        ((WON,) * 64, 1.0),
    ],
)
def test_q_is_a_moving_average_of_the_outcomes(outcomes: tuple[float, ...], value: float) -> None:
    assert rivals.q_value(outcomes) == pytest.approx(value)


def test_z_scores_by_hand() -> None:
    """The deviations of 1, 2 and 6 from 3 are −2, −1 and 3: the variance is 14/3."""
    std = (14 / 3) ** 0.5
    assert rivals.z_scores([1.0, 2.0, 6.0]) == pytest.approx([-2 / std, -1 / std, 3 / std])
    assert rivals.z_scores([0.5]) == [0.0]
    assert rivals.z_scores([1.0, 1.0, 0.99999994]) == [0.0] * 3, "float32 rounding is no difference"


def test_similarity_and_value_have_equal_weights() -> None:
    """Q is −0.3 after a loss and 0.3 after a success.

    With two candidates, z is ±1. With three, the mean and the standard deviation of the similarity
    are 0.8 and √0.02, those of Q 0.1 and √0.08.
    """
    found = [candidate("a", 0.9, LOST), candidate("b", 0.7, WON)]
    assert rivals.value_scores(found, 0, SETTINGS) == pytest.approx([0.0, 0.0])  # ½ · 1 − ½ · 1
    found = [candidate("a", 0.9, LOST), candidate("b", 0.9, WON), candidate("c", 0.6, WON)]
    expected = [
        0.5 * 0.1 / 0.02**0.5 - 0.5 * 0.4 / 0.08**0.5,
        0.5 * 0.1 / 0.02**0.5 + 0.5 * 0.2 / 0.08**0.5,
        -0.5 * 0.2 / 0.02**0.5 + 0.5 * 0.2 / 0.08**0.5,
    ]
    assert rivals.value_scores(found, 0, SETTINGS) == pytest.approx(expected)
    assert chosen("VALUE", found) == "b"


def test_the_value_decides_among_equally_similar_memories() -> None:
    """Q is 0.09 for a late success, −0.09 for an early one, and 0 for a new memory.

    The first two have equal counts, so only the order of their outcomes differs.
    """
    found = [candidate("late", 1.0, LOST, WON), candidate("early", 1.0, WON, LOST)]
    assert chosen("VALUE", found) == "late"
    assert chosen("VALUE", [found[1], candidate("new", 1.0)]) == "new"
    ties = [candidate("x", 1.0), candidate("y", 1.0)]
    assert {chosen("VALUE", ties, seed=seed) for seed in range(20)} == {"x", "y"}


# ── Evolving-RL ───────────────────────────────────────────────────────────────────────────────────


def episode(
    group: int, member: int, condition: Condition, won: bool = True, error: str | None = None
) -> Trajectory:
    outcome = Outcome({"outcome": float(won)}, success=won, error=error)
    task = Task("room", 3, "train", f"place {group}")
    return Trajectory(task, EpisodeAddress(5, group, member), condition, outcome=outcome)


def test_a_source_is_distilled_once_for_each_candidate() -> None:
    batch = [
        episode(0, 0, "guided"), episode(0, 1, "guided"), episode(0, 2, "guided"),
        episode(0, 3, "free", won=False), episode(1, 0, "guided"), episode(1, 3, "free", error="e"),
    ]  # fmt: skip
    selected = rivals.SourceCandidates(members=4).select(batch)
    assert {t.task.goal for t in selected} == {"place 0"}, "a source with an error is left out"
    assert [DistilRequest.from_trajectory("run", t).id for t in selected] == [
        "run/5/0/3", "run/5/0/7", "run/5/0/11",
    ]  # fmt: skip
    assert not any(t.success for t in selected), "the free episode lost, the guided ones won"


def arm(name: str, *sets: str) -> RunConfig:
    return load(["room"], sets=[*coevolution.COMMON, *rivals.RIVALS[name], *sets])


def evolving_rl() -> tuple[RunConfig, Method]:
    config = arm("evolving-rl")
    return config, build_method(config, {"room": get_spec("room")})


def test_a_group_has_one_source_and_one_evaluation_for_each_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config, method = evolving_rl()
    plans = method.planner.plan(Task("room", 0, "train", ""), config.rollout.group_size, 0)
    conditions = [plan.condition for plan in plans]
    assert conditions == ["guided"] * 7 + ["free"]
    assert method.distiller
    assert len(method.distiller.select([episode(0, 7, "free")])) == 7
    assert (config.bank.max_per_goal, config.bank.evict) == (7, "fifo")
    assert (config.retrieval.trial_share, config.extractor.baseline) == (1.0, "guided")
    assert config.trains_extractor
    with pytest.raises(ConfigError, match="leaves fewer than two evaluations"):
        arm("evolving-rl", "rollout.group_size=2")


def test_the_solver_is_trained_on_the_evaluations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the source has no advantage, and does not change that of the evaluations.

    Of three evaluations, one won: the mean is 1/3, and the standard deviation 1/√3.
    """
    monkeypatch.chdir(ROOT)
    _, method = evolving_rl()
    (term,) = method.actor.terms
    batch = [
        episode(0, 0, "guided"), episode(0, 1, "guided", won=False),
        episode(0, 2, "guided", won=False), episode(0, 3, "free"),
    ]  # fmt: skip
    advantages = term(batch)
    assert isinstance(advantages, torch.Tensor)
    expected = [2 / 3 * 3**0.5, -1 / 3 * 3**0.5, -1 / 3 * 3**0.5, 0.0]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_similar_lessons_are_drawn_without_their_records() -> None:
    found = [candidate("lost", 1.0, LOST, LOST, retrieved=2), candidate("won", 0.995, WON, WON)]
    assert {chosen("SIMILAR", found, seed=seed) for seed in range(20)} == {"lost", "won"}
    assert {chosen("SIMILAR", found, seed=seed, trial=True) for seed in range(20)} == {"won"}, (
        "a trial takes the candidate that was evaluated least"
    )


# ── arms ──────────────────────────────────────────────────────────────────────────────────────────


def test_frozen_models_of_the_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check which models each arm trains: (actor, extractor)."""
    monkeypatch.chdir(ROOT)
    trained = {
        name: (config.actor.optimizer.learning_rate > 0, config.trains_extractor)
        for name in rivals.RIVALS
        for config in [arm(name)]
    }
    assert trained == {
        "evolving-rl": (True, True),
        "memrl": (False, False),
        "memrl retrieval": (True, True),
        "skillos": (False, True),
    }
    arms = ("co-evolved", *rivals.RIVALS, "experience only")
    assert figures.FIGURES["rivals"].arms == arms


def test_memrl_searches_by_intent_without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("memrl", "memrl retrieval"):
        config = arm(name)
        assert config.retrieval.choice == f"{ROOT / 'benchmarks' / 'rivals.py'}:VALUE"
        assert config.retrieval.trial_share == 0.0
        assert config.bank.key_text_weight == 1e-6
    assert arm("memrl").bank.evict == "fifo"
    assert arm("memrl retrieval").bank.evict == "credit", "the bank of the arm co-evolved"
