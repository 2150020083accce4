"""Tests of the screen in a pseudo-terminal: keys, resizing, and restoring of the terminal."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pytest

from crl.cli.dashboard.screen import Dashboard, LineStream
from crl.cli.dashboard.terminal import keys_of
from crl.cli.main import _screen
from crl.cli.output import is_terminal
from crl.config.load import load
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.monitor.snapshot import RunInfo
from crl.records.shards import write_shard

pytest.importorskip("pyte")

from support.snapshots import group
from support.terminals import ENTER, HIDE, LEAVE, SHOW, Terminal

APPLICATION = """
import asyncio, os, signal, sys, threading, time
from contextlib import closing
from crl.cli.dashboard.screen import Dashboard
from crl.monitor.snapshot import RunInfo

# A process in the background of a shell ignores these signals, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def wait(seconds=120):
    print("waiting")  # is buffered, like the notes
    time.sleep(seconds)

async def stopped():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("waiting")
    await asyncio.wait_for(stop.wait(), 120)
    screen.note("stopped")

def fail():
    sys.stderr.write("a warn")
    sys.stderr.write("ing\\n")
    raise RuntimeError("it broke")

def train():
    for step in range(2, 1000):
        time.sleep(0.1)
        screen.log(step, "train", {"rollout/success": 0.25})

with closing(Dashboard(RunInfo("one", "grpo", ("room",), 5, "runs/one"))) as screen:
    screen.note("the [bold]header[/bold]\\n  of the run")
    screen.log(1, "train", {"rollout/success": 0.5})
    time.sleep(0.6)
    {action}
    screen.note("the summary")
print("after")
"""


def dashboard(action: str, **options: int) -> Terminal:
    code = APPLICATION.replace("{action}", action)
    return Terminal(sys.executable, "-c", code, **options)  # pyright: ignore[reportArgumentType]


HEADER = "the [bold]header[/bold]\n  of the run\n"


# ── restoring ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("action", "number", "code", "says"),
    [
        ("pass", None, 0, f"{HEADER}the summary\nafter\n"),
        ("fail()", None, 1, f"{HEADER}a warning\nTraceback"),
        ("wait()", signal.SIGINT, -signal.SIGINT, f"{HEADER}waiting\nTraceback"),
        (
            "asyncio.run(stopped())", signal.SIGTERM, 0,
            f"{HEADER}waiting\nstopped\nthe summary\nafter\n",
        ),
        ("wait()", signal.SIGQUIT, -signal.SIGQUIT, ""),
        ("wait()", signal.SIGHUP, -signal.SIGHUP, ""),
    ],
    ids=["the end", "an error", "Ctrl-C", "SIGTERM", "SIGQUIT", "SIGHUP"],
)  # fmt: skip
def test_the_terminal_is_restored(action, number, code, says):
    with dashboard(action) as terminal:
        assert not terminal.reads_keys
        terminal.wait_for("waiting" if number else "0.500")
        if number:
            assert terminal.reads_keys
            terminal.signal(number)
        assert terminal.wait() == code
        assert not terminal.reads_keys
        seen = terminal.written
    assert seen.index(ENTER) < seen.rindex(LEAVE)
    assert seen.count(ENTER) == 1
    assert seen.rindex(HIDE) < seen.rindex(SHOW)
    live, after = seen[: seen.rindex(LEAVE)], seen[seen.rindex(LEAVE) + len(LEAVE) :]
    assert after.removeprefix(SHOW).startswith(says)
    assert "0.500" in live
    assert seen.startswith(ENTER), "nothing was printed before"
    assert "\x1b" not in after.replace(SHOW, "").replace(LEAVE, "").split("Traceback")[0]


def test_a_resumed_run_shows_its_steps_and_its_last_episodes(tmp_path):
    run = RunDir.create(tmp_path / "run")
    write_shard(run.episodes, 3, group(1, "You see the stairs."))
    line = "LoggedLine(3, 'train', 30.0, {'rollout/success': 0.75})"
    action = (
        "from crl.protocols import LoggedLine; "
        f"screen._info = RunInfo('one', 'grpo', ('room',), 5, {str(run.path)!r}); "
        f"screen.resumed([{line}], 40.0); wait()"
    )
    with dashboard(action) as terminal:
        terminal.wait_for("step 3/5")
        assert "elapsed 0:4" in terminal.text
        assert "0.750" in terminal.text
        terminal.type("7")
        terminal.wait_for("go <east>, then north.")
        terminal.signal(signal.SIGINT)
        terminal.wait()


LAUNCHER = """
import os, signal, sys
child = os.fork()
if not child:
    os.setpgid(0, 0)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
