"""Named, seeded randomness. No draw in the project comes from a global generator.

Every draw has an address (run seed, purpose, step, group, turn, …) and takes a seed derived from it, so a checkpoint needs no
generator's state: it holds where the streams stand.
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(root: int, name: str, *key: int | str) -> int:
    """A 63-bit seed for the draw `name` at address `key`: equal inputs give equal seeds on every machine."""
    text = "\x1f".join([str(root), name, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, name: str, *key: int | str) -> random.Random:
    """A fresh private generator for the draw `name` at address `key`."""
    return random.Random(derive_seed(root, name, *key))
