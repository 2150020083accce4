"""Environments of GEM (arXiv 2510.01051, the package gem-llm): `gem:ID` in a task file.

GEM's protocol is `reset(seed) -> (observation, info)` and `step(text) -> (observation, reward,
terminated, truncated, info)`, where `info["suffix"]` may hold the rest of the observation. The
protocol reports neither success nor valid actions. A last reward of 1 or more is therefore counted
as a success (GEM's `success_reward`). A negative reward is counted as an invalid action (GEM's
`format_error_reward`; it ends most GEM games). Rewards are used unchanged. GEM's games also end at
their own turn limits.

GEM's games draw from the global generators of Python and numpy, and GEM's `reset(seed)` seeds these
generators for the whole process. GEM's games therefore run in worker processes. There every game
has its own state of the generators, which is installed during each call, one call at a time. Some
games count their resets and change with the count, so every episode gets a new instance. The
`math`, `code` and `qa` games load their data with each new instance.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from crl.envs.actions import tagged_answers
from crl.envs.base import ActionSpace, EnvSpec, Rendering, Runtime
from crl.envs.registry import GEM_PREFIX
from crl.envs.seeded import SeededTasks
from crl.errors import ConfigError
from crl.types import StepResult, Task

SUCCESS_REWARD = 1.0

_GENERATORS_LOCK = threading.Lock()
"""Lock that is held while a game's state of the global generators is installed."""


class GemGame:
    """`Game` of the GEM environment with the id `env_id`."""

    def __init__(self, env_id: str) -> None:
        self._id = env_id
        self._env: Any = None
        self._generators: tuple[Any, Any] | None = None

    def reset(self, task: Task) -> str:
        """Start an episode with a new instance of the environment.

        Raise `ConfigError` if the instance cannot be created, because no episode could be played
        then.
        """
        with self._game_generators():
            random.seed(task.seed)  # constructors draw from the generators too
            np.random.seed(task.seed)
            self._env = _make_env(self._id)
            return _text(*self._env.reset(seed=task.seed))

    def step(self, action: str) -> StepResult:
        """Play the content of the last pair of answer tags, or else the whole text.

        Raise `RuntimeError` outside an episode.
        """
        if self._env is None:
            raise RuntimeError("no episode is running: call reset first")
        answer = (tagged_answers(action) or [action])[-1]
        with self._game_generators():
            observation, reward, terminated, truncated, info = self._env.step(answer)
        done = bool(terminated or truncated)
        if done:
            self._env = None
        won = done and float(reward) >= SUCCESS_REWARD
        return StepResult(
            _text(observation, info), float(reward), done, won, valid=float(reward) >= 0
        )

    def close(self) -> None:
        self._env = None

    @contextmanager
    def _game_generators(self) -> Iterator[None]:
        with _GENERATORS_LOCK:
            process_states = random.getstate(), np.random.get_state()
            if self._generators:
                _set_generators(self._generators)
            try:
                yield
            finally:
                self._generators = random.getstate(), np.random.get_state()
                _set_generators(process_states)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _text(observation: str, info: dict[str, Any]) -> str:
    parts = [
        "The episode is over."
        if observation == _gem().utils.constants.TERMINAL_STATE
        else observation,
        info.get("suffix"),
    ]
    return "\n".join(part for part in parts if part)


@cache
def _gem() -> Any:
    """Return the package `gem`.

    Its import would send every log message of the process to stderr, unless the root logger already
    has a handler.
    """
    null_handler, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(null_handler)
    try:
        import gem.utils.constants  # pyright: ignore[reportMissingImports]

        return gem
    finally:
        root.removeHandler(null_handler)


def _make_env(env_id: str) -> Any:
    try:
        return _gem().make(env_id)
    except Exception as error:  # a missing package, data that cannot be loaded, …
        reason = f"cannot be created ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise ConfigError(
            "env", f"{GEM_PREFIX}{env_id}", reason, "Install its dependencies, or download its data"
        ) from error


def _make_game(env_id: str, rendering: Rendering) -> GemGame:
    return GemGame(env_id)


def spec(env_id: str, key: str) -> EnvSpec:
    """Return the spec of the GEM environment with this id.

    Raise `ConfigError` with the key `key` if there is no such environment, or if gem-llm is not
    installed.
    """
    if importlib.util.find_spec("gem") is None:
        raise ConfigError(
            key,
            f"{GEM_PREFIX}{env_id}",
            "it needs the extra 'gem', which is not installed",
            "Run pip install 'crl[gem]'",
        )
    registered = _gem().envs.registration.ENV_REGISTRY
    if env_id not in registered:
        close = difflib.get_close_matches(env_id, registered, n=3)
        remedy = f"Did you mean {' or '.join(close)}? " if close else ""
        listing = "List all of them: python -c 'import gem; gem.print_envs()'"
        raise ConfigError(
            key,
            f"{GEM_PREFIX}{env_id}",
            "the package gem-llm has no such environment",
            f"{remedy}{listing}",
        )
    seeded = SeededTasks(f"{GEM_PREFIX}{env_id}", f"GEM {env_id}.")
    return EnvSpec(
        name=f"{GEM_PREFIX}{env_id}",
        make_game=partial(_make_game, env_id),
        tasks=replace(seeded.tasks, query_with_observation=True),
        actions=ActionSpace(description="as the game says, for example in \\boxed{}"),
        turns=30,
        reward_range=(-math.inf, math.inf),  # GEM does not report the range
        runtime=Runtime("processes"),
    )
