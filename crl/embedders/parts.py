"""Computation of many vectors on the event loop, in short parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

PART_CHARACTERS = 1_000
"""Characters of a part, at most, unless it is a single text. They take about a millisecond."""


async def embed_in_parts(
    texts: Sequence[str], dim: int, embed: Callable[[Sequence[str]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the vectors of `texts` by `embed`: float32 [len(texts), dim].

    Other tasks run between two parts. The parts depend on the texts alone, so that a deterministic
    run is reproducible. `embed` must return the same vector for a text in any part.
    """
    vectors: list[NDArray[np.float32]] = []
    for part in _parts(texts):
        if vectors:
            await asyncio.sleep(0)
        vectors.append(embed(part))
    return np.concatenate(vectors) if vectors else np.zeros((0, dim), np.float32)


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield `texts` in parts of consecutive texts."""
    start = characters = 0
    for position, text in enumerate(texts):
        if position > start and characters + len(text) > PART_CHARACTERS:
            yield texts[start:position]
            start, characters = position, 0
        characters += len(text)
    if texts:
        yield texts[start:]
