"""Sokoban: the rules, the generator, and the solver against a hand-worked puzzle and a search."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.envs.base import StreamSettings, play
from crl.envs.search import shortest_path
from crl.envs.sokoban import SPEC
from crl.envs.sokoban.game import SokobanGame
from crl.envs.sokoban.player import read_puzzle
from crl.envs.sokoban.puzzle import (
    BOXES,
    MOVES,
    STEPS,
    Position,
    Room,
    move,
    moves_to_solve,
    puzzle,
)

CORRIDOR, START = read_puzzle("Map:\nWWWWWW\nW@.A.W\nWWWWCW\nWWWW.W\nWWWWWW\nWWWWWW\nLegend: @ you")
"""Corridor that bends to the south, without a solution.

Its only box cannot be pushed around the corner.
"""


def position(player: tuple[int, int], *boxes: tuple[int, int]) -> Position:
    return Position(player, frozenset(boxes))


def test_a_step_a_push_and_what_blocks_them() -> None:
    room = Room(frozenset((x, 1) for x in range(1, 5)), frozenset({(4, 1)}))
    assert move(room, position((1, 1), (3, 1)), "east") == position((2, 1), (3, 1))
    assert move(room, position((2, 1), (3, 1)), "east") == position((3, 1), (4, 1))
    assert move(room, position((3, 1), (4, 1)), "east") == position((3, 1), (4, 1)), (
        "a wall behind the box"
    )
    assert move(room, position((2, 1), (3, 1), (4, 1)), "east") == position(
        (2, 1), (3, 1), (4, 1)
    ), "a box behind the box"
    assert move(room, position((2, 1), (3, 1)), "north") == position((2, 1), (3, 1)), "a wall"
    assert move(room, position((2, 1), (3, 1)), "west") == position((1, 1), (3, 1)), (
        "boxes are never pulled"
    )


def test_the_solver_on_a_room_worked_by_hand() -> None:
    """The puzzle is a row of four cells with the target at the east end.

    A box in the second cell needs two pushes from the west. A box in the third cell needs two moves
    if the player starts at the west end. A box at the west end cannot be solved.
    """
    room = Room(frozenset((x, 1) for x in range(1, 5)), frozenset({(4, 1)}))
    moves = moves_to_solve(room)
    assert moves[position((1, 1), (2, 1))] == 2
    assert moves[position((2, 1), (3, 1))] == 1
    assert moves[position((1, 1), (3, 1))] == 2
    assert moves[position((3, 1), (4, 1))] == 0
    assert position((2, 1), (1, 1)) not in moves
    assert position((3, 1), (2, 1)) not in moves, "the player is on the wrong side"
    assert START not in moves_to_solve(CORRIDOR)


@settings(max_examples=15)
@given(st.integers(0, 10**9))
def test_backwards_and_forwards_agree(seed: int) -> None:
    made = puzzle(seed)

    def moves(at: Position) -> Iterator[tuple[str, Position]]:
        return ((name, move(made.room, at, name)) for name in STEPS)

    for start, needed in made.moves.items():
        path = shortest_path(
            Position(start, made.boxes), lambda at: at.boxes == made.room.targets, moves
        )
        assert path is not None
        assert len(path) == needed
        assert needed in MOVES
    assert len(made.boxes) == len(made.room.targets) == BOXES
    assert not made.boxes & made.room.targets
    assert made.boxes <= made.room.floor
    assert not made.boxes & set(made.moves)


def test_a_puzzle_depends_on_its_seed_alone() -> None:
    random.seed(1)
    state = random.getstate()
    first = puzzle.__wrapped__(42)
    assert random.getstate() == state, "its generator is its own"
    random.seed(2)
    assert puzzle.__wrapped__(42) == first != puzzle(43)
    layouts = {(puzzle(seed).room, puzzle(seed).boxes) for seed in range(100)}
    assert len(layouts) == 100


def test_the_texts() -> None:
    (task,) = SPEC.eval_tasks("new", 2, 0, StreamSettings())[1:]
    full, compact = SokobanGame("full"), SokobanGame("compact")
    assert full.reset(task) == (
        "Map:\nWWWWWW\nW@.WCW\nW.AC.W\nWW..AW\nW....W\nWWWWWW\n"
        "Legend: @ you; A box; C target; . floor; W wall"
    )
    assert compact.reset(task) == "@ . W C\n. A C .\nW . . A\n. . . ."
    solution = ("south", "east", "south", "east", "south", "east", "north", "north")
    results = [(full.step(action), compact.step(action)) for action in solution]
    assert [both.success for both, _ in results] == [False] * 7 + [True]
    assert [both.reward for _, both in results] == [0.0] * 7 + [1.0]
    assert (results[1][0].text.splitlines()[3], results[1][1].text.splitlines()[1]) == (
        "W.@*.W",
        ". @ * .",
    )
    assert (results[-1][0].text, results[-1][1].text) == ("Every box is on a target.", "solved.")


@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_the_scripted_player_takes_the_shortest_solution(rendering) -> None:
    game = SokobanGame(rendering)
    for i, task in enumerate(SPEC.eval_tasks("new", 40, 0, StreamSettings())):
        played = play(game, task, SPEC.scripted_player(random.Random(i)), SPEC.turns)
        assert played.success
        assert len(played.actions) == game.puzzle.moves[starts(task)]


def starts(task) -> tuple[int, int]:
    game = SokobanGame("full")
    game.reset(task)
    return game.position.player
