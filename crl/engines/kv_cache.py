"""The in-process engine's key-value cache: rows for the sequences that run, and prefixes of conversations that may go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [slots, heads, capacity, head_dim]; sequence i fills its row from position 0."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._cache.slots, like.shape[1], self._cache.capacity, like.shape[3])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the pass's new keys and values at its positions; returns those of its rows up to its longest sequence."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        first, positions, longest = self._cache.view
        rows = torch.arange(first, first + positions.shape[0], device=positions.device)[:, None]
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        block = slice(first, first + positions.shape[0])
        return self.keys[block, :, :longest], self.values[block, :, :longest]

    def move(self, source: int, target: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def grow(self, capacity: int) -> None:
        if self.keys is not None and self.values is not None:
            more = capacity - self.keys.shape[2]
            self.keys, self.values = (torch.nn.functional.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.view[2], 0


class SlotCache(Cache):
    """A cache of `slots` rows whose capacity (tokens a row) doubles as needed. `view` says which rows a pass is for."""

    def __init__(self, layers: int, slots: int) -> None:
        self.slots, self.capacity = slots, 128
        self.view: tuple[int, torch.Tensor, int] = (0, torch.zeros(0, 0, dtype=torch.long), 0)
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def reserve(self, tokens: int) -> None:
        while self.capacity < tokens:
            self.capacity *= 2
            for layer in self.layers:
                layer.grow(self.capacity)  # pyright: ignore[reportAttributeAccessIssue]

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer.move(source, target)  # pyright: ignore[reportAttributeAccessIssue]

    def copy_out(self, row: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [heads, tokens, head_dim] of a row's first tokens, per layer."""
        return [(layer.keys[row, :, :tokens].clone(), layer.values[row, :, :tokens].clone()) for layer in self.layers]  # pyright: ignore

    def copy_in(self, row: int, tokens: int, saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts the first tokens of what was copied out at the start of a row."""
        self.reserve(tokens)
        for layer, (keys, values) in zip(self.layers, saved, strict=True):
            layer.keys[row, :, :tokens], layer.values[row, :, :tokens] = keys[:, :tokens], values[:, :tokens]  # pyright: ignore


@dataclass(frozen=True)
class Prefix:
    """What a conversation's last turn left: its token ids, and the keys and values of each."""

    ids: tuple[int, ...]
    saved: list[tuple[torch.Tensor, torch.Tensor]]


class Prefixes:
    """Prefixes by session, of one version of the weights; the least recently used go first.

    They take at most as many tokens as the cache's own rows, so the memory of both is at most twice the cache's.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._tokens = 0

    def keep(self, session: str, ids: tuple[int, ...], row: int) -> None:
        """The row's keys and values of `ids`, for the session's next turn."""
        self.drop(session)
        self._held[session] = Prefix(ids, self._cache.copy_out(row, len(ids)))
        self._tokens += len(ids)
        while self._tokens > self._cache.slots * self._cache.capacity:
            self.drop(next(iter(self._held)))

    def reusable(self, session: str | None, ids: tuple[int, ...]) -> int:
        """How many of the prompt's first tokens need no prefill: those it shares with the session's prefix, at most all but one."""
        prefix = self._held.get(session) if session is not None else None
        if prefix is None:
            return 0
        limit = min(len(prefix.ids), len(ids) - 1)
        if prefix.ids[:limit] == ids[:limit]:
            return limit
        return next(i for i in range(limit) if prefix.ids[i] != ids[i])

    def take(self, session: str | None, ids: tuple[int, ...], row: int) -> int:
        """Moves what is reusable into the row and forgets it here; returns how many tokens that was."""
        tokens = self.reusable(session, ids)
        if session is not None and tokens:
            self._cache.copy_in(row, tokens, self._held[session].saved)
        if session is not None:
            self.drop(session)
        return tokens

    def drop(self, session: str) -> None:
        prefix = self._held.pop(session, None)
        self._tokens -= len(prefix.ids) if prefix else 0

    def clear(self) -> None:
        self._held.clear()
        self._tokens = 0
