"""Dashboard of `crl train`, and the live screen that it shares with `crl watch`."""

from __future__ import annotations

import io
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console, Group
from rich.live import Live

from crl.cli.dashboard.frame import NO_KEYS, Keys, View, draw, pressed
from crl.cli.dashboard.terminal import Keyboard, TerminalSignals, in_foreground
from crl.errors import ConfigError
from crl.monitor.plain import PlainMonitor
from crl.monitor.run_dir import RunDir
from crl.monitor.snapshot import RunInfo, Snapshot, SnapshotMonitor
from crl.protocols import LoggedLine, Metrics, Monitor
from crl.records.shards import read_records, shards, trajectory_of
from crl.types import Experience, Trajectory
from crl.wording import printable_lines

REFRESH_PER_S = 4
"""Number of redraws per second."""

MAX_LINE_CHARS = 10_000
"""Maximum number of buffered characters of an unfinished line. Earlier ones are dropped."""

TRAIN_KEYS = Keys(
    "q close",
    {
        "q": "close the dashboard and print lines instead; the run continues",
        "Ctrl-C": "stop the run with a checkpoint",
        "Ctrl-Z": "suspend the run",
    },
)


class LiveScreen:
    """Live view on the alternate screen, with keys if stdin is a terminal.

    A separate thread draws the newest snapshot. The terminal is restored by `stop`, and while the
    process is suspended.

    `snapshot`: returns the contents. `keys`: keys that close the view or stop the run. `on_quit`:
    called in the thread of the keyboard when q is pressed.
    """

    def __init__(
        self,
        console: Console,
        snapshot: Callable[[], Snapshot],
        *,
        keys: Keys,
        on_quit: Callable[[], object],
    ) -> None:
        self._console, self._snapshot, self._on_quit = console, snapshot, on_quit
        self._view, self._view_lock = View(), threading.Lock()
        self._live: Live | None = None
        self._keyboard = (
            Keyboard(sys.stdin.fileno(), self._press) if sys.stdin and sys.stdin.isatty() else None
        )
        self._keys = keys if self._keyboard else NO_KEYS
        self._signals = TerminalSignals(self._leave, self._enter)
        self._stopped = True

    def start(self) -> None:
        """Open the alternate screen and start drawing."""
        self._stopped = False
        self._signals.start()
        self._open()

    def stop(self) -> None:
        """Stop drawing and restore the terminal, also if the screen was being opened."""
        self._stopped = True
        try:
            self._leave()
        finally:
            self._signals.stop()

    def draw_frame(self) -> Group:
        """Return a drawing of the current snapshot."""
        with self._view_lock:
            drawing, self._view = draw(
                self._snapshot(), self._view, *self._console.size, self._keys
            )
        return drawing

    def _open(self) -> None:
        self._live = Live(
            console=self._console,
            screen=True,
            get_renderable=self.draw_frame,
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        )
        if self._keyboard:
            self._keyboard.start()
        self._live.start(refresh=True)

    def _leave(self) -> None:
        """Restore the terminal."""
        live, self._live = self._live, None
        if self._keyboard:
            self._keyboard.stop()
        if live is None:
            return
        try:
            live.stop()
        except BaseException:  # interrupted, now or while the screen was being opened
            self._console.set_alt_screen(False)
            self._console.show_cursor(True)
            raise

    def _enter(self) -> None:
        """Open the screen again, after the process was suspended."""
        if self._live is None and not self._stopped and in_foreground(self._console.file.fileno()):
            self._open()

    def _press(self, key: str) -> None:
        """Handle a key. Called in the thread of the keyboard."""
        if key == "q":
            self._on_quit()
            return
        with self._view_lock:
            self._view = pressed(self._view, key, self._console.height)
        if live := self._live:
            live.refresh()


