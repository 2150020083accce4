"""Losses compared with numbers worked by hand, masking, and gradients of split minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from crl.algo import cispo, clipped_surrogate, nll, truncated_importance_weights
from crl.algo.losses import NextTokenLoss

INF, NAN = float("inf"), float("nan")
METRICS = {"ratio_mean", "ratio_max", "clip_fraction", "approx_kl", "masked_fraction"}


def leaf(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, requires_grad=True)


def gradient(loss: Tensor, logp: Tensor) -> list[list[float]]:
    loss.backward()
    assert logp.grad is not None
    return logp.grad.tolist()


def approx(rows: Sequence[Sequence[float]]) -> list[object]:
    return [pytest.approx(row) for row in rows]


# ── the clipped surrogate ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rho", "adv", "loss", "grad", "clipped"),
    [
        # Bounds 0.8 and 1.3. d(−ρA)/dlogp = −ρA, as dρ/dlogp = ρ. The clipped branch has no
        # gradient.
        (1.1, 2.0, -2.2, -2.2, 0.0),  # inside the bounds, A > 0: raises the probability
        (0.9, -2.0, 1.8, 1.8, 0.0),  # inside the bounds, A < 0: lowers the probability
        (1.5, 2.0, -2.6, 0.0, 1.0),  # min(3.0, 1.3 · 2): has risen enough
        (1.5, -2.0, 3.0, 3.0, 0.0),  # min(−3.0, −2.6): has risen although A < 0, full gradient
        (0.5, 2.0, -1.0, -1.0, 0.0),  # min(1.0, 1.6): has fallen although A > 0, full gradient
        (0.5, -2.0, 1.6, 0.0, 1.0),  # min(−1.0, 0.8 · −2): has fallen enough
        (1.5, 0.0, 0.0, 0.0, 0.0),  # no advantage
    ],
)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_both_clip_sides_and_both_signs(rho, adv, loss, grad, clipped, ratio):
    logp = leaf([[math.log(rho) - 1.0]])
    value, metrics = clipped_surrogate(
        logp,
        torch.tensor([[-1.0]]),
        torch.tensor([adv]),
        torch.ones(1, 1),
        clip_low=0.2,
        clip_high=0.3,
        ratio=ratio,
    )
    assert value.item() == pytest.approx(loss)
    assert gradient(value, logp) == approx([[grad]])
    assert metrics["clip_fraction"].item() == clipped


@pytest.mark.parametrize(
    ("rho", "adv", "loss", "grad", "clipped"),
    [
        # c = 3: with A < 0 the term is at least 3 · A.
        (2.0, -2.0, 4.0, 4.0, 0.0),  # max(−4, −6): below the bound, full gradient
        (5.0, -2.0, 6.0, 0.0, 1.0),  # max(−10, −6)
        (0.5, -2.0, 1.6, 0.0, 1.0),  # max(min(−1.0, −1.6), −6): the clip alone
        (5.0, 2.0, -2.6, 0.0, 1.0),  # A > 0: the clip alone
        (0.5, 2.0, -1.0, -1.0, 0.0),
    ],
)
def test_the_dual_clip_bounds_terms_of_negative_advantages(rho, adv, loss, grad, clipped):
    logp = leaf([[math.log(rho) - 1.0]])
    value, metrics = clipped_surrogate(
        logp, torch.tensor([[-1.0]]), torch.tensor([adv]), torch.ones(1, 1),
        clip_low=0.2, clip_high=0.3, dual_clip=3.0,
    )  # fmt: skip
    assert float(value) == pytest.approx(loss)
    assert gradient(value, logp) == approx([[grad]])
    assert float(metrics["clip_fraction"]) == clipped


def test_the_mean_is_per_sequence_and_the_default_weight_one_over_b():
    # ρ = 1. Row 0: two tokens, A 3; row 1: one token, A −1. Loss −(½ · 3 + ½ · −1) = −1.
    # Gradient −w A / tokens: −½ · 3 / 2 = −0.75 per token of row 0, and −½ · −1 / 1 = 0.5 in row 1.
    logp = leaf([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 1]])
    loss, _ = clipped_surrogate(
        logp, logp.detach(), torch.tensor([3.0, -1.0]), mask, clip_low=0.2, clip_high=0.2
    )
    assert loss.item() == pytest.approx(-1.0)
    assert gradient(loss, logp) == [[-0.75, -0.75, 0.0], [0.0, 0.0, 0.5]]


def test_weights_replace_one_over_b():
    # −(0.25 · 3 + 0.125 · −1) = −0.625; gradients −0.25 · 3 / 2 = −0.375 and 0.125
    logp = leaf([[-1.0, -2.0], [-1.0, -2.0]])
    loss, _ = clipped_surrogate(
        logp, logp.detach(), torch.tensor([3.0, -1.0]), torch.tensor([[1, 1], [0, 1]]),
        clip_low=0.2, clip_high=0.2, weights=torch.tensor([0.25, 0.125]),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-0.625)
    assert gradient(loss, logp) == [[-0.375, -0.375], [0.0, 0.125]]


def test_an_advantage_per_token():
    # Row 0: mean of 1 and 3 is 2; row 1: −2; loss −(½ · 2 + ½ · −2) = 0. Gradients −½ A / tokens.
    logp = leaf([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    adv, mask = (
        torch.tensor([[1.0, 3.0, 99.0], [99.0, 99.0, -2.0]]),
        torch.tensor([[1, 1, 0], [0, 0, 1]]),
    )
    loss, _ = clipped_surrogate(logp, logp.detach(), adv, mask, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(0.0)
    assert gradient(loss, logp) == [[-0.25, -0.75, 0.0], [0.0, 0.0, 1.0]]


def test_the_sequence_ratio_is_length_normalised_and_shared():
    # Log-ratios 0.2 and 0.4: mean 0.3, ρ = e^0.3 = 1.3498588, loss −ρ · 1.
    # dρ/dlogp_t = ρ / 2: gradient −0.6749294 each.
    logp = leaf([[0.2, 0.4, 5.0]])
    mask = torch.tensor([[True, True, False]])
    loss, metrics = clipped_surrogate(
        logp,
        torch.zeros(1, 3),
        torch.tensor([1.0]),
        mask,
        clip_low=0.5,
        clip_high=0.5,
        ratio="sequence",
    )
    assert loss.item() == pytest.approx(-1.3498588)
    assert gradient(loss, logp) == approx([[-0.6749294, -0.6749294, 0.0]])
    assert metrics["ratio_mean"].item() == metrics["ratio_max"].item() == pytest.approx(1.3498588)
    # The KL is estimated per token: (e^0.2 − 1.2 + e^0.4 − 1.4) / 2 = (0.0214028 + 0.0918247) / 2
    assert metrics["approx_kl"].item() == pytest.approx(0.0566137, rel=1e-5)


def test_the_sequence_ratio_clips_the_whole_sequence():
    # ρ = e^0.3 is above 1 + 3e-4, so the loss is −1.0003 and has no gradient. The ratio of the
    # first token alone has fallen.
    logp = leaf([[-0.2, 0.8]])
    loss, metrics = clipped_surrogate(
        logp,
        torch.zeros(1, 2),
        torch.tensor([1.0]),
        torch.ones(1, 2),
        clip_low=3e-4,
        clip_high=3e-4,
        ratio="sequence",
    )
    assert loss.item() == pytest.approx(-1.0003)
    assert gradient(loss, logp) == [[0.0, 0.0]]
    assert metrics["clip_fraction"].item() == 1.0


def test_the_sequence_ratio_with_an_advantage_per_token():
    # ρ = e^0.3 for both tokens, A = 1 and 3: loss −ρ · 2 = −2.6997176
    # dloss/dlogp_t = −ρ · 2 / 2 = −1.3498588
    logp = leaf([[0.2, 0.4]])
    loss, _ = clipped_surrogate(
        logp,
        torch.zeros(1, 2),
        torch.tensor([[1.0, 3.0]]),
        torch.ones(1, 2),
        clip_low=0.5,
        clip_high=0.5,
        ratio="sequence",
    )
    assert loss.item() == pytest.approx(-2.6997176)
    assert gradient(loss, logp) == approx([[-1.3498588, -1.3498588]])


def test_metrics_are_over_unmasked_tokens():
    # A > 0. ρ = 2 is above 1.2 and clipped; ρ = ½ is not clipped.
    # k3: (2 − 1 − ln 2) and (½ − 1 + ln 2), mean ½ / 2 = 0.25
    logp = leaf([[math.log(2), -math.log(2), 7.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    _, metrics = clipped_surrogate(
        logp, torch.zeros(1, 3), torch.tensor([1.0]), mask, clip_low=0.2, clip_high=0.2
    )
    assert set(metrics) == METRICS
    assert all(metric.ndim == 0 and not metric.requires_grad for metric in metrics.values())
    assert metrics["ratio_mean"].item() == pytest.approx(1.25)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)
    assert metrics["clip_fraction"].item() == pytest.approx(0.5)
    assert metrics["approx_kl"].item() == pytest.approx(0.25)
    assert metrics["masked_fraction"].item() == pytest.approx(1 / 3)


# ── CISPO ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rho", "logp", "adv", "loss", "grad", "clipped"),
    [
        # Bounds 0.8 and 1.5. The loss is −clip(ρ) A logp. The ratio has no gradient, so
        # dloss/dlogp = −clip(ρ) A, clipped or not.
        (1.2, -1.0, 2.0, 2.4, -2.4, 0.0),
        (2.0, -1.0, 2.0, 3.0, -3.0, 1.0),
        (2.0, -1.0, -2.0, -3.0, 3.0, 1.0),
        (0.5, -2.0, -1.0, -1.6, 0.8, 1.0),
        (0.5, -2.0, 1.0, 1.6, -0.8, 1.0),
    ],
)
def test_cispo_clips_the_ratio_and_keeps_the_gradient(rho, logp, adv, loss, grad, clipped):
    tensor = leaf([[logp]])
    old = torch.tensor([[logp - math.log(rho)]])
    value, metrics = cispo(
        tensor, old, torch.tensor([adv]), torch.ones(1, 1), eps_low=0.2, eps_high=0.5
    )
    assert value.item() == pytest.approx(loss)
    assert gradient(value, tensor) == approx([[grad]])
    assert set(metrics) == METRICS
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["ratio_max"].item() == pytest.approx(rho)


def test_cispo_sums_over_tokens_and_divides_by_all_of_them():
    # ρ = 1. Row 0: A 2 on logp −1 and −3; row 1: A −1 on logp −5.
    # The sum −(2·−1 + 2·−3 + −1·−5) = 3 over 3 tokens is 1. Gradients −A / 3.
    # A sequence counts once per token.
    logp = leaf([[-1.0, -3.0], [-9.0, -5.0]])
    mask, adv = torch.tensor([[1, 1], [0, 1]]), torch.tensor([2.0, -1.0])
    loss, _ = cispo(logp, logp.detach(), adv, mask, eps_low=0.2, eps_high=0.2)
    assert loss.item() == pytest.approx(1.0)
    assert gradient(loss, logp) == approx([[-2 / 3, -2 / 3], [0.0, 1 / 3]])


def test_cispo_divides_by_total_tokens_if_given():
    # the same sum, 3, over 12 tokens: 0.25
    logp, adv = torch.tensor([[-1.0, -3.0], [-9.0, -5.0]]), torch.tensor([[2.0, 2.0], [77.0, -1.0]])
    loss, _ = cispo(
        logp, logp, adv, torch.tensor([[1, 1], [0, 1]]), eps_low=0.2, eps_high=0.2, total_tokens=12
    )
    assert loss.item() == pytest.approx(0.25)


# ── NLL and importance weights ────────────────────────────────────────────────────────────────────


def test_nll_is_the_weighted_mean_of_sequence_means():
    # −(½ · (−1 − 3)/2 + ½ · −5) = 3.5; token mean (1 + 3 + 5) / 3 = 3; gradients −½ / 2 and −½
    logp = leaf([[-1.0, -3.0], [INF, -5.0]])
    mask = torch.tensor([[1, 1], [0, 1]])
    loss, metrics = nll(logp, mask)
    assert loss.item() == pytest.approx(3.5)
    assert gradient(loss, logp) == [[-0.25, -0.25], [0.0, -0.5]]
    assert metrics["nll"].item() == pytest.approx(3.0)
    assert metrics["masked_fraction"].item() == pytest.approx(0.25)
    # weights 0.1 and 0.2: 0.1 · 2 + 0.2 · 5 = 1.2
    assert nll(logp, mask, torch.tensor([0.1, 0.2]))[0].item() == pytest.approx(1.2)


def test_the_loss_of_supervised_training_weighs_tokens():
    # −(1 · −1 + 0.5 · −3 + 1 · −5) / 4 = 7.5 / 4; mean weighted by 1, 0.5, 1: 7.5 / 2.5 = 3
    logp = leaf([[-1.0, -3.0], [INF, -5.0]])
    weights = torch.tensor([[1.0, 0.5], [7.0, 1.0]])
    loss, metrics = NextTokenLoss()(
        logp, logp.detach(), weights, torch.tensor([[1, 1], [0, 1]]),
        weights=torch.ones(2), total_tokens=4,
    )  # fmt: skip
    assert loss.item() == pytest.approx(1.875)
    assert gradient(loss, logp) == [[-0.25, -0.125], [0.0, -0.25]]
    assert metrics["nll"].item() == pytest.approx(3.0)


def test_importance_weights_are_truncated_masked_and_detached():
    # e^ln 4 = 4 → cap 2; e^ln ½ = ½; e^0 = 1; masked → 0; an overflowing exp → cap 2
    trainer = torch.tensor([[math.log(4), math.log(0.5), -3.0, NAN, 1e30]], requires_grad=True)
    engine = torch.tensor([[0.0, 0.0, -3.0, INF, -1e30]], requires_grad=True)
    weights = truncated_importance_weights(
        trainer, engine, torch.tensor([[1, 1, 1, 0, 1]]), cap=2.0
    )
    assert weights.tolist() == approx([[2.0, 0.5, 1.0, 0.0, 2.0]])
    assert not weights.requires_grad


# ── masked positions ──────────────────────────────────────────────────────────────────────────────

LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "token": partial(clipped_surrogate, clip_low=0.2, clip_high=0.3),
    "sequence": partial(clipped_surrogate, clip_low=0.2, clip_high=0.3, ratio="sequence"),
    "cispo": partial(cispo, eps_low=0.2, eps_high=0.3),
    "nll": lambda logp, old_logp, adv, mask: nll(logp, mask),
}
MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])


def inputs(garbage: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, old_logp and a [b, t] advantage, with `garbage` where MASK is 0."""
    rng = torch.Generator().manual_seed(5)
    columns = [
        -torch.rand(3, 5, generator=rng),
        -torch.rand(3, 5, generator=rng),
        torch.randn(3, 5, generator=rng),
    ]
    if garbage is not None:
        columns = [torch.where(MASK.bool(), column, torch.tensor(garbage)) for column in columns]
    return columns[0].requires_grad_(), columns[1], columns[2]


