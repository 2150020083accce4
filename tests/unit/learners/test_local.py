"""Training step on real tiny models: its effect on the weights, and its metrics.

Some numbers are worked by hand, for a model whose tokens are all equally likely (`uniform_model`).
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crl.algo import cispo
from crl.config.schema import OptimizerSection
from crl.errors import ConfigError, LearnerError
from crl.learners.local import LocalLearner
from crl.learners.optimizer_file import OPTIMIZER_FILE
from crl.learners.step import Trainer, TrainSettings, adamw, mismatch, mismatch_moments
from crl.methods.parts.training import SurrogateLoss
from crl.modeling.loading import checksum, load_model, named_weights, token_logprobs
from crl.protocols import Loss
from crl.types import BEHAVIOUR, STEP_START, Minibatch, StepStats, TokenTrace, TrainSample
from support.kept_sets import kept_set

V = 16
SURROGATE = SurrogateLoss(clip_low=0.2, clip_high=0.2, ratio="token")
SETTINGS = TrainSettings(temperature=1.0, micro_batch_tokens=10_000, max_grad_norm=1e9)
NAN = float("nan")


def token_mean_cispo(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    weights: torch.Tensor,
    total_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return cispo(
        logp, old_logp, advantage, mask, eps_low=0.5, eps_high=2.0, total_tokens=total_tokens
    )


def qwen2(seed: int = 0) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24, initializer_range=0.2,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def uniform_model() -> PreTrainedModel:
    """Return a model for which all tokens are equally likely: log p = −log 16."""
    model = qwen2()
    torch.nn.init.zeros_(model.get_parameter("lm_head.weight"))
    return model


@torch.no_grad()
def trace(
    model: PreTrainedModel,
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    version: int = 0,
    shift: float = 0.0,
) -> TokenTrace:
    """Return a trace as an engine with the model's weights would sample it.

    The log-probs of the trace are off by `shift`.
    """
    trained = torch.tensor([mask], dtype=torch.bool)
    logp = token_logprobs(model, torch.tensor([ids]), trained).logp
    old = torch.where(trained, logp + shift, 0.0)[0].tolist()
    return TokenTrace(
        tuple(ids), tuple(mask), tuple(old), tuple(version if m else -1 for m in mask)
    )


def minibatch(model: PreTrainedModel, seed: int = 0, samples: int = 6) -> Minibatch:
    """Return samples of many lengths, with advantages of both signs and unequal weights."""
    draw = random.Random(seed)
    rows = []
    for i in range(samples):
        length = draw.randint(4, 20)
        ids = [draw.randrange(V) for _ in range(length)]
        mask = [0] + [draw.randint(0, 1) for _ in range(length - 2)] + [1]
        advantage: Any = draw.gauss(0, 1) if i % 2 else tuple(draw.gauss(0, 1) for _ in ids)
        rows.append(
            TrainSample(
                trace(model, ids, mask, shift=draw.gauss(0, 0.1)),
                advantage,
                draw.random() / samples,
            )
        )
    return Minibatch(tuple(rows), sum(sum(r.trace.mask) for r in rows) + 5)


def minibatch_of(sample: TrainSample) -> Minibatch:
    return Minibatch((sample,), sum(sample.trace.mask))


@asynccontextmanager
async def learning(
    model: PreTrainedModel,
    loss: Loss = SURROGATE,
    settings: TrainSettings = SETTINGS,
    **optimizer: float,
) -> AsyncIterator[LocalLearner]:
    section = OptimizerSection(
        **({"learning_rate": 1e-2} | optimizer),  # pyright: ignore[reportArgumentType]
    )
    learner = LocalLearner(model, loss, section, settings)
    try:
        yield learner
    finally:
        await learner.aclose()


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model).items()}


def weight_changes(
    model: PreTrainedModel, before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {name: tensor - before[name] for name, tensor in named_weights(model).items()}


def sgd_step(
    model: PreTrainedModel, batches: Sequence[Minibatch], loss: Loss = SURROGATE, **settings: Any
) -> StepStats:
    """Take one step of plain gradient descent at rate 1: the weights move by minus the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Trainer(model, optimizer, schedule, loss, replace(SETTINGS, **settings)).step(
        batches, version=0
    )


# ── the gradient ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("loss", [SURROGATE, token_mean_cispo], ids=["surrogate", "cispo"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_does_not_depend_on_the_micro_batches(loss: Loss, recompute: bool) -> None:
    batch = minibatch(qwen2())
    start, whole = weights(qwen2()), qwen2()
    stats = sgd_step(whole, [batch], loss, recompute=recompute)
    gradient = weight_changes(whole, start)
    assert stats.metrics["grad_norm"] == pytest.approx(
        math.sqrt(sum(float((g * g).sum()) for g in gradient.values())), rel=1e-5
    )
    for budget in (1, 25, 45):
        split = qwen2()
        other = sgd_step(split, [batch], loss, recompute=recompute, micro_batch_tokens=budget)
        for name, change in weight_changes(split, start).items():
            torch.testing.assert_close(
                change, gradient[name], rtol=1e-4, atol=1e-6 * stats.metrics["grad_norm"]
            )
        for name in ("loss", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "grad_norm"):
            assert other.metrics[name] == pytest.approx(stats.metrics[name], rel=1e-4, abs=1e-6), (
                name
            )


