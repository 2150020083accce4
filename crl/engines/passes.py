"""Forward passes of the in-process engine.

A pass concatenates the new tokens of all running sequences in one row. No padding is needed, so
decoding sequences and sequences in prefill share a pass. All parts of a model except attention
work token by token. `attend` replaces the attention: each token attends to the keys and values of
its own sequence in the cache. A model whose attention transformers cannot replace reads one padded
`Block` of a pass at a time.
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

from crl.modeling.packing import UNSUPPORTED_OPTIONS

CACHED_ATTENTION = "crl_cached"
"""Name under which `attend` is registered in transformers."""

MAX_PADDING_RATIO = 1.1
"""Maximum ratio of padded to real query-key products for prefill rows that share one call."""

MAX_STACKED_TOKENS = 32
"""Maximum number of new tokens per row for which grouped queries are stacked.

Up to this number, the queries that share a key-value head become rows of one product, each with
its own mask row. With more new tokens, copies of the keys need less memory than the masks.
"""

CALL_COST = 1 << 14
"""Number of extra query-key products that are accepted to avoid one more call of attention."""


class Block:
    """Neighbouring rows of a pass whose attention is computed in one call."""

    def __init__(self, forward_pass: Pass, begin: int, end: int) -> None:
        """Create the block of the rows `begin` to `end` (exclusive) of the pass `forward_pass`."""
        first, lengths = sum(forward_pass.lengths[:begin]), forward_pass.lengths[begin:end]
        self.rows = slice(begin, end)
        """Rows of the pass."""
        self.tokens = slice(first, first + sum(lengths))
        """Tokens of the pass."""
        self.width = max(lengths)
        """Largest number of new tokens in a row."""
        self.longest = max(map(add, lengths, forward_pass.starts[begin:end]))
        """Number of tokens in the longest row after the pass."""
        self._pass, self._lengths = forward_pass, lengths
        self._masks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @cached_property
    def _padding_index(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index maps between tokens and padded rows; None if no padding is needed.

        The first tensor [b · width] is the token at each position of the padded rows. The second
        tensor [t] is the position of each token in the padded rows.
        """
        if self.width == min(self._lengths):
            return None
        tokens, positions, begin = [], [], 0
        for row, length in enumerate(self._lengths):
            end = begin + length
            tokens += [*range(begin, end), *[end - 1] * (self.width - length)]
            positions += range(row * self.width, row * self.width + length)
            begin = end
        return torch.tensor(tokens, device=self._pass.device), torch.tensor(
            positions, device=self._pass.device
        )

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's padded rows [b, width, …] of x [T, …], a tensor of the whole pass.

        The padding of a row repeats its last token.
        """
        x = x[self.tokens]
        x = x if self._padding_index is None else x.index_select(0, self._padding_index[0])
        return x.unflatten(0, (-1, self.width))

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens [t, …] of the padded rows x [b, width, …]."""
        return (
            x.flatten(0, 1)
            if self._padding_index is None
            else x.flatten(0, 1).index_select(0, self._padding_index[1])
        )

    def mask(self, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
        """Return the additive mask [b, 1, width · groups, longest]: 0 for visible keys, else -inf.

        `groups` is the number of query heads that share a key-value head. The mask is cached for
        all layers.
        """
        if (dtype, groups) not in self._masks:
            masked = (
                self._pass.key_positions[: self.longest]
                > self.padded(self._pass.positions)[:, :, None]
            )
            mask = torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(
                masked, float("-inf")
            )
            self._masks[dtype, groups] = (
                mask[:, None, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3)
            )
        return self._masks[dtype, groups]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return the attention output [t, heads, d] of the block's tokens.

        `query` [T, heads, d] holds the queries of the whole pass. `keys` and `values` are cached
        tensors [slots, key-value heads, capacity, d]. If no row has more than
        `MAX_STACKED_TOKENS` new tokens, the queries that share a key-value head become rows of one
        product and no key is copied.
        """
        k, v = (x[self.rows, :, : self.longest] for x in (keys, values))
        groups = query.shape[1] // k.shape[1]
        if self.width > MAX_STACKED_TOKENS:
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        q = self.padded(query).unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask(q.dtype, groups), scale=scaling
        )
        return self.unpadded(out.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3))


class Pass:
    """Forward pass over the first rows of the cache."""

    def __init__(
        self,
        new_tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        decoding: int,
        device: torch.device,
    ) -> None:
        """Lay out the tokens of a pass.

        `new_tokens` holds the tokens that each row reads. `starts` is the number of tokens that
        each row already holds. The first `decoding` rows decode: they read one token each.
        """
        self.lengths, self.starts, self.device = list(map(len, new_tokens)), list(starts), device
        rows = [row for row, length in enumerate(self.lengths) for _ in range(length)]
        positions = [
            i
            for start, length in zip(starts, self.lengths, strict=True)
            for i in range(start, start + length)
        ]
        ids = [token for tokens in new_tokens for token in tokens]
        self.ids, self.rows, self.positions = torch.tensor([ids, rows, positions], device=device)
        """Id, row and position of each token, three tensors [T]."""
        spans = [(0, decoding)] if decoding else []
        self.blocks = [
            Block(self, *span) for span in spans + list(_spans(self.lengths, self.starts, decoding))
        ]
        self.longest = max(block.longest for block in self.blocks)

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """All positions of the longest row, in order [longest]."""
        return torch.arange(self.longest, device=self.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """Index of each row's last token [b]."""
        return torch.tensor(list(accumulate(self.lengths)), device=self.device) - 1


def _spans(lengths: Sequence[int], starts: Sequence[int], begin: int) -> Iterator[tuple[int, int]]:
    """Yield spans (begin, end) of neighbouring rows, starting at row `begin`.

    The rows of a span are cheap to pad to the same number of new tokens and of keys.
    `MAX_PADDING_RATIO` and `CALL_COST` limit the cost of the padding.
    """
    width = longest = products = 0
    for row in range(begin, len(lengths)):
        end = starts[row] + lengths[row]
        row_products = lengths[row] * end
        new_width, new_longest = max(width, lengths[row]), max(longest, end)
        padded_products = (row + 1 - begin) * new_width * new_longest
        limit = MAX_PADDING_RATIO * (products + row_products) + CALL_COST
        if row > begin and padded_products > limit:
            yield begin, row
            begin, products, new_width, new_longest = row, 0, lengths[row], end
        width, longest, products = new_width, new_longest, products + row_products
    if begin < len(lengths):
        yield begin, len(lengths)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *, forward_pass: Pass | None = None, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return the attention output [1, T, heads, d] of a pass, within each of its sequences.

    The signature is that of an attention function of transformers. `query` has the shape
    [1, heads, T, d]. `key` and `value` are the layer's cache [slots, key-value heads, capacity, d].
    Without `forward_pass`, call the `sdpa` attention of transformers. Raise `NotImplementedError`
    if the model asks for another kind of attention (`UNSUPPORTED_OPTIONS`).
    """
    if forward_pass is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if unsupported := [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]:
        raise NotImplementedError(f"the torch engine does not support {', '.join(unsupported)}")
    q = query[0].transpose(0, 1)
    outputs = [block.attend(q, key, value, scaling) for block in forward_pass.blocks]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(CACHED_ATTENTION, attend)
AttentionMaskInterface.register(CACHED_ATTENTION, sdpa_mask)
