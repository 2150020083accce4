"""Summary at the end of a run, word for word."""

from __future__ import annotations

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
    ExperienceReport,
    NextSteps,
    SuccessReport,
    Summary,
    best_of_each_task,
    experience_report,
)
from crl.run.totals import Totals
from crl.types import Counters, Experience, Lift, Provenance

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
    next_steps=NextSteps(
        run=Path("runs/one"),
        checkpoint=Path("runs/one/checkpoints/80"),
        command="crl train --tasks room,maze --method grpo --set run.steps=80",
        seed=4,
        planned_steps=80,
    ),
)

TEXT = """
80 steps in 172 s
environment turns: 12,345 (678 in overtime); sampled tokens: actor 98,765

success on fixed eval sets, sampled at temperature 1 [95 % Wilson interval over episodes]:
  room seen   without experience         256 episodes   0.250 [0.201, 0.306] → \
0.750 [0.694, 0.799]   +0.500
  room unseen without experience         256 episodes   0.000 [0.000, 0.015] → \
0.551 [0.490, 0.611]   +0.551

effects in this run [95 % interval, without the spread between seeds]:
  Training raised success without experience in places seen before (+0.500 [+0.420, +0.569]) and \
raised success without experience in new places (+0.551 [+0.488, +0.611]).

the trained models, in Hugging Face format: runs/one/checkpoints/80
  look further:      crl report runs/one
  repeat the eval:   crl eval runs/one
  train further:     crl resume runs/one --steps 160
  another seed:      crl train --tasks room,maze --method grpo --set run.steps=80 --seed 5
  in Python:         AutoModelForCausalLM.from_pretrained('runs/one/checkpoints/80/actor')
  metrics, episodes: runs/one/metrics.jsonl, runs/one/episodes"""


def test_a_whole_run() -> None:
    assert SUMMARY.text() == TEXT


def test_notes_on_unofficial_data() -> None:
    rows, note = (
        TEXT.split("+0.551\n"),
        "played on a generated maze: metrics are not comparable with published results",
    )
    success = SuccessReport(1.0, BEFORE, AFTER, data_notes={"maze": note})
    assert (
        replace(SUMMARY, success=success).text() == f"{rows[0]}+0.551\n  maze is {note}\n{rows[1]}"
    )


def test_a_stopped_run_has_no_final_evaluation() -> None:
    text = replace(SUMMARY, success=SuccessReport(1.0, BEFORE), steps=3).text()
    assert "3 steps in 172 s" in text
    assert "  room seen   without experience         256 episodes   0.250 [0.201, 0.306]\n" in text
    assert "→" not in text


def test_a_run_stopped_in_its_first_evaluation() -> None:
    text = replace(SUMMARY, success=SuccessReport(1.0, None), steps=0).text()
    assert "0 steps in 172 s\nenvironment turns: 12,345" in text
    assert "actor 98,765\n\nstopped before the first evaluation\n\nthe trained models" in text


def test_errors_and_skipped_updates_are_reported() -> None:
    success = SuccessReport(1.0, replace(BEFORE, errors=1), replace(AFTER, errors=4))
    text = replace(SUMMARY, skipped_updates=2, success=success).text()
    assert "  5 eval episodes ended with an error and count as failures\n" in text
    assert "  2 updates were skipped because the loss or its gradient was not finite\n" in text


def test_failed_training_episodes_are_counted() -> None:
    for errors, line in (
        (1, "  1 training episode failed with an error and was not trained on\n"),
        (1200, "  1,200 training episodes failed with an error and were not trained on\n"),
    ):
        assert line in replace(SUMMARY, totals=replace(SUMMARY.totals, errors=errors)).text()


def test_a_run_without_updates_has_trained_no_model() -> None:
    text = replace(SUMMARY, next_steps=replace(SUMMARY.next_steps, actor_updated=False)).text()
    assert "the trained models" not in text
    assert (
        "\nno update of the actor was made: its weights are unchanged\n"
        "the models, in Hugging Face format: runs/one/checkpoints/80\n"
    ) in text


