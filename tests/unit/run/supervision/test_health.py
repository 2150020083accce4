"""Failing episodes that end a run, and warnings about runs that learn nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from crl.errors import CrlError, RolloutError
from crl.run.supervision.health import EpisodeHealth, Warnings

ERROR = RolloutError("env", "toy: step: the dice are broken")


def test_the_first_episodes_of_a_task_that_all_fail_end_the_run():
    health = EpisodeHealth(1.0)
    for _ in range(15):
        health.observe("toy", ERROR)
        health.observe("room", None)
    with pytest.raises(CrlError) as caught:
        health.observe("toy", ERROR)
    assert str(caught.value) == (
        "task toy: the first 16 episodes all failed. The last error: env: toy: step: the dice are "
        "broken"
    )
    assert caught.value.__cause__ is ERROR
    assert not isinstance(caught.value, RolloutError), "a run would take it for a failed episode"


def test_a_share_of_errors_ends_the_run():
    health = EpisodeHealth(0.25)
    for episode in range(63):
        health.observe("toy", ERROR if episode % 2 else None)
    with pytest.raises(CrlError, match=r"50% of the last 64 episodes failed, more"):
        health.observe("toy", ERROR)
    health = EpisodeHealth(0.25)
    for episode in range(1000):
        health.observe("toy", ERROR if episode % 4 == 3 else None)


def test_only_the_last_episodes_count():
    health = EpisodeHealth(0.5)
    for _ in range(1000):
        health.observe("toy", None)
    for _ in range(128):
        health.observe("toy", ERROR)
    with pytest.raises(CrlError, match="50% of the last 256 episodes failed"):
        health.observe("toy", ERROR)


def observed(*steps: Mapping[str, float]) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings = Warnings(notes.append)
    for step, metrics in enumerate(steps, start=1):
        warnings.observe(step, metrics)
    return notes, warnings.lines()


def test_a_warning_after_five_steps_that_is_repeated_rarely():
    idle = {"actor/updates": 0}
    assert observed(*[idle] * 4) == ([], [])
    assert observed(*[idle] * 4, {"actor/updates": 1}, *[idle] * 4) == ([], [])
    notes, lines = observed(*[idle] * 60)
    text = "no sample could be trained on"
    assert notes == [
        f"warning: in the last 5 steps {text}",
        f"warning: in the last 55 steps {text}",
    ]
    assert lines == [f"warning: in 60 of 60 steps {text}"]


@pytest.mark.parametrize(
    ("metrics", "text", "steps", "seen"),
    [
        ({"rollout/invalid_actions": 0.51}, "most actions were invalid", 5, 5),
        ({"bank/size": 3, "rollout/used": 0.0}, "no experience guided an episode", 21, 20),
    ],
)
def test_signs(metrics: dict[str, float], text: str, steps: int, seen: int):
    assert observed(*[metrics] * (steps - 1))[1] == []
    assert observed(*[metrics] * steps)[1] == [f"warning: in {seen} of {steps} steps {text}"]
    assert observed(
        *[{**metrics, "rollout/invalid_actions": 0.5, "rollout/used": 0.1}] * steps
    ) == (
        [],
        [],
    )
    assert observed(*[{}] * 6) == ([], [])


def test_answers_of_the_extractor_that_are_all_dropped():
    done = [{"queue/done": 4 * step, "ops/add": 7, "ops/drop": 4 * step} for step in range(1, 8)]
    notes, _ = observed({"queue/done": 0, "ops/add": 7}, *done)
    assert notes == ["warning: in the last 5 steps all answers of the extractor were dropped"]
    added = [{**line, "ops/add": line["queue/done"]} for line in done]
    assert observed(*added) == ([], [])
