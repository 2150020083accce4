"""Thread host, registry and scratch folder, with small fake games.

The tests of the host cover timeouts, failures and reuse.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from crl import scratch
from crl.envs import registry
from crl.envs.actions import parse_choice
from crl.envs.base import (
    ActionSpace,
    EnvSpec,
    EnvTasks,
    Game,
    Hosting,
    Runtime,
    StreamSettings,
    play_episode,
)
from crl.envs.curriculum import Curriculum
from crl.envs.hosting import threads
from crl.envs.hosting.threads import Hosts, ThreadHost
from crl.envs.places import PlaceStream
from crl.errors import ConfigError, RolloutError
from crl.types import StepResult, Task

TASK = Task("fake", seed=3, split="train", goal="Guess.")
NUMBERS = tuple("01234567")
BARRIER = threading.Barrier(2, timeout=60)  # passes only if two calls run at the same time


class Guess:
    """Game in which some actions are not guesses but cause a fault."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.unhang = threading.Event()
        self.threads: set[int] = set()

    def reset(self, task: Task) -> str:
        self.secret = random.Random(task.seed).randrange(8)
        return f"Guess a number from 0 to 7. ({task.goal})"

    def step(self, action: str) -> StepResult:
        assert not self.closed.is_set()
        self.threads.add(threading.get_ident())
        if action in FAULTS:
            return FAULTS[action](self)
        guess = parse_choice(action, NUMBERS)
        if guess is None:
            return StepResult("Answer with one number from 0 to 7.", valid=False)
        won = int(guess) == self.secret
        return StepResult("Right." if won else "Wrong.", reward=float(won), done=won, success=won)

    def close(self) -> None:
        self.closed.set()


def _raise(error: BaseException) -> Callable[[Guess], StepResult]:
    def fault(game: Guess) -> StepResult:
        raise error

    return fault


def _hang(game: Guess) -> StepResult:
    game.unhang.wait(30)
    return StepResult("too late")


def _meet(game: Guess) -> StepResult:
    BARRIER.wait()
    return StepResult("met")


def _sleep(game: Guess) -> StepResult:
    time.sleep(0.3)
    return StepResult("slept")


FAULTS: dict[str, Callable[[Guess], StepResult]] = {
    "raise": _raise(ValueError("broken dice")),
    "stop": _raise(StopIteration()),
    "exit": _raise(SystemExit(3)),
    "hang": _hang,
    "meet": _meet,
    "sleep": _sleep,
    "nothing": lambda game: None,  # type: ignore[dict-item, return-value]
    "nan": lambda game: StepResult("?", reward=float("nan")),
    "grade": lambda game: StepResult("?", score=1.5),
    "mute": lambda game: StepResult(None),  # type: ignore[arg-type]
    "bytes": lambda game: StepResult(b"won"),  # type: ignore[arg-type]
    "words": lambda game: StepResult("?", reward="1"),  # type: ignore[arg-type]
    "over": lambda game: StepResult("?", done=1),  # type: ignore[arg-type]
    "perhaps": lambda game: StepResult("?", success=None),  # type: ignore[arg-type]
    "rich": lambda game: StepResult("?", reward=5.0, done=True, success=True),
    "poor": lambda game: StepResult("?", reward=-0.5),
    "half": lambda game: StepResult("?", reward=0.6),
    "truncated": lambda game: StepResult("a smile: \ud83d."),
}


def spec_of(make: Callable[[], Game], hosting: Hosting = "threads") -> EnvSpec:
    return EnvSpec(
        name="fake",
        make_game=lambda rendering: make(),
        tasks=EnvTasks(
            lambda seed, settings: PlaceStream("fake", "{place}", seed, settings),
            lambda split, n, seed, settings: (),
        ),
        actions=ActionSpace(NUMBERS),
        turns=8,
        runtime=Runtime(hosting),
        curriculum=Curriculum(lambda rng: CountingPlayer()),
    )


class CountingPlayer:
    def begin(self, goal: str, observation: str) -> None:
        self.next = 0

    def act(self) -> str:
        return str(self.next)

    def observe(self, observation: str) -> None:
        self.next += 1


@asynccontextmanager
async def hosting(make: Callable[[], Game] = Guess, **settings: float) -> AsyncIterator[ThreadHost]:
    host = ThreadHost({"fake": (spec_of(make), "full")}, **settings)  # type: ignore[arg-type]
    try:
        yield host
    finally:
        await host.aclose()


def game_of(environment: object) -> Guess:
    game = environment.game.game  # type: ignore[attr-defined]
    assert isinstance(game, Guess)
    return game


