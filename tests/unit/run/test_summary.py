"""Summary at the end of a run: its text word for word, and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crl.evaluation.evaluate import EvalKey, Evaluation, SuccessRate
from crl.evaluation.metrics import GroupGap
from crl.intervals import Mean
from crl.run.summary import (
    HEIGHT,
    WIDTH,
    ExperienceReport,
    Outcome,
    SuccessReport,
    Summary,
    best_of_each_task,
    experience_report,
)
from crl.run.totals import Totals
from crl.types import Counters, Experience, Lift, Place, Provenance

SETTINGS: list[EvalKey] = [
    ("room", "seen", "free"),
    ("room", "unseen", "free"),
    ("room", "seen", "guided"),
    ("room", "unseen", "online"),
]
SEEN, UNSEEN, GUIDED, ONLINE = SETTINGS
BEFORE = Evaluation({SEEN: SuccessRate(64, 256), UNSEEN: SuccessRate(0, 256)}, {}, 0)
AFTER = Evaluation({SEEN: SuccessRate(192, 256), UNSEEN: SuccessRate(141, 256)}, {}, 0)

SUMMARY = Summary(
    steps=80,
    seconds=171.6,
    totals=Totals(env_turns=12_345, overtime_turns=678, actor_tokens=98_765),
    success=SuccessReport(1.0, BEFORE, AFTER),
    skipped_updates=0,
    outcome=Outcome(Path("runs/one"), Path("runs/one/checkpoints/80"), planned_steps=80),
)

TEXT = """
80 steps: 172 s, 12,345 environment turns, 98,765 sampled tokens
success [95 % interval]:
  seen, without experience           0.250 → 0.750   +0.500 [+0.420, +0.569]
  unseen, without experience         0.000 → 0.551   +0.551 [+0.488, +0.611]

Without experience, training raised success in seen places (+0.500 [+0.420,
  +0.569]) and in unseen places (+0.551 [+0.488, +0.611]).