class Dashboard(Monitor):
    """`Monitor` that occupies the terminal from its first call until `close`.

    Notes, and the output that Python code prints meanwhile, are buffered and printed after the
    terminal is restored. A separate thread draws. It only reads snapshots, so no call here waits
    for the terminal. The key q closes the view: lines are printed from then on.

    `stream`: terminal to draw on, by default stdout. `clock`: returns the time in seconds.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, force_terminal=True, force_interactive=True)
        self._info, self._run = run, SnapshotMonitor(run, clock=clock)
        self._screen: LiveScreen | None = None
        self._redirected = ExitStack()
        self._buffered: list[tuple[IO[str], str]] = []
        self._lock = threading.RLock()
        self._closed = False
        self._lines: PlainMonitor | None = None

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        self._run.log(step, kind, metrics)
        if self._lines:
            self._lines.log(step, kind, metrics)
        self._start()

    def resumed(self, lines: Sequence[LoggedLine], seconds: float) -> None:
        self._run.resumed(lines, seconds)
        last = max((line.step for line in lines if line.kind == "train"), default=0)
        shard = shards(RunDir(Path(self._info.path)).episodes).get(last)
        with suppress(ConfigError, OSError):  # the file may be damaged
            if shard:
                self._run.trajectories([trajectory_of(record) for record in read_records(shard)])
        self._start()

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        self._run.trajectories(trajectories)

    def experiences(self, experiences: Sequence[Experience]) -> None:
        self._run.experiences(experiences)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._run.progress(stage, done, total)
        self._start()

    def note(self, text: str) -> None:
        self._buffer_text(self._stream, text)
        self._start()

    def close(self) -> None:
        """Leave the alternate screen and print the buffered lines.

        Notes after that are printed immediately.
        """
        with self._lock:
            if self._closed:
                return
            try:
                if self._screen:
                    self._screen.stop()
            finally:
                self._redirected.close()
                self._closed = True
                for stream, text in self._buffered:
                    _write(stream, text)

    def _quit(self) -> None:
        """Close the view, and print lines from now on."""
        with self._lock:
            if self._closed:
                return
            self.close()
            self._lines = PlainMonitor(steps=self._info.steps, stream=self._stream)
            again = f"crl watch {shlex.quote(self._info.path)} shows it again. " * bool(
                self._info.path
            )
            self.note(f"The dashboard is closed. {again}The run continues; Ctrl-C stops it.")

    def _start(self) -> None:
        """Start drawing and redirect stdout and stderr. Do nothing if started or closed."""
        if self._screen or self._closed:
            return
        self._screen = LiveScreen(
            self._console, self._snapshot, keys=TRAIN_KEYS, on_quit=self._quit
        )
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():  # output to a file does not disturb the screen
                lines = self._redirected.enter_context(
                    closing(LineStream(stream, partial(self._buffer_text, stream)))
                )
                self._redirected.enter_context(redirect(lines))
        self._screen.start()

    def _snapshot(self) -> Snapshot:
        return self._run.snapshot()

    def _buffer_text(self, stream: IO[str], text: str) -> None:
        """Buffer a text, or print it if the dashboard is closed."""
        with self._lock:
            if self._closed:
                _write(stream, text)
            else:
                self._buffered.append((stream, text))
                self._run.note(text)


def _write(stream: IO[str], text: str) -> None:
    """Print a text with escapes."""
    print(printable_lines(text), file=stream, flush=True)


class LineStream(io.TextIOBase):
    """Text stream that replaces `stream` and passes every complete line to `on_line`.

    Any thread may write. Of a line that was overwritten with carriage returns, such as a progress
    bar, only the last version is passed on.
    """

    def __init__(self, stream: IO[str], on_line: Callable[[str], None]) -> None:
        self._stream, self._on_line = stream, on_line
        self._partial_line = ""
        self._lock = threading.RLock()  # re-entrant: a finalizer may print a warning at any time

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Pass on the complete lines and buffer the rest. Return the number of characters."""
        with self._lock:
            *lines, rest = (self._partial_line + text).split("\n")
            self._partial_line = rest[-MAX_LINE_CHARS:]
        for line in lines:
            self._on_line(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        """Do nothing. A handler of log lines may flush the stream after it was closed."""

    def close(self) -> None:
        """Pass on the rest as a line."""
        if self._partial_line:
            self.write("\n")
        super().close()