async def test_plays_an_episode_and_reuses_the_game_released_last() -> None:
    async with hosting() as host:
        first, second = await host.acquire(TASK), await host.acquire(TASK)
        assert (await first.reset(TASK)).text == "Guess a number from 0 to 7. (Guess.)"
        assert (await first.step("maybe")) == StepResult(
            "Answer with one number from 0 to 7.", valid=False
        )
        results = [await first.step(number) for number in NUMBERS]
        assert [result.success for result in results].count(True) == 1
        games = [game_of(first), game_of(second)]
        await host.release(first)
        await host.release(second)
        assert game_of(await host.acquire(TASK)) is games[1]
        assert game_of(await host.acquire(TASK)) is games[0]
        with pytest.raises(RolloutError, match="released"):
            await first.step("1")
    assert all(game.closed.is_set() for game in games)
    with pytest.raises(RolloutError, match="closed"):
        await host.acquire(TASK)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "env: fake: step: ValueError: broken dice"),
        ("stop", "StopIteration"),
        ("exit", "SystemExit: 3"),
        ("nothing", "must return a StepResult, not NoneType"),
        ("nan", "finite"),
        ("grade", r"a score must be in \[0, 1\], not 1.5"),
        ("mute", "TypeError: a result's text must be a str, not NoneType"),
        ("bytes", "TypeError: a result's text must be a str, not bytes"),
        ("words", "TypeError: a result's reward must be a float, not str"),
        ("over", "TypeError: a result's done must be a bool, not int"),
        ("perhaps", "TypeError: a result's success must be a bool, not NoneType"),
        ("rich", r"ValueError: the total reward of an episode must be in \[0, 1\], not 5"),
        ("poor", r"ValueError: the total reward of an episode must be in \[0, 1\], not -0.5"),
    ],
)
async def test_a_failing_game_fails_its_episode_and_is_never_reused(fault: str, words: str) -> None:
    async with hosting(threads=1) as host:
        environment = await host.acquire(TASK)
        await environment.reset(TASK)
        broken = game_of(environment)
        with pytest.raises(RolloutError, match=words) as caught:
            await environment.step(fault)
        assert caught.value.kind == "env"
        assert await asyncio.to_thread(broken.closed.wait, 60)
        with pytest.raises(RolloutError, match="failed"):
            await environment.step("1")
        await host.release(environment)
        again = await host.acquire(TASK)
        assert game_of(again) is not broken
        await again.reset(TASK)
        assert (host.failures, host.replaced) == (1, 0)


async def test_the_reward_range_applies_to_the_whole_episode() -> None:
    async with hosting() as host:
        environment = await host.acquire(TASK)
        for _ in range(2):
            await environment.reset(TASK)
            await environment.step("half")
        with pytest.raises(
            RolloutError, match=r"the total reward of an episode must be in \[0, 1\], not 1.2"
        ):
            await environment.step("half")


async def test_a_lone_surrogate_is_replaced() -> None:
    async with hosting() as host:
        environment = await host.acquire(TASK)
        assert (
            await environment.reset(replace(TASK, goal="\udcff"))
        ).text == "Guess a number from 0 to 7. (\ufffd)"
        assert (await environment.step("truncated")).text == "a smile: \ufffd."


async def test_a_reset_that_returns_no_text() -> None:
    class Mute(Guess):
        def reset(self, task: Task) -> str:
            return None  # type: ignore[return-value]

    async with hosting(Mute) as host:
        environment = await host.acquire(TASK)
        with pytest.raises(
            RolloutError,
            match="reset: TypeError: reset must return the observation as a str, not NoneType",
        ):
            await environment.reset(TASK)


async def test_a_hung_game_and_its_thread_are_replaced() -> None:
    async with hosting(threads=2) as host:
        hung = [await host.acquire(TASK) for _ in range(2)]
        games = [game_of(environment) for environment in hung]
        for environment in hung:
            await environment.reset(TASK)
        original_timeout, host.thread_pool.timeout = host.thread_pool.timeout, 0.1
        errors = await asyncio.gather(
            *(environment.step("hang") for environment in hung), return_exceptions=True
        )
        assert all(
            isinstance(error, RolloutError) and "env_timeout = 0.1 s" in str(error)
            for error in errors
        )
        assert (host.failures, host.replaced) == (2, 2)
        host.thread_pool.timeout = original_timeout
        fresh = [await host.acquire(TASK) for _ in range(2)]
        assert not {id(game_of(environment)) for environment in fresh} & {
            id(game) for game in games
        }
        for environment in fresh:
            await environment.reset(TASK)
        results = await asyncio.gather(*(environment.step("meet") for environment in fresh))
        assert [result.text for result in results] == ["met", "met"]
        assert not any(game.closed.is_set() for game in games), (
            "a game is not closed under its running call"
        )
        for game in games:
            game.unhang.set()
        assert all(game.closed.wait(60) for game in games), (
            "a hung thread closes its game when it returns"
        )


