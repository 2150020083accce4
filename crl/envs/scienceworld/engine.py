"""ScienceWorld's simulator: one game at a time per `Simulator`, in Java virtual machines (JVMs).

A process starts JVMs on demand. Up to `GAMES_PER_JVM` simulators share one. Simulators in a JVM
share two kinds of state, which must not make a game depend on the games beside it:

* Java's identity hashes order the things in a description. `_JVM_OPTIONS` makes them constant.
* Every load writes the simulator's list of simplifications. The calls of a JVM run one at a time.

The same actions therefore give the same texts in every JVM.

The gateway to a JVM listens on the loopback interface only and requires a token. A JVM ends when
its last simulator is closed, and when the process that started it ends, even if it is killed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from py4j.java_gateway import (  # pyright: ignore[reportMissingImports]
    GatewayParameters,
    JavaGateway,
    launch_gateway,
)
from py4j.protocol import Py4JError, Py4JJavaError  # pyright: ignore[reportMissingImports]
from scienceworld.constants import BASEPATH, JAR_PATH  # pyright: ignore[reportMissingImports]

from crl.envs.scienceworld.java import find_java
from crl.errors import TransientError

GAMES_PER_JVM = 16
"""Maximum number of simulators in a JVM. A game takes about 12 MB of its heap."""

HEAP_MB = 512
"""Maximum heap of a JVM in MiB. The JVM takes about 130 MiB more."""

SIMPLIFICATIONS = "easy"
"""Simplifications that EMPO² uses: open doors and containers, teleports, and others."""

_JVM_OPTIONS = (
    f"-Xmx{HEAP_MB}m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",  # a JVM without memory is replaced
    "-XX:-UsePerfData",  # writes files that a killed JVM leaves behind
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",  # constant identity hashes
)
_EXIT_TIMEOUT_S = 5.0


class JvmEnded(TransientError):
    """Loss of a game whose JVM has ended. The game can be played again in another JVM."""

    def __init__(self, reason: str) -> None:
        super().__init__("env", f"the Java process has ended{reason}")


class Simulator:
    """Simulator of one game at a time. Not thread-safe.

    Its JVM is replaced at the next `load` if it has ended.
    """

    def __init__(self) -> None:
        self._jvm: _Jvm | None = None
        self._server: Any = None

    def load(self, task: str, variation: int, *, gold: bool = False) -> str:
        """Start the game of a variation of a task, with a gold path if `gold` is set.

        Return the description of the first location. As in the original, the agent has looked
        around, which may score points. Raise `RuntimeError` if no JVM can be started.
        """
        if self._jvm is None or not self._jvm.alive:
            self._connect()
        game = task, variation, SIMPLIFICATIONS, gold
        try:
            self._call("load", *game)
        except JvmEnded:  # this was not known yet
            self._connect()
            self._call("load", *game)
        return self.step("look around")

    def step(self, action: str) -> str:
        """Return the simulator's answer to an action. Raise `JvmEnded` if the JVM has ended."""
        return self._call("step", action)

    def look(self) -> str:
        """Return the description of the location. It takes no time."""
        return self._call("freeActionLook")

    def inventory(self) -> str:
        """Return the list of carried things. It takes no time."""
        return self._call("freeActionInventory")

    @property
    def goal(self) -> str:
        """Description of the task in one line."""
        return " ".join(self._call("getTaskDescription").split())

    @property
    def score(self) -> int:
        """Score of the game so far, in [-100, 100]. It is negative after a failure."""
        return round(100 * self._call("getScore"))

    @property
    def completed(self) -> bool:
        """True if the simulator has ended the game."""
        return bool(self._call("getCompleted"))

    def gold_path(self) -> tuple[str, ...]:
        """Return the actions of the gold path. The game must have been loaded with one."""
        return tuple(self._call("getGoldActionSequence"))

    def variations(self, split: str) -> tuple[int, ...]:
        """Return the task's variations of a split of ScienceWorld: Train, Dev or Test."""
        return tuple(self._call(f"getVariations{split}"))

    def close(self) -> None:
        """Free the game and its slot in the JVM."""
        jvm, self._jvm, self._server = self._jvm, None, None
        if jvm is not None:
            jvm.release()

    def _connect(self) -> None:
        self.close()
        self._jvm = _lease_jvm()
        self._server = self._guarded(self._jvm, self._jvm.new_server)

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._jvm is None:
            raise RuntimeError("no game is loaded")
        return self._guarded(self._jvm, getattr(self._server, method), *arguments)

    @staticmethod
    def _guarded(jvm: _Jvm, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call of the JVM. Raise `JvmEnded` if the connection is lost."""
        try:
            with jvm.turn:
                return call(*arguments)
        except Py4JJavaError:
            raise
        except (Py4JError, OSError) as error:  # the connection is lost
            raise JvmEnded(jvm.exit_reason()) from error


class _Jvm:
    """Java process with ScienceWorld's simulators."""

    def __init__(self) -> None:
        self.games = 0
        """Number of simulators."""
        self.turn = threading.Lock()
        """Lock of a call. The simulators of a process are not safe beside each other."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            launched: Any = launch_gateway(
                java_path=find_java() or "java",
                classpath=JAR_PATH,
                cwd=BASEPATH,
                javaopts=[*_JVM_OPTIONS, f"-XX:ErrorFile={os.devnull}"],
                die_on_exit=True,
                enable_auth=True,
                redirect_stderr=self._log,
                return_proc=True,
            )
        except (OSError, ValueError) as error:  # no program, or no port in its output
            raise RuntimeError(f"Java cannot be started{self._last_log_line()}") from error
        port, token, self.process = launched
        self._gateway: Any = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token),
            java_process=self.process,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def new_server(self) -> Any:
        return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def release(self) -> None:
        """Release the slot of a simulator. End the JVM after the last one."""
        with _LOCK:
            self.games -= 1
            if self.games and self.alive:
                return
            if self in _JVMS:
                _JVMS.remove(self)
        self._shut_down()

    def exit_reason(self) -> str:
        """Return the exit code and the last message of the process, or an empty text."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
            return f" with exit code {self.process.returncode}{self._last_log_line()}"
        return ""

    def _shut_down(self) -> None:
        with suppress(Exception):  # the process may have ended
            self._gateway.shutdown()
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _last_log_line(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""


_JVMS: list[_Jvm] = []
"""Running JVMs of this process."""

_LOCK = threading.Lock()


def _lease_jvm() -> _Jvm:
    """Return a JVM with a free slot, and occupy the slot."""
    with _LOCK:
        free = (jvm for jvm in _JVMS if jvm.alive and jvm.games < GAMES_PER_JVM)
        jvm = next(free, None)
        if jvm is None:
            jvm = _Jvm()
            _JVMS.append(jvm)
        jvm.games += 1
        return jvm
