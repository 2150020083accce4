"""Worker processes with a toy game: placement, timeouts, deaths, and no orphan processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.envs.base import Runtime
from crl.envs.hosting.processes import MAX_AFFINITY_SURPLUS, ProcessEnvironment, ProcessHost
from crl.envs.hosting.threads import Hosts, ThreadHost
from crl.errors import ConfigError, RolloutError, TransientError
from crl.types import StepResult
from support import toy_games
from support.paths import python_environment
from support.toy_games import NUMBERS, SPEC
from support.toy_hosts import TASK, acquire_and_reset, hosting, worker_pid


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (
        FileNotFoundError,
        ProcessLookupError,  # the process ended between opening and reading the file
    ):
        return False


def folder_exists(folder: str) -> bool:
    return Path(folder).is_dir()


def wait_for_end(process: int, seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(process)


async def test_plays_an_episode_and_reuses_the_game() -> None:
    async with hosting() as host:
        environment = await host.acquire(TASK)
        assert (await environment.reset(TASK)).text == "Guess a number from 0 to 7. (Guess.)"
        assert await environment.step("maybe") == StepResult(
            "Answer with one number from 0 to 7.", valid=False
        )
        results = [await environment.step(number) for number in NUMBERS]
        assert [result.success for result in results].count(True) == 1
        place = (environment.worker, environment.game)
        await host.release(environment)
        with pytest.raises(RolloutError, match="released"):
            await environment.step("1")
        again = await acquire_and_reset(host)
        assert (again.worker, again.game) == place
        assert (await again.step("hm")).valid is False
        assert (host.failures, host.replaced) == (0, 0)
    with pytest.raises(RolloutError, match="closed"):
        await host.acquire(TASK)


async def test_games_are_spread_over_workers_and_stay_in_their_worker() -> None:
    async with hosting(processes=3) as host:
        environments = [await acquire_and_reset(host) for _ in range(7)]
        pids = [await worker_pid(environment) for environment in environments]
        assert sorted(Counter(pids).values()) == [2, 2, 3]
        assert os.getpid() not in pids
        assert [await worker_pid(environment) for environment in environments] == pids
        games = {environment.game: pid for environment, pid in zip(environments, pids, strict=True)}
        for environment in environments:
            await host.release(environment)
        again = [await acquire_and_reset(host) for _ in range(7)]
        assert {
            environment.game: await worker_pid(environment) for environment in again
        } == games, "no game was created again"


async def test_with_affinity_a_task_stays_in_its_worker_until_that_worker_is_too_busy() -> None:
    async with hosting(
        replace(SPEC, runtime=Runtime("processes", affinity=True)), processes=2
    ) as host:
        first, second = (replace(TASK, seed=seed) for seed in (1, 2))
        members = [await host.acquire(task) for task in [first] * 4 + [second] * 4]
        assert [len({e.worker for e in half}) for half in (members[:4], members[4:])] == [1, 1]
        workers = (members[0].worker, members[4].worker)
        assert workers[0] is not workers[1], (
            "another task goes to the worker with fewer acquired games"
        )
        for environment in members:
            await host.release(environment)
        assert (await host.acquire(second)).worker is workers[1]
        many = [await host.acquire(first) for _ in range(MAX_AFFINITY_SURPLUS + 2)]
        assert [e.worker for e in many[: MAX_AFFINITY_SURPLUS + 1]] == [workers[0]] * (
            MAX_AFFINITY_SURPLUS + 1
        )
        assert many[-1].worker is workers[1], "the preferred worker has too many acquired games"
        workers[1].retire()
        await workers[1]._serve_task
        assert (await host.acquire(second)).worker.alive


async def test_a_lone_surrogate_is_replaced() -> None:
    async with hosting(processes=1) as host:
        assert (await (await acquire_and_reset(host)).step("truncated")).text == "a smile: \ufffd."


async def test_games_in_one_worker_do_not_mix() -> None:
    async with hosting(processes=1) as host:
        environments = [await acquire_and_reset(host) for _ in range(5)]

        async def play(environment: ProcessEnvironment, turns: int) -> str:
            text = ""
            for _ in range(turns):
                text = (await environment.step("0")).text
            return text

        texts = await asyncio.gather(
            *(play(environment, turns) for turns, environment in enumerate(environments, start=1))
        )
        assert [text.split()[-1] for text in texts] == ["1.", "2.", "3.", "4.", "5."]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "env: toy: step: ValueError: broken dice"),
        ("exit", "SystemExit: 3"),
        ("nothing", "must return a StepResult, not NoneType"),
        ("mute", "TypeError: a result's text must be a str, not NoneType"),
        ("rich", r"ValueError: the total reward of an episode must be in \[0, 1\], not 5"),
    ],
)
async def test_an_error_of_a_game_fails_only_its_episode(fault: str, words: str) -> None:
    async with hosting(processes=1) as host:
        broken, other = await acquire_and_reset(host), await acquire_and_reset(host)
        with pytest.raises(RolloutError, match=words) as caught:
            await broken.step(fault)
        assert caught.value.kind == "env"
        with pytest.raises(RolloutError, match="failed"):
            await broken.step("1")
        assert (await other.step("hm")).valid is False
        number = broken.game
        await host.release(broken)
        assert (await acquire_and_reset(host)).game != number
        assert (host.failures, host.replaced) == (1, 0)


@pytest.mark.parametrize(("fault", "transient"), [("lose", True), ("raise", False)])
async def test_a_transient_error_of_a_game_stays_one(fault: str, transient: bool) -> None:
    async with hosting(processes=1) as host:
        environment = await acquire_and_reset(host)
        with pytest.raises(RolloutError) as caught:
            await environment.step(fault)
    assert isinstance(caught.value, TransientError) == transient
    if transient:
        assert str(caught.value) == "env: toy: step: the dice are lost"
    assert any("In the worker process" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", r"the worker process was killed by SIGKILL$"),
        ("quit", r"the worker process ended with exit code 7: the floor is lava$"),
        ("vanish", r"the worker process was killed by SIGKILL$"),
        ("garble", r"the reply of the worker process cannot be read: ValueError: invalid literal"),
        ("hang", r"exceeded the timeout of 0.5 s \(see rollout.env_timeout\)$"),
    ],
)
async def test_a_lost_worker_fails_only_its_episodes_and_is_replaced(
    fault: str, words: str
) -> None:
    async with hosting(processes=2) as host:
        environments = [await acquire_and_reset(host) for _ in range(4)]
        pids = [await worker_pid(environment) for environment in environments]
        lost = [e for e, pid in zip(environments, pids, strict=True) if pid == pids[0]]
        kept = [e for e, pid in zip(environments, pids, strict=True) if pid != pids[0]]
        assert len(lost) == len(kept) == 2
        host.timeout = 0.5 if fault == "hang" else host.timeout
        fatal = asyncio.create_task(lost[0].step(fault))
        await asyncio.sleep(0)  # the step has started with this timeout
        host.timeout = 60.0
        first, second, third = await asyncio.gather(
            fatal, lost[1].step("1"), kept[0].step("hm"), return_exceptions=True
        )
        for error in (first, second):
            assert isinstance(error, RolloutError)
        with pytest.raises(RolloutError, match=words):
            raise first  # type: ignore[misc]
        assert third == StepResult("Answer with one number from 0 to 7.", valid=False)
        assert (host.failures, host.replaced) == (2, 1)
        assert wait_for_end(pids[0])
        for environment in lost:
            await host.release(environment)
        fresh = [await acquire_and_reset(host) for _ in range(2)]
        assert not {await worker_pid(environment) for environment in fresh} & {pids[0]}
        assert (await kept[1].step("hm")).valid is False


@pytest.mark.parametrize("kind", ["fork", "daemon"])
async def test_the_death_of_a_worker_with_forked_children_is_detected_immediately(
    kind: str,
) -> None:
    async with hosting(processes=1) as host:
        environment = await acquire_and_reset(host)
        child = int((await environment.step(kind)).text)
        try:
            # A timeout has another message.
            with pytest.raises(RolloutError, match=r"the worker process was killed by SIGKILL$"):
                await environment.step("die")
            await host.release(environment)
            assert (await (await acquire_and_reset(host)).step("hm")).valid is False
            assert wait_for_end(child, 30) == (kind == "fork"), (
                "a process that has left its process group is not ended"
            )
        finally:
            if kind == "daemon":
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("hangs", [False, True])
async def test_closing_ends_the_children_of_games(hangs: bool) -> None:
    host = ProcessHost({"toy": (SPEC, "full")}, processes=1)
    environment = await acquire_and_reset(host)
    child = int((await environment.step("fork")).text)
    assert is_running(child)
    hung = asyncio.create_task(environment.step("hang")) if hangs else None
    await asyncio.sleep(0.1)
    await host.aclose()
    assert wait_for_end(child, 30)
    if hung:
        with pytest.raises(RolloutError):
            await hung


async def test_every_replaced_worker_is_reported() -> None:
    notes: list[str] = []
    host = ProcessHost({"toy": (SPEC, "full")}, processes=1, note=notes.append)
    for fault in ("quit", "die"):
        environment = await acquire_and_reset(host)
        with pytest.raises(RolloutError):
            await environment.step(fault)
        await host.release(environment)
    await acquire_and_reset(host)
    hosts = Hosts({"toy": host})
    assert hosts.metrics() == {"env/failures": 2, "env/replaced": 2}
    hosts.resume({"env/failures": 5, "env/replaced": 3})
    assert hosts.metrics() == {"env/failures": 7, "env/replaced": 5}
    await host.aclose()
    assert notes == [
        "environments: the worker process ended with exit code 7: the floor is lava; "
        "a new worker replaces it (1 replaced so far)",
        "environments: the worker process was killed by SIGKILL; "
        "a new worker replaces it (2 replaced so far)",
    ]


async def test_the_death_of_an_idle_worker_fails_no_episode() -> None:
    async with hosting(processes=1) as host:
        environment = await acquire_and_reset(host)
        process = await worker_pid(environment)
        await host.release(environment)
        os.kill(process, signal.SIGKILL)
        assert environment.worker._process
        await environment.worker._process.wait()  # the event loop has seen the exit
        assert await worker_pid(await acquire_and_reset(host)) != process
        assert host.failures == 0


async def test_output_and_input_of_games_do_not_reach_the_host() -> None:
    async with hosting() as host:
        environment = await acquire_and_reset(host)
        assert (await environment.step("print")).valid is False
        assert (await environment.step("read")).text == "read ''"


async def test_a_cancelled_call_discards_only_its_game() -> None:
    async with hosting(processes=1, timeout=60.0) as host:
        cancelled, other = await acquire_and_reset(host), await acquire_and_reset(host)
        call = asyncio.create_task(cancelled.step("1"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await other.step("hm")).valid is False
        with pytest.raises(RolloutError, match="failed"):
            await cancelled.step("1")
        await host.release(cancelled)


async def test_a_game_that_cannot_be_created() -> None:
    async with hosting(replace(SPEC, make_game=toy_games.make_broken)) as host:
        with pytest.raises(RolloutError, match="make: OSError: no display"):
            await host.acquire(TASK)
    async with hosting(replace(SPEC, make_game=toy_games.make_refused)) as host:
        with pytest.raises(ConfigError, match="needs the extra") as caught:
            await host.acquire(TASK)
    assert caught.value.remedy == "Install it"


async def test_the_timeout_does_not_include_the_start_of_a_worker() -> None:
    async with hosting(timeout=0.001) as host:
        environment = await host.acquire(TASK)
        host.timeout = 60.0
        assert (await environment.reset(TASK)).text == "Guess a number from 0 to 7. (Guess.)"
        assert (host.failures, host.replaced) == (0, 0)


async def test_the_timeout_does_not_include_the_wait_for_the_worker() -> None:
    """Play many more episodes than workers, so that the last call waits longer than its timeout."""
    async with hosting(processes=1) as host:
        environments = [await acquire_and_reset(host) for _ in range(20)]
        host.timeout = 1.0
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(environment.step("think") for environment in environments))
        assert asyncio.get_running_loop().time() - start > host.timeout
        assert (host.failures, host.replaced) == (0, 0)


async def test_closing_ends_every_worker_and_removes_its_files() -> None:
    host = ProcessHost({"toy": (SPEC, "full")}, processes=2)
    environments = [await acquire_and_reset(host) for _ in range(2)]
    places = [(await environment.step("where")).text.split() for environment in environments]
    assert all(folder_exists(folder) for _, folder in places)
    hung = asyncio.create_task(environments[0].step("hang"))
    await asyncio.sleep(0.1)
    await host.aclose()
    with pytest.raises(RolloutError):
        await hung
    assert not any(is_running(int(process)) or folder_exists(folder) for process, folder in places)


def test_invalid_arguments_of_a_process_host() -> None:
    with pytest.raises(ValueError, match="hosting is 'processes', not: toy"):
        ProcessHost({"toy": (replace(SPEC, runtime=Runtime("threads")), "full")})
    with pytest.raises(ValueError, match="processes must be at least 1"):
        ProcessHost({}, processes=0)
    with pytest.raises(
        ValueError, match="toy: make_game must be a function that worker processes can import"
    ):
        ProcessHost({"toy": (replace(SPEC, make_game=lambda rendering: toy_games.Guess()), "full")})


PARENT = """
import asyncio
from support.toy_hosts import acquire_and_reset, hosting, worker_pid

