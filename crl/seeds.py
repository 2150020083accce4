"""Named, seeded randomness. No draw in the project comes from a global generator.

A draw that can be addressed (episode, turn, group) takes a seed derived from its address, so it needs no state at all; a
draw that walks a stream (the next room) takes a `random.Random` whose state is part of the checkpoint.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any


def derive_seed(root: int, name: str, *key: int | str) -> int:
    """A 63-bit seed for the draw `name` at address `key`: equal inputs give equal seeds on every machine."""
    text = "\x1f".join([str(root), name, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, name: str, *key: int | str) -> random.Random:
    """A fresh private generator for the draw `name` at address `key`."""
    return random.Random(derive_seed(root, name, *key))


def generator_state(rng: random.Random) -> list[Any]:
    """The generator's state in plain JSON types."""
    version, internal, gauss = rng.getstate()
    return [version, list(internal), gauss]


def restore_generator(rng: random.Random, state: list[Any]) -> None:
    """Puts `rng` back to a state taken by `generator_state`."""
    version, internal, gauss = state
    rng.setstate((version, tuple(internal), gauss))
