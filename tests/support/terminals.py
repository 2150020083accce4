"""Processes in a pseudo-terminal whose screen can be read."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte  # pyright: ignore[reportMissingImports]

ENTER, LEAVE, SHOW, HIDE = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h", "\x1b[?25l"
"""Control sequences: alternate screen on and off, cursor on and off."""


class Terminal:
    """Process in a pseudo-terminal that it controls, like a command of an interactive shell.

    Leaving the context kills the process.
    """

    def __init__(self, *command: str, columns: int = 80, lines: int = 24, **environment: str):
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        """Everything that was written to the terminal."""
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        surroundings = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        surroundings |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=surroundings,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs  # kept open, so that the settings can be read after the end

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window."""
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def read(self, seconds: float = 0.1) -> None:
        """Read the output for `seconds`."""
        deadline = time.monotonic() + seconds
        while select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(self._ours, 65536)
            self.output += chunk
            self._stream.feed(chunk)

    def wait_for(self, condition: str | Callable[[], bool], seconds: float = 60) -> str:
        """Read until the screen contains a text or a condition is met. Return the screen.

        Raise `AssertionError` after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.05)
            if condition in self.text if isinstance(condition, str) else condition():
                return self.text
        raise AssertionError(f"waited for {condition!r}; the screen is\n{self.text}")

    def wait(self, seconds: float = 60) -> int:
        """Return the exit code of the process. Read its output meanwhile."""
        self.wait_for(lambda: self.process.poll() is not None, seconds)
        self.read()
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    @property
    def text(self) -> str:
        """Visible text."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def written(self) -> str:
        """Output as text, with line feeds instead of the terminal's line breaks."""
        return self.output.decode("utf-8", "replace").replace("\r\n", "\n")

    @property
    def reads_keys(self) -> bool:
        """True if the terminal passes on single keys and does not show them."""
        flags = termios.tcgetattr(self._theirs)[3]
        return not flags & (termios.ICANON | termios.ECHO)

    @property
    def on_alternate_screen(self) -> bool:
        """True if the last switch was to the alternate screen."""
        written = self.written
        return written.rfind(ENTER) > written.rfind(LEAVE)