@pytest.mark.parametrize("garbage", [INF, -INF, NAN, 1e30, -1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_values_affect_neither_loss_nor_metrics_nor_gradients(name, garbage):
    clean_logp, clean_old, clean_adv = inputs(None)
    logp, old, adv = inputs(garbage)
    clean_loss, clean_metrics = LOSSES[name](clean_logp, clean_old, clean_adv, MASK)
    loss, metrics = LOSSES[name](logp, old, adv, MASK)
    assert torch.equal(loss, clean_loss)
    assert torch.isfinite(loss)
    for metric, value in clean_metrics.items():
        assert torch.equal(metrics[metric], value), metric
    grad, clean_grad = (
        torch.tensor(gradient(loss, logp)),
        torch.tensor(gradient(clean_loss, clean_logp)),
    )
    assert torch.equal(grad, clean_grad)
    assert (grad[MASK == 0] == 0).all()
    assert (grad[MASK == 1] != 0).any()


@pytest.mark.parametrize("mixed", [(INF, -INF), (-INF, INF), (1e30, -1e30), (-1e30, 1e30)])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_values_whose_ratio_overflows_have_no_effect(name, mixed):
    clean_logp, clean_old, clean_adv = inputs(None)
    logp, old, adv = inputs(mixed[0])[0], inputs(mixed[1])[1], inputs(NAN)[2]
    loss, clean_loss = (
        LOSSES[name](logp, old, adv, MASK)[0],
        LOSSES[name](clean_logp, clean_old, clean_adv, MASK)[0],
    )
    assert torch.equal(loss, clean_loss)
    assert gradient(loss, logp) == gradient(clean_loss, clean_logp)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.float32, torch.float64]
)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mask_may_have_any_type(name, dtype):
    expected, _ = LOSSES[name](*inputs(NAN), MASK)
    loss, metrics = LOSSES[name](*inputs(NAN), MASK.to(dtype))
    assert torch.equal(loss, expected)
    assert metrics["masked_fraction"].item() == pytest.approx(10 / 15)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_trained_tokens_is_zero_with_zero_gradients(name):
    logp, old, _ = inputs(NAN)
    loss, metrics = LOSSES[name](logp, old, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 5))
    assert loss.item() == 0.0
    assert not torch.tensor(gradient(loss, logp)).any()
    assert metrics.pop("masked_fraction").item() == 1.0
    assert all(metric.item() == 0.0 for metric in metrics.values())


