"""Immediate ends of the process: their line on stderr, whatever the screen does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from crl.monitor.run_dir import RunDir
from crl.protocols import Monitor
from crl.run.supervision import ending
from crl.run.supervision.ending import Ending


class Screen(Monitor):
    """Screen that needs `seconds` to close."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.closed = seconds, False

    def close(self) -> None:
        time.sleep(self.seconds)
        self.closed = True


class Exit:
    """Function that replaces the end of the process. It records the exit codes."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Exit:
    function = Exit()
    monkeypatch.setattr(ending, "SCREEN_LIMIT_S", 0.2)
    monkeypatch.setattr(ending, "exit_process", function)
    monkeypatch.setattr(ending, "remove_own_folders", lambda: None)  # other tests need them
    return function


def test_the_line_is_printed_though_the_screen_does_not_close(
    ended: Exit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(1.0)
    thread = threading.Thread(target=Ending(RunDir(tmp_path), screen).exit_now, args=(3, "lost"))
    thread.start()
    assert ended.called.wait(60)
    assert not screen.closed
    assert capfd.readouterr().err == "lost\n"
    assert ended.codes[0] == 3
    thread.join()


def test_the_line_is_printed_once_after_the_screen_is_closed(
    ended: Exit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(0.0)
    Ending(RunDir(tmp_path), screen).exit_now(3, "error: \x1b[2J\ud83d")
    assert screen.closed
    time.sleep(0.5)
    assert capfd.readouterr().err == "error: \\x1b[2J\\ud83d\n"
    assert ended.codes == [3]


def test_the_process_ends_though_stderr_is_blocked(
    ended: Exit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, write = threading.Event(), os.write
    monkeypatch.setattr(ending.os, "write", lambda *args: released.wait(60))
    end = Ending(RunDir(tmp_path), Screen(0.0))
    thread = threading.Thread(target=end.exit_now, args=(3, "lost"))
    thread.start()
    called = ended.called.wait(60)
    monkeypatch.setattr(ending.os, "write", write)
    released.set()
    thread.join()
    assert called
