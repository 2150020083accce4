"""Processes that end with their owner, without vLLM."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from crl.child_processes import OWNER_VARIABLE, Owner
from crl.engines.vllm_owner import EndsWithOwner
from support.live_runs import MARK, kill_all, mark, processes, temporary_files, wait_for_end
from support.paths import python_environment

OWNER = """
import os, pickle, subprocess, sys, time
from crl.child_processes import OWNER_VARIABLE, Owner
from crl.engines.vllm_owner import EndsWithOwner
from crl.scratch import scratch_folder

os.environ[OWNER_VARIABLE] = str(Owner.current())
(scratch_folder() / "file").touch()
receive = f"import pickle; pickle.loads({pickle.dumps(EndsWithOwner())!r});"
for last in sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", receive + last])
time.sleep(600)
"""
"""Program that starts processes and gives them its `EndsWithOwner`.

Its arguments are what the processes do then.
"""
WAITS = "import time; time.sleep(600)"
IS_SUSPENDED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
KEEPS_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(600)"
"""Program that hangs in C code and does not release the interpreter lock."""


def test_processes_end_with_a_killed_owner_and_leave_no_file(tmp_path: Path) -> None:
    name = mark()
    programs = [WAITS, IS_SUSPENDED, KEEPS_THE_LOCK]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *programs],
        env=python_environment(TMPDIR=str(tmp_path), **{MARK: name}),
    )
    try:
        while not all(processes(name, f";{program}") for program in programs):
            assert owner.poll() is None
        assert temporary_files(tmp_path)
        owner.kill()
        owner.wait()
        assert wait_for_end(name, 60) == {}
        assert temporary_files(tmp_path) == []
    finally:
        kill_all(name)


def test_the_owner_itself_does_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of vLLM's configuration in the owner start no thread."""
    before = threading.active_count()
    monkeypatch.setenv(OWNER_VARIABLE, str(Owner.current()))
    copy.deepcopy(EndsWithOwner())
    monkeypatch.delenv(OWNER_VARIABLE)
    pickle.loads(pickle.dumps(EndsWithOwner()))
    assert threading.active_count() == before
