"""Where games come from: ALFWorld's own files where its users have them, else generated houses, each proved solvable once.

ALFWorld's files are found as it finds them: under $ALFWORLD_DATA, by default ~/.cache/alfworld (`alfworld-download` puts them there).
Generated games are kept as game.tw-pddl files under $XDG_CACHE_HOME/crl/alfworld, named by their content; a game whose file is
there has been solved by the planner. Of a small house that is the game with what its chore needs alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from crl.envs.alfworld.house import KINDS, Chore, House
from crl.errors import ConfigError
from crl.types import Task

if TYPE_CHECKING:
    from crl.envs.alfworld.pddl import GameData

VARIABLE = "ALFWORLD_DATA"
"""The environment variable that names the folder of ALFWorld's own games."""
_DEFAULT_DATA = Path("~/.cache/alfworld")
_GAMES = "json_2.1.1"
_SOLVABLE = b'"solvable": true'


def data_folder() -> Path | None:
    """Where ALFWorld's own games are; None where there are none. Raises `ConfigError` when $ALFWORLD_DATA names a folder without them."""
    default = _DEFAULT_DATA.expanduser()
    folder = Path(os.environ.get(VARIABLE) or default).expanduser()
    if (folder / _GAMES).is_dir():
        return folder
    if folder != default:
        reason = f"holds no {_GAMES}, as alfworld-download makes it"
        raise ConfigError(
            VARIABLE,
            str(folder),
            reason,
            "Run alfworld-download, or unset it to play generated games",
        )
    return None


def playable_games(folder: Path, split: str) -> Iterator[str]:
    """The playable games of one of ALFWorld's splits (train, valid_seen, valid_unseen), relative to `folder`: solvable ones without
    movable receptacles and slicing, as ALFWorld chooses them. Raises `ConfigError` when there are none."""
    none = True
    for path in sorted((folder / _GAMES / split).glob("*/*/game.tw-pddl")):
        if official_chore(str(path)) and _SOLVABLE in path.read_bytes():
            none = False
            yield str(path.relative_to(folder))
    if none:
        reason = f"holds no game in {_GAMES}/{split} that can be played (game.tw-pddl, of alfworld-download)"
        raise ConfigError(
            VARIABLE,
            str(folder),
            reason,
            "Run alfworld-download, or unset it to play generated games",
        )


@cache
def official_games(folder: Path, split: str, most: int) -> tuple[str, ...]:
    """The playable games of a split; at most `most`, a fixed sample. Raises `ConfigError` when there are none."""
    games = list(playable_games(folder, split))
    return (
        tuple(sorted(random.Random(0).sample(games, most))) if len(games) > most else tuple(games)
    )


def official_chore(path: str) -> Chore | None:
    """What ALFRED names the game's folder after: kind-Thing-MovableReceptacle-Receptacle-floor plan. None for chores that ALFWorld
    leaves out, and for other names."""
    parts = Path(path).parts[-3].split("-")
    if len(parts) != 5 or not all(parts):
        return None
    kind, thing, movable, receptacle, _ = parts
    if kind not in KINDS or movable != "None" or "Sliced" in path:
        return None
    return Chore(kind, thing, receptacle)


def game_of(task: Task) -> GameData:
    """The game that a task's params name. Raises `KeyError` when they name none."""
    from crl.envs.alfworld import floorplans, small
    from crl.envs.alfworld.pddl import game_data

    params = task.params
    if path := official_path(task):
        return _read(path)
    if "lgen" in params:
        layout = int(params["lgen"])
        _prove(
            small.house(layout, None)
        )  # what else lies about is in nobody's way: no receptacle is ever full
        return game_data(small.house(layout, int(params["core"])))
    house = floorplans.house(str(params["use"]), int(params["number"]))
    _prove(house)
    return game_data(house)


def official_path(task: Task) -> Path | None:
    """The file of the one of ALFWorld's own games that a task's params name."""
    game = task.params.get("game")
    if game is None:
        return None
    folder = data_folder()
    if folder is None:
        raise ConfigError(VARIABLE, None, f"is needed for {game}", "Set it as where the run began")
    return folder / str(game)


def _read(path: Path) -> GameData:
    """Raises `ValueError` for a file that is none of ALFWorld's games."""
    try:
        data = json.loads(path.read_text("utf-8"))
        missing = [
            name
            for name in ("pddl_domain", "pddl_problem", "grammar")
            if not isinstance(data[name], str)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no game of ALFWorld's: {type(error).__name__}: {error}"
        ) from error
    if missing:
        raise ValueError(f"{path} is no game of ALFWorld's: {missing[0]} is no text")
    return data


@lru_cache(maxsize=4096)
def _prove(house: House) -> None:
    """Has the planner solve the house's game, now or earlier. Raises `RuntimeError` when it finds no way."""
    from crl.envs.alfworld.engine import plan_length
    from crl.envs.alfworld.pddl import game_data

    data = game_data(house)
    text = json.dumps(data)
    path = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.tw-pddl"
    if not path.exists():
        if plan_length(data) is None:
            raise RuntimeError(f"the planner finds no way to do {house.chore} in {house}")
        _write(path, text)


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "crl" / "alfworld"


def _write(path: Path, text: str) -> None:
    """At once or not at all: several processes may write the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        reason = f"{path.parent} cannot be written ({error.strerror})"
        raise ConfigError(
            "XDG_CACHE_HOME",
            os.environ.get("XDG_CACHE_HOME"),
            reason,
            "Set it to a folder that can",
        ) from error
