"""Sequences of unequal length in one row, without padding, and the attention that keeps them apart.

A model reads its tokens as one row [1, T]; positions start again with every sequence. Everything in it works token by token but
attention, for which `attend` stands in: transformers' models hand it the `Packing` that they were called with.
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

PACKED = "crl_packed"
"""The name under which transformers knows `attend`."""

PADDING = 1.25
"""Positions over tokens up to which neighbours are padded to one length where attention has no kernel for unequal ones."""

OTHER_ATTENTION = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Options by which transformers' models ask for more than plain causal attention."""

# Before 2.12 the kernel shares key-value heads without being asked to.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class Packing:
    """b sequences one after the other in a row of T = Σ lengths tokens; every length is at least 1."""

    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int32 [b + 1]: where each sequence begins, and T."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(self.device)

    @cached_property
    def rows(self) -> torch.Tensor:
        """[T]: each token's sequence."""
        counts = torch.tensor(self.lengths, device=self.device)
        return torch.arange(len(self.lengths), device=self.device).repeat_interleave(
            counts, output_size=sum(self.lengths)
        )

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T]: each token's position in its sequence."""
        return torch.arange(sum(self.lengths), device=self.device) - self.offsets[self.rows]

    @cached_property
    def runs(self) -> list[Run]:
        """The row in runs of sequences that are padded to one length, so that positions ≤ PADDING × tokens."""
        return [Run(begin, tuple(lengths), self.device) for begin, lengths in _runs(self.lengths)]


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences, from token `begin` of the row on."""

    begin: int
    lengths: tuple[int, ...]
    device: torch.device

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + sum(self.lengths))

    @cached_property
    def padded(self) -> torch.Tensor | None:
        """Each token's place among n × longest; None where all lengths are equal, and nothing is padded."""
        longest = max(self.lengths)
        if longest == min(self.lengths):
            return None
        places = [
            row * longest + position
            for row, length in enumerate(self.lengths)
            for position in range(length)
        ]
        return torch.tensor(places, device=self.device)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    begin, run = 0, []
    for length in lengths:
        if run and max(*run, length) * (len(run) + 1) > PADDING * (sum(run) + length):
            yield begin, run
            begin, run = begin + sum(run), []
        run.append(length)
    if run:
        yield begin, run


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    *, packing: Packing, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention within each sequence, as an attention function of transformers.

    query [1, heads, T, d], key and value [1, shared heads, T, d] → [1, T, heads, d]. Half precision on CUDA goes through torch's
    kernel for unequal lengths, anything else through its ordinary one, in runs of about equal lengths. There is no dropout.
    Raises `NotImplementedError` for a model with another kind of attention.
    """
    if other := [name for name in OTHER_ATTENTION if options.get(name) is not None]:
        raise NotImplementedError(f"packed sequences are not attended to with {', '.join(other)}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        offsets, longest = packing.offsets, max(packing.lengths)
        attended = varlen_attn(
            q,
            k,
            v,
            offsets,
            offsets,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),
            **_GROUPED,
        )
        assert isinstance(attended, torch.Tensor)
        return attended[None], None
    pieces = [
        _attend_run(run, q[run.tokens], k[run.tokens], v[run.tokens], scaling)
        for run in packing.runs
    ]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None], None


def _attend_run(
    run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    n, padded = len(run.lengths), run.padded
    size = n * max(run.lengths)
    if padded is not None:
        q, k, v = (Scatter.apply(x, padded, size) for x in (q, k, v))
    # A token sees those before it, and padding stands behind: none of them sees it.
    q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if padded is None else Gather.apply(out, padded)


class Scatter(torch.autograd.Function):
    """Rows of x at `places` of `size` rows, the others 0. No place occurs twice, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Gather(torch.autograd.Function):
    """Rows of x at `places`, none of which occurs twice: the gradient is copied, where an index's would be added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(
            0, ctx.saved_tensors[0], grad.contiguous()
        ), None


def pack_sequences(model: PreTrainedModel) -> None:
    """From now on the model reads packed sequences, and only those: `packing` must be given with every forward pass.

    A model whose attention transformers cannot replace stays as it is, see `reads_packed`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, attend)
    model.set_attn_implementation(PACKED)


def reads_packed(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == PACKED
