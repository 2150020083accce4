"""MiniHack level: create, seed and step it, and copy the visible part of the map.

This module imports nle, minihack and gymnasium. The environments' own modules import it only in
`make_game`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from crl.envs.minihack.view import UNSEEN, Cell, View
from crl.scratch import scratch_folder


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Let imports of a module that is not imported yet fail."""
    hidden = module not in sys.modules
    if hidden:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]


# minihack imports inflect for texts of its wiki, which are not used here. pkg_resources offers a
# copy of it, whose import takes several seconds. pkg_resources itself is deprecated.
with _without("inflect"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gymnasium
    import minihack.envs.keyroom  # noqa: F401  (registers the levels; `keyroom` uses its classes)
    import nle.nethack
    import nle.nethack.nethack
    from gymnasium.envs.registration import load_env_creator

nethack: Any = nle.nethack  # type checkers do not know the names that come from C

OBSERVATIONS = ("glyphs", "chars", "blstats", "message", "screen_descriptions")
INVENTORY = ("inv_letters", "inv_strs")
_SETTINGS: Mapping[str, Any] = {
    "penalty_step": 0.0,  # default: −0.01 when game time does not advance
    "penalty_time": 0.0,
    "max_episode_steps": 10**9,  # the turn limit belongs to the rollout
    "fix_moon_phase": True,  # otherwise the real clock changes the game
    "observation_keys": OBSERVATIONS,
}
_SUCCESS = 2  # minihack's StepStatus.TASK_SUCCESSFUL
_PLAIN_NAMES = {"floor of a room": "floor", "dark part of a room": "floor"}


class _ScratchTempfile:
    """Replacement of `tempfile` inside nle. It uses this process's scratch folder.

    nle has no setting for the directory.
    """

    def TemporaryDirectory(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=prefix, dir=scratch_folder())

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)


nle.nethack.nethack.tempfile = _ScratchTempfile()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Window:
    """Part of NetHack's map that belongs to a level, in cells."""

    x: int
    """Left column."""
    y: int
    """Top row."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one action."""

    view: View | None
    """View after the turn; None when the game is over, because NetHack has cleared its map."""
    success: bool


class Level:
    """NetHack instance that plays one kind of MiniHack level repeatedly."""

    def __init__(self, creator: str | Callable[..., Any], window: Window, **settings: Any) -> None:
        """Create the instance. `creator` is a level's id or its class.

        `settings` are further arguments of the level. `observation_keys` may also include
        `INVENTORY`. Raise `OSError` if MiniHack could not compile the level.
        """
        if isinstance(creator, str):
            # not gymnasium.make: it passes max_episode_steps to a wrapper instead of the level,
            # and the level would end at its own limit
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
                "MiniHack could not compile its level "
                "(it needs bash and a temporary folder that may execute)"
            )
        self._window = window
        self.actions: tuple[int, ...] = tuple(int(action) for action in self._env.actions)

    def reset(self, lgen: int, core: int) -> View:
        """Start the episode with layout `lgen` and dynamics `core`.

        The episode does not depend on earlier ones.
        """
        # needed before every reset, because reset(seed=...) does not seed NetHack
        self._env.seed(core, core, False, lgen)
        observation, _ = self._env.reset()
        return self._view(observation)

    def step(self, action: int) -> Turn:
        """Play the action with this index in `actions`. Not allowed after the end of an episode."""
        observation, _, over, _, info = self._env.step(action)
        if over:
            return Turn(None, int(info["end_status"]) == _SUCCESS)
        return Turn(self._view(observation), False)

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
        hit_points, max_hit_points = int(stats[nethack.NLE_BL_HP]), int(stats[nethack.NLE_BL_HPMAX])
        return View(cells, position, hit_points, max_hit_points, message, _inventory(observation))


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
def _cell(glyph: int, char: int, description: bytes, is_player: bool) -> Cell:
    if is_player:
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