def foreground(group):
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, group)
os.setpgid(child, child)
foreground(child)
_, status = os.waitpid(child, os.WUNTRACED)
assert os.WIFSTOPPED(status)
foreground(os.getpgrp())
print("SUSPENDED", flush=True)
input()
foreground(child)
os.kill(child, signal.SIGCONT)
_, status = os.waitpid(child, 0)
foreground(os.getpgrp())
print("ENDED", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_the_terminal_is_restored_while_the_process_is_suspended():
    code = APPLICATION.replace("{action}", "wait(6)")
    with Terminal(sys.executable, "-c", LAUNCHER, code) as terminal:
        terminal.wait_for("0.500")
        terminal.wait_for(lambda: terminal.reads_keys)
        terminal.type("\x1a")  # Ctrl-Z
        terminal.wait_for("SUSPENDED")
        assert not terminal.reads_keys
        assert not terminal.on_alternate_screen
        terminal.type("\n")
        terminal.wait_for(lambda: terminal.on_alternate_screen)
        terminal.wait_for(lambda: terminal.reads_keys)
        terminal.type("8")
        terminal.wait_for("of the run")
        terminal.wait_for("ENDED 0")
        assert not terminal.reads_keys
        assert not terminal.on_alternate_screen


# ── keys and size ─────────────────────────────────────────────────────────────────────────────────


def test_keys_change_the_page_and_q_leaves_the_run_alone():
    with dashboard("train()") as terminal:
        first = terminal.wait_for("0.250")
        assert " 1 overview " in first
        assert "? help" in first.splitlines()[-1]
        for key, text in [
            ("8", "the [bold]header[/bold]"), ("\x1b[D", "No training episode"),
            ("\x1b[C", "the [bold]header[/bold]"), ("\t", "episodes  0.250"), ("?", "PgUp"),
        ]:  # fmt: skip
            terminal.type(key)
            terminal.wait_for(text)
        terminal.type("q")
        terminal.wait_for(lambda: "The run continues; Ctrl-C stops it." in terminal.written)
        assert not terminal.reads_keys
        assert not terminal.on_alternate_screen
        assert "crl watch runs/one shows it again" in terminal.written.replace("\n", " ")
        lines = terminal.written.count("success 0.250")
        terminal.wait_for(lambda: terminal.written.count("success 0.250") > lines + 2)
        terminal.type("\x03")
        assert terminal.wait() != 0


def test_unknown_keys_and_pasted_bytes_do_nothing():
    with dashboard("wait(8)") as terminal:
        terminal.wait_for(lambda: terminal.reads_keys)
        terminal.type("\x00\x1b[200~\x1b]0;x\x07zZ€\x1b[99;99R\x1b\x1b\x1b[1;5D")
        terminal.read(0.5)
        assert " 1 overview " in terminal.text
        terminal.type("8")
        terminal.wait_for("of the run")
        assert terminal.wait() == 0


def test_a_resized_window_is_drawn_again():
    with dashboard("wait()", columns=80, lines=24) as terminal:
        terminal.wait_for("0.500")
        for columns, lines in ((160, 50), (60, 20), (80, 24)):
            terminal.resize(columns, lines)
            terminal.wait_for(lambda columns=columns: len(progress(terminal)) == columns)
            terminal.wait_for("0.500")
            assert len(terminal.text.splitlines()) == lines
        terminal.resize(30, 8)
        assert "0.500" in terminal.wait_for("1–8 page  q close  ? help")


def progress(terminal: Terminal) -> str:
    """Return the line of the progress, which fills the window."""
    lines = [line for line in terminal.text.splitlines() if line.startswith("step ")]
    return lines[0] if lines else ""


def test_without_a_keyboard_the_terminal_is_left_alone():
    code = APPLICATION.replace("{action}", "wait(2)")
    with Terminal("/bin/sh", "-c", '"$0" -c "$1" < /dev/null', sys.executable, code) as terminal:
        terminal.wait_for("0.500")
        terminal.read(0.5)
        assert not terminal.reads_keys
        assert "help" not in terminal.text
        assert terminal.wait() == 0


def test_names_of_keys():
    text = "a\x1b[A\x1bOB\x1b[5~ \t\x1b[Z?q\x1b[1;5C8\x1b"
    assert list(keys_of(text)) == [
        "a", "up", "down", "page up", "space", "tab", "shift tab", "?", "q", "\x1b[1;5C", "8",
        "escape",
    ]  # fmt: skip


# ── without a terminal ────────────────────────────────────────────────────────────────────────────


def test_a_dashboard_that_was_never_started_writes_nothing():
    stream = io.StringIO()
    screen = Dashboard(RunInfo("one", "grpo", ("room",), 5), stream=stream)
    screen.close()
    screen.close()
    assert stream.getvalue() == ""
    screen.note("late\x1b[2J")
    screen.progress("evaluation", 0, 3)
    assert stream.getvalue() == "late\\x1b[2J\n"


def test_a_line_stream_passes_on_complete_lines():
    seen: list[str] = []
    stream = LineStream(sys.__stdout__, seen.append)  # pyright: ignore[reportArgumentType]
    print("a", "b", file=stream, end="")
    print("c\nd\n\ne", file=stream)
    stream.write("10 %\r20 %\r\n")
    stream.write("rest")
    assert seen == ["a bc", "d", "", "e", "20 %"]
    stream.close()
    assert seen[-1] == "rest"
    stream.flush()  # as a handler of log lines does that was made while the screen was open


class TextTerminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore[reportAssignmentType]

    def isatty(self) -> bool:
        return True


def test_the_dashboard_is_for_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = load(["room"], sets=["actor.model=tiny-actor"])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(_screen(config, tmp_path, plain=False), PlainMonitor)
    monkeypatch.setattr(sys, "stdout", TextTerminal())
    assert isinstance(_screen(config, tmp_path, plain=False), Dashboard)
    assert isinstance(_screen(config, tmp_path, plain=True), PlainMonitor)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(TextTerminal, "encoding", "ascii")
    assert not is_terminal()
    monkeypatch.setattr(sys, "stdout", None)  # as with the shell's >&-
    assert not is_terminal()
