"""Forward passes of the in-process engine: the new tokens of all running sequences, one after the other in one row.

A pass needs no padding, so sequences that decode and sequences whose prompt is read share it. Everything in a model works token
by token but attention, for which `attend` stands in: each token reads the keys and values of its own sequence from the cache.
Models whose attention transformers cannot replace read one padded block of a pass at a time (`Padded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from crl.packing import OTHER_ATTENTION

CACHED = "crl_cached"
"""Name of `attend` in transformers."""

PADDING = 1.1
"""Products of queries and keys, padded over real ones, up to which rows whose prompts are read share a call."""

SHORT = 32
"""New tokens of a row up to which queries that share a key-value head are rows of one product, each with a mask of its own; for more
of them copies of the keys are smaller than the masks."""

CALL = 1 << 14
"""Products of queries and keys that are computed rather than a call of attention more."""


class Block:
    """Neighbouring rows of the cache whose new tokens are attended to in one call."""

    def __init__(self, whole: Pass, begin: int, end: int) -> None:
        """begin, end: rows of the pass."""
        first, lengths = sum(whole.lengths[:begin]), whole.lengths[begin:end]
        self.rows = slice(begin, end)
        self.tokens = slice(first, first + sum(lengths))
        self.width = max(lengths)
        self.longest = max(map(add, lengths, whole.starts[begin:end]))
        """Tokens of the longest row after the pass."""
        self._whole, self._lengths = whole, lengths
        self._masks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Token [b · width] that stands at each place of padded rows, and place [t] of each token; None without padding."""
        if self.width == min(self._lengths):
            return None
        tokens, places, begin = [], [], 0
        for row, length in enumerate(self._lengths):
            end = begin + length
            tokens += [*range(begin, end), *[end - 1] * (self.width - length)]
            places += range(row * self.width, row * self.width + length)
            begin = end
        return torch.tensor(tokens, device=self._whole.device), torch.tensor(
            places, device=self._whole.device
        )

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [b, width, …] of the pass's tokens x [T, …]; a row's padding repeats its last token."""
        x = x[self.tokens]
        x = x if self._places is None else x.index_select(0, self._places[0])
        return x.unflatten(0, (-1, self.width))

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's tokens [t, …] of rows x [b, width, …]."""
        return (
            x.flatten(0, 1)
            if self._places is None
            else x.flatten(0, 1).index_select(0, self._places[1])
        )

    def mask(self, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
        """Return 0 where a query sees a key, else -inf, [b, 1, width · groups, longest]; all layers share it.

        groups: queries of a token that share a key-value head.
        """
        if (dtype, groups) not in self._masks:
            hidden = (
                self._whole.places[: self.longest] > self.padded(self._whole.positions)[:, :, None]
            )
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[dtype, groups] = (
                mask[:, None, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3)
            )
        return self._masks[dtype, groups]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend from the pass's queries [T, heads, d] to cached keys and values [slots, shared heads, capacity, d].

        Where a row has few new tokens, queries that share a key-value head become rows of one product, so that no key is copied.
        """
        k, v = (x[self.rows, :, : self.longest] for x in (keys, values))
        groups = query.shape[1] // k.shape[1]
        if self.width > SHORT:
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        q = self.padded(query).unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask(q.dtype, groups), scale=scaling
        )
        return self.unpadded(out.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3))


class Pass:
    """One forward pass over the first rows of the cache."""

    def __init__(
        self,
        new: Sequence[Sequence[int]],
        starts: Sequence[int],
        decoding: int,
        device: torch.device,
    ) -> None:
        """new: tokens that each row reads; starts: tokens that it holds; decoding: the first rows, which read one token each."""
        self.lengths, self.starts, self.device = list(map(len, new)), list(starts), device
        rows = [row for row, length in enumerate(self.lengths) for _ in range(length)]
        positions = [
            i
            for start, length in zip(starts, self.lengths, strict=True)
            for i in range(start, start + length)
        ]
        ids = [token for tokens in new for token in tokens]
        self.ids, self.rows, self.positions = torch.tensor([ids, rows, positions], device=device)
        """Id, row and position of each token [T]."""
        spans = [(0, decoding)] if decoding else []
        self.blocks = [
            Block(self, *span) for span in spans + list(_spans(self.lengths, self.starts, decoding))
        ]
        self.longest = max(block.longest for block in self.blocks)

    @cached_property
    def places(self) -> torch.Tensor:
        """Positions that a row may have [longest]."""
        return torch.arange(self.longest, device=self.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Index of each row's last token [b]."""
        return torch.tensor(list(accumulate(self.lengths)), device=self.device) - 1


def _spans(lengths: Sequence[int], starts: Sequence[int], begin: int) -> Iterator[tuple[int, int]]:
    """Yield spans of neighbouring rows, from row `begin` on, that are cheap to pad to one width and one number of keys."""
    width = longest = products = 0
    for row in range(begin, len(lengths)):
        end = starts[row] + lengths[row]
        own, wider, more = lengths[row] * end, max(width, lengths[row]), max(longest, end)
        if row > begin and (row + 1 - begin) * wider * more > PADDING * (products + own) + CALL:
            yield begin, row
            begin, products, wider, more = row, 0, lengths[row], end
        width, longest, products = wider, more, products + own
    if begin < len(lengths):
        yield begin, len(lengths)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    *, reading: Pass | None = None, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend within each sequence of `reading`, as an attention function of transformers; without it like `sdpa`.

    query [1, heads, T, d]; key and value: the layer's cache [slots, shared heads, capacity, d] → [1, T, heads, d]. Raise
    `NotImplementedError` for a model with another kind of attention.
    """
    if reading is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if other := [name for name in OTHER_ATTENTION if options.get(name) is not None]:
        raise NotImplementedError(f"the engine does not attend with {', '.join(other)}")
    q = query[0].transpose(0, 1)
    pieces = [block.attend(q, key, value, scaling) for block in reading.blocks]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None], None


AttentionInterface.register(CACHED, attend)
AttentionMaskInterface.register(CACHED, sdpa_mask)
