"""Sokoban: the rules, the generator, and the solver against a hand-worked puzzle and a search."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.envs.base import StreamSettings, play_episode
from crl.envs.shortest_path import shortest_path
from crl.envs.sokoban import SPEC
from crl.envs.sokoban.game import SokobanGame
from crl.envs.sokoban.player import read_puzzle
from crl.envs.sokoban.puzzle import (
    BOXES,
    SOLUTION_MOVES,
    STEPS,
    Grid,
    Position,
    move,
    moves_to_solve,
    puzzle,
)
from support.shipped_tasks import scripted_player

CORRIDOR, START = read_puzzle("Map:\nWWWWWW\nW@.A.W\nWWWWCW\nWWWW.W\nWWWWWW\nWWWWWW\nLegend: @ you")
"""Corridor that bends to the south, without a solution.

Its only box cannot be pushed around the corner.
"""


def position(player: tuple[int, int], *boxes: tuple[int, int]) -> Position:
    return Position(player, frozenset(boxes))


def test_steps_pushes_and_blocked_moves() -> None:
    grid = Grid(frozenset((x, 1) for x in range(1, 5)), frozenset({(4, 1)}))
    assert move(grid, position((1, 1), (3, 1)), "east") == position((2, 1), (3, 1))
    assert move(grid, position((2, 1), (3, 1)), "east") == position((3, 1), (4, 1))
    assert move(grid, position((3, 1), (4, 1)), "east") == position((3, 1), (4, 1)), (
        "a wall behind the box"
    )
    assert move(grid, position((2, 1), (3, 1), (4, 1)), "east") == position(
        (2, 1), (3, 1), (4, 1)
    ), "a box behind the box"
    assert move(grid, position((2, 1), (3, 1)), "north") == position((2, 1), (3, 1)), "a wall"
    assert move(grid, position((2, 1), (3, 1)), "west") == position((1, 1), (3, 1)), (
        "boxes cannot be pulled"
    )


def test_the_solver_on_a_grid_worked_by_hand() -> None:
    """Use a row of four cells with the target at the east end.

    A box in the second cell needs two pushes from the west. A box in the third cell needs two moves
    if the player starts at the west end. A box at the west end cannot be solved.
    """
    grid = Grid(frozenset((x, 1) for x in range(1, 5)), frozenset({(4, 1)}))
    moves = moves_to_solve(grid)
    assert moves[position((1, 1), (2, 1))] == 2
    assert moves[position((2, 1), (3, 1))] == 1
    assert moves[position((1, 1), (3, 1))] == 2
    assert moves[position((3, 1), (4, 1))] == 0
    assert position((2, 1), (1, 1)) not in moves
    assert position((3, 1), (2, 1)) not in moves, "the player is on the wrong side"
    assert START not in moves_to_solve(CORRIDOR)


@settings(max_examples=15)
@given(st.integers(0, 10**9))
def test_backward_and_forward_search_agree(seed: int) -> None:
    generated = puzzle(seed)

    def moves(state: Position) -> Iterator[tuple[str, Position]]:
        return ((name, move(generated.grid, state, name)) for name in STEPS)

    for start, needed in generated.moves.items():
        path = shortest_path(
            Position(start, generated.boxes),
            lambda state: state.boxes == generated.grid.targets,
            moves,
        )
        assert path is not None
        assert len(path) == needed
        assert needed in SOLUTION_MOVES
    assert len(generated.boxes) == len(generated.grid.targets) == BOXES
    assert not generated.boxes & generated.grid.targets
    assert generated.boxes <= generated.grid.floor
    assert not generated.boxes & set(generated.moves)


def test_a_puzzle_depends_only_on_its_seed() -> None:
    random.seed(1)
    state = random.getstate()
    first = puzzle.__wrapped__(42)
    assert random.getstate() == state, "the global generator is not used"
    random.seed(2)
    assert puzzle.__wrapped__(42) == first != puzzle(43)
    layouts = {(puzzle(seed).grid, puzzle(seed).boxes) for seed in range(100)}
    assert len(layouts) == 100


def test_the_texts() -> None:
    (task,) = SPEC.tasks.eval_tasks("unseen", 2, 0, StreamSettings())[1:]
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
    for i, task in enumerate(SPEC.tasks.eval_tasks("unseen", 40, 0, StreamSettings())):
        played = play_episode(game, task, scripted_player(SPEC, random.Random(i)), SPEC.turns)
        assert played.success
        assert len(played.actions) == game.puzzle.moves[starts(task)]


def starts(task) -> tuple[int, int]:
    game = SokobanGame("full")
    game.reset(task)
    return game.position.player
