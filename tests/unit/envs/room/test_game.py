"""Room environment: determinism, texts that contain only visible facts, and winning."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from crl.config.catalog import task_file
from crl.config.load import task_settings
from crl.envs import places
from crl.envs.base import Rendering, StreamSettings, play_episode
from crl.envs.curriculum import ScriptedPlayer
from crl.envs.hosting.threads import ThreadHost
from crl.envs.room import ACTIONS, PLACES, SPEC, demonstration_tasks, probe_tasks
from crl.envs.room.game import RoomGame
from crl.envs.room.oracle import true_stairs
from crl.envs.room.player import RoomPlayer
from crl.scratch import scratch_folder
from crl.types import Task
from support.shipped_tasks import scripted_player

SETTINGS = StreamSettings()
UNSEEN = PLACES.eval_tasks("unseen", 256, 0, SETTINGS)


@pytest.fixture(scope="module")
def games() -> Iterator[dict[Rendering, RoomGame]]:
    pair: dict[Rendering, RoomGame] = {"full": RoomGame("full"), "compact": RoomGame("compact")}
    yield pair
    for game in pair.values():
        game.close()


def transcript(game: RoomGame, task: Task, turns: int = 12) -> list[str]:
    """Return the texts of an episode whose actions depend only on the task."""
    rng = random.Random(task.seed)
    texts = [game.reset(task)]
    for _ in range(turns):
        result = game.step(rng.choice(ACTIONS))
        texts.append(f"{result.text} {result.reward} {result.done}")
        if result.done:
            break
    return texts


def map_of(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the rows of the map and the legend of a full text."""
    lines = text.splitlines()
    top = lines.index("Map:") + 1
    legend = lines[top + 5].removeprefix("Legend: ").split("; ")
    return lines[top : top + 5], {entry[0]: entry[2:] for entry in legend}


# ── determinism ───────────────────────────────────────────────────────────────────────────────────


async def test_members_of_a_group_play_the_same_episode_at_the_same_time() -> None:
    host = ThreadHost({"room": (SPEC, "compact")}, threads=4)
    (task,) = PLACES.stream(1, SETTINGS).draw(1)

    async def member() -> list[str]:
        environment = await host.acquire(task)
        texts = [(await environment.reset(task)).text]
        for action in ("north", "east", "south", "west", "southwest"):
            result = await environment.step(action)
            texts.append(result.text)
            if result.done:
                break
        await host.release(environment)
        return texts

    members = await asyncio.gather(*(member() for _ in range(8)))
    await host.aclose()
    assert all(texts == members[0] for texts in members)
    assert host.failures == 0


def test_a_layout_keeps_its_start_while_dynamics_vary(
    games: dict[Rendering, RoomGame],
) -> None:
    game, starts, texts = games["full"], set(), set()
    for core in range(12):
        task = Task("room", core, "train", "", {"lgen": 100_003, "core": core, "place": "x"})
        texts.add(tuple(transcript(game, task, turns=6)))
        starts.add(game.start)
    assert len(starts) == 1
    assert len(texts) > 1


# ── contents of the texts ─────────────────────────────────────────────────────────────────────────


def test_the_first_full_text(games: dict[Rendering, RoomGame]) -> None:
    assert games["full"].reset(UNSEEN[3]) == (
        "Map:\n~~~~~\n~~~~~\n~~~~~\n~~~..\n~~~.@\nLegend: @ you; . floor; ~ not seen yet\nHP 12/12"
    )
    assert UNSEEN[3].goal == "Room: the black camp. Reach the stairs down (>)."


def test_the_first_compact_text(games: dict[Rendering, RoomGame]) -> None:
    assert games["compact"].reset(UNSEEN[3]) == "at 5 5\ndark north west northwest"