@pytest.mark.parametrize("adv", [1.0, -1.0])
@pytest.mark.parametrize("name", ["token", "sequence", "cispo"])
def test_an_extreme_ratio_leaves_loss_gradient_and_metrics_finite(name, adv):
    # For the engine, the token was almost impossible: the log-ratio is 1e4 and exp overflows.
    logp = leaf([[-1.0, -1.0]])
    loss, metrics = LOSSES[name](
        logp, torch.tensor([[-1.0, -1e4]]), torch.tensor([adv]), torch.ones(1, 2)
    )
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.tensor(gradient(loss, logp))).all()
    assert all(torch.isfinite(metric) for metric in metrics.values())


def test_no_gradient_reaches_the_behaviour_or_the_advantage():
    logp, old, adv = (column.requires_grad_() for column in inputs(None))
    for name in ("token", "sequence", "cispo"):
        LOSSES[name](logp, old, adv, MASK)[0].backward()
    assert old.grad is None
    assert adv.grad is None


def test_half_precision_log_probs_are_summed_in_float32():
    # bfloat16 cannot represent 257. With a sum in bfloat16, the mean would be 256 / 257.
    loss, metrics = nll(torch.full((1, 257), -1.0, dtype=torch.bfloat16), torch.ones(1, 257))
    assert (loss.item(), metrics["nll"].item(), loss.dtype) == (1.0, 1.0, torch.float32)


