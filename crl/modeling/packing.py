"""Packed sequences: several sequences of unequal length in one row, without padding.

A model reads all tokens as one row [1, T]. Positions restart at 0 with every sequence. All parts of
a model except attention work token by token. `attend` replaces the attention and keeps the
sequences separate: the models of transformers pass it the `Packing` with which they were called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKED_ATTENTION = "crl_packed"
"""Name under which `attend` is registered in transformers."""

MAX_PADDING_RATIO = 1.25
"""Maximum ratio of padded positions to tokens in a bucket of neighbouring sequences.

Buckets are used if there is no attention kernel for unequal lengths.
"""

UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Options with which models of transformers request more than plain causal attention."""

# Before torch 2.12 the kernel supports shared key-value heads without this option.
_GQA_OPTION: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class Packing:
    """Layout of b concatenated sequences in a row of T = Σ lengths tokens."""

    lengths: Sequence[int]
    """Number of tokens of each sequence, at least 1."""
    device: torch.device

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Index of each sequence's first token, followed by T; int32 [b + 1]."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(self.device)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Index of each token's sequence [T]."""
        counts = torch.tensor(self.lengths, device=self.device)
        return torch.arange(len(self.lengths), device=self.device).repeat_interleave(
            counts, output_size=sum(self.lengths)
        )

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence [T]."""
        return torch.arange(sum(self.lengths), device=self.device) - self.offsets[self.rows]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of neighbouring sequences that are padded to the same length.

        In each bucket, the number of padded positions is at most `MAX_PADDING_RATIO` × tokens.
        """
        return [
            Bucket(begin, tuple(lengths), self.device) for begin, lengths in _buckets(self.lengths)
        ]


@dataclass(frozen=True)
class Bucket:
    """Bucket of neighbouring sequences in a row."""

    begin: int
    """Index of the first token in the row."""
    lengths: tuple[int, ...]
    device: torch.device

    @property
    def tokens(self) -> slice:
        """Tokens of the bucket in the row."""
        return slice(self.begin, self.begin + sum(self.lengths))

    @cached_property
    def padded_index(self) -> torch.Tensor | None:
        """Index of each token in the padded bucket of n × longest positions.

        None if all lengths are equal, because then no padding is needed.
        """
        longest = max(self.lengths)
        if longest == min(self.lengths):
            return None
        indices = [
            row * longest + position
            for row, length in enumerate(self.lengths)
            for position in range(length)
        ]
        return torch.tensor(indices, device=self.device)


def _buckets(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the first token and the lengths of each bucket."""
    begin, bucket = 0, []
    for length in lengths:
        if bucket and max(*bucket, length) * (len(bucket) + 1) > MAX_PADDING_RATIO * (
            sum(bucket) + length
        ):
            yield begin, bucket
            begin, bucket = begin + sum(bucket), []
        bucket.append(length)
    if bucket:
        yield begin, bucket


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *, packing: Packing, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return causal attention within each sequence, [1, T, heads, d].

    The signature is that of an attention function of transformers. `query` has the shape
    [1, heads, T, d]; `key` and `value` have the shape [1, key-value heads, T, d]. Half precision on
    CUDA uses torch's kernel for unequal lengths. All other cases use the ordinary kernel, in
    buckets of about equal lengths. There is no dropout. Raise `NotImplementedError` if the model
    asks for another kind of attention (`UNSUPPORTED_OPTIONS`).
    """
    if unsupported := [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]:
        raise NotImplementedError(f"packed sequences do not support {', '.join(unsupported)}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        offsets, longest = packing.offsets, max(packing.lengths)
        output = varlen_attn(
            q,
            k,
            v,
            offsets,
            offsets,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),
            **_GQA_OPTION,
        )
        assert isinstance(output, torch.Tensor)
        return output[None], None
    outputs = [
        _attend_bucket(bucket, q[bucket.tokens], k[bucket.tokens], v[bucket.tokens], scaling)
        for bucket in packing.buckets
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend_bucket(
    bucket: Bucket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Return causal attention [t, heads, d] within each sequence of a bucket."""
    n, padded_index = len(bucket.lengths), bucket.padded_index
    size = n * max(bucket.lengths)
    if padded_index is not None:
        q, k, v = (Scatter.apply(x, padded_index, size) for x in (q, k, v))
    # Causal attention hides padding from real tokens, because padding is at the end of a sequence.
    q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if padded_index is None else Gather.apply(out, padded_index)


class Scatter(torch.autograd.Function):
    """Scatter of the rows of x to the rows `indices` of a zero tensor with `size` rows.

    The indices must be distinct, so the gradient is a plain gather.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, indices, x)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Gather(torch.autograd.Function):
    """Rows of x at `indices`, which must be distinct.

    The backward pass copies the gradient. The backward pass of ordinary indexing would add it up.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.size = len(x)
        return x.index_select(0, indices)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(
            0, ctx.saved_tensors[0], grad.contiguous()
        ), None


def enable_packing(model: PreTrainedModel) -> None:
    """Set the model to read packed sequences only.

    Every forward pass then needs the argument `packing`. A model whose attention transformers
    cannot replace is not changed; see `reads_packed`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, attend)
    model.set_attn_implementation(PACKED_ATTENTION)


def reads_packed(model: PreTrainedModel) -> bool:
    """Return whether the model reads packed sequences."""
    return model.config._attn_implementation == PACKED_ATTENTION
