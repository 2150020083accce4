"""A process that plays games for `crl.envs.processes`: `python -m crl.envs.worker`, one pickled request after the other on stdin,
one reply each on stdout.

It ends when its stdin does, so it cannot outlive its parent, not even under a game that hangs.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import threading
import time
from typing import Any, BinaryIO

from crl.envs.base import Game
from crl.envs.host import CheckedGame, describe
from crl.errors import ConfigError

LENGTH = struct.Struct(">I")
"""What comes before each pickle: its length in bytes."""

_GRACE = 2.0
"""Seconds that games have to close once the parent is gone."""

_Frames = queue.SimpleQueue[bytes | None]


def framed(message: object) -> bytes:
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    requests, replies = _take_pipes()
    frames: _Frames = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, frames), daemon=True).start()
    games: dict[int, Game] = {}
    while (frame := frames.get()) is not None:
        replies.write(framed(_reply(games, frame)))
        replies.flush()
    for game in games.values():
        game.close()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes to the parent, for nobody else: what games print goes to stderr, and they have nothing to read."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO, frames: _Frames) -> None:
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        frames.put(requests.read(*LENGTH.unpack(head)))
    frames.put(None)
    time.sleep(_GRACE)
    os._exit(1)


def _reply(games: dict[int, Game], frame: bytes) -> tuple[Any, ConfigError | str | None]:
    """(value, None), or (None, error): in words, unless it is the user's to mend."""
    try:
        return _play(games, *pickle.loads(frame)), None
    except (
        BaseException
    ) as error:  # whatever a game raises, SystemExit too, costs its episode and not the process
        return None, error if type(error) is ConfigError else describe(error)


def _play(games: dict[int, Game], number: int, method: str, arguments: tuple[Any, ...]) -> Any:
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
