"""Games of ALFWorld: the project's own files if the user has them, else generated houses.

ALFWorld's files are searched where ALFWorld searches them: in $ALFWORLD_DATA, by default
~/.cache/alfworld (`alfworld-download` stores them there).

The planner proves once that a generated game can be solved. A solved game is stored in
$XDG_CACHE_HOME/crl/alfworld as a .tw-pddl file, which is named after a hash of its content. An
existing file means that the game has been solved. For a small house, the proof uses the game that
has only the things that its chore needs.
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
"""Environment variable with the folder of ALFWorld's own games."""
_DEFAULT_DATA = Path("~/.cache/alfworld")
_GAMES_FOLDER = "json_2.1.1"
_SOLVABLE = b'"solvable": true'


def data_folder() -> Path | None:
    """Return the folder of ALFWorld's own games, or None if there are none.

    Raise `ConfigError` if $ALFWORLD_DATA names a folder without games.
    """
    default = _DEFAULT_DATA.expanduser()
    folder = Path(os.environ.get(VARIABLE) or default).expanduser()
    if (folder / _GAMES_FOLDER).is_dir():
        return folder
    if folder != default:
        reason = f"contains no {_GAMES_FOLDER}, which alfworld-download creates"
        raise ConfigError(
            VARIABLE,
            str(folder),
            reason,
            f"Run alfworld-download, or unset {VARIABLE} to play generated games",
        )
    return None


def playable_games(folder: Path, split: str) -> Iterator[str]:
    """Yield the playable games of one of ALFWorld's splits, as paths relative to `folder`.

    The splits are train, valid_seen and valid_unseen. As in ALFWorld, a playable game is solvable
    and uses neither movable receptacles nor slicing. Raise `ConfigError` if there are none.
    """
    is_empty = True
    for path in sorted((folder / _GAMES_FOLDER / split).glob("*/*/game.tw-pddl")):
        if official_chore(str(path)) and _SOLVABLE in path.read_bytes():
            is_empty = False
            yield str(path.relative_to(folder))
    if is_empty:
        reason = (
            f"contains no playable game in {_GAMES_FOLDER}/{split} "
            f"(a file game.tw-pddl from alfworld-download)"
        )
        raise ConfigError(
            VARIABLE,
            str(folder),
            reason,
            f"Run alfworld-download, or unset {VARIABLE} to play generated games",
        )


@cache
def official_games(folder: Path, split: str, limit: int) -> tuple[str, ...]:
    """Return the playable games of a split.

    If there are more than `limit`, return a fixed sample of `limit` games. Raise `ConfigError` if
    there are none.
    """
    games = list(playable_games(folder, split))
    return (
        tuple(sorted(random.Random(0).sample(games, limit))) if len(games) > limit else tuple(games)
    )


def official_chore(path: str) -> Chore | None:
    """Return the chore of one of ALFWorld's own games.

    ALFRED names the folder of a game kind-Thing-MovableReceptacle-Receptacle-floor plan. Return
    None for chores that ALFWorld leaves out, and for other names.
    """
    parts = Path(path).parts[-3].split("-")
    if len(parts) != 5 or not all(parts):
        return None
    kind, thing, movable, receptacle, _ = parts
    if kind not in KINDS or movable != "None" or "Sliced" in path:
        return None
    return Chore(kind, thing, receptacle)


def game_of(task: Task) -> GameData:
    """Return the game that a task's params name. Raise `KeyError` if they name none."""
    from crl.envs.alfworld import floorplans, small
    from crl.envs.alfworld.pddl import game_data

    params = task.params
    if path := official_path(task):
        return _read(path)
    if "lgen" in params:
        layout = int(params["lgen"])
        # the other things do not matter for the proof, because no receptacle is ever full
        _verify_solvable(small.house(layout, None))
        return game_data(small.house(layout, int(params["core"])))
    house = floorplans.house(str(params["use"]), int(params["number"]))
    _verify_solvable(house)
    return game_data(house)


def official_path(task: Task) -> Path | None:
    """Return the file of the task's game, or None if the game is generated.

    Raise `ConfigError` if the folder of ALFWorld's own games is missing.
    """
    game = task.params.get("game")
    if game is None:
        return None
    folder = data_folder()
    if folder is None:
        raise ConfigError(
            VARIABLE,
            None,
            f"must be set to load the game {game}",
            "Set it to the same folder as for the run",
        )
    return folder / str(game)


def _read(path: Path) -> GameData:
    """Return the content of a game's file. Raise `ValueError` if it is not a game of ALFWorld."""
    try:
        data = json.loads(path.read_text("utf-8"))
        missing = [
            name
            for name in ("pddl_domain", "pddl_problem", "grammar")
            if not isinstance(data[name], str)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a valid ALFWorld game: {type(error).__name__}: {error}"
        ) from error
    if missing:
        raise ValueError(f"{path} is not a valid ALFWorld game: {missing[0]} is not a string")
    return data


@lru_cache(maxsize=4096)
def _verify_solvable(house: House) -> None:
    """Let the planner solve the house's game, unless it has been solved before.

    Raise `RuntimeError` if the planner finds no solution.
    """
    from crl.envs.alfworld.engine import plan_length
    from crl.envs.alfworld.pddl import game_data

    data = game_data(house)
    text = json.dumps(data)
    path = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.tw-pddl"
    if not path.exists():
        if plan_length(data) is None:
            raise RuntimeError(f"the planner finds no solution for {house.chore} in {house}")
        _write(path, text)


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "crl" / "alfworld"


def _write(path: Path, text: str) -> None:
    """Write the file atomically, because several processes may write the same file.

    Raise `ConfigError` if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        reason = f"{path.parent} cannot be written ({error.strerror})"
        raise ConfigError(
            "XDG_CACHE_HOME",
            os.environ.get("XDG_CACHE_HOME"),
            reason,
            "Set it to a writable folder",
        ) from error
