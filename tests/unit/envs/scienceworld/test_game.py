"""Games of ScienceWorld in the real simulator: texts, scores, splits, and Java processes."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.envs.base import Rendering, StreamSettings, play_episode
from crl.envs.hosting.processes import ProcessHost
from crl.envs.scienceworld import SMALL_SPEC, SPEC, tasks
from crl.envs.scienceworld.java import find_java
from crl.envs.scienceworld.tasks import demonstration_tasks
from crl.errors import TransientError
from crl.methods.parts.rollouts import ChatContext
from crl.rollout.episode import EpisodeKey, Limits
from crl.types import RolloutPlan, Task, Trajectory
from support.doors import renderer, runner, script
from support.paths import python_environment
from support.shipped_tasks import scripted_player

if importlib.util.find_spec("scienceworld") is None:
    pytest.skip(
        "scienceworld is not installed: pip install 'crl[scienceworld]'", allow_module_level=True
    )
if find_java() is None:
    pytest.skip(
        "Java is not installed, which the extra scienceworld needs", allow_module_level=True
    )

from crl.envs.scienceworld import collect, engine
from crl.envs.scienceworld.engine import JvmEnded, Simulator
from crl.envs.scienceworld.game import ScienceWorldGame

STREAM = StreamSettings()


def find(task: str, variation: int) -> Task:
    return Task("scienceworld", 0, "seen", "", {"task": task, "variation": variation})


@pytest.fixture
def game() -> Iterator[ScienceWorldGame]:
    game = ScienceWorldGame("full")
    yield game
    game.close()


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    simulator = Simulator()
    yield simulator
    simulator.close()


def java_processes(parent: int) -> list[int]:
    """Return the Java processes that a process has started."""
    found = subprocess.run(
        ["ps", "--ppid", str(parent), "-o", "pid=,comm="], capture_output=True, text=True
    )
    return [int(pid) for pid, name in map(str.split, found.stdout.splitlines()) if name == "java"]


def wait_for_end(process: int) -> bool:
    until = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and time.monotonic() < until:
        stat = Path(f"/proc/{process}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return not Path(f"/proc/{process}").exists()


# ── episodes ──────────────────────────────────────────────────────────────────────────────────────


def test_a_won_episode(game: ScienceWorldGame) -> None:
    first = game.reset(find("find-animal", 0))
    assert first.startswith("This room is called the hallway.")
    assert "In your inventory, you see:" in first
    actions = (
        "teleport to outside", "focus on dove egg", "<answer>Pick up dove egg</answer>",
        "teleport to kitchen", "move dove egg to red box",
    )  # fmt: skip
    results = [game.step(action) for action in actions]
    assert [result.score for result in results] == [0.17, 0.67, 0.75, 0.83, 1.0]
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert (results[-1].done, results[-1].success) == (True, True)
    assert not any(result.done for result in results[:-1])
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("look around")


def test_a_failure_ends_the_episode_with_reward_0(game: ScienceWorldGame) -> None:
    game.reset(find("find-animal", 0))
    results = [game.step("teleport to outside"), game.step("focus on axe")]
    assert (results[1].done, results[1].success, results[1].score) == (True, False, 0.0)
    assert sum(result.reward for result in results) == pytest.approx(0.0)
    assert results[1].text.endswith("The task has failed.")


def test_points_of_the_start_are_part_of_the_first_reward(game: ScienceWorldGame) -> None:
    game.reset(find("find-animal", 0))
    result = game.step("look around")
    assert (result.reward, result.score) == (0.08, 0.08)
    assert game.step("look around").reward == 0


def test_invalid_actions(game: ScienceWorldGame) -> None:
    game.reset(find("find-animal", 0))
    for action in (
        "dance",
        "move x to y",
        "",
        "<answer>open\ndoor</answer>",
        "\ud83d\ufffd é \n x",
    ):
        result = game.step(action.encode("utf-8", "replace").decode())
        assert (result.valid, result.done) == (False, False)
        assert "action" in result.text


def test_an_ambiguous_request_is_answered_with_a_number(game: ScienceWorldGame) -> None:
    game.reset(find("find-animal", 0))
    request = game.step("close door")
    assert request.valid
    assert request.text.startswith("Ambiguous request: Please enter the number")
    assert "\n2:\t" in request.text
    assert game.step("2").text == "The door is now closed."
    game.step("close door")
    unknown = game.step("look around")
    assert not unknown.valid, "an open request accepts numbers only"
    assert game.step("look around").text.startswith("This room is called the hallway.")


def test_compact_episodes() -> None:
    game = ScienceWorldGame("compact")
    assert game.reset(find("find-animal", 0)) == "hallway: picture"
    actions = ("go outside", "focus dove egg", "take dove egg", "dance")
    assert [game.step(action).text for action in actions] == [
        "outside: axe, blue jay egg, butterfly egg, dove egg, fire pit, fountain, ground, wood",
        "focus on dove egg",
        "took dove",
        "unknown action.",
    ]
    request = game.step("close door").text
    assert request.startswith("Ambiguous request: ")
    assert "\n" not in request
    assert game.step("0").text == "The door is now closed."
    game.step("go kitchen")
    assert game.step("put dove egg in red box").text == "done."
    game.close()


@pytest.mark.parametrize("rendering", ["compact", pytest.param("full", marks=pytest.mark.soak)])
def test_the_small_player_wins(rendering: Rendering) -> None:
    game = SMALL_SPEC.make_game(rendering)
    for task in (*SMALL_SPEC.tasks.eval_tasks("seen", 15, 0, STREAM), *demonstration_tasks(15)):
        player = scripted_player(SMALL_SPEC, random.Random(0))
        assert play_episode(game, task, player, SMALL_SPEC.turns).success, task
    game.close()


@pytest.mark.parametrize(
    "name", ["find-plant", "power-component", "test-conductivity", "use-thermometer"]
)
def test_gold_paths_win(name: str) -> None:
    game, spec = SPEC.make_game("full"), SPEC
    (task,) = (
        task
        for task in spec.tasks.eval_tasks("seen", 89, 0, STREAM)
        if (task.params["task"], task.params["variation"]) == (name, 1)
    )
    episode = play_episode(game, task, scripted_player(spec, random.Random(0)), spec.turns)
    assert (episode.success, episode.reward) == (True, pytest.approx(1.0))
    game.close()


def test_the_stored_goals_are_those_of_the_simulator(simulator: Simulator) -> None:
    stored = json.loads((Path(tasks.__file__).parent / "variations.json").read_text("utf-8"))
    assert tuple(stored) == collect.TASK_NAMES
    for task, goals_of in stored.items():
        splits = collect._splits(simulator, task)
        assert [*goals_of] == ["train", "unseen"]
        for split, goals in goals_of.items():
            assert [int(variation) for variation in goals] == list(splits[split])
            last = splits[split][-1]
            assert goals[str(last)] == collect._goal(simulator, task, last)


def test_the_stored_animals_are_those_of_the_simulator(simulator: Simulator) -> None:
    stored = json.loads((Path(tasks.__file__).parent / "small.json").read_text("utf-8"))
    for task, uses in stored.items():
        simulator.load(task, 0)
        splits = collect._splits(simulator, task)
        for use, games in uses.items():
            assert [int(variation) for variation in games] == list(splits[use])
        for variation in ("0", *list(uses["unseen"])[:3]):
            games = uses["train"] if variation == "0" else uses["unseen"]
            assert games[variation] == collect._small(simulator, task, int(variation))


# ── reproducibility and Java processes ────────────────────────────────────────────────────────────

ACTIONS = (
    "look around", "inventory", "teleport to kitchen", "teleport to outside", "look in cupboard",
    "teleport to art studio", "pick up orange", "0", "teleport to greenhouse", "wait1", "open door",
)  # fmt: skip


def transcript(game: ScienceWorldGame, task: Task, seed: int) -> list[object]:
    rng = random.Random(seed)
    return [game.reset(task), *(game.step(rng.choice(ACTIONS)) for _ in range(15))]


def test_games_do_not_depend_on_other_games() -> None:
    played = [find(name, 1) for name in ("chemistry-mix", "find-plant", "use-thermometer")]
    game = ScienceWorldGame("full")
    alone = [transcript(game, task, 7) for task in played]
    assert [transcript(game, task, 7) for task in reversed(played)] == alone[::-1]
    game.close()
    games, rngs = [ScienceWorldGame("full") for _ in played], [random.Random(7) for _ in played]
    together: list[list[object]] = [[g.reset(task)] for g, task in zip(games, played, strict=True)]
    for _ in range(15):
        for game, rng, texts in zip(games, rngs, together, strict=True):
            texts.append(game.step(rng.choice(ACTIONS)))
    assert together == alone
    for game in games:
        game.close()


def test_games_of_a_java_process_may_be_played_in_several_threads() -> None:
    """The simulator's list of simplifications is shared by the games of a process."""
    games = [ScienceWorldGame("full") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            texts = pool.map(lambda game: game.reset(find("find-animal", 0)), games)
            assert len({*texts}) == 1
    for game in games:
        game.close()


def test_games_share_java_processes_and_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GAMES_PER_JVM", 2)
    monkeypatch.setattr(engine, "_JVMS", [])  # the gold player's has a free place
    before = java_processes(os.getpid())
    games = [ScienceWorldGame("full") for _ in range(3)]
    for game in games:
        game.reset(find("find-animal", 0))
    started = {*java_processes(os.getpid())} - {*before}
    assert len(started) == 2
    games.pop(0).close()
    games.append(ScienceWorldGame("full"))
    games[-1].reset(find("find-animal", 0))
    assert {*java_processes(os.getpid())} - {*before} == started, "the free place is taken"
    for game in games:
        game.close()
    assert java_processes(os.getpid()) == before


def test_the_gateway_listens_on_the_loopback_interface_and_needs_a_token() -> None:
    from py4j.java_gateway import (  # pyright: ignore[reportMissingImports]
        GatewayParameters,
        JavaGateway,
    )
    from py4j.protocol import Py4JError  # pyright: ignore[reportMissingImports]

    game = ScienceWorldGame("full")
    game.reset(find("find-animal", 0))
    (process,) = {jvm.process.pid for jvm in engine._JVMS if jvm is game._simulator._jvm}
    inodes = {
        os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()
    }
    listening = [
        fields[1].split(":")
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes
    ]
    ((address, port),) = listening
    assert address in ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1
    stranger: Any = JavaGateway(gateway_parameters=GatewayParameters(port=int(port, 16)))
    with pytest.raises(Py4JError):
        stranger.jvm.java.lang.System.getProperty("user.name")
    game.close()


def test_a_dead_java_process_is_replaced_at_the_next_reset(game: ScienceWorldGame) -> None:
    first = game.reset(find("find-animal", 0))
    (jvm,) = {game._simulator._jvm}
    assert jvm is not None
    os.kill(jvm.process.pid, signal.SIGKILL)
    with pytest.raises(JvmEnded, match="the Java process has ended with exit code -9"):
        game.step("look around")
    assert game.reset(find("find-animal", 0)) == first
    os.kill(game._simulator._jvm.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert game.reset(find("find-animal", 0)) == first, "also if its end was not known yet"


def test_java_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_JVM_OPTIONS", ("-XX:+NoSuchOption",))
    game = ScienceWorldGame("full")
    with pytest.raises(RuntimeError, match="Java cannot be started: "):
        game.reset(find("find-animal", 0))
    game.close()


def test_a_java_process_that_dies_before_its_first_game_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease, simulator = engine._lease_jvm, Simulator()

    def killed() -> engine._Jvm:
        jvm = lease()
        os.kill(jvm.process.pid, signal.SIGKILL)
        jvm.process.wait()
        return jvm

    monkeypatch.setattr(engine, "_lease_jvm", killed)
    with pytest.raises(JvmEnded, match="the Java process has ended with exit code -9"):
        simulator.load("find-animal", 0)
    simulator.close()
    assert not engine._JVMS


async def test_a_killed_java_process_fails_its_episodes_only() -> None:
    host = ProcessHost({"scienceworld": (SPEC, "full")}, processes=1, timeout=60)
    task = find("find-animal", 0)
    environments = [await host.acquire(task) for _ in range(2)]
    for environment in environments:
        await environment.reset(task)
    worker = environments[0].worker._process
    assert worker is not None
    (java,) = java_processes(worker.pid)
    os.kill(java, signal.SIGKILL)
    for environment in environments:
        with pytest.raises(TransientError, match="the Java process has ended") as error:
            await environment.step("look around")
        assert error.value.kind == "env"
        await host.release(environment)
    environment = await host.acquire(task)
    await environment.reset(task)
    assert (await environment.step("teleport to outside")).score == 0.17
    (java,) = java_processes(worker.pid)
    await host.aclose()
    assert wait_for_end(java)
    assert host.replaced == 0, "the worker is kept"


async def test_an_episode_is_played_again_after_its_java_process_was_killed() -> None:
    host = ProcessHost({"scienceworld": (SPEC, "compact")}, processes=1, timeout=60)
    actions = script("look around", "go outside", "look around")
    kills: list[int] = []

    def kill_and_act(prompt: str) -> str:
        action = actions(prompt)
        if action == "go outside" and not kills:
            worker = host._workers[0]._process
            assert worker is not None
            kills.extend(java_processes(worker.pid))
            os.kill(kills[0], signal.SIGKILL)
        return action

    async def play(reply: Callable[[str], str]) -> Trajectory:
        player = runner(
            ScriptedEngine(renderer(), reply), host, context=ChatContext({"scienceworld": ""}),
            limits={"scienceworld": Limits(max_turns=3, max_response_tokens=32)},
        )  # fmt: skip
        key = EpisodeKey("train", 0, 0, 0)
        player.join(key)
        return await player.play(key, find("find-animal", 0), RolloutPlan("free"))

    whole, again = await play(actions), await play(kill_and_act)
    await host.aclose()
    assert len(kills) == 1
    assert (again.error, again.turns, again.segments) == (None, 3, whole.segments)
    assert again.turn_rewards == whole.turn_rewards


def test_java_ends_with_a_killed_process() -> None:
    script = (
        "import sys\nfrom crl.envs.scienceworld.engine import Simulator\ns = Simulator()\n"
        "s.load('find-animal', 0)\nprint(s._jvm.process.pid, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=python_environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        java = int(process.stdout.readline())
        assert Path(f"/proc/{java}").exists()
        process.kill()
    assert wait_for_end(java)