def test_gradients_above_the_norm_are_clipped_and_the_original_norm_is_reported() -> None:
    batch, start = minibatch(qwen2()), weights(qwen2())
    free, clipped = qwen2(), qwen2()
    norm = sgd_step(free, [batch]).metrics["grad_norm"]
    stats = sgd_step(clipped, [batch], max_grad_norm=norm / 4)
    assert stats.metrics["grad_norm"] == pytest.approx(norm)
    for name, change in weight_changes(clipped, start).items():
        torch.testing.assert_close(
            change, weight_changes(free, start)[name] / 4, rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("sign", [1.0, -1.0])
async def test_a_positive_advantage_raises_the_logprob_and_a_negative_one_lowers_it(
    sign: float,
) -> None:
    model = qwen2()
    sampled = trace(model, [1, 5, 7, 2, 9], [0, 1, 1, 0, 1])
    async with learning(model, learning_rate=1e-3) as learner:
        stats = await learner.step([minibatch_of(TrainSample(sampled, sign, 1.0))])
    after = trace(model, sampled.ids, sampled.mask)
    assert stats.updates == 1
    assert sign * (sum(after.logprobs) - sum(sampled.logprobs)) > 1e-3


async def test_token_advantages_of_both_signs_in_one_sample() -> None:
    model = qwen2()
    sampled = trace(model, [1, 5, 7, 2, 9], [0, 1, 0, 0, 1])
    async with learning(model, learning_rate=1e-3) as learner:
        await learner.step([minibatch_of(TrainSample(sampled, (0, 1.0, 0, 0, -1.0), 1.0))])
    after = trace(model, sampled.ids, sampled.mask)
    assert after.logprobs[1] > sampled.logprobs[1]
    assert after.logprobs[4] < sampled.logprobs[4]


async def test_masked_tokens_have_no_effect() -> None:
    sampled = trace(qwen2(), [1, 5, 7, 2, 9, 3], [0, 1, 0, 1, 0, 0])
    plain = TrainSample(sampled, (0.0, 1.0, 0.0, -2.0, 0.0, 0.0), 1.0)
    logprobs = tuple(p if m else NAN for p, m in zip(sampled.logprobs, sampled.mask, strict=True))
    # Noise in the context after the last trained token, and in log-probs and advantages of masked
    # tokens.
    noise = TrainSample(
        replace(sampled, ids=(1, 5, 7, 2, 4, 4), logprobs=logprobs),
        (NAN, 1.0, 1e9, -2.0, NAN, -1e9),
        1.0,
    )
    models = [qwen2(), qwen2()]
    for model, sample in zip(models, (plain, noise), strict=True):
        assert sgd_step(model, [minibatch_of(sample)]).updates == 1
    for name, tensor in named_weights(models[0]).items():
        torch.testing.assert_close(named_weights(models[1])[name], tensor, rtol=0, atol=0)


# ── by hand, on a uniform model ───────────────────────────────────────────────────────────────────


LOG_2 = math.log(2)


def uniform_sample(
    advantage: float, *, shift: float = 0.0, weight: float = 1.0, version: int = 0
) -> TrainSample:
    return TrainSample(
        trace(uniform_model(), [1, 5, 7, 2], [0, 1, 0, 1], shift=shift, version=version),
        advantage,
        weight,
    )


@pytest.mark.parametrize(
    ("settings", "advantage", "loss", "ratio"),
    [
        # For the engine, the tokens were half as likely: ρ = 2. It is clipped to 1.2 if that gives
        # the smaller objective.
        ({}, 3.0, -3.6, 2.0),
        ({}, -3.0, 6.0, 2.0),
        # With the trainer's own log-probs, ρ = 1. The mismatch of 2 is ignored without a cap. With
        # a cap, the mismatch is a factor, limited by the cap.
        ({"recompute": True}, 3.0, -3.0, 1.0),
        ({"recompute": True, "importance_cap": 1.5}, 3.0, -4.5, 1.0),
        ({"recompute": True, "importance_cap": 5.0}, -3.0, 6.0, 1.0),
    ],
)
def test_old_logprobs_and_importance_weights_by_hand(
    settings: dict[str, Any], advantage: float, loss: float, ratio: float
) -> None:
    stats = sgd_step(
        uniform_model(),
        [minibatch_of(uniform_sample(advantage, shift=-LOG_2))],
        **settings,
    )
    assert stats.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert (
        stats.metrics["ratio_mean"] == stats.metrics["ratio_max"] == pytest.approx(ratio, rel=1e-5)
    )


@pytest.mark.parametrize("settings", [{}, {"recompute": True, "importance_cap": 1.5}])
def test_tokens_that_no_policy_sampled_are_trained_by_their_likelihood(
    settings: dict[str, Any],
) -> None:
    """Check tokens that no policy sampled.

    The ratio is 1 for any log-probs in the trace, and the step is that of A · log p.
    """
    models = [uniform_model(), uniform_model()]
    one, other = (
        minibatch_of(uniform_sample(2.0, shift=shift, version=-1)) for shift in (-LOG_2, 3.0)
    )
    stats = [
        sgd_step(model, [batch], **settings)
        for model, batch in zip(models, (one, other), strict=True)
    ]
    for each in stats:
        assert each.metrics["ratio_mean"] == each.metrics["ratio_max"] == pytest.approx(1.0)
        assert each.metrics["grad_norm"] == pytest.approx(stats[0].metrics["grad_norm"])
        assert each.metrics["grad_norm"] > 0.1
    before, after = (
        trace(model, [1, 5, 7, 2], [0, 1, 0, 1]).logprobs for model in (uniform_model(), models[0])
    )
    assert sum(after) > sum(before) + 0.1


def test_recomputed_logprobs_are_those_before_the_first_update() -> None:
    """Train two equal minibatches.

    The first update changes the tokens' log-probs, so the ratio of the second minibatch is not 1.
    """
    batches = [minibatch_of(uniform_sample(1.0, shift=-LOG_2))] * 2
    stats = sgd_step(uniform_model(), batches, recompute=True)
    assert stats.updates == 2
    assert stats.metrics["ratio_max"] > 1.01


def test_a_sample_can_ask_for_the_logprobs_at_the_start_of_the_step() -> None:
    """Train two equal minibatches without `recompute`. The stored log-probs must have no effect."""
    batches = [minibatch_of(uniform_sample(1.0, shift=9.0, version=STEP_START))] * 2
    asked, recomputed = uniform_model(), uniform_model()
    stats = sgd_step(asked, batches)
    expected = sgd_step(recomputed, [minibatch_of(uniform_sample(1.0))] * 2, recompute=True)
    assert stats.metrics["ratio_max"] == pytest.approx(expected.metrics["ratio_max"])
    assert stats.metrics["ratio_max"] > 1.01
    for one, other in zip(asked.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_other_samples_keep_the_logprobs_of_the_engine() -> None:
    asks, sampled = uniform_sample(1.0, version=STEP_START), uniform_sample(1.0, shift=-LOG_2)
    stats = sgd_step(uniform_model(), [Minibatch((sampled, asks), 4)])
    assert stats.metrics["ratio_max"] == pytest.approx(2.0)
    assert stats.metrics["ratio_mean"] == pytest.approx(1.5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sample_can_keep_the_logprobs_of_the_policy_that_sampled_it(recompute: bool) -> None:
    """Check that the trainer does not replace stored log-probs, which belong to another prompt."""
    sample = uniform_sample(1.0, shift=-LOG_2, version=BEHAVIOUR)
    stats = sgd_step(uniform_model(), [minibatch_of(sample)], recompute=recompute)
    assert stats.metrics["ratio_mean"] == pytest.approx(2.0)


def test_losses_are_weighted_and_then_averaged_over_minibatches() -> None:
    one = Minibatch((uniform_sample(2.0, weight=0.25), uniform_sample(-1.0, weight=0.75)), 4)
    assert sgd_step(uniform_model(), [one]).metrics["loss"] == pytest.approx(-0.5 + 0.75)
    frozen = Trainer(uniform_model(), *frozen_optimizer(uniform_model()), SURROGATE, SETTINGS)
    assert frozen.step([one, minibatch_of(uniform_sample(1.0))], version=0).metrics[
        "loss"
    ] == pytest.approx((0.25 - 1.0) / 2)


def frozen_optimizer(
    model: PreTrainedModel,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return an optimizer and a schedule that do not change the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_the_kl_pulls_the_model_back_to_the_reference() -> None:
    """Check a second step in which only the KL term acts.

    The advantages are 0. The reference is the model as the trainer received it.
    """
    batch = minibatch_of(uniform_sample(3.0))
    quiet = minibatch_of(uniform_sample(0.0))
    model = uniform_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Trainer(
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        SURROGATE,
        replace(SETTINGS, kl_coef=2.0),
    )
    first = trainer.step([batch], version=0).metrics
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)  # before the update
    assert first["loss"] == pytest.approx(-3.0)
    second = trainer.step([quiet], version=1).metrics
    assert second["reference_kl"] > 0.1
    # Two of two tokens are trained.
    assert second["loss"] == pytest.approx(2.0 * second["reference_kl"], rel=1e-5)
    assert trainer.step([quiet], version=2).metrics["reference_kl"] < second["reference_kl"]


def test_the_kl_is_averaged_over_the_tokens_of_the_whole_minibatch() -> None:
    model = uniform_model()
    trainer = Trainer(
        model,
        *frozen_optimizer(model),
        SURROGATE,
        replace(SETTINGS, kl_coef=1.0, micro_batch_tokens=4),
    )
    with torch.no_grad():
        model.get_parameter("lm_head.weight").copy_(qwen2().get_parameter("lm_head.weight"))
    samples = (uniform_sample(0.0), uniform_sample(0.0))
    metrics = trainer.step([Minibatch(samples, 16)], version=0).metrics
    assert metrics["loss"] == pytest.approx(metrics["reference_kl"] * 4 / 16, rel=1e-5)


async def test_the_reference_after_a_resume_is_the_initial_model(tmp_path: Path) -> None:
    settings = replace(SETTINGS, kl_coef=0.5)
    model = qwen2()
    batches = [[minibatch(model, i)] for i in range(2)]
    async with learning(model, settings=settings) as learner:
        await learner.step(batches[0])
        await learner.save(tmp_path)
        uninterrupted = await learner.step(batches[1])
    async with learning(qwen2(), settings=settings) as learner:
        await learner.load(tmp_path)
        learner.load_state({"version": 1})
        assert await learner.step(batches[1]) == uninterrupted
    assert uninterrupted.metrics["reference_kl"] > 1e-4


def test_training_uses_the_sampling_temperature() -> None:
    model = qwen2()
    hot = replace(SETTINGS, temperature=1.7)
    ids = torch.tensor([[1, 5, 7, 2]])
    with torch.no_grad():
        log_p = (model(input_ids=ids).logits[0, :-1] / 1.7).log_softmax(-1)
    old = (0.0, *log_p.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    sampled = TokenTrace((1, 5, 7, 2), (0, 1, 1, 1), old, (-1, 0, 0, 0))
    stats = Trainer(model, *frozen_optimizer(model), SURROGATE, hot).step(
        [minibatch_of(TrainSample(sampled, 1.0, 1.0))], version=0
    )
    assert stats.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert stats.metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert stats.metrics["entropy"] == pytest.approx(
        float(-(log_p.exp() * log_p).sum(-1).mean()), rel=1e-4
    )


def test_the_entropy_of_a_uniform_model() -> None:
    assert sgd_step(uniform_model(), [minibatch(uniform_model())]).metrics[
        "entropy"
    ] == pytest.approx(math.log(V), rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_kept_sets_by_hand(recompute: bool) -> None:
    """Check tokens with kept sets of 4 tokens and of 1 token, and one without a kept set.

    All 16 tokens are equally likely, so the probabilities are 1/4, 1 and 1/16. The engine's are the
    same. The old log-probs are the engine's or the trainer's.
    """
    sampled = TokenTrace(
        (1, 5, 7, 2),
        (0, 1, 1, 1),
        (0.0, -math.log(4), 0.0, -math.log(16)),
        (-1, 0, 0, 0),
        (b"", kept_set(3, 5, 6, 15), kept_set(7), b""),
    )
    batch = Minibatch((TrainSample(sampled, 1.0, 1.0),), 3)
    model = uniform_model()
    metrics = sgd_step(model, [batch], recompute=recompute, kl_coef=1.0).metrics
    assert metrics["entropy"] == pytest.approx((math.log(4) + math.log(16)) / 3)
    assert metrics["ratio_max"] == metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    # Per token, ∂ loss / ∂ z is (p − 1[token]) / 3. Row 4 of the head belongs to a token outside
    # the kept sets: only the token without a kept set changes it. Rows 3 and 4 differ by the first
    # token, and row 7 by the second token, whose gradient is 0.
    head = model.get_parameter("lm_head.weight").detach()
    assert torch.equal(head[4], head[0])
    assert torch.equal(head[7], head[4])
    assert not torch.allclose(head[3], head[4])
    without = replace(batch.samples[0], trace=replace(sampled, kept=()))
    without_kept = sgd_step(uniform_model(), [replace(batch, samples=(without,))])
    assert without_kept.metrics["mismatch_kl"] > 0.5


def test_mismatch_is_measured_on_tokens_of_the_trainers_own_version() -> None:
    model = uniform_model()
    agreeing, off, older = (
        uniform_sample(1.0),
        uniform_sample(1.0, shift=-LOG_2),
        uniform_sample(1.0, shift=-5.0, version=3),
    )

    def mismatch(*samples: TrainSample) -> float | None:
        trainer = Trainer(
            model, *frozen_optimizer(model), SURROGATE, replace(SETTINGS, micro_batch_tokens=4)
        )
        return trainer.step([Minibatch(samples, 99)], version=0).metrics.get("mismatch_kl")

    assert mismatch(agreeing) == pytest.approx(0, abs=1e-6)
    # The trainer's probability is twice as large.
    assert mismatch(off) == pytest.approx(2 - 1 - LOG_2, rel=1e-5)
    assert mismatch(older) is None
    assert mismatch(older, off) == pytest.approx(2 - 1 - LOG_2, rel=1e-5)
    assert mismatch(off, agreeing) == pytest.approx((1 - LOG_2) / 2, rel=1e-4)


def test_mismatch_is_measured_on_a_probe_that_is_not_trained() -> None:
    """Check samples of an older version with a probe of two traces of the current version.

    The step must be the same as without the probe.
    """
    model, bare = uniform_model(), uniform_model()
    older, off = uniform_sample(1.0, version=3), uniform_sample(1.0, shift=-LOG_2).trace
    stats = sgd_step(
        model,
        [
            Minibatch((older,), 2, (off, off)),
            Minibatch((older,), 2, (uniform_sample(1.0, shift=-5.0).trace,)),
        ],
    )
    alone = sgd_step(bare, [Minibatch((older,), 2)] * 2)
    # The second probe follows an update and is ignored.
    assert stats.metrics["mismatch_kl"] == pytest.approx(2 - 1 - LOG_2, rel=1e-5)
    assert alone.metrics.keys() <= stats.metrics.keys()
    assert {name: stats.metrics[name] for name in alone.metrics} == alone.metrics
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True)
    )


def test_mismatch_is_not_measured_after_an_update() -> None:
    """Check the second of two minibatches.

    After the first update, the trainer's weights differ from those of the version that sampled.
    """
    model = uniform_model()
    stats = sgd_step(
        model,
        [
            minibatch_of(uniform_sample(1.0)),
            minibatch_of(uniform_sample(1.0, shift=-3.0)),
        ],
    )
    assert stats.metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)


def test_mismatch_with_recomputed_logprobs_uses_the_engines_logprobs() -> None:
    off, older = uniform_sample(1.0, shift=-LOG_2), uniform_sample(1.0, shift=-5.0, version=3)
    stats = sgd_step(
        uniform_model(),
        [Minibatch((off, older), 4), minibatch_of(off)],
        recompute=True,
        micro_batch_tokens=4,
    )
    assert stats.metrics["mismatch_kl"] == pytest.approx(2 - 1 - LOG_2, rel=1e-5)


def metrics(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    return mismatch(
        {name: float(value) for name, value in mismatch_moments(trainer, engine).items()}
    )


def test_mismatch_by_hand() -> None:
    engine = torch.tensor([-1.0, -2.0, -3.0])
    same = metrics(engine, engine)
    assert [
        float(same[f"mismatch_{name}"]) for name in ("kl", "correlation", "explained")
    ] == pytest.approx([0, 1, 0])
    sharper = metrics(2 * engine, engine)  # gaps −1, −2, −3
    assert float(sharper["mismatch_kl"]) == pytest.approx(
        (math.exp(-1) + math.exp(-2) + math.exp(-3) - 3 + 6) / 3, rel=1e-5
    )
    assert [
        float(sharper[f"mismatch_{name}"]) for name in ("correlation", "explained")
    ] == pytest.approx([1, 1])
    # Gaps −1, 1, 1. Around their mean: −4/3, 2/3, 2/3.
    apart = metrics(torch.tensor([-2.0, -1.0, -2.0]), engine)
    assert float(apart["mismatch_correlation"]) == pytest.approx(0, abs=1e-6)
    assert float(apart["mismatch_explained"]) == pytest.approx(2**2 / (24 / 9 * 2), rel=1e-5)
    constant = metrics(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -2.0]))
    assert [float(constant[f"mismatch_{name}"]) for name in ("correlation", "explained")] == [1, 0]


@pytest.mark.parametrize("micro_batch_tokens", [8, 24, 1000])
def test_the_mismatch_does_not_depend_on_the_micro_batches(micro_batch_tokens: int) -> None:
    """Compare with the mismatch over all tokens at once, for any number of passes.

    Engine log-probs and gaps differ from sample to sample.
    """
    draw = torch.Generator().manual_seed(0)
    model = qwen2()
    ids = [tuple(torch.randint(V, (n,), generator=draw).tolist()) for n in (8, 3, 6, 5)]
    engine = [(0.0, *(-1.0 - 4 * torch.rand(len(row) - 1, generator=draw)).tolist()) for row in ids]
    rows = [
        TokenTrace(row, (0, *(1,) * (len(row) - 1)), logp, (0,) * len(row))
        for row, logp in zip(ids, engine, strict=True)
    ]
    with torch.no_grad():
        own = [
            token_logprobs(model, torch.tensor([row]), torch.arange(len(row))[None] > 0).logp[0, 1:]
            for row in ids
        ]
    expected = metrics(torch.cat(own), torch.tensor([value for row in engine for value in row[1:]]))
    assert 0.01 < abs(expected["mismatch_correlation"]) < 0.99
    trainer = Trainer(
        model,
        *frozen_optimizer(model),
        SURROGATE,
        replace(SETTINGS, micro_batch_tokens=micro_batch_tokens),
    )
    stats = trainer.step(
        [Minibatch(tuple(TrainSample(row, 0.5, 0.25) for row in rows), 99)], version=0
    )
    for name, value in expected.items():
        assert stats.metrics[name] == pytest.approx(value, rel=1e-4), name


# ── half precision ────────────────────────────────────────────────────────────────────────────────


def to_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    return model.bfloat16()


async def test_updates_below_the_models_precision_accumulate() -> None:
    """Check 60 updates of 1e-4. The step size of bfloat16 at 1 is 4e-3.

    AdamW without memory moves every weight by the learning rate.
    """
    model = to_bfloat16(qwen2())
    norm = model.get_parameter("model.norm.weight")
    assert bool((norm == 1).all())
    sampled = minibatch_of(TrainSample(trace(model, [1, 5, 7, 2, 9], [0, 1, 1, 0, 1]), 1.0, 1.0))
    async with learning(model, token_mean_cispo, learning_rate=1e-4, beta1=0, beta2=0) as learner:
        await learner.step([sampled] * 10)
        assert bool((norm == 1).all()), "one update is smaller than the precision of bfloat16"
        await learner.step([sampled] * 50)
    assert float((norm.detach().float() - 1).abs().median()) == pytest.approx(60e-4, rel=0.4)
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.parameters())


