"""Cache of an embedder's vectors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from crl.embedders.cached import CachedEmbedder
from support.managers import WordEmbedder


async def test_the_cache_embeds_only_new_texts_and_drops_the_least_recently_used():
    inner = WordEmbedder()
    cached = CachedEmbedder(inner, size=2)
    assert (cached.name, cached.dim) == (inner.name, inner.dim)
    for texts in (["a", "b", "a"], ["b"], ["c"], ["b", "a", "c"], ["x", "y", "z", "x"], []):
        assert np.array_equal(await cached.embed(texts), await WordEmbedder().embed(texts))
    assert inner.calls == [["a", "b"], ["c"], ["a"], ["x", "y", "z"]]
    assert (cached.hits, cached.misses) == (5, 7)
    assert (await cached.embed([])).shape == (0, cached.dim)
    with pytest.raises(ValueError, match="at least one text, not 0"):
        CachedEmbedder(inner, size=0)


async def test_callers_cannot_change_cached_vectors():
    cached = CachedEmbedder(WordEmbedder(), size=2)
    (await cached.embed(["a"]))[:] = 0
    assert np.array_equal(await cached.embed(["a"]), await WordEmbedder().embed(["a"]))


async def test_calls_share_the_requests_in_progress():
    inner = WordEmbedder()
    cached = CachedEmbedder(inner, size=4)
    calls = (["a", "b"], ["b", "c", "a"], ["c", "d", "b"])
    for texts, vectors in zip(calls, await asyncio.gather(*map(cached.embed, calls)), strict=True):
        assert np.array_equal(vectors, await WordEmbedder().embed(texts))
    assert inner.calls == [["a", "b"], ["c"], ["d"]]
