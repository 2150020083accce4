"""What the MiniHack environments share: making a level, seeding it, stepping it, and copying what is seen as words.

Importing this module imports nle, minihack and gymnasium; the environments' own modules do so on `make_game` only.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from crl.envs.minihack.view import UNSEEN, Cell, View
from crl.scratch import scratch_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pkg_resources is deprecated; minihack imports it
    import gymnasium
    import minihack.envs.keyroom  # noqa: F401  (registers the levels; the key room takes its classes from here)
    import nle.nethack
    import nle.nethack.nethack
    from gymnasium.envs.registration import load_env_creator

nethack: Any = nle.nethack  # half of its names come from C, unknown to type checkers

OBSERVATIONS = ("glyphs", "chars", "blstats", "message", "screen_descriptions")
INVENTORY = ("inv_letters", "inv_strs")
_SETTINGS: Mapping[str, Any] = {
    "penalty_step": 0.0,  # else −0.01 whenever game time stands still
    "penalty_time": 0.0,
    "max_episode_steps": 10**9,  # the turn limit belongs to the rollout
    "fix_moon_phase": True,  # else the real clock changes the game
    "observation_keys": OBSERVATIONS,
}
_SUCCESS = 2  # minihack's StepStatus.TASK_SUCCESSFUL
_PLAIN_NAMES = {"floor of a room": "floor", "dark part of a room": "floor"}


class _ScratchTempfile:
    """Stands in for `tempfile` inside nle, which takes no directory for its own: this process's scratch folder."""

    def TemporaryDirectory(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=prefix, dir=scratch_folder())

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)


nle.nethack.nethack.tempfile = _ScratchTempfile()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of NetHack's map that belongs to a level: its left column, top row and size, in cells."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one action did. `view` is None when the game is over: NetHack has then wiped its map."""

    view: View | None
    success: bool


class Level:
    """One NetHack instance that plays one kind of MiniHack level, again and again."""

    def __init__(self, creator: str | Callable[..., Any], window: Window, **settings: Any) -> None:
        """`creator`: a level's id, or its class. `settings`: further arguments of it; `observation_keys` may name `INVENTORY` too."""
        if isinstance(creator, str):
            # not gymnasium.make: it keeps max_episode_steps for a wrapper, and the level would end after its own
            spec = gymnasium.spec(creator)
            settings = {**spec.kwargs, **settings}
            assert spec.entry_point is not None
            creator = (
                spec.entry_point
                if callable(spec.entry_point)
                else load_env_creator(spec.entry_point)
            )
        self._env = creator(**{**_SETTINGS, **settings})
        if (Path(self._env.nethack._vardir) / "nhdat").is_symlink():
            self.close()
            raise OSError(
                "MiniHack could not compile its level (it needs bash and a temporary folder that may execute)"
            )
        self._window = window
        self.actions: tuple[int, ...] = tuple(int(action) for action in self._env.actions)

    def reset(self, lgen: int, core: int) -> View:
        """Starts the episode with layout `lgen` and dynamics `core`: the same one whatever was played before."""
        self._env.seed(
            core, core, False, lgen
        )  # before every reset; reset(seed=...) does not seed NetHack
        observation, _ = self._env.reset()
        return self._view(observation)

    def step(self, action: int) -> Turn:
        """Plays the action with this index in `actions`. Not to be called once an episode is over."""
        observation, _, over, _, info = self._env.step(action)
        if over:
            return Turn(None, int(info["end_status"]) == _SUCCESS)
        return Turn(self._view(observation), False)

    @property
    def temporary_folder(self) -> Path:
        """Where this instance keeps its files while it lives."""
        return Path(self._env.nethack._vardir)

    def close(self) -> None:
        self._env.close()

    def _view(self, observation: Mapping[str, np.ndarray]) -> View:
        window, stats = self._window, observation["blstats"]
        rows, columns = (
            slice(window.y, window.y + window.height),
            slice(window.x, window.x + window.width),
        )
        position = (
            int(stats[nethack.NLE_BL_X]) - window.x,
            int(stats[nethack.NLE_BL_Y]) - window.y,
        )
        glyphs = observation["glyphs"][rows, columns]
        chars = observation["chars"][rows, columns]
        descriptions = observation["screen_descriptions"][rows, columns]
        cells = tuple(
            tuple(
                _cell(
                    int(glyphs[y, x]),
                    int(chars[y, x]),
                    descriptions[y, x].tobytes(),
                    (x, y) == position,
                )
                for x in range(window.width)
            )
            for y in range(window.height)
        )
        message = _text(observation["message"].tobytes())
        hit_points, most = int(stats[nethack.NLE_BL_HP]), int(stats[nethack.NLE_BL_HPMAX])
        return View(cells, position, hit_points, most, message, _inventory(observation))


def _inventory(observation: Mapping[str, np.ndarray]) -> dict[str, str]:
    if INVENTORY[0] not in observation:
        return {}
    letters, descriptions = (observation[name] for name in INVENTORY)
    return {
        chr(letter): _text(words.tobytes())
        for letter, words in zip(letters, descriptions, strict=True)
        if letter
    }


@lru_cache(maxsize=4096)
def _cell(glyph: int, char: int, description: bytes, here: bool) -> Cell:
    if here:
        return Cell("@", "you", "you")
    name = _text(description).removeprefix("a ").removeprefix("an ").removeprefix("the ")
    if nethack.glyph_is_monster(glyph) or nethack.glyph_is_invisible(glyph):
        return Cell(chr(char), name or "creature", "creature")
    if nethack.glyph_is_trap(glyph):
        return Cell(chr(char), name or "trap", "trap")
    if nethack.glyph_is_object(glyph):
        return Cell(chr(char), name or "object", "object")
    if chr(char) == " ":
        return Cell(UNSEEN, "not seen yet", "unseen")
    return Cell(chr(char), _PLAIN_NAMES.get(name, name), "plain")


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("latin-1").strip()
