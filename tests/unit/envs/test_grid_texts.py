"""Texts, actions and lessons of maze, key room and river."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from crl.envs import keyroom, maze, river
from crl.envs.base import EnvSpec, StreamSettings, play_episode
from crl.envs.keyroom import lessons as key_lessons
from crl.envs.keyroom.game import KeyRoomGame
from crl.envs.keyroom.oracle import true_cells
from crl.envs.maze import lessons as maze_lessons
from crl.envs.maze.game import MazeGame
from crl.envs.maze.oracle import true_maze, true_way
from crl.envs.river.game import RiverGame
from crl.envs.shortest_path import shortest_path
from crl.types import Segment, Task
from support.shipped_tasks import scripted_player

SETTINGS = StreamSettings()


def new(spec: EnvSpec, n: int) -> tuple[Task, ...]:
    return spec.tasks.eval_tasks("unseen", n, 0, SETTINGS)


@pytest.fixture(scope="module")
def full_keyroom() -> Iterator[KeyRoomGame]:
    game = KeyRoomGame("full")
    yield game
    game.close()


@pytest.fixture(scope="module")
def compact_keyroom() -> Iterator[KeyRoomGame]:
    game = KeyRoomGame("compact")
    yield game
    game.close()


@pytest.fixture(scope="module")
def compact_maze() -> Iterator[MazeGame]:
    game = MazeGame("compact")
    yield game
    game.close()


@pytest.fixture(scope="module")
def compact_river() -> Iterator[RiverGame]:
    game = RiverGame("compact")
    yield game
    game.close()


def texts_of(game: KeyRoomGame | RiverGame, *actions: str) -> list[str]:
    return [game.step(action).text for action in actions]


def segments(first: str, turns: Sequence[tuple[str, str]]) -> list[Segment]:
    """Return an episode's texts: the first observation, then actions and their results."""
    episode = [Segment("user", first, "env")]
    for action, text in turns:
        episode += [Segment("assistant", action, "policy"), Segment("user", text, "env")]
    return episode


# ── maze ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_mazes_first_texts(compact_maze: MazeGame) -> None:
    task = new(maze.SPEC, 2)[1]
    full = MazeGame("full")
    assert full.reset(task) == (
        "Map:\n..@~~~~\n~~.~~~~\n~~.~~~~\n~~~~~~~\n~~~~~~~\n~~~~~~~\n~~~~~~~\n"
        "Legend: @ you; . floor; ~ solid stone or not seen yet\nHP 12/12"
    )
    full.close()
    assert compact_maze.reset(task) == "at 1 3\nopen south west"
    assert task.goal == "Maze: the amber porch. Reach the stairs down (>)."


def test_the_true_way_reaches_the_stairs_under_any_dynamics(
    compact_maze: MazeGame,
) -> None:
    for task in new(maze.SPEC, 15):
        lgen = int(task.params["lgen"])
        start, corridors, stairs = true_maze(lgen)
        for core in (1, 2):
            compact_maze.reset(Task("maze", core, "train", "", {"lgen": lgen, "core": core}))
            assert compact_maze.start == start
            results = [compact_maze.step(name) for name in true_way(lgen)]
            assert [result.success for result in results] == [False] * (len(results) - 1) + [True]
        assert stairs in corridors
        assert len(true_way(lgen)) >= max(abs(stairs[0] - start[0]), abs(stairs[1] - start[1]))


def test_the_stairs_of_a_small_maze_are_not_near_its_start() -> None:
    """Check that a seed that puts the stairs near the start gets another layout.

    It is always the same layout, and the advisor knows it.
    """
    advisor, game = maze.SMALL_SPEC.curriculum.advisor, maze.make_small_game("compact")
    assert advisor is not None
    for task in new(maze.SMALL_SPEC, 40):
        way = maze_lessons.read(advisor.right(task))
        assert way is not None
        assert len(way) >= 3
        game.reset(task)
        assert [game.step(name).success for name in way] == [False] * (len(way) - 1) + [True]
    game.close()


def test_a_lesson_lists_the_steps_and_can_be_read() -> None:
    assert (
        maze_lessons.lesson(["east", "east", "south", "northeast"])
        == "from the start go east east south northeast."
    )
    assert maze_lessons.read("from the start go east east south.") == ["east", "east", "south"]
    for text in (
        "from the start go up.",
        "from the start go east 2.",
        "from the start go .",
        "go east.",
        "from the start go east. Then wait.",
        "",
    ):
        assert maze_lessons.read(text) is None