async def test_the_timeout_does_not_include_the_wait_for_a_thread() -> None:
    """Check that the timeout of a call starts when a thread takes the call.

    The second call is made with a timeout that is shorter than its wait. The timeout is raised
    before a thread takes the call.
    """
    async with hosting(threads=1) as host:
        first, second = [await host.acquire(TASK) for _ in range(2)]
        ahead = asyncio.create_task(first.step("hang"))
        await asyncio.sleep(0)
        original_timeout, host.thread_pool.timeout = host.thread_pool.timeout, 0.05
        waiting = asyncio.create_task(second.step("sleep"))
        await asyncio.sleep(0.1)
        host.thread_pool.timeout = original_timeout
        game_of(first).unhang.set()
        assert ((await ahead).text, (await waiting).text) == ("too late", "slept")


async def test_the_number_of_threads_is_limited() -> None:
    async with hosting(threads=3) as host:
        environments = [await host.acquire(TASK) for _ in range(12)]
        await asyncio.gather(*(environment.step("sleep") for environment in environments))
        assert (
            len(set().union(*(game_of(environment).threads for environment in environments))) <= 3
        )


async def test_a_cancelled_call_discards_its_game() -> None:
    async with hosting(threads=1) as host:
        environment = await host.acquire(TASK)
        game = game_of(environment)
        call = asyncio.create_task(environment.step("hang"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await host.release(environment)
        assert game_of(await host.acquire(TASK)) is not game
        game.unhang.set()
        assert game.closed.wait(60)


async def test_an_error_does_not_wait_for_a_slow_end_of_the_game() -> None:
    may_close = threading.Event()

    class Slow(Guess):
        def close(self) -> None:
            assert may_close.wait(60)
            super().close()

    async with hosting(Slow) as host:
        environment = await host.acquire(TASK)
        game = game_of(environment)
        with pytest.raises(RolloutError, match="broken dice"):
            await environment.step("raise")
        await host.release(environment)
        assert not game.closed.is_set()
        may_close.set()
    assert game.closed.is_set(), "the end of the host waits for it"


async def test_details_name_task_call_and_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(threads, "monotonic", lambda: now)
    unhang = threading.Event()

    class Hanging(Guess):
        def reset(self, task: Task) -> str:
            assert unhang.wait(60)
            return super().reset(task)

    async with hosting(Hanging) as host:
        hosts = Hosts({"fake": host})
        environments = [await hosts.acquire(TASK) for _ in range(3)]
        now = 1010.0
        resets = [asyncio.create_task(e.reset(TASK)) for e in environments[:2]]
        await asyncio.sleep(0)
        now = 1312.0
        assert hosts.details() == [
            "3 environments in use, 0 failed, 0 replaced",
            "fake: 1 between calls, the longest for 312 s",
            "fake: 2 in reset, the longest for 302 s",
        ]
        unhang.set()
        await asyncio.gather(*resets)
        assert hosts.details()[1:] == ["fake: 3 between calls, the longest for 312 s"]
        for environment in environments:
            await hosts.release(environment)
        assert hosts.details() == ["0 environments in use, 0 failed, 0 replaced"]


async def test_details_name_environments_that_are_being_created() -> None:
    may_be_made = threading.Event()

    def make() -> Guess:
        assert may_be_made.wait(60)
        return Guess()

    async with hosting(make) as host:
        hosts = Hosts({"fake": host})
        acquired = asyncio.create_task(hosts.acquire(TASK))
        await asyncio.sleep(0)
        assert hosts.details()[1:] == ["fake: 1 in make, the longest for 0 s"]
        may_be_made.set()
        await hosts.release(await acquired)


@pytest.mark.parametrize("call", ["step", "aclose"])
async def test_a_call_that_is_cancelled_before_a_thread_takes_it_closes_its_game(call: str) -> None:
    async with hosting(threads=1) as host:
        ahead, waiting = [await host.acquire(TASK) for _ in range(2)]
        slow, game = game_of(ahead), game_of(waiting)
        running = asyncio.create_task(ahead.step("hang"))
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(waiting.step("1") if call == "step" else waiting.aclose())
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert game.closed.wait(10)
        assert not game.threads, "it was never played"
        slow.unhang.set()
        assert (await running).text == "too late"


async def test_a_game_that_cannot_be_created() -> None:
    def broken() -> Game:
        raise OSError("no display")

    def refused() -> Game:
        raise ConfigError("tasks", "fake", "needs the extra `fake`", "pip install crl[fake]")

    late: list[Guess] = []
    overrun = threading.Event()

    def slow() -> Game:
        overrun.wait(60)
        late.append(Guess())
        return late[0]

    async with hosting(broken) as host:
        with pytest.raises(RolloutError, match="make: OSError: no display"):
            await host.acquire(TASK)
    async with hosting(refused) as host:
        with pytest.raises(ConfigError, match="needs the extra"):
            await host.acquire(TASK)
    async with hosting(slow, timeout=0.05) as host:
        with pytest.raises(RolloutError, match="make exceeded its timeout"):
            await host.acquire(TASK)
        overrun.set()
        while not late:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert late[0].closed.wait(60), "made too late: closed, not leaked"


async def test_closing_the_host_closes_acquired_games() -> None:
    async with hosting() as host:
        game = game_of(await host.acquire(TASK))
    assert game.closed.is_set()


def test_invalid_arguments_of_a_thread_host() -> None:
    with pytest.raises(ValueError, match="hosting is 'threads', not: fake"):
        ThreadHost({"fake": (spec_of(Guess, hosting="processes"), "full")})
    with pytest.raises(ValueError, match="timeout must be positive"):
        ThreadHost({}, timeout=0.0)


def test_a_scripted_player_plays_through_text() -> None:
    played = play_episode(Guess(), TASK, CountingPlayer(), turns=8)
    assert played.success
    assert played.reward == 1.0
    assert len(played.observations) == len(played.actions) + 1
    assert not play_episode(
        Guess(), Task("fake", 3, "train", ""), CountingPlayer(), turns=1
    ).success


# ── the registry ──────────────────────────────────────────────────────────────────────────────────

OWN = spec_of(Guess)


def test_finds_environments_by_name_and_by_path() -> None:
    assert registry.get_spec("room").name == "room"
    assert "room" in registry.names()
    assert registry.get_spec(f"{__name__}:OWN") is OWN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rooom",
            (
                r"tasks.room.env = 'rooom': unknown environment \(available: .*room.*\)\. "
                r"Did you mean 'room'\?"
            ),
        ),
        ("chess", "Choose one of them, or name your own environment as"),
        (":SPEC", "unknown environment"),
        ("no_such_module:SPEC", "there is no module 'no_such_module'"),
        (f"{__name__}:TASK", "not an EnvSpec"),
        (f"{__name__}:NOBODY", "not an EnvSpec"),
    ],
)
def test_an_unknown_environment_is_a_config_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registry.get_spec(name, key="tasks.room.env")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import no_such_extra", "no_such_extra"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_users_module_that_fails_is_a_config_error(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"broken_{abs(hash(body))}"
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"its module cannot be imported .*{words}"):
        registry.get_spec(f"{module}:SPEC", key="tasks.mine.env")


