"""Processes that end with their owner, without vLLM."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
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
receive = f"import pickle; pickle.loads({pickle.dumps(EndsWithOwner())!r})"
for program in sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", program.replace("RECEIVE", receive)])
time.sleep(600)
"""
"""Program that starts processes and gives them its `EndsWithOwner`.

Its arguments are the programs of the processes. RECEIVE stands for the receipt.
"""
WAITS = "RECEIVE; import time; time.sleep(600)"
IS_SUSPENDED = "RECEIVE; import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
KEEPS_THE_LOCK = "RECEIVE; import ctypes; ctypes.PyDLL(None).sleep(600)"
"""Program that hangs in C code and does not release the interpreter lock."""
HANGS_LATER = """import ctypes, time
from crl.engines import vllm_owner
vllm_owner._remove_files = lambda owner: ctypes.PyDLL(None).sleep(600)
vllm_owner.END_S = 2
RECEIVE
time.sleep(600)"""
"""Program that keeps the lock as soon as the files of the owner are removed."""


@pytest.mark.parametrize("programs", [(WAITS, IS_SUSPENDED, KEEPS_THE_LOCK), (HANGS_LATER,)])
def test_processes_end_with_a_killed_owner(programs: Sequence[str], tmp_path: Path) -> None:
    name = mark()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *programs],
        env=python_environment(TMPDIR=str(tmp_path), **{MARK: name}),
    )
    try:
        deadline = time.monotonic() + 60
        while len(processes(name)) <= len(programs):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert temporary_files(tmp_path)
        owner.kill()
        owner.wait()
        assert wait_for_end(name, 60) == {}
        assert temporary_files(tmp_path) == [] or HANGS_LATER in programs
    finally:
        kill_all(name)


def test_the_owner_itself_does_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of vLLM's configuration in the owner start no thread."""
    monkeypatch.setenv(OWNER_VARIABLE, str(Owner.current()))
    copy.deepcopy(EndsWithOwner())
    monkeypatch.delenv(OWNER_VARIABLE)
    pickle.loads(pickle.dumps(EndsWithOwner()))
    assert "owner watch" not in [thread.name for thread in threading.enumerate()]
