"""Lessons about rooms: wording, digest of an episode, and the stairs' direction from its texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crl.envs.actions import COMPASS
from crl.envs.curriculum import LessonVerdict
from crl.envs.places import PROBE_LAYOUTS
from crl.envs.room import SPEC, probe_tasks
from crl.envs.room.game import RoomGame
from crl.envs.room.lessons import (
    LESSONS,
    RoomAdvisor,
    bearing,
    digest,
    lesson,
    read,
    stairs_direction,
    true_stairs_direction,
)
from crl.envs.room.player import RoomPlayer
from crl.types import Segment

ADVISOR = RoomAdvisor()


@pytest.fixture(scope="module")
def game() -> Iterator[RoomGame]:
    game = RoomGame("compact")
    yield game
    game.close()


def conversation(*texts: str, hint: str = "") -> list[Segment]:
    """Return a goal, the hint if any, and the texts of the room and the agent in turn."""
    opening = [
        Segment("user", "Room: the jade attic.", "task"),
        *([Segment("user", hint, "experience")] if hint else []),
    ]
    return opening + [
        Segment("assistant", text, "policy") if i % 2 else Segment("user", text, "env")
        for i, text in enumerate(texts)
    ]


# ── wording ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("start", "end", "direction"),
    [
        ((2, 2), (2, 0), "north"), ((2, 2), (4, 2), "east"),
        ((2, 2), (2, 3), "south"), ((4, 2), (0, 2), "west"),
        ((0, 4), (4, 0), "northeast"), ((1, 1), (3, 3), "southeast"),
        ((4, 0), (3, 1), "southwest"), ((4, 4), (0, 0), "northwest"),
        ((0, 0), (4, 1), "east"),  # 14 degrees below east
        ((0, 0), (2, 1), "southeast"),  # 27 degrees
        ((0, 0), (1, 2), "southeast"),  # 63 degrees
        ((0, 0), (1, 3), "south"),  # 72 degrees
        ((4, 2), (0, 1), "west"),  # 14 degrees above west
        ((4, 2), (2, 1), "northwest"),  # 27 degrees
    ],
)  # fmt: skip
def test_bearings(start: tuple[int, int], end: tuple[int, int], direction: str) -> None:
    assert bearing(start, end) == direction


def test_the_same_cell_has_no_bearing() -> None:
    assert bearing((3, 1), (3, 1)) is None


@pytest.mark.parametrize("kind", LESSONS)
@pytest.mark.parametrize("direction", COMPASS)
def test_read_reverses_lesson(kind: str, direction: str) -> None:
    assert read(lesson(kind, direction)) == (
        kind,
        direction if "{direction}" in LESSONS[kind] else None,
    )


def test_the_wording_of_the_exit() -> None:
    assert lesson("exit", "southeast") == "from the start go southeast."


@pytest.mark.parametrize(
    "text",
    [
        "", "from the start go up.", "from the start go southeast",
        "From the start go southeast.", "from the start go .",
        "walk north until the wall. be careful.", "be careful.\n", "be carefulX",
        "from the start go {direction}.",
    ],
)  # fmt: skip
def test_other_texts_are_not_lessons(text: str) -> None:
    assert read(text) == ("other", None)


# ── the digest ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("texts", "direction"),
    [
        (("at 3 3\ndark north", "north", "at 2 3\ndark north"), None),
        (("at 3 3\nstairs west",), "west"),
        # Seen from (2, 1), the stairs are at (1, 0). The start is (2, 2), so they are one column
        # to the west and two rows to the north.
        (("at 3 3\ndark north", "north", "at 2 3\nstairs northwest"), "northwest"),
        # The walk goes from (0, 4) east along the bottom. The stairs at (3, 3) are 18 degrees
        # above east.
        ((
            "at 5 1\ndark east", "east", "at 5 2\ndark east", "east", "at 5 3\nstairs northeast",
        ), "east"),
        # The walk goes from (0, 2) through the south to (3, 3). The stairs are at (2, 2), which was
        # not visible before. They are not at (1, 1) or (0, 2), which were visible without stairs.
        ((
            "at 3 1\ndark east", "south", "at 4 1\ndark east", "southeast", "at 5 2\ndark east",
            "east", "at 5 3\ndark east", "northeast", "at 4 4\nstairs northwest",
        ), "east"),
        # The stairs are at (4, 3). A later text from farther away does not change this.
        ((
            "at 3 3\ndark east", "east", "at 3 4\nstairs southeast", "southwest",
            "at 4 3\nstairs east",
        ), "southeast"),
        (("at 3 3\nstairs south", "south", "stairs reached."), "south"),
        (("at 3 3\nstairs south", " South. ", "stairs reached."), "south"),
        ((
            "at 3 3\nstairs south", "jump", "unknown action.\nat 3 3\nstairs south", "south",
            "stairs reached.",
        ), "south"),
        # This was a teleporter, because adjacent stairs would have been visible.
        (("at 3 3\ndark south", "south", "stairs reached."), None),
        (("at 3 3\ndark south", "south", "you died."), None),
        (("at 3 3\nstairs east", "north", "you died."), "east"),
        # A teleporter in the southwest moves the agent to the stairs in the east.
        (("at 3 3\nstairs east\ntrap southwest", "southwest", "stairs reached."), "east"),
        ((), None),
    ],
)  # fmt: skip
def test_the_direction_of_the_stairs_in_the_texts(
    texts: tuple[str, ...], direction: str | None
) -> None:
    assert stairs_direction(conversation(*texts)) == direction
    assert ADVISOR.informative(conversation(*texts)) == (direction is not None)


def test_hints_are_not_observations() -> None:
    assert (
        stairs_direction(conversation("at 3 3\ndark north", "north", hint="at 1 1\nstairs south"))
        is None
    )


def test_the_digest() -> None:
    won = conversation(
        "at 3 3\ndark south",
        "east",
        "at 3 4\nstairs south",
        "south",
        "stairs reached.",
        hint="be careful.",
    )
    assert digest(won) == "moves east south\nstairs southeast of the start"
    assert digest(won[:3]) == "moves \nstairs not seen"
    assert SPEC.curriculum.digest is digest


# ── true directions ───────────────────────────────────────────────────────────────────────────────


def test_judgements() -> None:
    rng = random.Random(0)
    for task in probe_tasks(12):
        right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, rng)
        assert right == lesson("exit", true_stairs_direction(int(task.params["lgen"])) or "")
        assert read(wrong)[0] == "exit"
        assert ADVISOR.judge(task, right) == LessonVerdict("exit", True)
        assert ADVISOR.judge(task, wrong) == LessonVerdict("wrong exit", False)
    (task,) = probe_tasks(1)
    assert ADVISOR.judge(task, "be careful.") == LessonVerdict("careful", False)
    assert ADVISOR.judge(task, "go on.") == LessonVerdict("other", False)
    assert {ADVISOR.wrong(task, rng) for _ in range(200)} == {
        lesson("exit", d) for d in COMPASS
    } - {ADVISOR.right(task)}


@given(st.sampled_from(PROBE_LAYOUTS), st.integers(0, 2**32))
@settings(max_examples=150)
def test_agents_that_reach_the_stairs_have_seen_them(game: RoomGame, lgen: int, seed: int) -> None:
    """Play a scripted walk with random steps in between.

    Exclude episodes in which a teleporter reached stairs that were not visible.
    """
    rng = random.Random(seed)
    task = replace(probe_tasks(1)[0], params={"lgen": lgen, "core": seed})
    texts, player = [game.reset(task)], RoomPlayer(rng)
    player.begin(task.goal, texts[0])
    for _ in range(20):
        texts.append(rng.choice(list(COMPASS)) if rng.random() < 0.3 else player.act())
        result = game.step(texts[-1])
        texts.append(result.text)
        if result.done:
            break
        player.observe(result.text)
    assume(texts[-1] == "stairs reached." and "stairs" in texts[-3])
    assert stairs_direction(conversation(*texts)) == true_stairs_direction(lgen)