def test_hosting_and_declaring_import_nothing_heavy() -> None:
    code = (
        "import sys, crl.envs.hosting.threads, crl.envs.registry as r; "
        "r.get_spec('room').tasks.train_stream(0, __import__('crl.envs.base', "
        "fromlist=['x']).StreamSettings()).draw(3); "
        "print(sorted({'nle', 'minihack', 'gymnasium', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_stream_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="permanent"):
        StreamSettings(places=4, permanent=5, visits=1)
    with pytest.raises(ValueError, match="visits"):
        StreamSettings(places=4, permanent=1, visits=0)


# ── the scratch folder ────────────────────────────────────────────────────────────────────────────


def test_a_partly_removed_scratch_folder_is_removed(tmp_path: Path) -> None:
    """A process that outlives the owner may add files while another one removes the folder."""
    folder = tmp_path / "crl-scratch-without-lock"
    (folder / "game").mkdir(parents=True)
    scratch.remove_stale_folders(tmp_path)
    assert not folder.exists()


def test_only_the_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from crl.scratch import scratch_folder\n"
        "folder = scratch_folder(Path(sys.argv[1])); (folder / 'left').touch(); "
        "print(folder, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert scratch.remove_stale_folders(tmp_path) == 0
        assert (folder / "left").exists()
        os.kill(process.pid, signal.SIGKILL)
    assert scratch.remove_stale_folders(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_removes_its_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from crl.scratch import scratch_folder; "
        "scratch_folder(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []
