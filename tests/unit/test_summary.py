"""What a run says at its end, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crl.run.evaluate import Evaluation, Rate
from crl.run.summary import Summary, success_lines

BEFORE = Evaluation({("room", "known"): Rate(64, 256), ("room", "new"): Rate(0, 256)}, {}, 0)
AFTER = Evaluation({("room", "known"): Rate(192, 256), ("room", "new"): Rate(141, 256)}, {}, 0)

SUMMARY = Summary(
    run=Path("runs/one"),
    checkpoint=Path("runs/one/checkpoints/80"),
    command="crl train --tasks room,maze --method grpo --set run.steps=80",
    seed=4,
    steps=80,
    seconds=171.6,
    temperature=1.0,
    before=BEFORE,
    after=AFTER,
    skipped_updates=0,
)

TEXT = """
80 steps in 172 s

success on fixed eval sets, sampled at temperature 1, without experience, [95 % Wilson interval over episodes]:
  room known   256 episodes   0.250 [0.201, 0.306] → 0.750 [0.694, 0.799]   +0.500
  room new     256 episodes   0.000 [0.000, 0.015] → 0.551 [0.490, 0.611]   +0.551

the trained actor, in Hugging Face format: runs/one/checkpoints/80/actor
  repeat the eval:   crl eval runs/one
  train it further:  crl train --tasks room,maze --method grpo --set run.steps=80 --set actor.model=runs/one/checkpoints/80/actor
  another seed:      crl train --tasks room,maze --method grpo --set run.steps=80 --seed 5
  in Python:         AutoModelForCausalLM.from_pretrained('runs/one/checkpoints/80/actor')
  every figure and every episode: runs/one/metrics.jsonl, runs/one/trajectories.jsonl"""


def test_a_whole_run() -> None:
    assert SUMMARY.text() == TEXT


def test_a_run_that_was_stopped_has_no_after() -> None:
    text = replace(SUMMARY, after=None, steps=3).text()
    assert "3 steps in 172 s" in text
    assert "  room known   256 episodes   0.250 [0.201, 0.306]\n" in text
    assert "→" not in text


def test_a_run_that_was_stopped_in_its_first_evaluation() -> None:
    text = replace(SUMMARY, before=None, after=None, steps=0).text()
    assert "0 steps in 172 s\n\nstopped before the first evaluation\n\nthe trained actor" in text


def test_what_went_wrong_is_said() -> None:
    text = replace(SUMMARY, skipped_updates=2, before=replace(BEFORE, errors=1), after=replace(AFTER, errors=4)).text()
    assert "  5 eval episodes could not be played and count as failures\n" in text
    assert "  2 updates were skipped because the loss or its gradient was not finite\n" in text


def test_an_evaluation_alone() -> None:
    assert success_lines(0.0, AFTER) == [
        "success on fixed eval sets, greedy, without experience, [95 % Wilson interval over episodes]:",
        "  room known   256 episodes   0.750 [0.694, 0.799]",
        "  room new     256 episodes   0.551 [0.490, 0.611]",
    ]
    assert success_lines(0.7, AFTER)[0].startswith("success on fixed eval sets, sampled at temperature 0.7, ")