def test_singular_nouns() -> None:
    success = SuccessReport(1.0, BEFORE, replace(AFTER, errors=1))
    report = replace(
        REPORT,
        stats={**REPORT.stats, "bank/size": 1, "queue/done": 1, "queue/dead": 1},
        best=[replace(REPORT.best[1], counters=Counters(credited=1, credit=1.0))],
        trained=1,
    )
    text = replace(SUMMARY, steps=1, success=success, skipped_updates=1, experience=report).text()
    for line in (
        "1 step in 172 s\n",
        "  1 eval episode ended with an error and counts as a failure\n",
        "  1 update was skipped because the loss or its gradient was not finite\n",
        "  extractor: 1 update; 1 episode distilled: 40 added, 5 updated, 0 returned, 0 refused; "
        "1 episode failed\n",
        "  bank: 1 experience in runs/one/bank.sqlite\n",
        "won   1 of    1 episode   Room: the wet hut.",
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
    bank=Path("runs/one/bank.sqlite"),
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
        GroupGap(("room", "hut"), 0.5),
        GroupGap(("room", "hut"), 0.0),
        GroupGap(("room", "cell"), 0.25),
        GroupGap(("shop", "cell"), 0.25),
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


def test_experience_lines() -> None:
    """Compute lifts: half = 3.182446 · √(1 + 0.125) / 3 = 1.125165 (e1), 12.706205 · √1 / 1 (e2).

    The gaps of the three places have one mean.
    """
    assert REPORT.lines() == [
        "",
        "experience [± half a 95 % interval, by Student's t over places]:",
        (
            "  guided − free success in the same groups, second half of the run: +0.250 ± "
            "0.000 over 4 groups in 3 places"
        ),
        "  room: gain from right advice on the probe: +0.010 ± 0.050 → +0.400 ± 0.060",
        "  room: gain from a bank built online in unseen places: +0.125 ± 0.050 over 64 places",
        "  room: right lessons in 256 answers of the extractor: 0.750 [0.694, 0.799]; "
        "untrained extractor, 128 answers on the same episodes: 0.250 [0.183, 0.332]",
        (
            "  extractor: 12 updates; 640 episodes distilled: 40 added, 5 updated, 0 "
            "returned, 0 refused; 2 episodes failed"
        ),
        "  bank: 31 experiences in runs/one/bank.sqlite",
        (
            "  best experiences by the lower end of lift (guided − free success in the same "
            "groups ± half a 95 % credible interval):"
        ),
        (
            "    lift +0.250 ± 1.125 over 3 groups    "
            "won  10 of  12 episodes   Room: the dusty hut.  go east."
        ),
        (
            "    lift +0.000 ± 12.706 over 1 group    "
            "won   4 of   4 episodes   Room: the wet hut.  go on."
        ),
        (
            "    lift unknown                         "
            "won   4 of   4 episodes   Room: the red hut.  go west."
        ),
    ]


def test_groups_of_one_place_are_one_cluster() -> None:
    """Compare the interval of a mean with numbers worked by hand.

    m = 0.1. Sums less n_c · m: hut 0.5 − 0.2, cell −0.25 − 0.2, yard 0.25 − 0.1. Their squares sum
    to 0.315. V = 3/2 · 0.315 / 25 = 0.0189; half = 4.302653 · √0.0189 = 0.591515. Over groups as if
    independent, half = 0.440.
    """
    values = {"hut": (0.75, -0.25), "cell": (0.0, -0.25), "yard": (0.25,)}
    gaps = [
        GroupGap(("room", place), gap) for place, place_gaps in values.items() for gap in place_gaps
    ]
    line = replace(REPORT, gaps=gaps).lines()[2]
    assert line == (
        "  guided − free success in the same groups, second half of the run: +0.100 ± "
        "0.592 over 5 groups in 3 places"
    )


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
    report = await experience_report(loop, Path("bank.sqlite"), "extractor")
    assert report is not None
    assert [experience.task for experience in report.best] == ["room", "room", "shop"]


def test_missing_values_are_left_out() -> None:
    stats = {"bank/size": 0}
    bare = ExperienceReport(
        Path("bank.sqlite"),
        stats,
        best=[],
        gaps=[],
        probe_gains={},
        evaluation=None,
        trained=None,
    )
    assert bare.lines()[2:] == [
        (
            "  extractor: not trained; 0 episodes distilled: 0 added, 0 updated, 0 returned, "
            "0 refused; 0 episodes failed"
        ),
        "  bank: 0 experiences in bank.sqlite",
    ]
    evaluation = Evaluation({}, {}, 0, lessons={"room": SuccessRate(1, 2)})
    gaps = [GroupGap(("room", "hut"), 0.5)]
    one = replace(bare, gaps=gaps, evaluation=evaluation).lines()
    assert one[2] == (
        "  guided − free success in the same groups, second half of the run: +0.500 ± – "
        "over 1 group in 1 place"
    )
    assert one[3] == "  room: right lessons in 2 answers of the extractor: 0.500 [0.095, 0.905]"


def test_suggested_commands_can_be_pasted() -> None:
    odd = Path("my runs/one")
    next_steps = NextSteps(odd, odd / "checkpoints/80", "crl train", seed=4, planned_steps=0)
    text = replace(SUMMARY, next_steps=next_steps).text()
    assert "  repeat the eval:   crl eval 'my runs/one'\n" in text
    assert "  train further:     crl resume 'my runs/one' --steps 1\n" in text


def test_the_summary_of_an_interrupted_run() -> None:
    next_steps = replace(SUMMARY.next_steps, interrupted=True)
    text = replace(SUMMARY, steps=7, next_steps=next_steps).text()
    assert text.startswith(
        "\ninterrupted after 7 of 80 steps, 172 s: the final evaluation was skipped, and the "
        "numbers below are not the result of the run\n"
    )
    assert text.endswith(
        "the last checkpoint: runs/one/checkpoints/80\n"
        "  continue the run:  crl resume runs/one\n"
        "  metrics, episodes: runs/one/metrics.jsonl, runs/one/episodes"
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
        _loop(4, [[9.0], [9.0], [0.25], [0.5, 0.75], []], probes), Path("bank.sqlite"), "extractor"
    )
    assert report is not None
    assert list(report.gaps) == [0.25, 0.5, 0.75]
    assert report.probe_gains == {"room": ((0.0, 0.01), (0.4, 0.01))}


async def test_a_run_stopped_before_its_first_step_has_no_gains() -> None:
    probes = {
        0: {"probe/room/right_minus_none": 0.5, "probe/room/right_minus_none/half_width": 0.1}
    }
    report = await experience_report(_loop(0, [], probes), Path("bank.sqlite"), "extractor")
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
