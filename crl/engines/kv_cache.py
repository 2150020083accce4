"""The in-process engine's key-value cache: rows for the sequences that run, and prefixes of conversations that may go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from crl.engines.passes import Block, Pass


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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values; nothing before the first pass."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's new keys and values [b, heads, width, d] at its places.

        Return the layer's tensors, which `crl.engines.passes.attend` reads, or, for a padded block, its rows as transformers'
        own attention reads them: [b, heads, longest, d].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        block = self._cache.padded
        for kept, new in zip(self.tensors, (key_states, value_states), strict=True):
            tokens = new.transpose(1, 2)
            rows, positions = self._cache.places
            kept[rows, :, positions] = tokens[0] if block is None else block.unpadded(tokens)
        keys, values = self.tensors
        if block is None:
            return keys, values
        return tuple(x[block.rows, :, : block.longest] for x in (keys, values))  # pyright: ignore

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (_longer(x, capacity) for x in self.tensors)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0


def _longer(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return x [slots, heads, capacity, head_dim] with so much capacity."""
    longer = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
    longer[:, :, : x.shape[2]] = x
    return longer


class SlotCache(Cache):
    """Keys and values of `slots` rows, whose capacity (tokens a row) doubles as needed.

    `places` and `padded` describe the pass under way: row and position of each new token, and the padded block that the model
    reads, or None if it reads all tokens in one row.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self.slots, self.capacity = slots, 128
        self.places = (torch.zeros(0, dtype=torch.long),) * 2
        self.padded: Block | None = None
        self._slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def begin(self, new: Pass, block: Block | None = None) -> None:
        """Make room for a pass and direct what the model computes: all of its tokens, or those of a padded block."""
        self.reserve(new.longest)
        tokens = slice(None) if block is None else block.tokens
        self.padded, self.places = block, (new.rows[tokens], new.positions[tokens])

    def reserve(self, tokens: int) -> None:
        """Make room for rows of so many tokens."""
        if self.capacity < tokens:
            while self.capacity < tokens:
                self.capacity *= 2
            for layer in self._slot_layers:
                layer.grow(self.capacity)

    def move(self, sources: Iterable[int], targets: Iterable[int], tokens: Iterable[int]) -> None:
        """Copy the first tokens of rows `sources`, so many of each, to rows `targets`."""
        moves = list(zip(sources, targets, tokens, strict=True))
        for layer in self._slot_layers:
            for x in layer.tensors:
                for source, target, n in moves:
                    x[target, :, :n] = x[source, :, :n]

    def copy_out(self, row: int, tokens: int) -> list[torch.Tensor]:
        """Return keys and values [heads, tokens, head_dim] of a row's first tokens, layer by layer."""
        return [x[row, :, :tokens].clone() for layer in self._slot_layers for x in layer.tensors]

    def copy_in(self, row: int, tokens: int, saved: Sequence[torch.Tensor]) -> None:
        """Put the first tokens of what was copied out at the start of a row."""
        self.reserve(tokens)
        for x, kept in zip(
            (x for layer in self._slot_layers for x in layer.tensors), saved, strict=True
        ):
            x[row, :, :tokens] = kept[:, :tokens]


@dataclass(frozen=True)
class Prefix:
    """Token ids of a conversation's last turn, with the keys and values of each."""

    ids: tuple[int, ...]
    saved: list[torch.Tensor]


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