def test_the_digest_of_a_maze_leaves_out_detours() -> None:
    """Check a walk from 1 1 with one step into a dead end in the east.

    The walk then goes back, and south to stairs that were not in sight.
    """
    episode = segments(
        "at 1 1\nopen east south",
        [
            ("east", "at 1 2\nopen west"),
            ("um", "unknown action.\nat 1 2\nopen west"),
            ("west", "at 1 1\nopen east south"),
            ("south", "at 2 1\nopen north south"),
            ("south", "stairs reached."),
        ],
    )
    assert maze_lessons.digest(episode) == "moves east west south south\nway south south"
    assert maze_lessons.digest(episode[:5]) == "moves east\nway not found"
    assert maze.SPEC.curriculum.advisor is not None
    assert maze.SPEC.curriculum.advisor.informative(episode)
    assert not maze.SPEC.curriculum.advisor.informative(episode[:5])


def test_visible_stairs_give_a_way_if_all_cells_between_are_known() -> None:
    episode = segments("at 1 1\nopen east", [("east", "at 1 2\nopen west east\nstairs east 3")])
    assert maze_lessons.found_way(episode) is None, "the cells between are not known yet"
    episode = segments("at 1 1\nopen east", [("east", "at 1 2\nopen west east\nstairs east 1")])
    assert maze_lessons.found_way(episode) == ["east", "east"]


# ── key room ──────────────────────────────────────────────────────────────────────────────────────


def test_the_key_rooms_first_texts(full_keyroom: KeyRoomGame, compact_keyroom: KeyRoomGame) -> None:
    task = new(keyroom.SPEC, 2)[1]
    assert full_keyroom.reset(task) == (
        "Map:\n~~~~~~~\n~~~|(.~\n~~~+@.~\n~~~-..~\n~~~~~~~\n~~~~~~~\n~~~~~~~\n"
        "Legend: @ you; | wall; ( key named The Master Key of Thievery; . floor; + closed door; "
        "- wall; ~ not seen yet\nHP 12/12\n"
        "Inventory: a +0 short sword (weapon in hand); 13 +0 daggers (alternate weapon; "
        "not wielded); an uncursed +1 leather armor (being"
        " worn); an uncursed potion of sickness; an uncursed lock pick; an empty uncursed sack; "
        "an uncursed blindfold"
    )
    assert (
        compact_keyroom.reset(task)
        == "at 3 5\nopen north east south northeast southeast\nkey north 1\ndoor west 1"
    )
    assert (
        task.goal
        == "Key room: the amber porch. Take the key, unlock the door, reach the stairs down (>)."
    )


def test_only_the_key_opens_the_door(
    full_keyroom: KeyRoomGame, compact_keyroom: KeyRoomGame
) -> None:
    task = new(keyroom.SPEC, 2)[1]
    full_keyroom.reset(task)
    texts = texts_of(
        full_keyroom, "apply", "west", "pickup", "north", "PICK UP", "south", "apply", "west"
    )
    assert [text.splitlines()[0] for text in texts[:5]] == [
        "You have no key.",
        "This door is locked.",
        "The stairs are solidly fixed to the floor.",
        "You see here a key named The Master Key of Thievery.",
        "h - a key named The Master Key of Thievery.",
    ]
    assert "Inventory:" in texts[4]
    assert texts[4].endswith("; a key named The Master Key of Thievery")
    assert texts[6].splitlines()[0] == "The door opens."
    assert "- wall or open door" in texts[6], "open doors and walls have the same symbol"
    assert full_keyroom.position == (3, 2), "in the doorway"
    compact_keyroom.reset(task)
    assert texts_of(compact_keyroom, "north", "pickup", "south", "apply") == [
        "at 2 5\nopen east south southeast\ndoor west 1 south 1\nkey here",
        "at 2 5\nopen east south southeast\ndoor west 1 south 1\nkey held",
        "at 3 5\nopen north east south northeast southeast\ndoor west 1\nkey held",
        "at 3 5\nopen north east south west northeast southeast\nentrance west 1\nkey held",
    ]


def test_the_key_needs_an_adjacent_door(full_keyroom: KeyRoomGame) -> None:
    full_keyroom.reset(new(keyroom.SPEC, 2)[1])
    texts_of(full_keyroom, "north", "pickup", "east", "south", "south")
    (text,) = texts_of(full_keyroom, "apply")
    assert text.startswith("There is no closed door next to you.\nMap:")


