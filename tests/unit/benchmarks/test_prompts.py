"""Replies to prompts: metrics by hand, positions in episodes, names of operations."""

from __future__ import annotations

import numpy as np
import pytest

from crl.manager.records import Distilled, Generation, Merged, Refined, UnitKey, Write
from crl.protocols import Hit
from crl.types import Completion, EpisodeAddress, ExperienceUse, Segment, Task, Trajectory
from support.managers import request
from support.paths import benchmark

prompts = benchmark("prompts")

USE = ExperienceUse("a", 1, "advisor", "start")


def reply(kind: str = "distil", **changes: object):
    values: dict[str, object] = {
        "task": "room", "kind": kind, "prompt_tokens": 100, "reply_tokens": 10, "cut_off": False,
        "usable": True, "content": ("add",), "text": "…",
    }  # fmt: skip
    return prompts.Reply(**{**values, **changes})


def episode(number: int, advice: str, goal: str = "Find the exit."):
    segments = [
        Segment("system", "Play.", "task"), Segment("user", "A hall.", "env"),
        Segment("assistant", "north", "policy"), Segment("user", "A wall.", "env"),
        Segment("assistant", "east", "policy"), Segment("user", "A door.", "env"),
        Segment("assistant", "open", "policy"), Segment("user", "Out.", "env"),
    ]  # fmt: skip
    task = Task("room", seed=0, split="train", goal=goal)
    trajectory = Trajectory(task, EpisodeAddress(0, 0, number), "free", tuple(segments))
    use = ExperienceUse(f"room-{number}", 1, "advisor", "start")
    return prompts.Episode(number, trajectory, Hit(advice, use, goal))


def test_metrics_are_means_over_the_replies_of_a_task_and_kind():
    replies = [
        reply(content=("add", "add", "no text"), reply_tokens=30),
        reply(content=("return",), prompt_tokens=200),
        reply(content=("no op in the answer",), usable=False, cut_off=True, reply_tokens=50),
        reply(content=("add",), prompt_tokens=300),
    ]
    row = prompts.row(replies)
    assert (row["task"], row["kind"], row["replies"]) == ("room", "distil", 4)
    assert (row["usable"], row["cut_off"]) == (0.75, 0.25)
    assert (row["prompt_tokens"], row["reply_tokens"]) == (175, 25)
    assert row["content"] == {
        "add": 0.75, "no text": 0.25, "return": 0.25, "no op in the answer": 0.25,
    }  # fmt: skip
    # Wilson, z = 1.96: centre (0.75 + z²/8) / (1 + z²/4) = 0.6275, half width 0.3269
    assert row["usable_interval"] == pytest.approx((0.3006, 0.9544), abs=1e-3)
    assert prompts.table([row]).splitlines()[-1] == (
        "| room | distil | 4 | 0.75 [0.30, 0.95] | 175 | 25 | 0.25 "
        "| add 0.75, no text 0.25, return 0.25, no op in the answer 0.25 |"
    )


def test_the_later_turn_is_in_the_middle_of_the_episode():
    played = episode(0, "Go east.")
    assert played.answers == ["north", "east", "open"]
    assert played.later_turn == 1
    assert [segment.text for segment in played.before(0)] == ["Play.", "A hall."]
    assert [s.text for s in played.before(1)] == ["Play.", "A hall.", "north", "A wall."]


def test_advice_is_right_and_wrong_in_turn_and_the_bank_has_no_repetitions():
    episodes = [episode(0, "Go east."), episode(1, "Go west."), episode(2, "Go east.")]
    assert [one.advice_kind for one in episodes] == ["right", "wrong", "right"]
    assert [entry.text for entry in prompts.bank(episodes)] == ["Go east.", "Go west."]
    other_goal = [*episodes, episode(3, "Go west.", "Find the key.")]
    assert [(entry.goal, entry.text) for entry in prompts.bank(other_goal)][2:] == [
        ("Find the key.", "Go west.")
    ]


def test_the_content_of_an_answer_is_its_operations_and_the_reasons_of_those_refused():
    vector = np.zeros(2, np.float32)
    target = UnitKey("a", 1)
    writes = (Write(0, "One.", (0, 1), vector), Write(1, "Two.", (1, 2), vector, (target,)))
    source = Generation("g", 0, (1,), Completion((2,), (-1.0,), (0,), "stop"), 0)
    assert prompts.ops(Distilled(request(), source, writes, 1, {"no text": 2})) == [
        "add", "update", "return", "no text", "no text",
    ]  # fmt: skip
    merged = (Write(0, "Both.", (0, 1), vector, (target, UnitKey("b", 1))),)
    discards = ((1, (target,)),)
    assert prompts.ops(Merged(source, merged, discards, {}, False)) == ["merge", "discard"]
    assert prompts.ops(Merged(source, (), (), {}, False)) == ["keep"]
    assert prompts.ops(Merged(source, (), (), {"not JSON": 1}, True)) == ["not JSON"]
    assert prompts.ops(Refined(source, USE, "Go.", (0, 1), {}, False)) == ["refine"]
    assert prompts.ops(Refined(source, USE, None, (0, 0), {}, False)) == ["return"]