def test_the_shape_of_compact_texts(games: dict[Rendering, RoomGame]) -> None:
    ways = "(north|south|east|west|northeast|southeast|southwest|northwest)"
    shape = re.compile(
        rf"(unknown action\.\n)?at [1-5] [1-5]\n"
        rf"(stairs {ways}|dark {ways}( {ways})*|dark nowhere)"
        rf"(\ntrap {ways}|\n[a-z ]+ {ways})*"
    )
    game, rng, seen = games["compact"], random.Random(5), Counter[str]()
    for task in UNSEEN[:60]:
        result_text = game.reset(task)
        for _ in range(10):
            assert shape.fullmatch(result_text), result_text
            seen.update(line.split()[0] for line in result_text.splitlines())
            result = game.step(rng.choice([*ACTIONS, "hm"]))
            if result.done:
                assert result.text in ("stairs reached.", "you died.")
                break
            result_text = result.text
    assert {"stairs", "trap", "jackal", "newt", "unknown"} <= set(seen)


def test_seen_cells_stay_on_the_map(games: dict[Rendering, RoomGame]) -> None:
    game, rng = games["full"], random.Random(0)
    for task in UNSEEN[:20]:
        rows, _ = map_of(game.reset(task))
        assert sum(row.count("~") for row in rows) >= 16, (
            "the room is dark, so only the neighbours are seen"
        )
        seen = {(x, y) for y in range(5) for x in range(5) if rows[y][x] != "~"}
        for _ in range(12):
            result = game.step(rng.choice(ACTIONS))
            if result.done:
                break
            rows, _ = map_of(result.text)
            assert tuple(rows) == game.grid
            now = {(x, y) for y in range(5) for x in range(5) if rows[y][x] != "~"}
            assert seen <= now
            x, y = game.position
            assert rows[y][x] == "@"
            seen = now


def test_the_legend_names_exactly_the_symbols_on_the_map(games: dict[Rendering, RoomGame]) -> None:
    game, rng, names = games["full"], random.Random(1), set[str]()
    for task in UNSEEN[:80]:
        text = game.reset(task)
        for _ in range(20):
            rows, legend = map_of(text)
            assert set("".join(rows)) == set(legend)
            names |= set(legend.values())
            result = game.step(rng.choice(ACTIONS))
            if result.done:
                break
            text = result.text
    assert {
        "you",
        "floor",
        "not seen yet",
        "staircase down",
        "staircase up",
        "teleportation trap",
        "jackal",
        "newt corpse",
    } <= names


def test_hit_points_follow_the_game(games: dict[Rendering, RoomGame]) -> None:
    game, rng, lost = games["full"], random.Random(2), 0
    for task in UNSEEN[:40]:
        text, before = game.reset(task), 12
        assert text.endswith("HP 12/12")
        for _ in range(15):
            result = game.step(rng.choice(ACTIONS))
            if result.done:
                break
            now, most = map(int, re.findall(r"HP (\d+)/(\d+)$", result.text)[0])
            assert now <= most
            if now < before:
                lost += 1
                assert re.search(
                    r"bites|hits|hit by|stings|touches|zapped|kicks|claws|butts", result.text
                ), result.text
            before = now
    assert lost > 10


def test_an_invalid_action_does_not_advance_the_game(games: dict[Rendering, RoomGame]) -> None:
    for rendering, game in games.items():
        first = game.reset(UNSEEN[0])
        result = game.step("open the door")
        assert not result.valid
        assert (result.reward, result.done, game.moves) == (0.0, False, 0)
        assert result.text.endswith("\n" + first)
        assert ("The actions are: north, east" in result.text) == (rendering == "full")
        expected = transcript(game, UNSEEN[0])
        game.reset(UNSEEN[0])
        rng = random.Random(UNSEEN[0].seed)
        texts = [first]
        for _ in range(len(expected) - 1):
            assert not game.step("um").valid
            result = game.step(f"<answer>{rng.choice(ACTIONS)}</answer>")
            texts.append(f"{result.text} {result.reward} {result.done}")
        assert texts == expected


def test_the_last_text_reports_the_end_and_no_step_is_possible(
    games: dict[Rendering, RoomGame],
) -> None:
    ends = Counter[str]()
    game, rng = games["full"], random.Random(3)
    for task in UNSEEN[:120]:
        game.reset(task)
        for _ in range(100):
            before, action = game.position, rng.choice(ACTIONS)
            result = game.step(action)
            if result.done:
                break
        if not result.done:
            continue
        ends[result.text] += 1
        assert (game.position, len(game.grid)) == (before, 5)
        with pytest.raises(RuntimeError, match="over"):
            game.step("north")
    assert set(ends) == {"You reach the stairs down.", "You die."}


