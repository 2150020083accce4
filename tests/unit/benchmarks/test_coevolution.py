"""Counterparts of the paper's figures: statistics, metrics and tables worked by hand, placebos."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

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
from support.paths import ROOT, benchmark

aggregates = benchmark("aggregates")
coevolution = benchmark("coevolution")
figures = benchmark("figures")
pictures = benchmark("pictures")
placebos = benchmark("placebos")
report = benchmark("report")

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
    early = [0.0] * 10 + [0.6] * 10 + [1.0] * 10
    assert figures.METRICS["early training"](lines(early), "room") == pytest.approx(0.3)
    assert figures.METRICS["guided"](lines(curve), "room") is None
    assert figures.METRICS["seen"](lines(curve), "room") == 0.6, "the last evaluation"


def results(settings: tuple[str, ...], rates: dict[str, tuple[float, ...]], **parts: Any) -> Any:
    """Return results of two seeds. `rates`: final success of the first seed by arm and setting.

    It is 0.1 higher for the second seed.
    """
    claims = (figures.Claim(*[*rates][:2], "training"),)
    parts = {"claims": claims, "metrics": ("training",), **parts}
    figure = figures.Figure("The claim.", parts.pop("claims"), settings, (*rates,), (1, 2), **parts)
    run = {"seconds": 1800.0, "processor": "a processor", "commit": "0123456789"}
    return figures.Results(
        figure,
        {
            (setting, arm): [{**run, "metrics": lines([rate + extra])} for extra in (0.0, 0.1)]
            for arm, of_arm in rates.items()
            for setting, rate in zip(settings, of_arm, strict=True)
        },
    )


def test_a_section_has_verdicts_paired_differences_and_aggregates() -> None:
    text = report.section(
        "8", results(("room", "sokoban"), {"none": (0.5, 0.2), "static": (0.3, 0.2)}, note="Note.")
    )
    rows = text.splitlines()
    assert rows[:3] == ["## Figure 8", "", "*Claim:* The claim."]
    assert rows[5:8] == ["", "Note.", ""]
    assert "- training of none > that of static: 0.100 ± 0.000. **agrees**" in rows
    assert "| training | room | 0.550 ± 0.635 | 0.350 ± 0.635 |" in rows
    assert "|  | none − arm |  | 0.200 ± 0.000 |" in rows
    assert "|  | none − arm |  | 0.000 ± 0.000 |" in rows
    # Of the scores 0.2, 0.3, 0.5, 0.6, the middle half is 0.3 and 0.5.
    assert any(row.startswith("| training | interquartile mean | 0.40 [") for row in rows)
    # In room 0.5 and 0.6 exceed 0.3, and 0.5 and 0.4 …: all pairs are won. In sokoban all are even.
    assert any(row.startswith("|  | P(none better) |  | 0.75 [") for row in rows)
    assert "2 seeds, 8 runs that took 4.0 hours in all (a processor; commit 01234567):" in rows


def test_verdicts_follow_the_interval_of_the_advantage() -> None:
    assert report.verdict([0.1, 0.1]) == "agrees"
    assert report.verdict([-0.1, -0.1]) == "disagrees"
    assert report.verdict([0.1, -0.1]) == report.verdict([0.1]) == report.verdict([]) == "not shown"
    assert report.overall(["agrees", "agrees"]) == "agrees"
    assert report.overall(["agrees", "disagrees", "agrees"]) == "1 disagrees, 2 agree"
    worst_first = ["2 disagree, 1 agrees", "1 not shown, 2 agree", "2 agree", "not run yet"]
    assert sorted(reversed(worst_first), key=report._rank) == worst_first
    fewer = results(("room",), {"none": (0.2,), "static": (0.5,)}, lower_is_better=True)
    assert report.advantage(fewer, fewer.figure.claims[0]) == pytest.approx([0.3, 0.3])


def test_a_claim_may_compare_the_gains_in_two_settings() -> None:
    claim = figures.Claim("none", "static", "training", ("sokoban",), minus=("room",))
    gains = results(
        ("room", "sokoban"), {"none": (0.5, 0.6), "static": (0.4, 0.3)}, claims=(claim,)
    )
    assert report.advantage(gains, claim) == pytest.approx([0.2, 0.2])
    alone = figures.Claim("none", "static", "training", ("room",))
    assert report.advantage(gains, alone) == pytest.approx([0.1, 0.1])
    both = figures.Claim("none", "static", "training")
    assert report.advantage(gains, both) == pytest.approx([0.2, 0.2]), "mean over the tasks"


def test_a_claim_may_be_about_one_task() -> None:
    claim = figures.Claim("none", "static", "training", tasks=("room",))
    both = results(("room", "webshop"), {"none": (0.5, 0.2), "static": (0.3, 0.4)}, claims=(claim,))
    assert report.advantage(both, claim) == pytest.approx([0.2, 0.2])
    line = "- training of none > that of static (room): 0.200 ± 0.000. **agrees**"
    assert line in report.section("8", both)


def test_numbers_of_a_claim_show_which_one_is_larger() -> None:
    text = report.section("8", results(("room",), {"none": (0.5002,), "static": (0.5,)}))
    assert "training of none > that of static: 0.0002 ± 0.0000. **agrees**" in text


def test_a_note_may_have_several_paragraphs() -> None:
    text = report.section(
        "8", results(("room",), {"none": (0.5,), "static": (0.3,)}, note="A.\n\nB.")
    )
    assert "\n\nA.\n\nB.\n\n| metric" in text


def test_each_mixture_has_its_own_aggregates() -> None:
    text = report.section(
        "9d", results(("three", "six"), {"none": (0.5, 0.2), "static": (0.3, 0.2)})
    )
    assert [
        row.split(" | ")[1] for row in text.splitlines() if "interquartile" in row or "P(" in row
    ] == ["three: interquartile mean", "three: P(none better)", "six: interquartile mean",
          "six: P(none better)"]  # fmt: skip


def test_costs_of_a_mixture_have_one_row() -> None:
    mixture = results(("three",), {"none": (0.5,), "static": (0.3,)}, metrics=("minutes", "seen"))
    for of_arm in mixture.runs.values():
        for run in of_arm:
            run["metrics"] = [{**line, "time": 60.0} for line in run["metrics"]]
    rows = [row.split(" | ")[:2] for row in report.section("8", mixture).splitlines()]
    of_minutes = [row for row in rows if row[0] == "| minutes"]
    assert of_minutes == [["| minutes", "three"]]
    assert [row[1] for row in rows if row[0] == "| seen"] == ["three: room"], "others have no value"


def test_the_commits_of_arms_are_named() -> None:
    both = results(("room",), {"none": (0.5,), "static": (0.3,)})
    both.runs["room", "static"][1]["commit"] = "fedcba98765"
    text = " ".join(report.section("8", both).split())
    assert "commits 01234567: none, static; fedcba98: static):" in text


def test_many_commits_are_counted() -> None:
    arms = ("none", "static", "co-evolved", "experience only", "reflexion")
    many = results(("room",), dict.fromkeys(arms, (0.5,)))
    for n, run in enumerate(run for of_arm in many.runs.values() for run in of_arm):
        run["commit"] = f"{n}" * 11
    text = " ".join(report.section("8", many).split())
    assert "10 commits, which are in the stored runs):" in text


def test_a_claim_may_compare_two_metrics_and_may_be_added_after_the_runs() -> None:
    claim = figures.Claim("none", "static", "seen", than="training", added=True)
    rates = {"none": (0.5,), "static": (0.3,)}
    both = results(("room",), rates, claims=(claim,), paper="“Better”.")
    # `seen` is the last evaluation. Of the two seeds, it and `training` are 0.2 higher in `none`.
    assert report.advantage(both, claim) == pytest.approx([0.2, 0.2])
    rows = report.section("8", both).splitlines()
    assert "*Paper:* “Better”." in rows
    line = "- seen of none > training of static: 0.200 ± 0.000. **agrees** *Added after the runs.*"
    assert line in rows


def test_numbers_of_actions_have_no_interquartile_mean() -> None:
    rates = {"none": (0.5, 0.2), "static": (0.3, 0.2)}
    text = report.section("8", results(("room", "sokoban"), rates, lower_is_better=True))
    assert "interquartile" not in text
    assert "P(none better)" in text
    assert "- training of none < that of static: -0.100 ± 0.000. **disagrees**" in text


def test_the_meaning_of_each_metric_is_given() -> None:
    text = " ".join(figures.METRIC_TEXTS).replace(",", "")
    missing = [name for name in figures.METRICS if name not in text]
    assert missing == ["right lessons, untrained extractor"], "explained with `right lessons`"


def test_the_documentation_has_all_figures_and_those_that_disagree_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.latency_figures, "LATENCY", tmp_path / "latency.json")
    (tmp_path / "latency.json").write_text('{"repetitions": 1, "rows": [{"arm": "off"}]}', "utf-8")
    folder = tmp_path / "results"
    folder.mkdir()
    page = folder / "figures.md"
    page.write_text(f"# Figures\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end.\n", "utf-8")
    latency = f"{report.LATENCY_BEGIN}\nlatency\n{report.LATENCY_END}\n"
    (folder / "speed.md").write_text(latency, "utf-8")
    good = results(("room",), {"co-evolved": (0.5,), "none": (0.4,)})
    bad = results(("room",), {"co-evolved": (0.3,), "none": (0.4,)})
    for _ in range(2):
        report.document({"3a": good, "6": bad}, folder)
    text = page.read_text("utf-8")
    head = "| figure | claim | fixed before the runs | added after them |"
    assert text.startswith(f"# Figures\n\n{report.BEGIN}\n\n{head}\n")
    assert text.endswith(f"\n{report.END}\n\nThe end.\n")
    assert (folder / "speed.md").read_text("utf-8") == latency, "unchanged without valid results"
    assert "old" not in text
    rows = [row for row in text.splitlines() if row.startswith("| ")][2:]
    verdicts = [row.split(" | ")[2:] for row in rows[: len(figures.FIGURES) + 3]]
    others = [["not run yet", "– |"]] * (len(figures.FIGURES) + 1)
    assert verdicts == [["disagrees", "– |"], ["agrees", "– |"], *others]
    assert rows[0].startswith("| [Figure 6](#figure-6) |")
    assert (tmp_path / "images" / "figures" / "3a.svg").exists()
    assert "![Figure 6](../images/figures/6.svg)" in text


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
        assert {arm for c in figure.claims for arm in (c.better, c.worse)} <= {*figure.arms}
        assert {c.metric for c in figure.claims} <= {*figure.metrics}
        assert {s for c in figure.claims for s in (*c.settings, *c.minus)} <= {*figure.settings}
        assert {*figure.settings} <= {*figures.SETTINGS}
        assert {*figure.metrics} <= {*figures.METRICS}
    assert len(figures.FIGURES["3a"].seeds) >= 10
    assert len(figures.FIGURES["table1"].seeds) >= 5


def test_a_picture_has_all_arms_and_is_reproducible(tmp_path: Path) -> None:
    costs = {"time": 60.0, "total/sampled_tokens/actor": 5}
    drawn = results(
        ("room",), {"co-evolved": (0.5,), "none": (0.4,)},
        metrics=("training", "guided", "seen", "tokens"), against=("tokens", "minutes"),
    )  # fmt: skip
    for of_arm in drawn.runs.values():
        for run in of_arm:
            run["metrics"] = [{**line, **costs} for line in run["metrics"]]
    first, second = (tmp_path / f"{name}.svg" for name in "ab")
    for path in (first, second):
        pictures.draw(drawn, path)
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
    row = {"task": "room", "split": "unseen", "success": {"value": 0.4, "low": 0.3, "high": 0.5}}
    alone = coevolution.online_metrics(
        {"results": [{**row, "condition": "alone"}, {**row, "condition": "online"}]}
    )
    name = "eval/room/unseen/success/alone"
    assert alone == {name: 0.4, f"{name}/low": 0.3, f"{name}/high": 0.5}
    with_bank = {"kind": "eval", "eval/room/unseen/success/online": 0.7, **alone}
    assert figures.METRICS["unseen with online bank"]([with_bank], "room") == 0.7
    assert figures.METRICS["unseen with online bank"]([{"kind": "eval", **alone}], "room") is None
    assert figures.METRICS["unseen visits alone"]([with_bank], "room") == 0.4


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


def test_runs_of_other_models_are_not_shared() -> None:
    """Runs of the methods have models that those of the other figures did not have."""
    by_figure = {
        name: {run.path for run in coevolution.runs_of(figure, figure.seeds)}
        for name, figure in figures.FIGURES.items()
    }
    methods = by_figure.pop("methods")
    assert not methods & set().union(*by_figure.values())
    assert {path.parts[0] for path in methods} == {"methods"}
    source = coevolution.source_of(coevolution.Run("room", "offline", 20, "methods"))
    assert source == coevolution.Run("room", "experience only", 20, "methods")


def test_no_run_starts_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def fail(sweep: Any, *arguments: str) -> None:
        started.append(arguments[:5])
        raise CalledProcessError(1, "crl")

    monkeypatch.setattr(coevolution.Sweep, "_crl", fail)
    sweep = coevolution.Sweep(tmp_path / "results", tmp_path / "runs", quick=True)
    runs = [coevolution.Run("room", arm, seed) for seed in (21, 20) for arm in ("offline", "none")]
    with pytest.raises(CalledProcessError):
        sweep.make(runs, jobs=1)
    assert started == [("train", "--tasks", "room", "--seed", "20")], "the source of the first run"


# ── placebos ──────────────────────────────────────────────────────────────────────────────────────


def task(goal: str, split: str = "train") -> Task:
    return Task("room", 3, split, goal)  # pyright: ignore[reportArgumentType]


def shown(context: ChatContext, place: Task, lesson: str) -> str:
    """Return the text that a guided agent reads instead of a lesson."""
    hit = Hit(lesson, ExperienceUse("u", 1, "g", "start"), place.goal)
    segments = context.opening(place, Observation("at 1 1"), [hit])
    (text,) = [segment.text for segment in segments if segment.origin == "experience"]
    return text


def placebo(kind: type) -> ChatContext:
    plain = ChatContext({"room": ""})
    return kind(**{part.name: getattr(plain, part.name) for part in fields(plain)})


def test_a_filler_has_the_length_of_the_lesson() -> None:
    assert (
        shown(placebo(placebos.Filler), task("a"), "from the start go east.")
        == "the the the the the"
    )


def test_shuffled_lessons_are_of_other_places_in_training() -> None:
    context = placebo(placebos.Shuffled)
    assert shown(context, task("a"), "go east") == "the the", "no other place is known"
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

    assert shown(context, task("a"), "one two") == "the the"
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


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_arms_of_a_figure_have_different_colours(name: str) -> None:
    arms = figures.FIGURES[name].arms
    colours = pictures.arm_colours(arms)
    assert len(set(colours.values())) == len(arms)
    assert all(colours[arm] == pictures.COLOURS[0] for arm in arms if arm == "co-evolved")