# ── micro-batches ─────────────────────────────────────────────────────────────────────────────────

B, T, VOCABULARY = 9, 7, 5


def whole_batch() -> dict[str, Tensor]:
    """Return a minibatch of 9 ragged sequences over a vocabulary of 5.

    The log-probs of the behaviour policy differ enough to be clipped.
    """
    rng = torch.Generator().manual_seed(11)
    ids = torch.randint(VOCABULARY, (B, T), generator=rng)
    mask = torch.rand(B, T, generator=rng) < 0.6
    mask[3] = False
    return {
        "ids": ids,
        "mask": mask,
        "old": -torch.rand(B, T, generator=rng, dtype=torch.float64) * 3,
        "adv": torch.randn(B, generator=rng, dtype=torch.float64),
        "weights": torch.rand(B, generator=rng, dtype=torch.float64) / B,
    }


def loss_of(name: str, logp: Tensor, batch: dict[str, Tensor], total_tokens: int) -> Tensor:
    old, adv, mask, weights = batch["old"], batch["adv"], batch["mask"], batch["weights"]
    if name == "cispo":
        return cispo(logp, old, adv, mask, eps_low=0.2, eps_high=0.3, total_tokens=total_tokens)[0]
    if name == "nll":
        return nll(logp, mask, weights)[0]
    return clipped_surrogate(
        logp,
        old,
        adv,
        mask,
        clip_low=0.2,
        clip_high=0.3,
        ratio=name,  # pyright: ignore
        weights=weights,
    )[0]