# ── winning ───────────────────────────────────────────────────────────────────────────────────────


def test_the_true_stairs_are_where_episodes_are_won(games: dict[Rendering, RoomGame]) -> None:
    game, checked = games["full"], 0
    for i, task in enumerate(UNSEEN[:40]):
        played = play_episode(game, task, scripted_player(SPEC, random.Random(i)), turns=30)
        seen = [
            (x, y)
            for y, row in enumerate(game.grid)
            for x, symbol in enumerate(row)
            if symbol == ">"
        ]
        if played.success and seen:
            assert seen == [true_stairs(int(task.params["lgen"]))]
            checked += 1
    assert checked > 20
    assert len({true_stairs(task.params["lgen"]) for task in UNSEEN}) > 20  # type: ignore[arg-type]


class InformedPlayer(RoomPlayer):
    """Player that knows the cell of the stairs."""

    def __init__(self, rng: random.Random, exit_at: tuple[int, int]) -> None:
        super().__init__(rng)
        self._exit = exit_at

    def observe(self, observation: str) -> None:
        super().observe(observation)
        self.stairs = {self._exit}


class RandomPlayer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def begin(self, goal: str, observation: str) -> None: ...

    def observe(self, observation: str) -> None: ...

    def act(self) -> str:
        return self._rng.choice(ACTIONS)


@pytest.mark.parametrize(
    "tasks", [UNSEEN, PLACES.eval_tasks("seen", 256, 0, SETTINGS)], ids=["unseen", "seen"]
)
def test_players_that_know_the_stairs_win_within_the_compact_turn_limit(
    games: dict[Rendering, RoomGame], tasks: Sequence[Task]
) -> None:
    """Check that a player that knows the stairs wins at least 90 % of the episodes.

    Monsters cause the losses. The explorer wins about half of the episodes, a random walker at most
    one in ten. The bounds allow for two standard errors of 256 episodes.
    """
    turns = task_settings(task_file("room"), "compact")["max_turns"]

    def wins(player: Callable[[Task, random.Random], ScriptedPlayer]) -> float:
        played = (
            play_episode(games["compact"], task, player(task, random.Random(i)), turns)
            for i, task in enumerate(tasks)
        )
        return sum(episode.success for episode in played) / len(tasks)

    assert wins(lambda task, rng: InformedPlayer(rng, true_stairs(int(task.params["lgen"])))) >= 0.9
    assert 0.4 <= wins(lambda _, rng: scripted_player(SPEC, rng)) <= 0.65
    assert wins(lambda _, rng: RandomPlayer(rng)) <= 0.1375


def test_a_game_keeps_its_files_in_the_scratch_folder() -> None:
    game = RoomGame("compact")
    folder = Path(game.level._env.nethack._vardir)
    assert folder.parent == scratch_folder()
    game.close()
    assert not folder.exists()


# ── the stream and the evals ──────────────────────────────────────────────────────────────────────


def test_places_persist_for_their_visits_and_the_permanent_ones_for_the_run() -> None:
    settings = StreamSettings(places=32, permanent=8, visits=5)
    tasks = PLACES.stream(0, settings).draw(32 * 40)
    rounds = [tasks[i : i + 32] for i in range(0, len(tasks), 32)]
    assert all(len({task.params["place"] for task in visits}) == 32 for visits in rounds)
    assert [task.params["place"] for task in rounds[0]] != [
        task.params["place"] for task in rounds[1]
    ]
    visits: dict[tuple[str, int], int] = Counter(
        (str(task.params["place"]), int(task.params["lgen"])) for task in tasks
    )
    assert len({name for name, _ in visits}) == len({lgen for _, lgen in visits}) == len(visits), (
        "a new layout has a new name"
    )
    seen = {
        (str(task.params["place"]), int(task.params["lgen"]))
        for task in PLACES.eval_tasks("seen", 8, 0, settings)
    }
    assert len(seen) == 8
    assert all(visits[place] == 40 for place in seen)
    at_the_ends = {
        (str(task.params["place"]), int(task.params["lgen"]))
        for task in [*tasks[:32], *tasks[-32:]]
    }
    assert all(count == 5 for place, count in visits.items() if place not in at_the_ends)
    assert {visits[place] for place in at_the_ends - seen} == {1, 2, 3, 4, 5}, (
        "they are not all replaced at the same time"
    )
    assert len({task.params["core"] for task in tasks}) == len(tasks)