trained models: runs/one/checkpoints/80
report: crl report runs/one"""


def test_a_whole_run() -> None:
    assert SUMMARY.text() == TEXT


def test_notes_on_unofficial_data() -> None:
    note = "played on a generated maze: metrics are not comparable with published results"
    success = SuccessReport(1.0, BEFORE, AFTER, data_notes={"maze": note})
    text = replace(SUMMARY, success=success).text()
    assert (
        "\n\nmaze is played on a generated maze: metrics are not comparable with published\n"
        "  results\n\ntrained models: "
    ) in text


def test_a_stopped_run_has_no_final_evaluation() -> None:
    text = replace(SUMMARY, success=SuccessReport(1.0, BEFORE), steps=3).text()
    assert "3 steps: 172 s" in text
    assert "  seen, without experience           0.250 [0.201, 0.306]\n" in text
    assert "→" not in text


def test_a_run_stopped_in_its_first_evaluation() -> None:
    text = replace(SUMMARY, success=SuccessReport(1.0, None), steps=0).text()
    assert "\n0 steps: 172 s, 12,345 environment turns" in text
    assert "98,765 sampled tokens\nstopped before the first evaluation\n\ntrained models" in text


def test_a_run_without_evaluations_has_no_heading_for_them() -> None:
    empty = Evaluation({}, {}, 0)
    text = replace(SUMMARY, success=SuccessReport(1.0, empty, empty)).text()
    assert "95 % interval" not in text


def test_errors_and_skipped_updates_are_reported() -> None:
    success = SuccessReport(1.0, replace(BEFORE, errors=1), replace(AFTER, errors=4))
    summary = replace(SUMMARY, skipped_updates=2, success=success)
    text = summary.text()
    assert "\n5 eval episodes ended with an error and count as failures\n" in text
    assert "\n2 updates were skipped because the loss or its gradient was not finite\n" in text
    assert summary.record()["errors"] == {
        "training_episodes": 0, "eval_episodes": 5, "skipped_updates": 2,
    }  # fmt: skip


def test_the_longest_text_fits_one_screen() -> None:
    """Two tasks, all conditions, both models, sentences of three lines, and many warnings."""
    keys = [
        (task, split, condition) for task in ("room", "maze") for _, split, condition in SETTINGS
    ]
    gains = {"room": Mean(-0.125, 0.05, 64, 64), "maze": Mean(-0.25, 0.05, 64, 64)}
    before = Evaluation({key: SuccessRate(128, 256) for key in keys}, {}, 3)
    after = Evaluation({key: SuccessRate(100, 256) for key in keys}, {}, 4, lift=gains)
    notes = {task: "played on generated data that is not the official one" for task in ("a", "b")}
    warnings = [f"warning: in {n} of 9 steps {'sign ' * 20}" for n in range(9)]
    stats = {**REPORT.stats, "bank/size": 1_234_567, "queue/done": 12_345_678}
    summary = replace(
        SUMMARY,
        success=SuccessReport(1.0, before, after, data_notes=notes),
        totals=Totals(123_456_789, 678, 9_876_543_210, errors=5),
        experience=replace(REPORT, stats=stats, evaluation=after),
        skipped_updates=2,
        warnings=warnings,
    )
    for outcome in (SUMMARY.outcome, replace(SUMMARY.outcome, interrupted=True)):
        lines = replace(summary, outcome=outcome).text().splitlines()
        assert len(lines) == HEIGHT - 1
        assert max(map(len, lines)) <= WIDTH
        assert lines[-1].startswith(("report: crl report", "continue: crl resume"))
        assert any(line.startswith("warning: in 0 of 9") for line in lines)
        assert any("more lines of notes: the report has them" in line for line in lines)
    record = summary.record()
    assert set(warnings) < set(record["notes"]), "the file has all of them"
    assert "success, mean of 2 tasks [95 % interval]:" in summary.text()
    assert sum("→" in line for line in summary.text().splitlines()) == 4


def test_the_file_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    replace(SUMMARY, experience=REPORT).write(path)
    record = json.loads(path.read_text("utf-8"))
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert (record["steps"], record["planned_steps"], record["seconds"]) == (80, 80, 171.6)
    assert record["success"][0] == {
        "task": "room", "split": "seen", "condition": "free", "episodes": 256,
        "first": {"value": 0.25, "low": pytest.approx(0.201, abs=5e-4),
                  "high": pytest.approx(0.306, abs=5e-4)},
        "last": {"value": 0.75, "low": pytest.approx(0.694, abs=5e-4),
                 "high": pytest.approx(0.799, abs=5e-4)},
        "change": {"value": 0.5, "low": pytest.approx(0.420, abs=5e-4),
                   "high": pytest.approx(0.569, abs=5e-4)},
    }  # fmt: skip
    assert record["judgements"] == SUMMARY.judgements
    assert record["totals"]["total/env_turns"] == 12_345
    experience = record["experience"]
    assert experience["gap"] == {"value": 0.25, "low": 0.25, "high": 0.25, "n": 4, "places": 3}
    assert experience["probe_gains"]["room"]["last"]["value"] == 0.4
    assert experience["online_gains"]["room"]["value"] == 0.125
    assert experience["lessons"]["room"]["correct"]["value"] == 0.75
    assert experience["lessons"]["room"]["untrained_answers"] == 128
    assert experience["bank"]["ops/add"] == 40
    assert [best["uid"] for best in experience["best"]] == [e.uid for e in REPORT.best]
    assert experience["best"][2]["lift"] is None


def test_the_file_of_a_deterministic_run_has_no_wall_times() -> None:
    record = replace(SUMMARY, outcome=replace(SUMMARY.outcome, deterministic=True)).record()
    assert [record[name] for name in ("seconds", "step_seconds", "bank_seconds")] == [None] * 3


def test_rates_without_intervals_are_null_in_the_file() -> None:
    unknown = Evaluation({ONLINE: SuccessRate(1, 2, effective_episodes=0)}, {}, 0)
    record = replace(SUMMARY, success=SuccessReport(1.0, BEFORE, unknown)).record()
    (row,) = record["success"]
    assert row["last"] == {"value": 0.5, "low": None, "high": None}
    assert (row["first"], row["change"]) == (None, None)


def test_failed_training_episodes_are_counted() -> None:
    for errors, line in (
        (1, "\n1 training episode failed with an error and was not trained on\n"),
        (1200, "\n1,200 training episodes failed with an error and were not trained on\n"),
    ):
        assert line in replace(SUMMARY, totals=replace(SUMMARY.totals, errors=errors)).text()


def test_a_run_without_updates_has_trained_no_model() -> None:
    text = replace(SUMMARY, outcome=replace(SUMMARY.outcome, actor_updated=False)).text()
    assert "trained models" not in text
    assert (
        "\nno update of the actor was made: its weights are unchanged\n\n"
        "checkpoint: runs/one/checkpoints/80\n"
    ) in text


def test_singular_nouns() -> None:
    success = SuccessReport(1.0, BEFORE, replace(AFTER, errors=1))
    stats = {**REPORT.stats, "bank/size": 1, "queue/done": 1}
    report = replace(REPORT, stats=stats)
    text = replace(SUMMARY, steps=1, success=success, skipped_updates=1, experience=report).text()
    for line in (
        "\n1 step: 172 s",
        "\n1 eval episode ended with an error and counts as a failure\n",
        "\n1 update was skipped because the loss or its gradient was not finite\n",
        "\nbank: 1 experience of 1 episode; ",
    ):
        assert line in text


def test_an_evaluation_alone() -> None:
    assert SuccessReport(0.0, AFTER).lines() == [
        "success on fixed eval sets, greedy [95 % Wilson interval over episodes]:",
        "  room seen   without experience         256 episodes   0.750 [0.694, 0.799]",
        "  room unseen without experience         256 episodes   0.551 [0.490, 0.611]",
    ]
    assert (
        SuccessReport(0.7, AFTER)
        .lines()[0]
        .startswith("success on fixed eval sets, sampled at temperature 0.7 [")
    )


# ── a run with experience ─────────────────────────────────────────────────────────────────────────

SOURCE = Provenance("g1", (0, 1))
REPORT = ExperienceReport(
    stats={
        "bank/size": 31,
        "total/sampled_tokens/extractor": 4_321,
        "queue/done": 640,
        "queue/dead": 2,
        "ops/add": 40,
        "ops/update": 5,
    },
    best=[
        Experience(
            "e1",
            1,
            "go east.",
            "room",
            "Room: the dusty hut.",
            SOURCE,
            Counters(credited=12, credit=8.0, lift=Lift(3, 0.25, 0.125)),
        ),
        Experience(
            "e2",
            1,
            "go on.",
            "room",
            "Room: the wet hut.",
            SOURCE,
            Counters(credited=4, credit=4.0, lift=Lift(1, 0.0)),
        ),
        Experience(
            "e3",
            1,
            "go west.",
            "room",
            "Room: the red hut.",
            SOURCE,
            Counters(credited=4, credit=4.0),
        ),
    ],
    gaps=[
        GroupGap(Place("room", "hut"), 0.5),
        GroupGap(Place("room", "hut"), 0.0),
        GroupGap(Place("room", "cell"), 0.25),
        GroupGap(Place("shop", "cell"), 0.25),
    ],
    probe_gains={"room": ((0.01, 0.05), (0.4, 0.06))},
    evaluation=Evaluation(
        {},
        {},
        0,
        lift={"room": Mean(0.125, 0.05, 64, 64)},
        lessons={"room": SuccessRate(192, 256)},
        untrained_lessons={"room": SuccessRate(32, 128)},
    ),
    trained=12,
)


def test_several_tasks_have_an_overall_row() -> None:
    maze: EvalKey = ("maze", "unseen", "free")
    before = Evaluation({UNSEEN: SuccessRate(64, 256), maze: SuccessRate(64, 256)}, {}, 0)
    after = Evaluation({UNSEEN: SuccessRate(192, 256), maze: SuccessRate(64, 256)}, {}, 0)
    # mean 1/4 [1/4 − 0.0493/√2, 1/4 + 0.0565/√2] and 1/2 ± √(0.0493² + 0.0565²)/2
    row = (
        "  overall unseen without experience         512 episodes   0.250 [0.215, 0.290] → "
        "0.500 [0.463, 0.537]   +0.250 [+0.195, +0.301]"
    )
    assert SuccessReport(1.0, before, after).lines()[-1] == row
    assert SuccessReport(1.0, before).lines()[-1] == row[: row.index(" →")]


def test_a_condition_without_an_earlier_rate_has_only_the_later_one() -> None:
    before = Evaluation({UNSEEN: SuccessRate(64, 256)}, {}, 0)
    after = Evaluation(
        {UNSEEN: SuccessRate(192, 256), ("room", "unseen", "online"): SuccessRate(64, 256)}, {}, 0
    )
    assert SuccessReport(1.0, before, after).lines()[1:] == [
        (
            "  room unseen without experience         256 episodes   0.250 [0.201, 0.306] → "
            "0.750 [0.694, 0.799]   +0.500"
        ),
        (
            "  room unseen with a bank built online   256 episodes   –                    → "
            "0.250 [0.201, 0.306]"
        ),
    ]


def test_rows_are_grouped_by_task_and_aligned() -> None:
    maze: EvalKey = ("maze", "unseen", "free")
    rates = {
        UNSEEN: SuccessRate(1, 2),
        maze: SuccessRate(1, 2),
        ("room", "unseen", "online"): SuccessRate(1, 2),
    }
    rows = SuccessReport(1.0, Evaluation(rates, {}, 0)).lines()[1:]
    assert [row[:17] for row in rows] == [
        "  room    unseen ",
        "  room    unseen ",
        "  maze    unseen ",
        "  overall unseen ",
    ]


def test_the_line_of_the_experience() -> None:
    """The gaps of the three places have one mean."""
    assert REPORT.line() == ("bank: 31 experiences of 640 episodes; guided − free +0.250 ± 0.000")
    assert replace(REPORT, gaps=[]).line() == "bank: 31 experiences of 640 episodes"


def test_groups_of_one_place_are_one_cluster() -> None:
    """Compare the interval of a mean with numbers worked by hand.

    m = 0.1. Sums less n_c · m: hut 0.5 − 0.2, cell −0.25 − 0.2, yard 0.25 − 0.1. Their squares sum
    to 0.315. V = 3/2 · 0.315 / 25 = 0.0189; half = 4.302653 · √0.0189 = 0.591515. Over groups as if
    independent, half = 0.440.
    """
    values = {"hut": (0.75, -0.25), "cell": (0.0, -0.25), "yard": (0.25,)}
    gaps = [
        GroupGap(Place("room", place), gap)
        for place, place_gaps in values.items()
        for gap in place_gaps
    ]
    assert replace(REPORT, gaps=gaps).line().endswith("guided − free +0.100 ± 0.592")


def experiences(*tasks: str) -> list[Experience]:
    """Return experiences, the best first."""
    return [
        Experience(f"e{i}", 1, "go east.", task, "", SOURCE, Counters(credited=9, credit=9.0 - i))
        for i, task in enumerate(tasks)
    ]


def test_the_best_experiences_of_every_task_are_shown() -> None:
    def shown(*tasks: str) -> list[str]:
        return [experience.uid for experience in best_of_each_task(experiences(*tasks))]

    assert shown() == []
    assert shown(*["room"] * 7) == ["e0", "e1", "e2", "e3", "e4"]
    assert shown(*["room"] * 7, "shop", "room", "house", "shop", "shop") == [
        "e0",
        "e1",
        "e7",
        "e10",
        "e9",
    ]
    assert shown("a", "a", "b", "b", "c", "d", "e", "f") == ["e0", "e2", "e4", "e5", "e6", "e7"]


async def test_the_report_shows_the_best_of_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _loop(0, [], {})
    monkeypatch.setattr(
        loop.experience.manager, "best", lambda n: experiences("room", "room", "shop")[:n]
    )
    report = await experience_report(loop, "extractor")
    assert report is not None
    assert [experience.task for experience in report.best] == ["room", "room", "shop"]


def test_missing_values_are_null() -> None:
    stats = {"bank/size": 0}
    bare = ExperienceReport(stats, best=[], gaps=[], probe_gains={}, evaluation=None, trained=None)
    record = bare.record()
    assert (record["gap"], record["extractor_updates"], record["lessons"]) == (None, None, {})
    assert record["bank"]["ops/add"] == 0
    evaluation = Evaluation({}, {}, 0, lessons={"room": SuccessRate(1, 2)})
    gaps = [GroupGap(Place("room", "hut"), 0.5)]
    one = replace(bare, gaps=gaps, evaluation=evaluation)
    assert one.line().endswith("guided − free +0.500 ± –")
    assert one.record()["gap"] == {"value": 0.5, "low": None, "high": None, "n": 1, "places": 1}
    assert one.record()["lessons"]["room"]["untrained_correct"] is None


def test_suggested_commands_can_be_pasted() -> None:
    odd = Path("my runs/one")
    outcome = Outcome(odd, odd / "checkpoints/80", planned_steps=0)
    text = replace(SUMMARY, outcome=outcome).text()
    assert text.endswith("\nreport: crl report 'my runs/one'")


def test_the_summary_of_an_interrupted_run() -> None:
    text = replace(SUMMARY, steps=7, outcome=replace(SUMMARY.outcome, interrupted=True)).text()
    assert text.startswith(
        "\ninterrupted after 7 of 80 steps: the final evaluation was skipped\n7 steps: 172 s, "
    )
    assert text.endswith(
        "\nlast checkpoint: runs/one/checkpoints/80\ncontinue: crl resume runs/one"
    )


class _Bank:
    async def stats(self) -> dict[str, int]:
        return {"bank/size": 3}

    def best(self, n: int) -> Sequence[Experience]:
        return REPORT.best[:n]


def _loop(
    completed_steps: int, gaps: list[list[float]], probes: dict[int, dict[str, float]]
) -> Any:
    experience = SimpleNamespace(
        manager=_Bank(), diagnostics=SimpleNamespace(gaps=gaps), trainer=None
    )
    return SimpleNamespace(
        experience=experience,
        measurements=SimpleNamespace(evaluations={}, probes=probes),
        completed_steps=completed_steps,
    )


async def test_gaps_of_the_second_half_and_gains_of_the_first_and_last_probe() -> None:
    name = "probe/room/right_minus_none"
    probes = {step: {name: step / 10, f"{name}/half_width": 0.01} for step in (0, 2, 4)}
    report = await experience_report(
        _loop(4, [[9.0], [9.0], [0.25], [0.5, 0.75], []], probes), "extractor"
    )
    assert report is not None
    assert list(report.gaps) == [0.25, 0.5, 0.75]
    assert report.probe_gains == {"room": ((0.0, 0.01), (0.4, 0.01))}


async def test_a_run_stopped_before_its_first_step_has_no_gains() -> None:
    probes = {
        0: {"probe/room/right_minus_none": 0.5, "probe/room/right_minus_none/half_width": 0.1}
    }
    report = await experience_report(_loop(0, [], probes), "extractor")
    assert report is not None
    assert report.probe_gains == {}


def test_every_condition_has_a_label() -> None:
    with_bank = replace(
        AFTER, rates={**AFTER.rates, GUIDED: SuccessRate(1, 2), ONLINE: SuccessRate(0, 1)}
    )
    assert [line[:40].rstrip() for line in SuccessReport(1.0, with_bank).lines()[1:]] == [
        "  room seen   without experience", "  room unseen without experience",
        "  room seen   with the run's bank", "  room unseen with a bank built online",
    ]  # fmt: skip