def test_logprobs_and_loss_are_float32_in_half_precision() -> None:
    seen = []

    def watching(logp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = SURROGATE(logp, *args, **kwargs)
        seen.extend([logp.dtype, loss.dtype])
        return loss, metrics

    full = sgd_step(qwen2(), [minibatch(qwen2())])
    half = sgd_step(to_bfloat16(qwen2()), [minibatch(qwen2())], loss=watching)
    assert seen == [torch.float32, torch.float32]
    for name in ("loss", "entropy", "grad_norm"):
        assert half.metrics[name] == pytest.approx(full.metrics[name], rel=0.05), name


async def test_gradients_of_half_precision_micro_batches_are_summed_in_float32() -> None:
    batch = minibatch(qwen2(), samples=24)
    norms = []
    for budget in (10_000, 1):
        async with learning(
            to_bfloat16(qwen2()),
            settings=replace(SETTINGS, micro_batch_tokens=budget),
            learning_rate=0,
        ) as learner:
            norms.append((await learner.step([batch])).metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)


@pytest.mark.parametrize("half", [False, True])
async def test_a_model_is_saved_without_its_optimizer(half: bool, tmp_path: Path) -> None:
    model = to_bfloat16(qwen2()) if half else qwen2()
    async with learning(model, learning_rate=1e-4) as learner:
        await learner.step([minibatch(model)])
        for name, optimizer in (("with", True), ("without", False)):
            (tmp_path / name).mkdir()
            (await learner.prepare_save(tmp_path / name, optimizer=optimizer))()
    names = {path.name for path in (tmp_path / "with").iterdir()}
    assert names - {path.name for path in (tmp_path / "without").iterdir()} == {OPTIMIZER_FILE}
    saved = [tmp_path / name / "model.safetensors" for name in ("with", "without")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


async def test_a_resumed_learner_in_half_precision_is_bit_identical(tmp_path: Path) -> None:
    model = to_bfloat16(qwen2())
    batches = [[minibatch(model, i)] for i in range(2)]
    async with learning(model, learning_rate=1e-4) as learner:
        await learner.step(batches[0])
        await learner.save(tmp_path)
        handle = await learner.publish()
        uninterrupted = await learner.step(batches[1])
        expected = (await learner.publish()).checksum
    assert set(handle.manifest.dtypes) == {"torch.bfloat16"}
    async with learning(to_bfloat16(qwen2(seed=9)), learning_rate=1e-4) as learner:
        await learner.load(tmp_path)
        learner.load_state({"version": 1})
        assert (await learner.publish()).checksum == handle.checksum
        assert await learner.step(batches[1]) == uninterrupted
        assert (await learner.publish()).checksum == expected


async def test_activation_checkpointing_changes_no_step() -> None:
    stats = []
    for checkpointing in (False, True):
        model = qwen2()
        async with learning(
            model, settings=replace(SETTINGS, activation_checkpointing=checkpointing, kl_coef=0.1)
        ) as learner:
            stats.append(
                (
                    await learner.step([minibatch(qwen2()), minibatch(qwen2(), 1)]),
                    (await learner.publish()).checksum,
                )
            )
    assert stats[0] == stats[1]


# ── non-finite values ─────────────────────────────────────────────────────────────────────────────


def with_nonfinite(batch: Minibatch, how: str) -> Minibatch:
    first, *rest = batch.samples
    if how == "log-prob":
        logprobs = [
            NAN if m else p for p, m in zip(first.trace.logprobs, first.trace.mask, strict=True)
        ]
        bad = replace(first, trace=replace(first.trace, logprobs=tuple(logprobs)))
    else:
        bad = replace(first, advantage={"advantage": NAN, "infinite advantage": math.inf}[how])
    return replace(batch, samples=(bad, *rest))


@pytest.mark.parametrize("how", ["advantage", "infinite advantage", "log-prob"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_minibatch_with_nonfinite_values_is_skipped(how: str, place: int) -> None:
    base = qwen2()
    good = [minibatch(base, seed=1), minibatch(base, seed=2)]
    with_bad = [*good[:place], with_nonfinite(minibatch(base, seed=3), how), *good[place:]]
    clean, guarded = qwen2(), qwen2()
    results = []
    for model, batches in ((clean, good), (guarded, with_bad)):
        async with learning(model, warmup_steps=3) as learner:
            results.append(await learner.step(batches))
            assert learner.version == 1
    assert (results[1].updates, results[1].skipped) == (2, 1)
    assert checksum(named_weights(guarded)) == checksum(named_weights(clean)), (
        "equal to a step without the minibatch"
    )
    assert all(math.isfinite(value) for value in results[1].metrics.values()), results[1].metrics
    same = {name: value for name, value in results[0].metrics.items() if name != "samples"}
    assert {name: results[1].metrics[name] for name in same} == same


async def test_a_step_with_only_nan_changes_nothing(tmp_path: Path) -> None:
    model = qwen2()
    async with learning(model, warmup_steps=4) as learner:
        await learner.step([minibatch(model)])
        (tmp_path / "before").mkdir()
        (tmp_path / "after").mkdir()
        await learner.save(tmp_path / "before")
        stats = await learner.step([with_nonfinite(minibatch(model), "advantage")])
        await learner.save(tmp_path / "after")
        assert (stats.updates, stats.skipped, learner.version) == (0, 1, 1)
        assert all(math.isfinite(value) for value in stats.metrics.values())
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()


async def test_a_save_is_not_divided_by_a_step(tmp_path: Path) -> None:
    """Check that weights and optimizer are of the same step if another step waits meanwhile."""
    model = qwen2()
    async with learning(model) as learner:
        await learner.step([minibatch(model)])
        (tmp_path / "alone").mkdir()
        (tmp_path / "beside").mkdir()
        await learner.save(tmp_path / "alone")
        write, _ = await asyncio.gather(
            learner.prepare_save(tmp_path / "beside"), learner.step([minibatch(model, 1)])
        )
        write()
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "beside" / file).read_bytes()


async def test_a_step_without_minibatches_makes_no_update() -> None:
    async with learning(qwen2()) as learner:
        stats = await learner.step([])
        assert (stats.updates, stats.skipped, learner.version) == (0, 0, 0)


# ── schedule, version, published weights ──────────────────────────────────────────────────────────


async def test_the_warmup_is_linear_and_the_applied_rate_is_reported() -> None:
    """Check the learning rate by the size of the updates.

    AdamW without memory moves a weight by the learning rate, regardless of the gradient's size.
    """
    model = qwen2()
    moves, reported = [], []
    async with learning(model, learning_rate=1e-4, warmup_steps=4, beta1=0, beta2=0) as learner:
        for seed in range(6):
            before = weights(model)
            reported.append((await learner.step([minibatch(model, seed)])).metrics["learning_rate"])
            changes = torch.cat(
                [change.abs().flatten() for change in weight_changes(model, before).values()]
            )
            moves.append(float(changes[changes > 0].median()))
    assert moves == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4], rel=0.02)
    assert reported == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4])


