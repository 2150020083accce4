"""Truncated sampling by top-k and top-p, and renormalisation over the tokens that it keeps.

Engines call `truncate` and `kept_sets`. Learners call `KeptTokens.restrict`. If both restrict a
distribution to the same kept set, its support is the same in sampling and in training ("Keep
Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from crl.types import KeptSet, kept_counts, split_kept


def truncate(log_p: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [b, V] of truncated distributions, −inf for dropped tokens.

    `log_p` [b, V] are log-probs. `top_p` is float [b] in (0, 1]. `top_k` is int [b], 0 for all.
    Of the k most probable tokens, top-p keeps the fewest whose renormalised probabilities sum to at
    least p (Holtzman et al. 2020, arXiv 1904.09751, section 3.1). The order of vLLM is the same.

    The GPU plan counts the memory of the sort (`crl.modeling.memory.TRUNCATED_LOGIT_BYTES`).
    """
    vocabulary = log_p.shape[1]
    ordered, ids = log_p.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=log_p.device)
    dropped = ranks >= top_k.where(top_k > 0, vocabulary)[:, None]
    p = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
    # At p = 1 the sum could reach p by rounding, before the last token.
    dropped |= p.cumsum(-1) - p >= top_p.where(top_p < 1, torch.inf)[:, None]
    ordered.masked_fill_(dropped, -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, ids, ordered).log_softmax(-1)


def kept_sets(log_p: torch.Tensor) -> tuple[KeptSet, ...]:
    """Return the kept set of each row of log-probs [b, V]: the tokens above −inf."""
    kept = log_p > -torch.inf
    ids = kept.nonzero()[:, 1].to(torch.int32)
    return split_kept(ids.cpu().numpy().tobytes(), kept.sum(-1).tolist())


@dataclass(frozen=True)
class KeptTokens:
    """Kept sets of n tokens as tensors."""

    ids: torch.Tensor
    """Ids of all kept sets, one after the other, int32 [K]."""
    counts: torch.Tensor
    """Number of ids of each kept set, int64 [n]; 0 for the whole vocabulary."""
    offsets: Sequence[int]
    """Index of the first id of each kept set, followed by K."""

    @classmethod
    def of(cls, kept: Sequence[KeptSet], device: torch.device) -> KeptTokens | None:
        """Return the kept sets as tensors on `device`; None if all of them are empty."""
        if not any(kept):
            return None
        counts = kept_counts(kept)
        return cls(
            torch.frombuffer(bytearray(b"".join(kept)), dtype=torch.int32).to(device),
            torch.tensor(counts, device=device),
            list(accumulate(counts, initial=0)),
        )

    def restrict(self, logits: torch.Tensor, part: slice) -> None:
        """Set the logits [m, V] of the m tokens in `part` to the lowest float outside kept sets.

        The result of a softmax is then 0 there, and its logarithm stays finite.
        """
        counts = self.counts[part]
        begin, end = self.offsets[part.start], self.offsets[part.start + len(counts)]
        rows = torch.arange(len(counts), device=logits.device).repeat_interleave(
            counts, output_size=end - begin
        )
        kept = rows, self.ids[begin:end].long()
        values = logits[kept]
        logits.masked_fill_((counts > 0)[:, None], torch.finfo(logits.dtype).min)
        logits[kept] = values