async def main():
    async with hosting() as host:
        environments = [await acquire_and_reset(host) for _ in range(2)]
        print(*[await worker_pid(environment) for environment in environments], flush=True)
        await environments[0].step("hang")

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(how: signal.Signals) -> None:
    command, environment = [sys.executable, "-c", PARENT], python_environment()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(os.getsid(worker) == worker for worker in workers), (
            "Ctrl-C reaches only the parent"
        )
        parent.send_signal(how)
        parent.wait(120)
    assert all(wait_for_end(worker) for worker in workers)


@settings(max_examples=8)
@given(
    scripts=st.lists(
        st.lists(st.sampled_from(["0", "7", "hm", "raise", "die", "quit"]), min_size=1, max_size=5),
        min_size=1,
        max_size=8,
    ),
    processes=st.integers(1, 3),
)
def test_every_episode_ends_and_later_episodes_succeed(
    scripts: list[list[str]], processes: int
) -> None:
    async def episode(host: ProcessHost, script: list[str]) -> None:
        environment = None
        try:
            environment = await acquire_and_reset(host)
            for word in script:
                await environment.step(word)
        except RolloutError:
            pass  # any other error fails the test
        finally:
            if environment is not None:
                await host.release(environment)

    async def run() -> None:
        async with hosting(processes=processes) as host:
            await asyncio.gather(*(episode(host, script) for script in scripts))
            assert host.failures <= len(scripts)
            assert bool(host.replaced) == any(
                {"die", "quit"} & set(script) and ends_worker(script) for script in scripts
            )
            for _ in range(processes + 1):
                assert (await (await acquire_and_reset(host)).step("hm")).valid is False

    asyncio.run(run())


def ends_worker(script: list[str]) -> bool:
    """Return whether the script ends its worker before the game raises an error."""
    return (
        "raise" not in script[: next(i for i, word in enumerate(script) if word in ("die", "quit"))]
    )


async def test_hosts_acquire_each_task_from_its_own_host() -> None:
    tasks = {"near": replace(TASK, name="near"), "far": replace(TASK, name="far")}
    near, far = (
        ThreadHost({"near": (replace(SPEC, runtime=Runtime("threads")), "full")}),
        ProcessHost({"far": (SPEC, "full")}, processes=1),
    )
    hosts = Hosts({"near": near, "far": far})
    pids = {}
    for name, task in tasks.items():
        environment = await hosts.acquire(task)
        await environment.reset(task)
        pids[name] = int((await environment.step("where")).text.split()[0])
        await hosts.release(environment)
    assert pids["near"] == os.getpid()
    assert pids["far"] != os.getpid()
    await hosts.aclose()
    assert wait_for_end(pids["far"])