async def test_the_learning_rate_falls_linearly_to_zero() -> None:
    """Check a warm-up of 2 updates, a decay over the 4 others, and that nothing changes later."""
    model = qwen2()
    reported = []
    async with learning(model, learning_rate=1e-4, warmup_steps=2, decay_steps=6) as learner:
        for seed in range(6):
            reported.append((await learner.step([minibatch(model, seed)])).metrics["learning_rate"])
        before = checksum(named_weights(model))
        stats = await learner.step([minibatch(model)])
    assert reported == pytest.approx([0.5e-4, 1e-4, 0.8e-4, 0.6e-4, 0.4e-4, 0.2e-4])
    assert (stats.updates, stats.metrics["learning_rate"]) == (1, 0.0)
    assert checksum(named_weights(model)) == before


@pytest.mark.parametrize(("warmup", "decay"), [(7, 6), (9, 6), (6, 6), (3, 1)])
def test_a_warm_up_that_is_longer_than_the_decay(warmup: int, decay: int) -> None:
    """The config refuses it, except for settings that are copied without a check."""
    section = OptimizerSection(learning_rate=1.0, warmup_steps=warmup, decay_steps=decay)
    _, schedule = adamw([torch.zeros(1)], section)
    rates = [schedule.lr_lambdas[0](update) for update in range(12)]
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert rates[decay:] == [0.0] * (12 - decay)


