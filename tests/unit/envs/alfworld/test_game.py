"""ALFWorld: a task fixes its episode, TextWorld's texts are unchanged, and games can be won."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crl.config.load import load
from crl.envs import alfworld
from crl.envs.alfworld import AlfworldPlayer, games, small, text
from crl.envs.alfworld.house import KINDS, Chore, phrase, read_chore
from crl.envs.alfworld.tasks import (
    SmallStream,
    demonstration_tasks,
    eval_tasks,
    small_eval_tasks,
    train_stream,
)
from crl.envs.base import EnvSpec, Rendering, Runtime, play_episode
from crl.envs.hosting.processes import ProcessHost
from crl.envs.registry import get_spec, require_extra
from crl.errors import ConfigError
from crl.planning.plan import overview
from crl.planning.tasks import data_notes
from crl.types import Segment, Task, states
from support.alfworld_episodes import SETTINGS, SMALL_UNSEEN, admissible, some_tasks, transcript
from support.paths import WEBSHOP_DATA, python_environment
from support.shipped_tasks import scripted_player, shipped_task

JUNK = [
    "",
    " ",
    "<answer>",
    "go to the moon 1",
    "\x00",
    "é" * 500,
    "take",
    "move mug 1",
    "9" * 100,
    "<answer></answer>\n",
    "help",
]


@pytest.fixture(autouse=True, scope="module")
def private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        # alfworld sets the variable when it is imported. The fixture can undo this only if it knows
        # the variable.
        patch.setenv("ALFWORLD_DATA", "")
        patch.delenv("ALFWORLD_DATA")
        yield


# ── words and declarations ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_read_chore_reverses_phrase(kind: str) -> None:
    assert read_chore(phrase(Chore(kind, "Mug", "Shelf"))) == Chore(kind, "mug", "shelf")


@pytest.mark.parametrize(
    ("goal", "kind"),
    [
        ("Your task is to: put some vase on safe.", "pick_and_place_simple"),
        ("clean some vase and put it in safe", "pick_clean_then_place_in_recep"),
        ("heat some vase and put it in safe", "pick_heat_then_place_in_recep"),
        ("cool some vase and put it in safe", "pick_cool_then_place_in_recep"),
        ("find two vase and put them in safe", "pick_two_obj_and_place"),
        ("examine the vase with the safe", "look_at_obj_in_light"),
        ("the amber arch: look at vase under the safe.", "look_at_obj_in_light"),
    ],
)
def test_reads_each_wording_of_a_chore(goal: str, kind: str) -> None:
    assert read_chore(goal) == Chore(kind, "vase", "safe")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 2, "
         "and a safe 1.\n\nYour task is to: x.",
         "see bed 1, desk 2, safe 1"),
        ("You arrive at cabinet 1. The cabinet 1 is closed.", "cabinet 1 closed"),
        ("You arrive at desk 1. On the desk 1, you see a pen 2, and a mug 1.",
         "desk 1: pen 2, mug 1"),
        ("You open the safe 1. The safe 1 is open. In it, you see nothing.", "safe 1: nothing"),
        ("You pick up the mug 1 from the desk 1.", "took mug 1"),
        ("You move the mug 1 to the desk 1.", "mug 1 in desk 1"),
        ("You put the mug 1 in/on the desk 1.", "mug 1 in desk 1"),
        ("You heat the mug 1 using the microwave 1.", "mug 1 hot"),
        ("You turn on the desklamp 1.", "desklamp 1 on"),
        ("You are facing the desk 1. Next to it, you see nothing.", "at desk 1"),
        ("You are carrying: a mug 1.", "have mug 1"),
        ("This is a hot and clean mug 1.", "hot and clean mug 1"),
        ("mug 1 hot", "mug 1 hot"),
    ],
)  # fmt: skip
def test_compact_words(output: str, words: str) -> None:
    assert text.compact(output) == words


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("<answer>Move  mug 1 to shelf 2.</answer>", "move mug 1 to shelf 2"),
        ("put mug 1 in/on shelf 2", "move mug 1 to shelf 2"),
        ("put mug 1 on shelf 2", "move mug 1 to shelf 2"),
        ("take pen 1", "take pen 1 from desk 1"),
        ("pick up pen 1 from desk 1", "take pen 1 from desk 1"),
        ("turn on desklamp 1", "use desklamp 1"),
        ("heat egg 1", "heat egg 1 with microwave 1"),
        ("move pen 1 to shelf 2", None),
        ("go to shelf", None),
        ("I will go to shelf 2", None),
    ],
)
def test_the_agents_wording_is_mapped_to_the_games_command(
    action: str, command: str | None
) -> None:
    admissible = (
        "go to shelf 2",
        "heat egg 1 with microwave 1",
        "move mug 1 to shelf 2",
        "take pen 1 from desk 1",
        "use desklamp 1",
    )
    assert text.chosen_command(action, admissible) == command
    older = (
        "go to shelf 2",
        "heat egg 1 with microwave 1",
        "put mug 1 in/on shelf 2",
        "take pen 1 from desk 1",
        "use desklamp 1",
    )
    assert text.chosen_command(action, older) == (
        command and command.replace("move mug 1 to", "put mug 1 in/on")
    )


def test_a_small_place_keeps_its_chore_and_needed_things_under_any_dynamics() -> None:
    for layout in range(300):
        houses = [small.house(layout, dynamics) for dynamics in range(5)]
        assert len({(house.chore, house.receptacles) for house in houses}) == 1
        chore = houses[0].chore
        wanted = [
            {(kind, home) for kind, home in house.things if kind in (chore.thing, chore.receptacle)}
            for house in houses
        ]
        assert all(needed == wanted[0] for needed in wanted)
        assert all(
            houses[0].receptacles[home] != chore.receptacle
            for kind, home in wanted[0]
            if kind == chore.thing
        )
    assert len({small.house(7, dynamics).things for dynamics in range(20)}) > 10
    assert {small.house(layout, 0).chore.kind for layout in range(100)} == set(KINDS)


def test_small_streams_and_evals() -> None:
    stream = SmallStream(3, SETTINGS)
    tasks = stream.draw(320)
    goals: dict[object, set[str]] = {}
    for task in tasks:
        goals.setdefault(task.params["lgen"], set()).add(task.goal)
    assert all(len(goal) == 1 for goal in goals.values()), (
        "a place has one goal, because lessons are retrieved by it"
    )
    assert len({goal for (goal,) in goals.values()}) == len(goals)
    seen = small_eval_tasks("seen", 16, 3, SETTINGS)
    assert {task.goal for task in seen} <= {task.goal for task in tasks}
    assert not {task.params["core"] for task in seen} & {task.params["core"] for task in tasks}
    assert not {task.params["lgen"] for task in SMALL_UNSEEN} & set(goals)
    demonstrations = demonstration_tasks(64)
    assert not {task.params["lgen"] for task in demonstrations} & (
        {task.params["lgen"] for task in SMALL_UNSEEN} | set(goals)
    )
    resumed = SmallStream(3, SETTINGS)
    resumed.load_state(json.loads(json.dumps(stream.state())))
    assert resumed.draw(9) == stream.draw(9)
    with pytest.raises(ValueError, match="seen or unseen"):
        small_eval_tasks("train", 1, 0, SETTINGS)


def test_a_missing_extra_is_a_config_error() -> None:
    spec = replace(get_spec("alfworld"), runtime=Runtime(extra="alfworld_that_is_not_there"))
    with pytest.raises(
        ConfigError,
        match=(
            r"tasks.chores.env = 'alfworld': it needs the extra "
            r"'alfworld_that_is_not_there'.*pip install"
        ),
    ):
        require_extra(spec, "tasks.chores.env")


def test_the_declaration_imports_neither_textworld_nor_alfworld() -> None:
    code = (
        "import sys, crl.envs.alfworld as a; from crl.envs.base import StreamSettings; "
        "a.SMALL_SPEC.tasks.train_stream(0, StreamSettings()).draw(3);"
        "print(sorted({'textworld', 'alfworld', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_the_plan_names_the_processes_if_a_task_needs_them(tiny_actor: Path) -> None:
    config = load(["alfworld"], sets=["rollout.env_processes=3"])
    assert "environments 3 processes" in overview(config)
    assert "environments 4 threads, 3 processes" in overview(
        load(["alfworld", "room"], sets=["rollout.env_processes=3"])
    )


def test_the_plan_names_generated_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    config, no_others = (
        load(["room", "webshop", "alfworld"]),
        "metrics are not comparable with published results",
    )
    output = overview(config)
    assert output.count(no_others) == 2
    assert f"\n  played on a generated catalogue of 1,000 products: {no_others}\nalfworld" in output
    assert f"\n  played on generated houses of six receptacles: {no_others}\n" in output
    assert data_notes({"alfworld": alfworld.SPEC}) == {
        "alfworld": f"played on generated games of the same domain: {no_others}"
    }
    monkeypatch.setenv("WEBSHOP_DATA", str(WEBSHOP_DATA))
    assert overview(config).count(no_others) == 1


# ── determinism ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def players() -> Iterator[dict[Rendering, alfworld.Game]]:
    pair: dict[Rendering, alfworld.Game] = {
        "full": alfworld.make_game("full"),
        "compact": alfworld.make_game("compact"),
    }
    yield pair
    for game in pair.values():
        game.close()


@settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    history=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 6)), max_size=4),
    task=st.integers(0, 7),
)
def test_the_same_task_is_the_same_episode_after_any_history(
    players: dict[Rendering, alfworld.Game], history: list[tuple[int, int]], task: int
) -> None:
    tasks, game = some_tasks(), players["full"]
    fresh = alfworld.make_game("full")
    for number, turns in history:
        transcript(game, tasks[number], turns)
    assert transcript(game, tasks[task]) == transcript(fresh, tasks[task])
    fresh.close()


def test_the_same_task_is_the_same_episode_in_another_process(
    players: dict[Rendering, alfworld.Game],
) -> None:
    code = (
        "import json; from crl.envs import alfworld; "
        "from support.alfworld_episodes import some_tasks, transcript\n"
        "game = alfworld.make_game('full'); "
        "print(json.dumps([transcript(game, task) for task in some_tasks()[::-1]]))"
    )
    environment = python_environment(PYTHONHASHSEED="1")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout) == [
        transcript(players["full"], task) for task in some_tasks()[::-1]
    ]


STOCK = """
import json, sys, textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
path, commands = sys.argv[1], json.loads(sys.argv[2])  # the engine overwrites them
env = textworld.start(path, textworld.EnvInfos(admissible_commands=True),\
 wrappers=[AlfredDemangler(shuffle=False)])
state, said = env.reset(), []
said.append([state.feedback, state["admissible_commands"]])
for command in commands:
    state, _, won = env.step(command)
    said.append([state.feedback, state["admissible_commands"], won])
print(json.dumps(said))
"""


@pytest.mark.parametrize("number", [0, 1])
def test_cached_work_does_not_change_textworlds_texts(number: int, tmp_path: Path) -> None:
    from crl.envs.alfworld.engine import PddlEngine

    data = games.game_of([SMALL_UNSEEN[2], eval_tasks("unseen", 1, 0, SETTINGS)[0]][number])
    engine, rng = PddlEngine(), random.Random(number)
    engine.start(games.game_of(SMALL_UNSEEN[3]))  # another chore, whose grammar is then known
    engine.start(data)
    engine.execute(engine.admissible[0])
    output: list[list[object]] = [
        [engine.start(data), list(engine.admissible)]
    ]  # a second start too
    commands = []
    for _ in range(25):
        commands.append(rng.choice(engine.admissible))
        words, won = engine.execute(commands[-1])
        output.append([words, list(engine.admissible), won])
    engine.close()
    (tmp_path / "game.tw-pddl").write_text(json.dumps(data))
    arguments = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        STOCK,
        str(tmp_path / "game.tw-pddl"),
        json.dumps(commands),
    ]
    assert (
        json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
        == output
    )


def test_sys_argv_is_restored(
    players: dict[Rendering, alfworld.Game], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["crl", "play", "alfworld"])
    players["full"].reset(eval_tasks("seen", 4, 0, SETTINGS)[3])
    assert sys.argv == ["crl", "play", "alfworld"]


# ── winning ───────────────────────────────────────────────────────────────────────────────────────


def check_scripted(players: dict[Rendering, alfworld.Game], small_n: int, full_n: int) -> None:
    """Check that the scripted player wins at least 95 % in both renderings and every eval set."""
    small_turns, turns = shipped_task("alfworld", "compact")[1], shipped_task("alfworld", "full")[1]
    evals: list[tuple[EnvSpec, Rendering, Sequence[Task]]] = [
        (alfworld.SMALL_SPEC, "compact", SMALL_UNSEEN[:small_n]),
        (alfworld.SMALL_SPEC, "compact", small_eval_tasks("seen", small_n, 0, SETTINGS)),
        (alfworld.SMALL_SPEC, "full", small_eval_tasks("seen", small_n, 0, SETTINGS)),
        (alfworld.SPEC, "full", eval_tasks("unseen", min(full_n, 134), 0, SETTINGS)),
        (alfworld.SPEC, "full", eval_tasks("seen", min(full_n, 140), 0, SETTINGS)),
        (alfworld.SPEC, "compact", eval_tasks("unseen", min(full_n, 134), 0, SETTINGS)),
    ]
    for spec, rendering, tasks in evals:
        limit = small_turns if spec is alfworld.SMALL_SPEC else turns
        outcomes = [
            play_episode(players[rendering], task, scripted_player(spec, random.Random(i)), limit)
            for i, task in enumerate(tasks)
        ]
        assert sum(played.success for played in outcomes) >= 0.95 * len(tasks), (
            spec.name,
            rendering,
        )
        assert all(played.reward == (1.0 if played.success else -1.0) for played in outcomes)


def test_the_scripted_player_wins_through_text_alone(
    players: dict[Rendering, alfworld.Game],
) -> None:
    check_scripted(players, 12, 4)


@pytest.mark.soak
def test_the_scripted_player_wins_every_eval_set(players: dict[Rendering, alfworld.Game]) -> None:
    check_scripted(players, 128, 140)


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


def check_actions(game: alfworld.Game, actions: int) -> None:
    """Check that random and malformed actions do not crash the game.

    The game accepts only admissible actions.
    """
    rng, tasks = random.Random(4), iter(SMALL_UNSEEN)
    done, moves, paid = True, 0, 0.0
    for _ in range(actions):
        if done or moves == 20:
            game.reset(next(tasks, SMALL_UNSEEN[0]))
            moves, paid = 0, 0.0
        action = rng.choice(JUNK) if rng.random() < 0.3 else rng.choice(admissible(game))
        before = admissible(game)
        result = game.step(action)
        moves += result.valid
        paid += result.reward
        assert result.valid == (action in before)
        assert game.moves == moves  # type: ignore[attr-defined]
        assert result.valid or admissible(game) == before
        assert result.text.strip()
        assert paid == (1.0 if result.success else -1.0)
        assert result.done == result.success
        done = result.done


@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_random_and_malformed_actions(
    players: dict[Rendering, alfworld.Game], rendering: Rendering
) -> None:
    check_actions(players[rendering], 400)


@pytest.mark.soak
@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_ten_thousand_actions(
    players: dict[Rendering, alfworld.Game], rendering: Rendering
) -> None:
    check_actions(players[rendering], 10_000)


def test_random_play_does_not_win(players: dict[Rendering, alfworld.Game]) -> None:
    wins, rng, (_, turns) = 0, random.Random(0), shipped_task("alfworld", "compact")
    for task in SMALL_UNSEEN[:20]:
        players["compact"].reset(task)
        wins += any(
            players["compact"].step(rng.choice(admissible(players["compact"]))).success
            for _ in range(turns)
        )
    assert wins <= 2


def test_the_last_text_reports_the_end_and_no_step_is_possible(
    players: dict[Rendering, alfworld.Game],
) -> None:
    played = play_episode(players["compact"], SMALL_UNSEEN[0], AlfworldPlayer(random.Random(0)), 30)
    assert played.observations[-1] == "done."
    with pytest.raises(RuntimeError, match="over"):
        players["compact"].step("look")


def test_the_accepted_commands_are_not_part_of_the_state(
    players: dict[Rendering, alfworld.Game],
) -> None:
    game, task = players["full"], some_tasks()[0]
    observation = game.reset(task)
    assert "go to" in observation
    (state,) = states([Segment("user", observation, "env")])
    assert "Looking quickly around you, you see" in state
    assert "go to" not in state


async def test_members_of_a_group_play_the_same_episode_in_worker_processes() -> None:
    host = ProcessHost({"alfworld_small": (alfworld.SMALL_SPEC, "compact")}, processes=2)
    environments = [await host.acquire(SMALL_UNSEEN[1]) for _ in range(3)]
    texts = []
    for environment in environments:
        first = (await environment.reset(SMALL_UNSEEN[1])).text
        place = first.removeprefix("see ").split(", ")[0]
        texts.append(
            [
                first,
                (await environment.step(f"go to {place}")).text,
                (await environment.step("nonsense")).text,
            ]
        )
    await host.aclose()
    assert texts[0] == texts[1] == texts[2]
    assert host.failures == 0


# ── generated games ───────────────────────────────────────────────────────────────────────────────


def test_generated_houses_follow_the_floor_plans_and_their_splits_share_none() -> None:
    from alfworld.gen.constants import (  # pyright: ignore[reportMissingImports]
        VAL_RECEPTACLE_OBJECTS,
    )

    from crl.envs.alfworld import floorplans
    from crl.envs.alfworld.house import LAMPS

    plans = {plan.receptacles: plan.number for plan in floorplans.floor_plans()}
    found: dict[str, list[floorplans.House]] = {}
    for use in ("train", "known", "new"):
        found[use] = [floorplans.house(use, number) for number in range(60)]
        assert {house.chore.kind for house in found[use]} == set(KINDS)
        for house in found[use]:
            assert house.receptacles in plans
            placed = [(kind, house.receptacles[home]) for kind, home in house.things]
            assert all(
                kind in LAMPS or kind in VAL_RECEPTACLE_OBJECTS[home] for kind, home in placed
            )
            assert (house.chore.thing, house.chore.receptacle) not in placed
    unseen = {
        plan.receptacles
        for plan in floorplans.floor_plans()
        if plan.number in floorplans.UNSEEN_PLANS
    }
    assert {house.receptacles for house in found["new"]} == unseen
    for use, count in (("train", 1466), ("known", 140)):
        assert not unseen & {
            floorplans.house(use, number).receptacles for number in range(count)
        }, "an unseen floor plan under another number"
    assert not set(found["train"]) & set(found["known"])
    for layout in range(200):
        house = small.house(layout, 0)
        assert all(
            kind in LAMPS or kind in VAL_RECEPTACLE_OBJECTS[house.receptacles[home]]
            for kind, home in house.things
        )


def test_generated_games_are_solved_once_and_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from crl.envs.alfworld import engine, pddl

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "from crl.envs.alfworld import games; "
        "from crl.envs.alfworld.tasks import demonstration_tasks\n"
        "[games.game_of(task) for task in demonstration_tasks(3)]"
    )
    command, environment = [sys.executable, "-c", code], python_environment()
    at_once = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in at_once] == [0, 0]
    files = sorted((tmp_path / "crl" / "alfworld").iterdir())
    assert len(files) == 3
    assert all(file.suffix == ".tw-pddl" for file in files)
    monkeypatch.setattr(engine, "plan_length", lambda data: pytest.fail("planned again"))
    games._verify_solvable.cache_clear()
    made = [games.game_of(task) for task in demonstration_tasks(3)]
    alone = [
        pddl.game_data(small.house(int(task.params["lgen"]), None))
        for task in demonstration_tasks(3)
    ]
    assert sorted(map(json.dumps, alone)) == sorted(file.read_text() for file in files)
    assert all(
        len(str(game["pddl_problem"])) > len(str(proved["pddl_problem"]))
        for game, proved in zip(made, alone, strict=True)
    )
    revisit = alfworld.SMALL_SPEC.tasks.revisit
    assert revisit
    # Other objects in the house do not matter.
    games.game_of(revisit(demonstration_tasks(1)[0], 1))
    monkeypatch.setattr(engine, "plan_length", lambda data: None)
    with pytest.raises(RuntimeError, match="finds no solution"):
        games.game_of(demonstration_tasks(4)[3])


def test_the_stream_plays_every_game_once_per_round() -> None:
    stream = train_stream(0, SETTINGS)
    stream.draw(1466 - 40)
    tasks = [*stream.draw(40), *stream.draw(40)]
    assert len({task.params["number"] for task in tasks[:40]}) == 40
    resumed = train_stream(0, SETTINGS)
    resumed.load_state(json.loads(json.dumps(stream.state())))
    assert resumed.draw(5) == stream.draw(5)
    assert all(re.fullmatch(r"Your task is to: .*\w\.", task.goal) for task in tasks)
    assert eval_tasks("unseen", 20, 1, SETTINGS) == eval_tasks("unseen", 134, 2, SETTINGS)[:20]
    uses = [eval_tasks(split, 1, 0, SETTINGS)[0].params for split in ("seen", "unseen")]
    assert uses == [
        {"use": "known", "number": 0, "variation": "known 0"},
        {"use": "new", "number": 0, "variation": "new 0"},
    ], "fix the draws"
    with pytest.raises(ValueError, match="135 games were requested, but there are only 134"):
        eval_tasks("unseen", 135, 0, SETTINGS)


# ── ALFWorld's own games ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like that of alfworld-download, with games of an older grammar."""
    for number, task in enumerate(SMALL_UNSEEN[:6]):
        house = small.house(int(task.params["lgen"]), int(task.params["core"]))
        data = dict(games.game_of(task))
        data["grammar"] = str(data["grammar"]).replace('"move {o} to {r}"', '"put {o} in/on {r}"')
        data["solvable"] = number != 5
        split = "train" if number % 2 else "valid_unseen"
        name = f"{house.chore.kind}-{house.chore.thing}-None-{house.chore.receptacle}-{number + 1}"
        for folder in (name, name.replace("-None-", "-Plate-")):
            file = tmp_path / "json_2.1.1" / split / folder / "trial_1" / "game.tw-pddl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(data))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    return tmp_path


def test_alfworlds_own_games_are_played_if_present(
    official: Path, players: dict[Rendering, alfworld.Game]
) -> None:
    train = train_stream(0, SETTINGS).draw(4)
    assert len({task.params["game"] for task in train}) == 2, (
        "no unsolvable games and no movable receptacles"
    )
    tasks = eval_tasks("unseen", 3, 0, SETTINGS)
    with pytest.raises(ValueError, match="there are only 3"):
        eval_tasks("unseen", 4, 0, SETTINGS)
    for task in (*train[:2], *tasks):
        played = play_episode(players["full"], task, AlfworldPlayer(random.Random(0)), 40)
        assert played.success
        assert task.goal in played.observations[0]
        if "look at" not in task.goal:
            assert any(" in/on " in words for words in played.observations), (
                "the older grammar's words"
            )


@pytest.mark.parametrize(
    ("folder", "chore"),
    [
        ("pick_and_place_simple-Mug-None-Desk-308", Chore("pick_and_place_simple", "Mug", "Desk")),
        ("pick_and_place_simple-Mug-None", None),
        ("pick_and_place_simple-Mug-None-Desk", None),
        ("pick_and_place_simple--None-Desk-308", None),
        ("pick_and_place_simple-Mug-None--308", None),
        ("pick_and_place_simple-Mug-None-Desk-308-2", None),
        ("pick_and_place_simple-Mug-Plate-Desk-308", None),
        ("pick_and_place_simple-AppleSliced-None-Desk-308", None),
        ("juggle-Mug-None-Desk-308", None),
    ],
)
def test_the_chore_is_read_from_the_name_of_the_folder(folder: str, chore: Chore | None) -> None:
    assert games.official_chore(f"json_2.1.1/train/{folder}/trial_1/game.tw-pddl") == chore


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "FileNotFoundError: "),
        ('{"solvable": true, "pddl_dom', "JSONDecodeError: Unterminated string"),
        ('["solvable"]', "TypeError: list indices"),
        ('{"pddl_domain": "", "pddl_problem": ""}', "KeyError: 'grammar'"),
        ('{"pddl_domain": "", "pddl_problem": 3, "grammar": ""}', "pddl_problem is not a string"),
    ],
)
def test_an_invalid_game_file_is_named_in_the_error(
    official: Path, players: dict[Rendering, alfworld.Game], content: str | None, reason: str
) -> None:
    (task,) = train_stream(0, SETTINGS).draw(1)
    path = official / str(task.params["game"])
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        ValueError, match=re.escape(f"{path} is not a valid ALFWorld game: {reason}")
    ):
        players["full"].reset(task)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("pddl_problem", "ParseError: Missing ')'"),
        ("grammar", "FailedToken: "),
        ("pddl_domain", "ParseError: "),
    ],
)
def test_a_game_that_textworld_cannot_parse_is_named_in_the_error(
    official: Path, players: dict[Rendering, alfworld.Game], part: str, reason: str
) -> None:
    bad, good, *_ = train_stream(0, SETTINGS).draw(2)
    first = players["full"].reset(good)
    path = official / str(bad.params["game"])
    path.write_text(json.dumps({**json.loads(path.read_text()), part: "(define (problem"}))
    with pytest.raises(
        ValueError, match=re.escape(f"{path} is not a valid ALFWorld game: {reason}")
    ):
        players["full"].reset(bad)
    assert players["full"].reset(good) == first


def test_a_folder_without_games_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"ALFWORLD_DATA = .*contains no json_2.1.1.*alfworld-download"
    ):
        eval_tasks("unseen", 1, 0, SETTINGS)
    (tmp_path / "json_2.1.1").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"ALFWORLD_DATA = .*contains no playable game in json_2.1.1/valid_unseen",
    ):
        eval_tasks("unseen", 1, 0, SETTINGS)
