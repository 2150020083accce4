"""Failing episodes that end a run, and warnings about runs that learn nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from crl.errors import CrlError, RolloutError
from crl.run.supervision.health import EpisodeHealth, Warnings
from crl.types import Task, Trajectory
from support.trajectories import build_trajectory

ERROR = RolloutError("env", "toy: step: the dice are broken")


def play(health: EpisodeHealth, task: str, error: RolloutError | None) -> None:
    with health.episode(task) as finish:
        finish(error)


def test_the_first_episodes_of_a_task_that_all_fail_end_the_run():
    health = EpisodeHealth(1.0)
    for _ in range(15):
        play(health, "toy", ERROR)
        play(health, "room", None)
    with pytest.raises(CrlError) as caught:
        play(health, "toy", ERROR)
    assert str(caught.value) == (
        "task toy: the first 16 episodes all failed. The last error: env: toy: step: the dice are "
        "broken"
    )
    assert caught.value.__cause__ is ERROR
    assert not isinstance(caught.value, RolloutError), "a run would take it for a failed episode"


def test_a_share_of_errors_ends_the_run():
    health = EpisodeHealth(0.25)
    for episode in range(63):
        play(health, "toy", ERROR if episode % 2 else None)
    with pytest.raises(CrlError, match=r"50 % of the last 64 episodes failed, more"):
        play(health, "toy", ERROR)
    health = EpisodeHealth(0.25)
    for episode in range(1000):
        play(health, "toy", ERROR if episode % 4 == 3 else None)


def test_only_the_last_episodes_count():
    health = EpisodeHealth(0.5)
    for _ in range(1000):
        play(health, "toy", None)
    for _ in range(128):
        play(health, "toy", ERROR)
    with pytest.raises(CrlError, match="50 % of the last 256 episodes failed"):
        play(health, "toy", ERROR)


def test_a_task_that_has_worked_may_always_fail_if_the_rate_allows_it():
    health = EpisodeHealth(1.0)
    play(health, "toy", None)
    for _ in range(600):
        play(health, "toy", ERROR)


def test_episodes_count_in_the_order_of_their_starts():
    """Start many episodes, of which 4 % fail at once. All others end later."""
    health = EpisodeHealth(0.5)
    with ExitStack() as stack:
        finish = [stack.enter_context(health.episode("toy")) for _ in range(2000)]
        for end in finish[7::25]:
            end(ERROR)
        for number, end in enumerate(finish):
            if number % 25 != 7:
                end(None)


def test_a_working_episode_may_reveal_that_others_before_it_failed():
    health = EpisodeHealth(0.5)
    with ExitStack() as stack:
        first, *others = [stack.enter_context(health.episode("toy")) for _ in range(64)]
        for end in others:
            end(ERROR)
        with pytest.raises(CrlError, match="98 % of the last 64 episodes failed") as caught:
            first(None)
    assert caught.value.__cause__ is ERROR


def test_cancelled_episodes_neither_count_nor_block_others():
    health = EpisodeHealth(1.0)
    for _ in range(3):
        with pytest.raises(KeyError), health.episode("toy"):
            raise KeyError("cancelled")
    for _ in range(15):
        play(health, "toy", ERROR)
    with pytest.raises(CrlError, match="the first 16 episodes all failed"):
        play(health, "toy", ERROR)


def episode(task: str, error: str | None = None, group: int = 0) -> Trajectory:
    return build_trajectory(Task(task, 0, "train", "goal"), 0, group, 0, "free", error=error)


def test_a_task_of_which_no_episode_has_worked_at_the_end_of_a_batch_ends_the_run():
    health = EpisodeHealth(1.0)
    for error in (ERROR, RolloutError("env", "toy: reset: no dice")):
        play(health, "toy", error)
    play(health, "room", None)
    batch = [episode("room"), episode("toy", "env: toy"), episode("toy", "env: toy", 1)]
    with pytest.raises(CrlError) as caught:
        health.batch_finished(batch)
    assert str(caught.value) == (
        "task toy: no episode has worked so far, and all 2 of this step failed. "
        "The last error: env: toy: reset: no dice"
    )
    assert caught.value.__cause__ is error
    restored = EpisodeHealth(1.0)
    play(health, "toy", None)
    restored.load_state(json.loads(json.dumps(health.state())))
    for observer in (health, restored):
        observer.batch_finished(batch)


def test_one_group_of_a_task_ends_a_run_only_if_no_other_task_works():
    health = EpisodeHealth(1.0)
    play(health, "toy", ERROR)
    batch = [episode("toy", "env: toy"), episode("toy", "env: toy")]
    health.batch_finished([*batch, episode("room")])
    with pytest.raises(CrlError, match="all 2 of this step failed"):
        health.batch_finished(batch)


def observed(*steps: Mapping[str, float]) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings = Warnings(notes.append)
    for step, metrics in enumerate(steps, start=1):
        warnings.observe(step, metrics)
    return notes, warnings.lines()


def test_a_warning_after_five_steps_that_is_repeated_rarely():
    idle = {"actor/updates": 0}
    assert observed(*[idle] * 4, *[{"actor/updates": 1}] * 9, *[idle] * 4) == ([], [])
    notes, lines = observed(*[idle] * 60)
    text = "no sample could be trained on"
    assert notes == [
        f"warning: in the last 5 steps {text}",
        f"warning: in the last 55 steps {text}",
    ]
    assert lines == [f"warning: in 60 of 60 steps {text}"]


def test_the_summary_of_a_short_run_shows_a_sign_of_half_of_its_steps():
    idle, busy = {"actor/updates": 0}, {"actor/updates": 1}
    line = "warning: in 2 of 4 steps no sample could be trained on"
    assert observed(idle, busy, idle, busy) == ([], [line])
    assert observed(idle, busy, idle, busy, busy) == ([], [])


def test_warnings_continue_after_a_resume():
    idle = {"actor/updates": 0, "queue/done": 2, "ops/drop": 2}
    steps = [{**idle, "queue/done": 2 * step} for step in range(1, 57)]
    notes: list[str] = []
    warnings = Warnings(notes.append)
    for step, metrics in enumerate(steps, start=1):
        state = json.loads(json.dumps(warnings.state()))
        warnings = Warnings(notes.append)
        warnings.load_state(state)
        warnings.observe(step, metrics)
    assert (notes, warnings.lines()) == observed(*steps)
    assert len(notes) == 4


@pytest.mark.parametrize(
    ("metrics", "text", "steps", "seen"),
    [
        ({"rollout/invalid_actions": 0.51}, "most actions were invalid", 5, 5),
        ({"bank/size": 3, "rollout/used": 0.0}, "no experience guided an episode", 21, 20),
    ],
)
def test_signs(metrics: dict[str, float], text: str, steps: int, seen: int):
    assert observed(*[metrics] * (steps - 1))[0] == []
    assert observed(*[metrics] * steps)[0] == [f"warning: in the last {seen} steps {text}"]
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
    assert notes == ["warning: in the last 5 steps all answers about episodes were dropped"]
    added = [{**line, "ops/add": line["queue/done"]} for line in done]
    assert observed(*added) == ([], [])
