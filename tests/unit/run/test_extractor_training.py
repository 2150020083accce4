"""Eq. 7 in the extractor's loss: gradients of a real model with minibatches and CISPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from crl.config.schema import OptimizerSection
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.manager import ExtractorSample
from crl.methods.parts.training import CispoLoss
from crl.modeling.loading import load_model
from crl.protocols import ExtractorRole
from crl.run.experience import ExtractorTrainer, extractor_minibatches
from support.credited_banks import (
    ANSWERS,
    EAST,
    WEST,
    distil,
    lose,
    open_bank_with_two_adds,
    train,
    win,
)
from support.managers import NoteEngine, RecordingMonitor, hit, request


def policy_gradient(model: Path) -> LocalLearner:
    """Return a learner with CISPO, all ratios clipped to 1, and a learning rate of 0.

    Its gradients can therefore be compared.
    """
    loss, optimizer = CispoLoss(0.0, 0.0), OptimizerSection(learning_rate=0.0)
    return LocalLearner(
        load_model(model, torch.device("cpu")),
        loss,
        optimizer,
        TrainSettings(1.0, 8192, max_grad_norm=1e9),
    )


def gradient(learner: LocalLearner) -> torch.Tensor:
    """Return the gradient of the last update."""
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


async def gradient_of(learner: LocalLearner, samples: Sequence[ExtractorSample]) -> torch.Tensor:
    stats = await learner.step(extractor_minibatches(samples))
    assert stats.updates == 1
    return gradient(learner)


async def test_the_gradient_of_repeated_training_is_scaled_by_the_weight(tmp_path, tiny_actor):
    """Check that the gradient is proportional to the weight w: 1, 2^−½, 3^−½.

    Every batch holds the same tokens with r = ±1, so the baseline is 0 and only w differs.
    """
    engine, learner = NoteEngine(ANSWERS), policy_gradient(tiny_actor)
    manager = await open_bank_with_two_adds(tmp_path, engine=engine, cooldown=2, alpha=0.5)
    trained: list[int] = []
    trainer = ExtractorTrainer(
        manager, ExtractorRole(CispoLoss(0.0, 0.0), 2), learner, engine, RecordingMonitor(),
        on_trained=lambda: trained.append(manager.step),
    )  # fmt: skip
    gradients = []
    for step in range(5):
        manager.advance(step)
        await win(manager, WEST.use, f"{step} won")
        await lose(manager, EAST.use, f"{step} lost")
        await trainer.train()
        if trainer.updates > len(gradients):
            gradients.append((step, gradient(learner)))
    (_, first), (_, second), (_, third) = gradients
    assert [step for step, _ in gradients] == trained == [0, 2, 4]
    assert first.norm() > 1e-3
    torch.testing.assert_close(second, 2**-0.5 * first)
    torch.testing.assert_close(third, 3**-0.5 * first)
    await learner.aclose()
    await manager.aclose()


async def test_units_of_a_batch_are_scaled_by_their_weights(tmp_path, tiny_actor):
    """Check the gradient of a unit with w = ½ in a batch with other units, for α = 1.

    * First batch: r = 1 and −1, so A = 1.
    * Second batch: w = ½, and new units with −1 and ½. The baseline is ½ − 1 + ½ = 0, so A = ½.
    """
    learner = policy_gradient(tiny_actor)
    manager = await open_bank_with_two_adds(tmp_path, cooldown=0, alpha=1.0)
    await distil(manager, request(group=2, note="north"), request(group=3, note="two"))
    await win(manager, WEST.use, "1")
    await lose(manager, EAST.use, "2")
    own = [
        sample
        for sample in (await train(manager, 2, 1)).values()
        if sample.generation == "run/0/0/0"
    ]
    first = await gradient_of(learner, own)
    await win(manager, WEST.use, "3")
    await lose(manager, hit("run/0/2/0#0").use, "4")
    await win(manager, hit("run/0/3/0#0").use, "5", "6", "7")
    await lose(manager, hit("run/0/3/0#0").use, "8")
    batch = await train(manager, 3, 2)
    assert [(s.weight, s.advantage) for s in batch.values()][:3] == [
        (0.5, 0.5),
        (1.0, -1.0),
        (1.0, 0.5),
    ]
    again = await gradient_of(
        learner, [sample for sample in batch.values() if sample.generation == "run/0/0/0"]
    )
    torch.testing.assert_close(again, 0.5 * first)
    await learner.aclose()
    await manager.aclose()
