"""Truncated sampling: kept tokens by hand, and the learner's statistics over them.

The reference for statistics and gradients is plain autograd on masked logits.
"""

from __future__ import annotations

import math

import pytest
import torch

import crl.modeling.loading
from crl.modeling.loading import HeadDistribution, TokenStats, token_logprobs
from crl.modeling.packing import enable_packing
from crl.modeling.truncation import KeptTokens, kept_sets, truncate
from support.kept_sets import kept_set
from support.torch_engines import V, prompts, qwen2

CPU = torch.device("cpu")
P = (0.2, 0.4, 0.1, 0.3)
"""Probabilities of a vocabulary of four tokens."""


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.6, 0, {1: 4 / 7, 3: 3 / 7}),  # 0.4 < 0.6 ≤ 0.4 + 0.3
        (0.3, 0, {1: 1.0}),
        (0.75, 0, {1: 4 / 9, 3: 3 / 9, 0: 2 / 9}),  # 0.7 < 0.75 ≤ 0.9
        (0.75, 3, {1: 4 / 7, 3: 3 / 7}),  # of three tokens, the first two have the mass 7/9 ≥ 0.75
        (1.0, 2, {1: 4 / 7, 3: 3 / 7}),
        (1.0, 9, dict(enumerate(P))),
        (1.0, 0, dict(enumerate(P))),
    ],
)
def test_the_kept_tokens_by_hand(top_p: float, top_k: int, kept: dict[int, float]) -> None:
    log_p = torch.tensor([P, (1.0, 1.0, 1.0, 1.0)]).log().log_softmax(-1)
    # The second row keeps everything, whatever the first one drops.
    result = truncate(log_p, torch.tensor([top_p, 1.0]), torch.tensor([top_k, 0]))
    assert result[0].exp().tolist() == pytest.approx([kept.get(token, 0.0) for token in range(4)])
    assert result[1].exp().tolist() == pytest.approx([0.25] * 4)
    assert kept_sets(result) == (kept_set(*sorted(kept)), kept_set(0, 1, 2, 3))


def test_the_log_probs_over_a_kept_set_by_hand() -> None:
    weight = torch.tensor([[math.log(p)] for p in P])
    kept = KeptTokens.of([b"", kept_set(1, 3), kept_set(2), b""], CPU)
    distribution = HeadDistribution(torch.ones(4, 1), weight, None, 1.0, kept)
    p = distribution.log_probs(slice(0, 9)).exp()
    assert p[0].tolist() == pytest.approx(P)
    assert p[1].tolist() == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7])
    assert p[2].tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])
    assert p[3].tolist() == pytest.approx(P)
    assert torch.equal(distribution.log_probs(slice(1, 3)).exp(), p[1:3])
    # At temperature 2 the odds are √(4/3).
    warm = HeadDistribution(torch.ones(4, 1), weight, None, 2.0, kept).log_probs(slice(1, 2))
    assert math.exp(warm[0, 1] - warm[0, 3]) == pytest.approx(math.sqrt(4 / 3))
    assert warm[0].exp().sum() == pytest.approx(1.0)


def test_without_kept_sets_nothing_is_restricted() -> None:
    assert KeptTokens.of([b"", b""], CPU) is None
    assert KeptTokens.of([], CPU) is None


def autograd_stats(model, reference, ids, mask, allowed, temperature: float) -> TokenStats:
    """Return the statistics of the selected tokens from whole rows of masked logits."""

    def log_probs(of) -> torch.Tensor:
        logits = of(input_ids=ids).logits[:, :-1][mask[:, 1:]] / temperature
        return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)

    log_p = log_probs(model)
    with torch.no_grad():
        log_q = log_probs(reference)
    finite = [x.masked_fill(~allowed, 0.0) for x in (log_p, log_q)]
    p = log_p.exp()
    return TokenStats(
        log_p.gather(-1, ids[mask][:, None])[:, 0],
        -(p * finite[0]).sum(-1).detach(),
        (p * (finite[0] - finite[1])).sum(-1),
    )


@pytest.mark.parametrize("tokens_at_a_time", [1000, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_and_gradients_equal_those_of_masked_logits(
    monkeypatch: pytest.MonkeyPatch, tokens_at_a_time: int, temperature: float
) -> None:
    monkeypatch.setattr(crl.modeling.loading, "MAX_LOGITS", V * tokens_at_a_time)
    ids = torch.tensor(prompts(12, 12))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 4:] = mask[1, 6:] = True
    draw = torch.Generator().manual_seed(3)
    allowed = torch.rand(int(mask.sum()), V, generator=draw) < 0.3
    allowed[torch.arange(len(allowed)), ids[mask]] = True
    allowed[[0, 5]] = True  # these tokens have no kept set
    kept = [kept_set(*row.nonzero()[:, 0].tolist()) for row in allowed]
    kept[0] = kept[5] = b""
    models, reference = (qwen2(), qwen2()), qwen2(seed=1)
    for model in (models[0], reference):
        enable_packing(model)
    found = token_logprobs(
        models[0], ids, mask, temperature, reference=reference, kept=KeptTokens.of(kept, CPU)
    )
    expected = autograd_stats(models[1], qwen2(seed=1), ids, mask, allowed, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs, atol=1e-5, rtol=1e-4)
        assert not bool(ours[~mask].any())
    gradients = []
    for model, stats in zip(models, (found, expected), strict=True):
        weights = torch.linspace(-1, 2, int(mask.sum()))
        logp, kl = (x[mask] if x.dim() == 2 else x for x in (stats.logp, stats.kl))
        (logp @ weights + kl.sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
