"""Counterparts of the paper's figures: statistics, metrics and tables worked by hand, placebos."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from crl.config import load
from crl.config.models import resolve_model
from crl.envs.registry import get_spec
from crl.methods.parts.rollouts import ChatContext
from crl.planning.methods import build_method
from crl.protocols import Hit
from crl.types import (
    Activity,
    EpisodeAddress,
    ExperienceUse,
    Observation,
    Outcome,
    Segment,
    Task,
    Trajectory,
)
from support.paths import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import aggregates  # pyright: ignore[reportMissingImports]
    import coevolution  # pyright: ignore[reportMissingImports]
    import figures  # pyright: ignore[reportMissingImports]
    import pictures  # pyright: ignore[reportMissingImports]
    import placebos  # pyright: ignore[reportMissingImports]

FIRST = np.array(
    [[0.1, 0.9, 0.5], [0.2, 0.8, 0.6], [0.4, 0.7, 0.5], [0.3, 0.6, 0.9], [0.9, 0.1, 0.2]]
)
SECOND = np.array(
    [[0.1, 0.7, 0.5], [0.0, 0.8, 0.4], [0.2, 0.6, 0.3], [0.5, 0.5, 0.5], [0.3, 0.2, 0.1]]
)


def test_aggregates_are_those_of_rliable() -> None:
    """The numbers are those of rliable 1.2.0 for these arrays; intervals from 20,000 samples."""
    assert aggregates.interquartile_mean(FIRST) == pytest.approx(0.5111111111111111)
    assert aggregates.interquartile_mean(SECOND) == pytest.approx(0.37777777777777777)
    assert aggregates.probability_of_improvement(FIRST, SECOND) == pytest.approx(0.68)
    assert aggregates.probability_of_improvement(FIRST, FIRST) == 0.5
    interval = aggregates.bootstrap_interval(aggregates.interquartile_mean, FIRST)
    assert interval == pytest.approx((0.34444444, 0.7), abs=0.02)
    both = (aggregates.probability_of_improvement, FIRST, SECOND)
    assert aggregates.bootstrap_interval(*both) == pytest.approx((0.47333333, 0.86), abs=0.02)
    assert aggregates.bootstrap_interval(*both) == aggregates.bootstrap_interval(*both)


def lines(successes: list[float], task: str = "") -> list[dict]:
    """Return metrics of a run. With `task`, they are those of one of several tasks."""
    name = f"{task}/" if task else ""
    steps = [
        {"kind": "train", f"rollout/{name}success": value, "rollout/success": 9.0}
        if task
        else {"kind": "train", "rollout/success": value}
        for value in successes
    ]
    evaluation = {f"eval/{task or 'room'}/seen/success/free": successes[-1]}
    return [
        *steps,
        {"kind": "eval", **dict.fromkeys(evaluation, 0.0)},
        {"kind": "eval", **evaluation},
    ]


def test_training_metrics_are_means_of_the_last_steps() -> None:
    curve = [0.0] * 5 + [0.2] * 5 + [0.6] * 5
    assert figures.METRICS["training"](lines(curve), "room") == pytest.approx(0.4)
    assert figures.METRICS["training"](lines(curve, "webshop"), "webshop") == pytest.approx(0.4)
    assert figures.METRICS["guided"](lines(curve), "room") is None
    assert figures.METRICS["seen"](lines(curve), "room") == 0.6, "the last evaluation"


def test_a_table_has_paired_differences_and_aggregates() -> None:
    figure = figures.Figure("claim", ("room", "sokoban"), ("none", "static"), (1, 2), ("training",))
    stored = {
        coevolution.Run(setting, arm, seed): {"metrics": lines([value + 0.1 * seed])}
        for setting, values in (("room", (0.5, 0.3)), ("sokoban", (0.2, 0.2)))
        for arm, value in zip(figure.arms, values, strict=True)
        for seed in figure.seeds
    }
    rows = [
        re.sub(" +", " ", row).strip()
        for row in coevolution.table(figure, (1, 2), stored).splitlines()
    ]
    assert "room 0.650 ± 0.635 0.450 ± 0.635" in rows
    assert "first arm − this arm 0.200 ± 0.000" in rows
    assert "first arm − this arm 0.000 ± 0.000" in rows
    # Of the scores 0.3, 0.4, 0.6, 0.7, the middle half is 0.4 and 0.6.
    assert rows[-2].startswith("interquartile mean 0.50 [")
    # In room 0.6 and 0.7 exceed 0.4 and 0.5: 1. In sokoban all pairs are balanced: 0.5.
    assert rows[-1].startswith("P(first arm better) 0.75 [")


def test_all_arms_are_valid_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("benchmarks").symlink_to(ROOT / "benchmarks")
    for model in ("source/extractor", "build/models/large-extractor"):
        Path(model).parent.mkdir(parents=True)
        Path(model).symlink_to(resolve_model("tiny-extractor"))
    for name, arm in figures.ARMS.items():
        sets = [text.format(source="source", checkpoint="source") for text in arm.sets]
        sets = [*coevolution.COMMON, *sets]
        assert load(["room"], sets=sets).run.seed == 0, name
        assert ("{" in "".join(arm.sets)) == (arm.source in figures.ARMS), name
    for figure in figures.FIGURES.values():
        assert {*figure.arms} <= {*figures.ARMS}
        assert {*figure.settings} <= {*figures.SETTINGS}
        assert {*figure.metrics} <= {*figures.METRICS}
    assert len(figures.FIGURES["3a"].seeds) >= 10
    assert len(figures.FIGURES["table1"].seeds) >= 5


def test_a_picture_has_all_arms_and_is_reproducible(tmp_path: Path) -> None:
    costs = {"time": 60.0, "total/sampled_tokens/actor": 5}
    runs = {
        arm: [[{**line, **costs} for line in lines([0.1, 0.2, rate])] for rate in (0.5, 0.7)]
        for arm in ("co-evolved", "none")
    }
    figure = figures.Figure(
        "", ("room",), (*runs,), (1, 2), ("training", "guided", "seen", "tokens"),
        against=("tokens", "minutes"),
    )  # fmt: skip
    first, second = (tmp_path / f"{name}.svg" for name in "ab")
    for path in (first, second):
        pictures.draw(figure, {"room": runs}, path)
    assert first.read_bytes() == second.read_bytes()
    comments = re.findall("<!-- (.*) -->", first.read_text("utf-8"))
    for text, count in {"co-evolved": 3, "none": 3, "training": 3, "minutes": 2, "seen": 1}.items():
        assert comments.count(text) == count, text


def test_curves_have_a_point_for_each_window() -> None:
    run = lines([0.0] * 5 + [0.2, 0.4])
    assert pictures.points(run, "training", pictures.STEP, "room") == [
        (5, 0),
        (7, pytest.approx(0.3)),
    ]
    assert pictures.points(run, "guided", pictures.STEP, "room") == []


def test_a_run_without_a_bank_plays_the_online_set_alone() -> None:
    row = {"task": "room", "split": "unseen", "success": {"value": 0.4}}
    alone = coevolution.online_metrics(
        {"results": [{**row, "condition": "alone"}, {**row, "condition": "online"}]}
    )
    assert alone == {"eval/room/unseen/success/alone": 0.4}
    with_bank = {"kind": "eval", "eval/room/unseen/success/online": 0.7, **alone}
    assert figures.METRICS["unseen, bank"]([with_bank], "room") == 0.7
    assert figures.METRICS["unseen, bank"]([{"kind": "eval", **alone}], "room") == 0.4
    assert figures.METRICS["unseen, alone"]([with_bank], "room") == 0.4


def test_costs_include_the_extractor() -> None:
    run = [
        {"kind": "eval", "time": 60.0},
        {"kind": "extractor", "time": 61.0, "total/trained_tokens/extractor": 10},
        {"kind": "train", "time": 62.0, "total/trained_tokens/actor": 1, "total/env_turns": 5},
        {"kind": "extractor", "time": 63.0, "total/trained_tokens/extractor": 20},
        {"kind": "train", "time": 180.0, "total/trained_tokens/actor": 2, "total/env_turns": 8},
        {"kind": "eval", "time": 300.0},
    ]
    assert figures.METRICS["trained tokens"](run, "room") == 22
    assert figures.METRICS["sampled tokens"](run, "room") == 0
    assert figures.METRICS["environment turns"](run, "room") == 8
    assert figures.METRICS["minutes"](run, "room") == 2


def test_an_arm_may_start_from_a_finished_run_of_another_arm() -> None:
    run = coevolution.Run("room", "foreign bank", 20)
    assert coevolution.source_of(run) == coevolution.Run("room", "co-evolved", 21)
    assert coevolution.source_of(coevolution.Run("room", "none", 20)) is None


# ── placebos ──────────────────────────────────────────────────────────────────────────────────────


def task(goal: str, split: str = "train") -> Task:
    return Task("room", 3, split, goal)  # pyright: ignore[reportArgumentType]


def shown(context: ChatContext, place: Task, lesson: str) -> str:
    """Return the text that a guided agent reads instead of a lesson."""
    hit = Hit(lesson, ExperienceUse("u", 1, "g", "start"), place.goal)
    segments = context.opening(place, Observation("at 1 1"), hit)
    (text,) = [segment.text for segment in segments if segment.origin == "experience"]
    return text


def placebo(kind: type) -> ChatContext:
    plain = ChatContext({"room": ""})
    return kind(**{part.name: getattr(plain, part.name) for part in fields(plain)})


def test_a_filler_has_the_length_of_the_lesson() -> None:
    assert (
        shown(placebo(placebos.Filler), task("a"), "from the start go east.")
        == "well " * 4 + "well"
    )


def test_shuffled_lessons_are_of_other_places_in_training() -> None:
    context = placebo(placebos.Shuffled)
    assert shown(context, task("a"), "go east") == "well well", "no other place is known"
    assert shown(context, task("z", "unseen"), "go up") == "go east"
    assert shown(context, task("b"), "go west") == "go east"
    assert {shown(context, task("a"), f"go {n}") for n in range(9)} == {"go west"}
    others = {shown(context, task("c"), f"go {n}") for n in range(40)}
    assert "go west" in others
    assert "go up" not in others, "evaluations leave nothing behind"


def test_the_best_trajectory_is_shown() -> None:
    context = placebo(placebos.BestTrajectory)
    shaper = placebos.RecordedReward(context)

    def play(place: Task, reward: float, *actions: str) -> None:
        trajectory = Trajectory(
            place, EpisodeAddress(0, 0, 0), "free",
            tuple(Segment("assistant", action, "policy") for action in actions), (),
            Outcome({"outcome": reward}, success=reward > 0), Activity((0.0,) * len(actions)),
        )  # fmt: skip
        assert shaper.shape(trajectory) == {"outcome": reward}

    assert shown(context, task("a"), "one two") == "well well"
    play(task("a"), 0.0, "north")
    assert shown(context, task("a"), "x") == "north"
    play(task("a"), 1.0, "east", "east", "south")
    play(task("a"), 1.0, "east", "southeast")
    play(task("a"), 1.0, "east", "west", "east")
    play(task("a", "seen"), 1.0, "southeast")
    assert shown(context, task("a"), "x") == "east southeast", (
        "won in the fewest turns, in training"
    )


@pytest.mark.parametrize("name", ["FILLER", "SHUFFLED", "TRAJECTORY", "RIGHT"])
def test_placebos_are_methods_with_their_own_section(name: str) -> None:
    reference = f"{ROOT / 'benchmarks' / 'placebos.py'}:{name}"
    config = load(["room"], sets=[f"method={reference}", f"{name.lower()}.lift_coef=1.0"])
    method = build_method(config, {"room": get_spec("room")})
    assert config.spec.name == name.lower()
    assert isinstance(method.context, ChatContext)
    (place,) = get_spec("room").curriculum.probe_tasks(1)
    assert shown(method.context, place, "wait") != "wait"
