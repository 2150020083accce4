"""Key-value cache of the in-process engine.

`SlotCache` holds one row for each running sequence. `PrefixCache` holds the keys and values of
conversations that may continue with another turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from crl.engines.passes import Block, Pass


class SlotLayer(CacheLayerMixin):
    """Keys and values [rows, heads, capacity, head_dim] of one layer.

    Sequence i fills row i, starting at position 0.
    """

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._cache.rows, like.shape[1], self._cache.capacity, like.shape[3])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values; an empty tuple before the first pass."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [b, heads, width, d] for the tokens of the current pass.

        Without a padded block, return the full tensors of the layer for
        `crl.engines.passes.attend`. For a padded block, return the rows of the block
        [b, heads, longest, d], the layout that the attention of transformers reads.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        block = self._cache.padded_block
        for cached, new in zip(self.tensors, (key_states, value_states), strict=True):
            tokens = new.transpose(1, 2)
            rows, positions = self._cache.write_index
            cached[rows, :, positions] = tokens[0] if block is None else block.unpadded(tokens)
        keys, values = self.tensors
        if block is None:
            return keys, values
        return tuple(x[block.rows, :, : block.longest] for x in (keys, values))  # pyright: ignore

    def grow(self) -> None:
        """Take the size of the cache. The new part is 0."""
        if self.is_initialized:
            self.keys, self.values = (_copied(x, self._empty(x)) for x in self.tensors)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0


def _copied(x: torch.Tensor, larger: torch.Tensor) -> torch.Tensor:
    """Copy x [rows, heads, capacity, head_dim] to the start of `larger` and return `larger`."""
    larger[: x.shape[0], :, : x.shape[2]] = x
    return larger


class SlotCache(Cache):
    """Keys and values of at most `slots` rows.

    The number of rows and their capacity (tokens per row) double when needed. All rows of a cache
    on a GPU are allocated at first, so that a run that needs too much memory fails early.
    """

    def __init__(self, layers: int, slots: int, device: torch.device) -> None:
        self.slots, self.capacity = slots, 128
        self.rows = 1 if device.type == "cpu" else slots
        """Number of rows in memory."""
        self.write_index = (torch.zeros(0, dtype=torch.long),) * 2
        """Row and position of each new token of the current pass."""
        self.padded_block: Block | None = None
        """Padded block that the model reads now; None if it reads all tokens in one row."""
        self._slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def begin(self, forward_pass: Pass, block: Block | None = None) -> None:
        """Prepare the cache for a pass.

        Grow to the rows of the pass and to the longest of them. Set where the model's next keys and
        values are written: those of all tokens of the pass, or those of the padded `block`.
        """
        self.reserve(len(forward_pass.lengths), forward_pass.longest)
        tokens = slice(None) if block is None else block.tokens
        self.padded_block = block
        self.write_index = (forward_pass.rows[tokens], forward_pass.positions[tokens])

    def reserve(self, rows: int, tokens: int) -> None:
        """Double the number of rows and the capacity until `rows` rows can hold `tokens` tokens."""
        size = self.rows, self.capacity
        while self.rows < rows:
            self.rows = min(2 * self.rows, self.slots)
        while self.capacity < tokens:
            self.capacity *= 2
        if size != (self.rows, self.capacity):
            for layer in self._slot_layers:
                layer.grow()

    def move(self, sources: Iterable[int], targets: Iterable[int], tokens: Iterable[int]) -> None:
        """Copy the first tokens of the rows `sources` to the start of the rows `targets`.

        `tokens` is the number of tokens to copy for each pair of rows.
        """
        moves = list(zip(sources, targets, tokens, strict=True))
        self.reserve(1 + max(target for _, target, _ in moves), max(n for *_, n in moves))
        for layer in self._slot_layers:
            for x in layer.tensors:
                for source, target, n in moves:
                    x[target, :, :n] = x[source, :, :n]

    def copy_out(self, row: int, tokens: int) -> list[torch.Tensor]:
        """Return copies of the keys and values [heads, tokens, head_dim] of a row's first tokens.

        The list holds two tensors per layer: keys, then values.
        """
        return [x[row, :, :tokens].clone() for layer in self._slot_layers for x in layer.tensors]

    def copy_in(self, row: int, tokens: int, saved: Sequence[torch.Tensor]) -> None:
        """Write the first `tokens` tokens of `saved`, a result of `copy_out`, to a row's start."""
        self.reserve(row + 1, tokens)
        for x, source in zip(
            (x for layer in self._slot_layers for x in layer.tensors), saved, strict=True
        ):
            x[row, :, :tokens] = source[:, :tokens]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(i for i in range(limit) if first[i] != second[i])


@dataclass(frozen=True)
class Prefix:
    """Tokens that a conversation has read so far, with their keys and values."""

    ids: tuple[int, ...]
    """Ids of the last prompt and of its completion, without the last sampled token."""
    saved: list[torch.Tensor]
    """Keys and values of `ids`, as returned by `SlotCache.copy_out`."""


class PrefixCache:
    """Prefixes by session, computed with one version of the weights.

    The prefixes hold at most as many tokens as all slots of the cache can hold. Cache and prefixes
    together therefore use at most twice the memory of a full cache. If a new prefix exceeds the
    limit, the prefixes that were stored first are dropped.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self._by_session: OrderedDict[str, Prefix] = OrderedDict()
        self._tokens = 0

    def store(self, session: str, ids: tuple[int, ...], row: int) -> None:
        """Store the row's keys and values of `ids` for the next turn of `session`.

        A previous prefix of the session is replaced. Old prefixes are dropped if the limit is
        exceeded.
        """
        self.drop(session)
        self._by_session[session] = Prefix(ids, self._cache.copy_out(row, len(ids)))
        self._tokens += len(ids)
        while self._tokens > self._cache.slots * self._cache.capacity:
            self.drop(next(iter(self._by_session)))

    def reusable(self, session: str | None, ids: tuple[int, ...]) -> int:
        """Return how many of the prompt's first tokens need no prefill.

        These are the leading tokens that the prompt `ids` shares with the session's prefix. The
        last prompt token is never counted, because its logits must be computed.
        """
        prefix = self._by_session.get(session) if session is not None else None
        if prefix is None:
            return 0
        return common_prefix(prefix.ids, ids[:-1])

    def restore(self, session: str | None, ids: tuple[int, ...], row: int) -> int:
        """Copy the reusable part of the session's prefix into the row and drop the prefix.

        Return the number of copied tokens.
        """
        tokens = self.reusable(session, ids)
        if session is not None and tokens:
            self._cache.copy_in(row, tokens, self._by_session[session].saved)
        if session is not None:
            self.drop(session)
        return tokens

    def drop(self, session: str) -> None:
        prefix = self._by_session.pop(session, None)
        self._tokens -= len(prefix.ids) if prefix else 0

    def clear(self) -> None:
        self._by_session.clear()
        self._tokens = 0