def test_the_streams_state_restores_the_exact_continuation() -> None:
    through = PLACES.stream(5, SETTINGS)
    through.draw(77)
    state = json.loads(json.dumps(through.state()))
    PLACES.eval_tasks("seen", 64, 5, SETTINGS)  # does not change the stream
    expected = through.draw(200)
    resumed = PLACES.stream(5, SETTINGS)
    resumed.draw(3)
    resumed.load_state(state)
    assert [*resumed.draw(9), *resumed.draw(191)] == expected
    assert PLACES.stream(6, SETTINGS).draw(200) != PLACES.stream(5, SETTINGS).draw(200)


def test_eval_tasks_are_those_of_earlier_versions() -> None:
    tasks = [
        PLACES.eval_tasks(split, 1, 0, StreamSettings())[0].params for split in ("seen", "unseen")
    ]
    assert tasks == [
        {"lgen": 1981090665, "core": 2021815205, "place": "damp oven"},
        {"lgen": 100000, "core": 1521393650, "place": "amber arch"},
    ]


def test_evals_are_fixed_and_separate_from_training() -> None:
    assert PLACES.eval_tasks("unseen", 64, 1, StreamSettings(places=4, permanent=1)) == UNSEEN[:64]
    assert len({task.params["lgen"] for task in UNSEEN}) == len(UNSEEN)
    seen = PLACES.eval_tasks("seen", 32, 3, SETTINGS)
    assert seen == PLACES.eval_tasks("seen", 64, 3, SETTINGS)[:32]
    assert seen != PLACES.eval_tasks("seen", 32, 4, SETTINGS)
    train = PLACES.stream(3, SETTINGS).draw(320)
    assert {task.params["lgen"] for task in seen} <= {task.params["lgen"] for task in train}
    assert all(task.params["core"] in places.HELD_OUT_DYNAMICS for task in (*seen, *UNSEEN))
    assert all(task.params["core"] in places.TRAIN_DYNAMICS for task in train)
    assert {task.split for task in train} | {task.split for task in seen} | {UNSEEN[0].split} == {
        "train",
        "seen",
        "unseen",
    }
    with pytest.raises(ValueError, match="seen or unseen"):
        PLACES.eval_tasks("train", 1, 0, SETTINGS)
    with pytest.raises(ValueError, match="permanent"):
        PLACES.eval_tasks("seen", 1, 0, StreamSettings(permanent=0))


def test_layout_and_dynamics_ranges_are_disjoint() -> None:
    layouts = [
        places.UNSEEN_LAYOUTS,
        places.DEMONSTRATION_LAYOUTS,
        places.PROBE_LAYOUTS,
        places.TRAIN_LAYOUTS,
    ]
    for ranges in (layouts, [places.TRAIN_DYNAMICS, places.HELD_OUT_DYNAMICS]):
        ordered = sorted(ranges, key=lambda values: values.start)
        assert all(low.stop <= high.start for low, high in pairwise(ordered))
    uses = [
        demonstration_tasks(50),
        probe_tasks(50),
        UNSEEN,
        tuple(PLACES.stream(0, SETTINGS).draw(320)),
    ]
    seen = [{task.params["lgen"] for task in tasks} for tasks in uses]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_goals_are_short_and_name_the_place() -> None:
    for task in (*UNSEEN, *PLACES.stream(0, SETTINGS).draw(64)):
        assert str(task.params["place"]) in task.goal
        assert len(task.goal.split()) <= 10


def test_inflect_is_not_imported() -> None:
    code = (
        "import sys, crl.envs.minihack.level as level; "
        "print(level.minihack.__name__, 'inflect' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "minihack False\n", answer.stderr
