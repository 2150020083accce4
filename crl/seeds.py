"""Named and seeded random draws. The project uses no global random generator.

Every draw has an address (run seed, purpose, step, group, turn, …), and its seed is derived from
this address. A checkpoint therefore stores positions, such as step numbers, and no generator state.
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(root: int, name: str, *key: int | str) -> int:
    """Return a 63-bit seed for the draw `name` at address `key`.

    Equal inputs give equal seeds on every machine.
    """
    text = "\x1f".join([str(root), name, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, name: str, *key: int | str) -> random.Random:
    """Return a new private generator for the draw `name` at address `key`."""
    return random.Random(derive_seed(root, name, *key))