def accumulate(name: str, parts: Sequence[Tensor]) -> tuple[float, Tensor]:
    """Return the summed loss and the accumulated gradient of a tiny policy, log_softmax(θ).

    The minibatch is cut into `parts`.
    """
    batch = whole_batch()
    theta = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
    total = 0.0
    for part in parts:
        rows = {key: column[part] for key, column in batch.items()}
        # A shorter micro-batch is padded less.
        width = int(rows["mask"].any(0).nonzero().max()) + 1 if rows["mask"].any() else 1
        rows = {
            key: column[:, :width] if column.ndim == 2 else column for key, column in rows.items()
        }
        loss = loss_of(
            name, torch.log_softmax(theta, 0)[rows["ids"]], rows, int(batch["mask"].sum())
        )
        loss.backward()
        total += loss.item()
    assert theta.grad is not None
    return total, theta.grad


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["token", "sequence", "cispo", "nll"])
def test_every_split_into_micro_batches_gives_the_same_loss_and_gradient(name, seed):
    rng = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(B - 1, generator=rng)[: seed + 1].add(1).sort().values.tolist()
    parts = torch.tensor_split(torch.randperm(B, generator=rng), cuts)
    loss, grad = accumulate(name, [torch.arange(B)])
    split_loss, split_grad = accumulate(name, parts)
    assert grad.abs().max() > 1e-2
    assert split_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(split_grad, grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["token", "sequence", "cispo", "nll"])
