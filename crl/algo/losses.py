"""Loss functions. Each returns (loss, metrics).

Shapes are [b, t]: b sequences padded to t tokens. Log-probs are natural logarithms. A token is
trained where `mask` (bool, int or float) is not 0. Values at masked positions are ignored: they may
be infinite or NaN. They are replaced before use and reach neither loss nor metrics nor gradients.
`weights` and `total_tokens` belong to the whole optimizer minibatch. Therefore the losses of its
micro-batches sum to the loss of the minibatch, for every division into micro-batches.

Metrics are detached scalars over the trained tokens of the call (0 if there are none):

* `ratio_mean`, `ratio_max`: of the importance ratios that the loss used, before clipping;
* `clip_fraction`: see each loss;
* `approx_kl`: mean(ρ − 1 − log ρ) over the token ratios, the k3 estimator of KL(old ‖ new)
  (Schulman 2020);
* `masked_fraction`: share of the b·t positions that the mask hides.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LossMetrics = dict[str, Tensor]
Ratio = Literal["token", "sequence"]

LOG_RATIO_BOUND = 20.0
"""Bound on the absolute log-ratio before exp (ρ ≤ 4.9e8).

Without it a single extreme token could make the loss or its gradient infinite or NaN.
"""


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Return the clipped surrogate loss of CRL eq. 4 and 5, and its metrics.

        loss = −Σ_i w_i · mean over i's unmasked tokens t of
               min(ρ_it Â_it, clip(ρ_it, 1 − clip_low, 1 + clip_high) Â_it)

    **Ours**: token ratios and a mean per sequence; see the departures in docs/algorithm.md.
    ρ_it = exp(logp_it − old_logp_it). With `ratio="sequence"` every token of i has the
    length-normalised ratio ρ_i = exp(mean over i's unmasked tokens of logp − old_logp) (GSPO,
    arXiv 2507.18071).

    With `dual_clip` = c, the term of a token with Â_it < 0 is at least c · Â_it, so that a large
    ratio cannot dominate the loss (arXiv 1912.09729).

    `logp`, `old_logp`, `mask`: [b, t]. `adv`: [b] or [b, t]. `weights`: [b], default 1/b. A
    sequence without unmasked tokens adds 0. `clip_fraction` is the share of tokens at which a
    clipped branch is chosen, so that they have no gradient.

    Raise `ValueError` on wrong shapes, an unknown ratio, a negative clip or a dual clip ≤ 1.
    """
    _not_negative(clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio must be 'token' or 'sequence', not {ratio!r}")
    unmasked = _unmasked(mask, logp=logp, old_logp=old_logp)
    advantage = _advantage(adv, unmasked)
    log_ratio = _select(logp, unmasked) - _select(old_logp, unmasked).detach()
    ratios = _bounded(
        log_ratio
        if ratio == "token"
        else _mean(log_ratio, unmasked, dim=1)[:, None].expand_as(log_ratio)
    ).exp()
    unclipped, clipped = ratios * advantage, ratios.clamp(1 - clip_low, 1 + clip_high) * advantage
    terms = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        terms = torch.where(advantage < 0, torch.maximum(terms, dual_clip * advantage), terms)
    loss = -(_weights(weights, logp) * _mean(terms, unmasked, dim=1)).sum()
    return loss, _ratio_metrics(log_ratio, ratios, terms != unclipped, unmasked)


def cispo(
    logp: Tensor,
    old_logp: Tensor,
    adv: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    total_tokens: int | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Return the CISPO loss of CRL eq. 3, and its metrics.

        loss = −Σ_it sg(clip(ρ_it, 1 − eps_low, 1 + eps_high)) Â_it logp_it / total_tokens
        ρ_it = exp(logp_it − old_logp_it)

    This is a policy gradient with clipped importance ratios in which every token keeps its
    gradient. sg is stop-gradient.

    `logp`, `old_logp`, `mask`: [b, t]. `adv`: [b] or [b, t]. `total_tokens`: trained tokens of the
    whole minibatch, default the mask's count. Without trained tokens the loss is 0.
    `clip_fraction` is the share of tokens whose ratio is outside the bounds.

    Raise `ValueError` on wrong shapes, a negative eps or total_tokens < 1.
    """
    _not_negative(eps_low=eps_low, eps_high=eps_high)
    if total_tokens is not None and not total_tokens >= 1:
        raise ValueError(f"total_tokens must be at least 1, not {total_tokens}")
    unmasked = _unmasked(mask, logp=logp, old_logp=old_logp)
    unmasked_logp = _select(logp, unmasked)
    log_ratio = unmasked_logp.detach() - _select(old_logp, unmasked).detach()
    ratios = _bounded(log_ratio).exp()
    clipped = ratios.clamp(1 - eps_low, 1 + eps_high)
    total = _count(unmasked) if total_tokens is None else total_tokens
    loss = -(clipped * _advantage(adv, unmasked) * unmasked_logp).sum() / total
    return loss, _ratio_metrics(log_ratio, ratios, clipped != ratios, unmasked)


def nll(logp: Tensor, mask: Tensor, weights: Tensor | None = None) -> tuple[Tensor, LossMetrics]:
    """Return the negative log-likelihood −Σ_i w_i · mean over i's unmasked tokens of logp.

    `logp`, `mask`: [b, t]. `weights`: [b], default 1/b. The metrics are `nll`, the mean over all
    unmasked tokens in nats, and `masked_fraction`. Raise `ValueError` on wrong shapes.
    """
    unmasked = _unmasked(mask, logp=logp)
    unmasked_logp = _select(logp, unmasked)
    loss = -(_weights(weights, logp) * _mean(unmasked_logp, unmasked, dim=1)).sum()
    return loss, {
        "nll": -_mean(unmasked_logp.detach(), unmasked),
        "masked_fraction": _masked_fraction(unmasked),
    }


class NextTokenLoss:
    """`crl.protocols.Loss` of supervised training: `nll` of the trained tokens.

    The loss is −Σ a · logp / `total_tokens` over the tokens of all samples; the advantage a is the
    weight of a token. The metric `nll` is the weighted mean −Σ a · logp / Σ a.
    """

    def __call__(
        self, logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *,
        weights: Tensor, total_tokens: int,
    ) -> tuple[Tensor, LossMetrics]:  # fmt: skip
        loss, metrics = nll(advantage * logp, mask, mask.sum(-1) / total_tokens)
        mean_weight = _mean(advantage, _unmasked(mask, advantage=advantage))
        return loss, {**metrics, "nll": metrics["nll"] / mean_weight}


def truncated_importance_weights(
    trainer_logp: Tensor, engine_logp: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """Return min(exp(trainer_logp − engine_logp), cap) at unmasked tokens and 0 elsewhere.

    This is truncated importance sampling (Ionides 2008). The weights correct for an engine whose
    log-probs differ from the trainer's at the same model weights. They multiply a per-token
    advantage and are valid only with recomputed old log-probs. All tensors are [b, t]; the result
    is detached.

    Raise `ValueError` on wrong shapes or cap ≤ 0.
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, not {cap}")
    unmasked = _unmasked(mask, trainer_logp=trainer_logp, engine_logp=engine_logp)
    log_ratio = _select(trainer_logp, unmasked).detach() - _select(engine_logp, unmasked).detach()
    return _select(log_ratio.exp().clamp(max=cap), unmasked)


# ── checks ────────────────────────────────────────────────────────────────────────────────────────


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, not {value}")


def _unmasked(mask: Tensor, **columns: Tensor) -> Tensor:
    """Return the unmasked tokens: bool [b, t].

    Raise `ValueError` if a column does not have the mask's shape, or if the mask is not [b, t]
    with b, t ≥ 1.
    """
    if mask.ndim != 2 or mask.numel() == 0:
        raise ValueError(f"mask must be [b, t] with b, t ≥ 1, not {list(mask.shape)}")
    for name, column in columns.items():
        if column.shape != mask.shape:
            raise ValueError(
                f"{name} must be {list(mask.shape)} like the mask, not {list(column.shape)}"
            )
    return mask != 0


def _advantage(adv: Tensor, unmasked: Tensor) -> Tensor:
    """Return `adv` ([b] or [b, t]) expanded to [b, t], detached, and 0 at masked tokens."""
    if adv.shape == unmasked.shape[:1]:
        adv = adv[:, None].expand(unmasked.shape)
    if adv.shape != unmasked.shape:
        raise ValueError(
            f"adv must be [{unmasked.shape[0]}] or {list(unmasked.shape)}, not {list(adv.shape)}"
        )
    return _select(adv, unmasked).detach()


def _weights(weights: Tensor | None, logp: Tensor) -> Tensor:
    """Return `weights` ([b]), detached, or 1/b for each sequence if None."""
    if weights is None:
        return logp.new_full(
            logp.shape[:1], 1 / len(logp), dtype=torch.promote_types(logp.dtype, torch.float32)
        )
    if weights.shape != logp.shape[:1]:
        raise ValueError(f"weights must be [{len(logp)}], not {list(weights.shape)}")
    return weights.detach()


# ── masked arithmetic ─────────────────────────────────────────────────────────────────────────────


def _select(values: Tensor, unmasked: Tensor) -> Tensor:
    """Return `values` at unmasked positions and 0 elsewhere, in float32 or better.

    A product with the mask would not do this, because 0 · inf is NaN.
    """
    selected = torch.where(unmasked, values, torch.zeros_like(values))
    return selected.to(torch.promote_types(selected.dtype, torch.float32))


def _count(unmasked: Tensor, dim: int | None = None) -> Tensor:
    """Return the number of unmasked tokens, along `dim` or in total.

    The result is at least 1, so it can be used as a divisor.
    """
    return unmasked.sum(dim).clamp(min=1)


def _mean(values: Tensor, unmasked: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the unmasked values, along `dim` or of all; 0 where there are none."""
    return _select(values, unmasked).sum(dim) / _count(unmasked, dim)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _masked_fraction(unmasked: Tensor) -> Tensor:
    return 1 - unmasked.to(torch.float32).mean()


@torch.no_grad()
def _ratio_metrics(
    log_ratio: Tensor, ratios: Tensor, clipped: Tensor, unmasked: Tensor
) -> LossMetrics:
    """Return the metrics that the module's docstring lists.

    `log_ratio`: token log-ratios. `ratios`: importance ratios that the loss used. `clipped`: True
    for each token that the loss clipped. `unmasked`: unmasked tokens.
    """
    bounded = _bounded(log_ratio)
    return {
        "ratio_mean": _mean(ratios, unmasked),
        "ratio_max": _select(ratios, unmasked).max(),
        "clip_fraction": _mean(clipped.to(ratios.dtype), unmasked),
        "approx_kl": _mean(bounded.expm1() - bounded, unmasked),
        "masked_fraction": _masked_fraction(unmasked),
    }