async def test_weights_without_a_gradient_decay() -> None:
    model = qwen2()
    # A token that does not occur in the batch.
    before = model.get_parameter("model.embed_tokens.weight")[9].clone()
    async with learning(model, learning_rate=0.1, weight_decay=0.5) as learner:
        await learner.step([minibatch_of(uniform_sample(1.0))])
    torch.testing.assert_close(
        model.get_parameter("model.embed_tokens.weight")[9], before * (1 - 0.1 * 0.5)
    )


async def test_a_learning_rate_of_zero_trains_nothing() -> None:
    model = qwen2()
    before = checksum(named_weights(model))
    async with learning(model, learning_rate=0, weight_decay=0.1) as learner:
        stats = await learner.step([minibatch(model), minibatch(model, 1)])
    assert stats.updates == 2
    assert checksum(named_weights(model)) == before


async def test_later_training_does_not_change_published_weights() -> None:
    model = qwen2()
    async with learning(model) as learner:
        await learner.step([minibatch(model)])
        handle = await learner.publish()
        published = {name: tensor.clone() for name, tensor in handle.tensors.items()}
        await learner.step([minibatch(model, 1)])
        assert handle.version == 1
        assert (await learner.publish()).version == 2
        assert handle.checksum == checksum(handle.tensors) == checksum(published)
        assert handle.checksum != checksum(named_weights(model))
        assert (await learner.publish()).checksum == checksum(named_weights(model))


