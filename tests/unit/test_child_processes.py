"""Owners of processes, and the forced end of these processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crl.child_processes import (
    ENGINE_VARIABLE,
    OWNER_VARIABLE,
    Owner,
    kill_engine,
    kill_owned,
    start_time,
)

NAME = "name of an engine"
OWN = {OWNER_VARIABLE: str(Owner.current())}
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return a process of an engine, a process of another one, and one of another owner."""
    other_owner = str(Owner.current()._replace(process=1))
    environments: list[dict[str, str]] = [
        {ENGINE_VARIABLE: NAME, **OWN},
        {ENGINE_VARIABLE: f"{NAME} 2", **OWN},
        {ENGINE_VARIABLE: f"{NAME} 2", OWNER_VARIABLE: other_owner},
    ]
    with ExitStack() as stack:
        started = []
        for variables in environments:
            process = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | variables)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


def killed(processes: list[subprocess.Popen[bytes]], *, count: int) -> list[bool]:
    """Wait for the end of the first `count` processes. Return which of all have been killed."""
    for process in processes[:count]:
        process.wait(30)
    return [process.poll() == -signal.SIGKILL for process in processes]


def test_only_the_processes_of_the_engine_are_killed(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    kill_engine(NAME)
    assert killed(processes, count=1) == [True, False, False]


def test_only_own_processes_are_killed(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    kill_owned()
    assert killed(processes, count=2) == [True, True, False]


def test_resource_trackers_are_not_killed() -> None:
    """They remove the shared memory of killed processes."""
    code = "from multiprocessing.resource_tracker import main; main(0)"  # ends with its input
    command = [sys.executable, "-c", code]
    environment = os.environ | OWN
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as tracker:
        kill_owned()
        assert tracker.stdin
        tracker.stdin.close()
        assert tracker.wait(30) == 0


def test_an_owner_is_read_from_its_text() -> None:
    owner = Owner(12, 345, Path("/tmp/a b"))
    assert Owner.parse(str(owner)) == owner
    assert Owner.current().started == start_time(os.getpid())
