"""Forward passes of the in-process engine: the new tokens of all running sequences, one after the other in one row.

A pass needs no padding, so sequences that decode and sequences whose prompt is read share it. Everything in a model works token
by token but attention, for which `attend` stands in: each token reads the keys and values of its own sequence from the cache.
Models whose attention transformers cannot replace read one padded block of a pass at a time (`Padded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from crl.packing import OTHER_ATTENTION

CACHED = "crl_cached"
"""Name of `attend` in transformers."""

PADDING = 1.25
"""Products of queries and keys, padded over real ones, up to which rows whose prompts are read share a call."""

CALL = 1 << 14
"""Products of queries and keys that are computed rather than a call of attention more."""


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of the cache whose tokens are attended to in one call."""

    first: int
    """First row of the cache."""
    begin: int
    """First token of the pass."""
    starts: Sequence[int]
    """Tokens that each row holds already."""
    lengths: Sequence[int]
    """New tokens of each row, at least 1."""
    device: torch.device

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.lengths))

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + sum(self.lengths))

    @cached_property
    def width(self) -> int:
        return max(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row after the pass."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    @cached_property
    def places(self) -> torch.Tensor | None:
        """Index of each token among rows × width; None if no row is padded."""
        if self.width == min(self.lengths):
            return None
        places = [row * self.width + i for row, length in enumerate(self.lengths) for i in range(length)]
        return torch.tensor(places, device=self.device)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [b, width, …] of the block's tokens x [t, …]; padding is 0."""
        if self.places is not None:
            x = x.new_zeros(len(self.lengths) * self.width, *x.shape[1:]).index_copy_(0, self.places, x)
        return x.unflatten(0, (len(self.lengths), self.width))

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's tokens [t, …] of rows x [b, width, …]."""
        return x.flatten(0, 1) if self.places is None else x.flatten(0, 1).index_select(0, self.places)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 where a token [b, width] sees a key [longest], else -inf. Padding stands behind all real tokens."""
        positions = torch.tensor(self.starts, device=self.device)[:, None] + torch.arange(self.width, device=self.device)
        hidden = torch.arange(self.longest, device=self.device) > positions[:, :, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))

    @cached_property
    def _masks(self) -> dict[tuple[torch.dtype, int], torch.Tensor]:
        return {}

    def _grouped_mask(self, dtype: torch.dtype, groups: int) -> torch.Tensor:
        """Return the mask [b, 1, width · groups, longest] of queries that share a key-value head; the layers share it."""
        key = (dtype, groups)
        if key not in self._masks:
            mask = self.mask(dtype)[:, None, :, None]
            self._masks[key] = mask.expand(-1, -1, -1, groups, -1).flatten(2, 3)
        return self._masks[key]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attend from queries [t, heads, d] to cached keys and values [slots, shared heads, capacity, d].

        Queries that share a key-value head become rows of one product, so that no key is copied.
        """
        k, v = (x[self.rows, :, : self.longest] for x in (keys, values))
        groups = query.shape[1] // k.shape[1]
        q = self.padded(query).unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._grouped_mask(q.dtype, groups), scale=scaling)
        return self.unpadded(out.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3))


def _spans(lengths: Sequence[int], starts: Sequence[int], begin: int) -> Iterator[tuple[int, int]]:
    """Yield spans of neighbouring rows, from row `begin` on, that are cheap to pad to one width and one number of keys."""
    width = longest = products = 0
    for row in range(begin, len(lengths)):
        end = starts[row] + lengths[row]
        wider, more = max(width, lengths[row]), max(longest, end)
        if row > begin and (row + 1 - begin) * wider * more > PADDING * (products + lengths[row] * end) + CALL:
            yield begin, row
            begin, products, wider, more = row, 0, lengths[row], end
        width, longest, products = wider, more, products + lengths[row] * end
    if begin < len(lengths):
        yield begin, len(lengths)


class Pass:
    """One forward pass over the first rows of the cache: every row's new tokens, from its start on."""

    def __init__(self, new: Sequence[Sequence[int]], starts: Sequence[int], decoding: int, device: torch.device) -> None:
        """new: tokens of each row; decoding: rows, the first ones, that read one token each and form a block of their own."""
        self.lengths = lengths = list(map(len, new))
        spans = [(0, decoding)] if decoding else []
        spans += _spans(lengths, starts, decoding)
        self.blocks = [Block(a, sum(lengths[:a]), starts[a:b], lengths[a:b], device) for a, b in spans]
        self.longest = max(block.longest for block in self.blocks)
        self._new, self._starts, self._device = new, starts, device

    @cached_property
    def ids(self) -> torch.Tensor:
        """Token ids [T]."""
        return torch.tensor([token for row in self._new for token in row], device=self._device)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Row of each token [T]."""
        counts = torch.tensor(self.lengths, device=self._device)
        return torch.arange(len(self.lengths), device=self._device).repeat_interleave(counts, output_size=sum(self.lengths))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence [T]."""
        spans = zip(self._starts, self.lengths, strict=True)
        return torch.tensor([i for start, n in spans for i in range(start, start + n)], device=self._device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Index of each row's last token [b]."""
        return torch.tensor(self.lengths, device=self._device).cumsum(0) - 1


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    *, reading: Pass | None = None, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend within each sequence of `reading`, as an attention function of transformers; without it like `sdpa`.

    query [1, heads, T, d]; key and value: the layer's cache [slots, shared heads, capacity, d] → [1, T, heads, d]. Raise
    `NotImplementedError` for a model with another kind of attention.
    """
    if reading is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if other := [name for name in OTHER_ATTENTION if options.get(name) is not None]:
        raise NotImplementedError(f"the engine does not attend with {', '.join(other)}")
    q = query[0].transpose(0, 1)
    pieces = [block.attend(q[block.tokens], key, value, scaling) for block in reading.blocks]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None], None


AttentionInterface.register(CACHED, attend)
AttentionMaskInterface.register(CACHED, sdpa_mask)
