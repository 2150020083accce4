"""Worker process that plays games for `crl.envs.hosting.processes`.

It runs as `python -m crl.envs.hosting.worker`.

The worker reads one pickled request after the other from stdin and writes one reply to each to
stdout. It ends when stdin is closed, so it cannot outlive its parent, even if a game hangs.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from crl.envs.base import Game
from crl.envs.hosting.threads import CheckedGame, describe_error
from crl.errors import ConfigError, TransientError
from crl.scratch import remove_stale_folders

HEADER = struct.Struct(">I")
"""Header of every pickle: its length in bytes."""

_CLOSE_TIMEOUT_S = 2.0
"""Seconds that games have to close after the parent has ended."""

_Frames = queue.SimpleQueue[bytes | None]


def to_frame(message: object) -> bytes:
    """Return the message as a pickle with its length header."""
    data = pickle.dumps(message)
    return HEADER.pack(len(data)) + data


def main() -> None:
    """Answer requests until stdin is closed, then close all games."""
    requests, replies = _take_pipes()
    frames: _Frames = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, frames), daemon=True).start()
    games: dict[int, Game] = {}
    while (frame := frames.get()) is not None:
        replies.write(to_frame(_answer(games, frame)))
        replies.flush()
    for game in games.values():
        game.close()
    _remove_folders_of_killed_parent()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the two pipes to the parent, and disconnect all other code from them.

    Output that games print is redirected to stderr. Their stdin is empty.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _read_requests(requests: BinaryIO, frames: _Frames) -> None:
    """Pass requests to `frames`, and None when stdin is closed.

    Then end the process after `_CLOSE_TIMEOUT_S` seconds, even if a game hangs.
    """
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        frames.put(requests.read(*HEADER.unpack(header)))
    frames.put(None)
    time.sleep(_CLOSE_TIMEOUT_S)
    _remove_folders_of_killed_parent()
    os._exit(1)


def _remove_folders_of_killed_parent() -> None:
    """Remove the temporary folder of the parent if it was killed, and those of other processes.

    This process's own temporary folder lies in it. A parent that is alive holds the folder's lock.
    """
    remove_stale_folders(Path(tempfile.gettempdir()).parents[1])


def _answer(
    games: dict[int, Game], frame: bytes
) -> tuple[Any, ConfigError | tuple[str, str, bool] | None]:
    """Return (value, None), or (None, error).

    The error is a description, a traceback, and whether it is a `TransientError`. It is a
    `ConfigError` if the user has to fix the cause.
    """
    try:
        return _call_game(games, *pickle.loads(frame)), None
    except BaseException as error:  # even SystemExit must fail only the episode, not the process
        if type(error) is ConfigError:
            return None, error
        lines = "".join(traceback.format_exception(error))
        return None, (describe_error(error), lines, isinstance(error, TransientError))


def _call_game(games: dict[int, Game], number: int, method: str, arguments: tuple[Any, ...]) -> Any:
    match method:
        case "make":
            make_game, rendering, reward_range = arguments
            games[number] = CheckedGame(make_game(rendering), reward_range)
        case "reset":
            return games[number].reset(*arguments)
        case "step":
            return games[number].step(*arguments)
        case "close":
            games.pop(number).close()


if __name__ == "__main__":
    main()
