"""MiniHack games and Sokoban.

A task fixes its episode, only valid actions advance the game, and its texts suffice to win.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.envs.base import EnvSpec, Rendering, StreamSettings, play_episode
from crl.envs.maze.oracle import MAX_SEARCH_STEPS
from crl.envs.registry import get_spec
from crl.types import Split
from support.grid_episodes import (
    ALL,
    JUNK,
    NAMES,
    RENDERINGS,
    SETTINGS,
    TASKS,
    all_transcripts,
    game,
    transcript,
    unseen,
)
from support.paths import python_environment
from support.shipped_tasks import scripted_player, shipped_task

each_game = pytest.mark.parametrize(
    ("name", "rendering"), [(name, rendering) for name in ALL for rendering in RENDERINGS]
)
WON = [("room", "full"), *((task, rendering) for task in TASKS for rendering in RENDERINGS)]
"""Environments and renderings in which the scripted player must win.

The compact room is missing, because its four turns are too few for a player without experience.
"""
each_won = pytest.mark.parametrize(("task", "rendering"), WON)
each_task = pytest.mark.parametrize("task", TASKS)
each_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", autouse=True)
def closed_games() -> Iterator[None]:
    yield
    for name in ALL:
        for rendering in RENDERINGS:
            for number in (0, 1):
                game(name, rendering, number).close()
    game.cache_clear()


# ── determinism ───────────────────────────────────────────────────────────────────────────────────


@each_game
def test_the_same_task_is_the_same_episode_after_any_history_and_in_any_instance(
    name: str, rendering: Rendering
) -> None:
    spec = get_spec(name)
    tasks = [
        *spec.tasks.train_stream(7, SETTINGS).draw(4),
        *spec.tasks.eval_tasks("seen", 3, 7, SETTINGS),
        *unseen(name, 4),
    ]
    expected = [transcript(game(name, rendering), task, spec.actions.choices) for task in tasks]
    assert len({tuple(texts) for texts in expected}) == len(tasks)
    chosen = st.integers(0, len(tasks) - 1)
    history = st.lists(
        st.tuples(chosen, st.lists(st.sampled_from([*spec.actions.choices, *JUNK]), max_size=8)),
        max_size=3,
    )

    @settings(max_examples=15)
    @given(history, chosen, st.sampled_from([0, 1]))
    def check(history: list[tuple[int, list[str]]], index: int, number: int) -> None:
        played = game(name, rendering, number)
        for before, actions in history:
            played.reset(tasks[before])
            for action in actions:
                if played.step(action).done:
                    break
        assert transcript(played, tasks[index], spec.actions.choices) == expected[index]

    check()


def test_the_same_task_is_the_same_episode_in_another_process() -> None:
    code = (
        "import json; from support.grid_episodes import all_transcripts\n"
        "print(json.dumps(all_transcripts()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == all_transcripts()
    assert done.stderr == "", "games must not print"


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@each_game
def test_an_invalid_action_does_not_advance_the_game(name: str, rendering: Rendering) -> None:
    spec, played = get_spec(name), game(name, rendering)
    for task in unseen(name, 5):
        assert transcript(played, task, spec.actions.choices, junk=0.5) == transcript(
            played, task, spec.actions.choices
        )
    first = played.reset(unseen(name, 1)[0])
    result = played.step("open sesame")
    assert not result.valid
    assert result.text.endswith("\n" + first)
    assert ("The actions are: north, east" in result.text) == (rendering == "full")


@each_game
@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_random_and_malformed_actions_never_crash_the_game(
    name: str, rendering: Rendering, n: int
) -> None:
    spec, played, rng = get_spec(name), game(name, rendering), random.Random(4)
    tasks = iter(unseen(name, 2000))
    played.reset(next(tasks))
    for i in range(n):
        action = rng.choice(JUNK) if rng.random() < 0.5 else rng.choice(spec.actions.choices)
        result = played.step(action)
        assert result.valid == (action in spec.actions.choices)
        assert result.text
        assert result.reward == float(result.success)
        if result.done or i % 200 == 199:
            played.reset(next(tasks))


@each_name
def test_a_step_after_the_end_is_an_error(name: str) -> None:
    spec, played = get_spec(name), game(name, "full")
    won = next(
        i
        for i, task in enumerate(unseen(name, 20))
        if play_episode(played, task, scripted_player(spec, random.Random(0)), spec.turns).success
    )
    assert won < 20
    with pytest.raises(RuntimeError, match="over"):
        played.step("north")


# ── winning ───────────────────────────────────────────────────────────────────────────────────────


@each_won
def test_the_scripted_player_wins_through_text_alone(task: str, rendering: Rendering) -> None:
    assert wins(task, rendering, "unseen", 60) >= 57


@pytest.mark.parametrize("seed", range(6))
def test_the_scripted_player_wins_in_the_permanent_small_mazes_of_every_run(seed: int) -> None:
    assert wins("maze", "compact", "seen", 64, seed) >= 61


@pytest.mark.soak
@pytest.mark.parametrize("split", ["unseen", "seen"])
@each_won
def test_the_scripted_player_wins_95_percent_of_each_eval(
    task: str, rendering: Rendering, split: Split
) -> None:
    assert wins(task, rendering, split, 512) >= 0.95 * 512


def wins(task: str, rendering: Rendering, split: Split, n: int, seed: int = 0) -> int:
    """Return how many of n episodes the scripted player wins.

    The episodes are from the split of a run with `seed`. The turns are those of the shipped task.
    """
    spec, turns = shipped_task(task, rendering)
    tasks = spec.tasks.eval_tasks(split, n, seed, SETTINGS)
    players = (scripted_player(spec, random.Random(i)) for i in range(n))
    return sum(
        play_episode(game(spec.name, rendering), *each, turns).success
        for each in zip(tasks, players, strict=True)
    )


class RandomPlayer:
    def __init__(self, spec: EnvSpec, rng: random.Random) -> None:
        self._actions, self._rng = spec.actions.choices, rng

    def begin(self, goal: str, observation: str) -> None: ...

    def observe(self, observation: str) -> None: ...

    def act(self) -> str:
        return self._rng.choice(self._actions)


@each_task
def test_random_play_wins_few_compact_episodes(task: str) -> None:
    """Check that at most one in ten is won.

    The bound for 200 episodes includes two standard errors.
    """
    spec, turns = shipped_task(task, "compact")
    players = (RandomPlayer(spec, random.Random(i)) for i in range(200))
    won = sum(
        play_episode(game(spec.name, "compact"), *each, turns).success
        for each in zip(unseen(spec.name, 200), players, strict=True)
    )
    assert won <= 28


@each_task
def test_a_compact_episode_fits_the_tiny_models_context(task: str) -> None:
    """Check an estimate of the tokens of an episode, won or lost.

    The estimate is one token per word, another one per number, and seven tokens of the chat
    template per turn.
    """
    spec, turns = shipped_task(task, "compact")
    for i, each in enumerate(unseen(spec.name, 20)):
        for player in (
            scripted_player(spec, random.Random(i)),
            RandomPlayer(spec, random.Random(i)),
        ):
            played = play_episode(game(spec.name, "compact"), each, player, turns)
            words = [
                word
                for text in (each.goal, *played.observations, *played.actions)
                for word in text.split()
            ]
            assert (
                len(words) + sum(word.isdigit() for word in words) + 7 * len(played.actions) < 900
            )


def test_small_mazes_can_be_searched_within_the_tasks_turns() -> None:
    assert shipped_task("maze", "compact")[1] == MAX_SEARCH_STEPS


# ── the stream and the evals ──────────────────────────────────────────────────────────────────────


@each_name
def test_evals_are_fixed_and_separate_from_training(name: str) -> None:
    spec = get_spec(name)
    train = spec.tasks.train_stream(3, SETTINGS).draw(320)
    seen, never = spec.tasks.eval_tasks("seen", 32, 3, SETTINGS), unseen(name, 64)
    assert seen == spec.tasks.eval_tasks("seen", 64, 3, SETTINGS)[:32]
    assert (
        never == spec.tasks.eval_tasks("unseen", 128, 1, StreamSettings(places=4, permanent=1))[:64]
    )
    assert {task.params["lgen"] for task in seen} <= {task.params["lgen"] for task in train}
    assert not {task.params["core"] for task in seen} & {task.params["core"] for task in train}
    assert not {task.params["lgen"] for task in never} & {task.params["lgen"] for task in train}
    assert not {task.params["place"] for task in never} & {task.params["place"] for task in train}
    for task in (*train, *seen, *never):
        assert task.name == name
        assert str(task.params["place"]) in task.goal
        assert "\n" not in task.goal


@each_name
def test_a_place_keeps_its_layout_under_all_dynamics(name: str) -> None:
    """Check that only Sokoban varies the first observation of a place, because its start varies."""
    spec, (task,) = get_spec(name), unseen(name, 1)
    first = {
        game(name, "compact").reset(spec.tasks.revisit(task, visit))  # type: ignore[misc]
        for visit in range(12)
    }
    assert (len(first) > 1) == (name == "sokoban")
