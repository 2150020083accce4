"""Keys and signals of a terminal."""

from __future__ import annotations

import os
import re
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

SEQUENCES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end",
    "\x1b[1~": "home", "\x1b[4~": "end", "\x1b[7~": "home", "\x1b[8~": "end",
    "\t": "tab", "\x1b[Z": "shift tab", " ": "space", "\x1b": "escape", "g": "home", "G": "end",
}  # fmt: skip
"""Names of keys by the characters that a terminal sends. Other keys have their character."""

KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|\x1b.?|.", re.DOTALL)

INCOMPLETE = re.compile(r"\x1b(\[[0-9;?]*)?\Z|\x1bO\Z")
"""End of an input in which a key may be incomplete."""

ESCAPE_WAIT_S = 0.05
"""Seconds for which the rest of a key is awaited."""

RESTORING_SIGNALS = (signal.SIGTSTP, signal.SIGQUIT, signal.SIGHUP)
"""Signals that stop or end the process without an exception."""


def keys_of(text: str) -> Iterator[str]:
    """Yield the names of the keys in an input."""
    for match in KEY.finditer(text):
        yield SEQUENCES.get(match[0], match[0])


def in_foreground(descriptor: int) -> bool:
    """Return whether this process may read from and draw on its terminal."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


class Keyboard:
    """Reader of single keys from a terminal, in a thread of its own.

    Ctrl-C and Ctrl-Z remain signals. `stop` restores the settings of the terminal.

    `descriptor`: file descriptor of the terminal. `on_key`: called with the name of each key.
    """

    def __init__(self, descriptor: int, on_key: Callable[[str], object]) -> None:
        self._descriptor, self._on_key = descriptor, on_key
        self._saved: list[Any] | None = None
        self._wake: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read keys without waiting for a line, and do not show them.

        Do nothing in the background, or if the terminal does not allow it.
        """
        if self._thread or not in_foreground(self._descriptor):
            return
        try:
            self._saved = termios.tcgetattr(self._descriptor)
            changed = termios.tcgetattr(self._descriptor)
            changed[3] &= ~(termios.ICANON | termios.ECHO)
            changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._descriptor, termios.TCSANOW, changed)
        except termios.error:
            self._saved = None
            return
        self._wake = os.pipe()
        self._thread = threading.Thread(
            target=self._read, args=(self._wake[0],), name="keyboard", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Restore the settings of the terminal and end the thread. Any thread may call this."""
        saved, self._saved = self._saved, None
        if saved is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSANOW, saved)
        thread, self._thread = self._thread, None
        wake, self._wake = self._wake, None
        if wake:
            os.close(wake[1])  # the thread reads the end of the pipe
            if thread and thread is not threading.current_thread():
                thread.join(1.0)
            os.close(wake[0])

    def _read(self, wake: int) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            while self._saved is not None and (text := self._input(wake)):
                for key in keys_of(text):
                    if self._saved is not None:  # no key has stopped the keyboard
                        self._on_key(key)

    def _input(self, wake: int) -> str:
        """Return the next input, or "" at its end."""
        text = ""
        while not text or INCOMPLETE.search(text):
            timeout = ESCAPE_WAIT_S if text else None
            ready, _, _ = select.select([self._descriptor, wake], [], [], timeout)
            if wake in ready:
                return ""
            if not ready:
                break
            chunk = os.read(self._descriptor, 1024).decode("utf-8", "replace")
            if not chunk:
                return ""
            text += chunk
        return text


class TerminalSignals:
    """Handler of signals that would leave the terminal as it is: Ctrl-Z, SIGCONT, Ctrl-\\, SIGHUP.

    `leave` restores the terminal. `enter` takes it again. Only the main thread handles signals; in
    another thread this does nothing.
    """

    def __init__(self, leave: Callable[[], object], enter: Callable[[], object]) -> None:
        self._leave, self._enter = leave, enter
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Handle the signals. A signal that is ignored or handled already is left alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in RESTORING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self._stop)
        if signal.SIGTSTP in self._previous:
            self._previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._continue)

    def stop(self) -> None:
        """Restore the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._previous:
            number, handler = self._previous.popitem()
            with suppress(TypeError):  # a handler that was not set by Python
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal, and let the signal have its usual effect."""
        with suppress(OSError):  # after SIGHUP, the terminal may be gone
            self._leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # The process goes on here after SIGCONT, or if the signal had no effect.
        signal.signal(number, self._stop)
        self._enter()

    def _continue(self, number: int, frame: FrameType | None) -> None:
        self._enter()