def test_micro_batches_of_one_sample_give_the_same_gradient(name):
    torch.testing.assert_close(
        accumulate(name, torch.arange(B).split(1))[1],
        accumulate(name, [torch.arange(B)])[1],
        atol=1e-12,
        rtol=0,
    )


# ── errors ────────────────────────────────────────────────────────────────────────────────────────

X, A = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: clipped_surrogate(X, X, A, X, clip_low=-0.1, clip_high=0.2),
            "clip_low must not be negative",
        ),
        (
            lambda: clipped_surrogate(X, X, A, X, clip_low=0.1, clip_high=NAN),
            "clip_high must not be negative",
        ),
        (
            lambda: clipped_surrogate(
                X,
                X,
                A,
                X,
                clip_low=0.1,
                clip_high=0.2,
                ratio="word",  # pyright: ignore
            ),
            "ratio must be 'token' or",
        ),
        (
            lambda: clipped_surrogate(X, X[:, :2], A, X, clip_low=0.1, clip_high=0.2),
            r"old_logp must be \[2, 3\] like the mask",
        ),
        (
            lambda: clipped_surrogate(X[:1], X, A, X, clip_low=0.1, clip_high=0.2),
            r"logp must be \[2, 3\]",
        ),
        (
            lambda: clipped_surrogate(X, X, torch.zeros(3), X, clip_low=0.1, clip_high=0.2),
            r"adv must be \[2\] or \[2, 3\], not \[3\]",
        ),
        (
            lambda: clipped_surrogate(X, X, A, X, clip_low=0.1, clip_high=0.2, dual_clip=1.0),
            "dual_clip must be above 1",
        ),
        (
            lambda: clipped_surrogate(
                X, X, A, X, clip_low=0.1, clip_high=0.2, weights=torch.zeros(3)
            ),
            r"weights must be \[2\]",
        ),
        (lambda: cispo(X, X, A, X, eps_low=-1.0, eps_high=0.2), "eps_low must not be negative"),
        (
            lambda: cispo(X, X, A, X, eps_low=0.2, eps_high=0.2, total_tokens=0),
            "total_tokens must be at least 1",
        ),
        (lambda: cispo(X, X, X.T, X, eps_low=0.2, eps_high=0.2), "adv must be"),
        (lambda: nll(X[0], X[0]), r"mask must be \[b, t\]"),
        (lambda: nll(X[:0], X[:0]), r"mask must be \[b, t\]"),
        (lambda: nll(X, X, torch.zeros(2, 1)), "weights must be"),
        (lambda: truncated_importance_weights(X, X, X, cap=0.0), "cap must be positive"),
        (lambda: truncated_importance_weights(X, X[:1], X, cap=1.0), "engine_logp must be"),
    ],
)
def test_invalid_input_raises_an_error_with_its_name(call, text):
    with pytest.raises(ValueError, match=text):
        call()