def test_the_true_cells_equal_the_cells_in_the_texts(compact_keyroom: KeyRoomGame) -> None:
    for i, task in enumerate(new(keyroom.SPEC, 15)):
        played = play_episode(
            compact_keyroom, task, scripted_player(keyroom.SPEC, random.Random(i)), 30
        )
        episode = segments(
            played.observations[0], list(zip(played.actions, played.observations[1:], strict=True))
        )
        assert key_lessons.found_cells(episode) == true_cells(int(task.params["lgen"]))


def test_the_digest_of_a_key_room() -> None:
    episode = segments(
        "at 3 5\nopen north\nkey north 1",
        [("north", "at 2 5\nopen south\nkey here"), ("pickup", "at 2 5\nopen south\nkey held")],
    )
    assert key_lessons.digest(episode) == "moves north pickup\nkey at 2 5\ndoor not seen"
    assert keyroom.SPEC.curriculum.advisor is not None
    assert not keyroom.SPEC.curriculum.advisor.informative(episode)


# ── advice ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spec", "kind"), [(maze.SPEC, "way"), (maze.SMALL_SPEC, "way"), (keyroom.SPEC, "places")]
)
def test_right_advice_is_right_and_wrong_advice_wrong(spec: EnvSpec, kind: str) -> None:
    advisor = spec.curriculum.advisor
    assert advisor is not None
    for i, task in enumerate(spec.curriculum.probe_tasks(20)):
        right, wrong = (
            advisor.judge(task, advisor.right(task)),
            advisor.judge(task, advisor.wrong(task, random.Random(i))),
        )
        assert (right.kind, right.correct, wrong.kind, wrong.correct) == (
            kind,
            True,
            f"wrong {kind}",
            False,
        )
        assert advisor.judge(task, "be careful.").kind == "other"
        assert advisor.wrong(task, random.Random(i)) == advisor.wrong(task, random.Random(i))


# ── river ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_rivers_first_texts(compact_river: RiverGame) -> None:
    task = new(river.SPEC, 2)[1]
    assert (
        compact_river.reset(task)
        == "at 6 3\nboulder north 2\nboulder east 8 north 4\nboulder east 9 north 3"
    )
    assert task.goal == "River: the amber porch. Reach the stairs down (>) across the water."


def test_a_small_rivers_first_texts() -> None:
    game = RiverGame("full", river.SMALL_BANK)
    assert game.reset(new(river.SMALL_SPEC, 1)[0]) == (
        "Map:\n.~~~~~~~~~~~~~~\n...~~~~~~~~~~~~\n.....~``}~~~~~~\n.......@}~~~~~~\n"
        ".~~~`...}~~~~~~\n~~~.....}~~~~~~\n~.......}~~~~~~\n"
        "Legend: @ you; . floor; ` boulder; } water; ~ not seen yet\nHP 12/12"
    )
    game.close()


def test_a_river_can_be_crossed_under_any_dynamics(compact_river: RiverGame) -> None:
    """Check that the river can be crossed under 20 dynamics.

    Some boulders sink, and then another boulder is needed. The water never kills.
    """
    task, fords = new(river.SPEC, 2)[1], 0
    for visit in range(20):
        again = river.PLACES.revisit(task, visit)
        played = play_episode(
            compact_river, again, scripted_player(river.SPEC, random.Random(0)), 60
        )
        assert played.success
        fords += any("ford" in text for text in played.observations)
    assert fords == 20


def test_the_river_cannot_be_crossed_by_swimming(compact_river: RiverGame) -> None:
    compact_river.reset(new(river.SPEC, 2)[1])
    compact_river.step("southeast")  # into a row without boulders
    for _ in range(60):
        assert not compact_river.step("east").done
        assert compact_river.position[0] <= 17


# ── search ────────────────────────────────────────────────────────────────────────────────────────


def steps(edges: dict[str, str]) -> Callable[[str], list[tuple[str, str]]]:
    return lambda state: [(f"to {following}", following) for following in edges.get(state, "")]


def test_equally_short_paths_prefer_earlier_moves() -> None:
    moves = steps({"a": "bc", "b": "d", "c": "de", "d": "e"})
    assert shortest_path("a", lambda state: state == "d", moves) == ["to b", "to d"]
    assert shortest_path("a", lambda state: state == "e", moves) == ["to c", "to e"]
    assert shortest_path("a", lambda state: state == "a", moves) == []
    assert shortest_path("e", lambda state: state == "a", moves) is None
