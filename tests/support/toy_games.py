"""Toy game for worker processes. Some actions make the game misbehave."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from crl.envs.actions import parse_choice
from crl.envs.base import ActionSpace, EnvSpec, EnvTasks, Rendering, Runtime
from crl.envs.curriculum import Curriculum
from crl.envs.places import PlaceStream
from crl.errors import ConfigError, TransientError
from crl.types import StepResult, Task

NUMBERS = tuple("01234567")


class Unreadable(str):
    """Text that a worker can pickle but the host cannot unpickle."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("seven",)


class Guess:
    def reset(self, task: Task) -> str:
        self.secret = random.Random(task.seed).randrange(8)
        self.guesses = 0
        return f"Guess a number from 0 to 7. ({task.goal})"

    def step(self, action: str) -> StepResult:
        match action:
            case "raise":
                raise ValueError("broken dice")
            case "lose":
                raise TransientError("env", "the dice are lost")
            case "exit":
                raise SystemExit(3)
            case "hang":
                time.sleep(600)
            case "think":
                time.sleep(0.1)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fork" | "daemon":
                settled, tell = os.pipe()
                if child := os.fork():
                    os.read(settled, 1)
                    return StepResult(f"{child}")
                if action == "daemon":
                    os.setsid()
                os.write(tell, b".")
                time.sleep(600)
            case "vanish":
                shutil.rmtree(tempfile.gettempdir())
                os.kill(os.getpid(), signal.SIGKILL)
            case "garble":
                return StepResult(Unreadable("?"))
            case "quit":
                print("the floor is lava", file=sys.stderr, flush=True)
                os._exit(7)
            case "print":
                print("chatter")
                subprocess.run(["echo", "more chatter"], check=True)
            case "read":
                return StepResult(f"read {sys.stdin.read()!r}")
            case "where":
                return StepResult(f"{os.getpid()} {tempfile.gettempdir()}")
            case "nothing":
                return None  # type: ignore[return-value]
            case "mute":
                return StepResult(None)  # type: ignore[arg-type]
            case "rich":
                return StepResult("?", reward=5.0, done=True, success=True)
            case "truncated":
                return StepResult("a smile: \ud83d.")
        guess = parse_choice(action, NUMBERS)
        if guess is None:
            return StepResult("Answer with one number from 0 to 7.", valid=False)
        self.guesses += 1
        won = int(guess) == self.secret
        return StepResult(
            f"{'Right' if won else 'Wrong'}, guess {self.guesses}.",
            reward=float(won),
            done=won,
            success=won,
        )

    def close(self) -> None: ...


def make_guess(rendering: Rendering) -> Guess:
    return Guess()


def make_refused(rendering: Rendering) -> Guess:
    raise ConfigError("tasks", "toy", "needs the extra `toy`", "Install it")


def make_broken(rendering: Rendering) -> Guess:
    raise OSError("no display")


class CountingPlayer:
    """Player that guesses the numbers in order."""

    def begin(self, goal: str, observation: str) -> None:
        self.next = 0

    def act(self) -> str:
        return str(self.next)

    def observe(self, observation: str) -> None:
        self.next += 1


SPEC = EnvSpec(
    name="toy",
    make_game=make_guess,
    tasks=EnvTasks(
        lambda seed, settings: PlaceStream("toy", "{place}", seed, settings),
        lambda split, n, seed, settings: (),
    ),
    actions=ActionSpace(NUMBERS),
    turns=8,
    runtime=Runtime("processes"),
    curriculum=Curriculum(lambda rng: CountingPlayer()),
)