async def test_a_resumed_learner_is_bit_identical(tmp_path: Path) -> None:
    model = qwen2()
    batches = [[minibatch(model, 2 * i), minibatch(model, 2 * i + 1)] for i in range(3)]
    async with learning(model, warmup_steps=5) as learner:
        await learner.step(batches[0])
        await learner.step(batches[1])
        await learner.save(tmp_path)
        state = copy.deepcopy(learner.state())
        uninterrupted = await learner.step(batches[2])
        expected = checksum(named_weights(model))
    other = qwen2(seed=9)
    async with learning(other, warmup_steps=5) as learner:
        await learner.step(batches[0])  # the learner's earlier state does not matter
        await learner.load(tmp_path)
        learner.load_state(state)
        resumed = await learner.step(batches[2])
        assert learner.version == 3
        await learner.save(tmp_path / "again")
    assert checksum(named_weights(other)) == expected
    assert resumed == uninterrupted


async def test_a_saved_model_can_be_loaded_by_transformers(tmp_path: Path) -> None:
    model = qwen2()
    async with learning(model) as learner:
        await learner.step([minibatch(model)])
        await learner.save(tmp_path / "actor")
    read = Qwen2ForCausalLM.from_pretrained(tmp_path / "actor")
    assert checksum(named_weights(read)) == checksum(named_weights(model))


async def test_failures_are_raised_as_learner_errors(tmp_path: Path) -> None:
    model = qwen2()
    outside = TokenTrace((1, V + 3), (0, 1), (0.0, -1.0), (-1, 0))
    async with learning(model) as learner:
        with pytest.raises(LearnerError, match=r"the learner failed: .*out of (range|bounds)"):
            await learner.step([minibatch_of(TrainSample(outside, 1.0, 1.0))])
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(LearnerError, match="the learner failed"):
            await learner.save(tmp_path / "file" / "actor")


async def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    model = qwen2()
    async with learning(model) as learner:
        for name in ("torn", "bare"):
            (tmp_path / name).mkdir()
            await learner.save(tmp_path / name)
        saved = load_file(tmp_path / "torn" / "model.safetensors")
        del saved["model.norm.weight"]
        save_file(saved, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "bare" / "optimizer.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"nowhere.*cannot be loaded"):
            await learner.load(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"lacks weights: model\.norm\.weight"):
            await learner.load(tmp_path / "torn")
        with pytest.raises(
            LearnerError, match=r"bare contains no optimizer\.safetensors: it is not a checkpoint"
        ):
            await learner.load(tmp_path / "bare")


async def test_a_resumed_learner_uses_the_learning_rate_of_its_settings(tmp_path: Path) -> None:
    async with learning(model := qwen2(), warmup_steps=4) as learner:
        before = await learner.step([minibatch(model)])
        await learner.save(tmp_path)
    async with learning(model := qwen2(), warmup_steps=4) as learner:
        await learner.load(tmp_path)
        same = await learner.step([minibatch(model)])
    async with learning(model := qwen2(), warmup_steps=8) as learner:
        await learner.load(tmp_path)
        slower = await learner.step([minibatch(model)])
    rate = before.metrics["learning_rate"]
    assert same.metrics["learning_rate"] == pytest.approx(2 * rate)
    assert slower.metrics["learning_rate"] == pytest.approx(rate)


async def test_a_checkpoint_without_weights_is_an_error_of_the_models_setting(
    tiny_actor: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_actor, torch.device("cpu"))
    learner = LocalLearner(model, SURROGATE, OptimizerSection(), SETTINGS, key="extractor.model")
    with pytest.raises(ConfigError, match=r"^extractor\.model = "):
        await learner.load(tmp_path)
    await learner.aclose()
