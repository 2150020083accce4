"""The torch engine and the local learner on a CUDA device: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crl.config.schema import OptimizerSection
from crl.engines.torch import TorchEngine
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import SurrogateLoss
from crl.modeling import load_model, resolve_device
from crl.types import Minibatch, Sampling, TokenTrace, TrainSample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

PROMPT = tuple(range(5, 45))


async def test_greedy_output_equals_transformers(tiny_actor: Path) -> None:
    model = load_model(tiny_actor, resolve_device("auto"))
    assert model.device.type == "cuda"
    engine = TorchEngine(model, max_batch=8, max_context=256)
    try:
        completion = await engine.generate(PROMPT, Sampling(16, (), 0.0))
    finally:
        await engine.aclose()
    expected = model.generate(  # pyright: ignore[reportCallIssue]
        torch.tensor([PROMPT], device="cuda"), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert list(completion.ids) == expected[0, len(PROMPT) :].tolist()


async def test_a_step_and_a_sync(tiny_actor: Path) -> None:
    """A positive advantage raises the log-prob of its tokens, and the engine samples with the new weights after the swap."""
    device = resolve_device("auto")
    engine = TorchEngine(load_model(tiny_actor, device), max_batch=8, max_context=256)
    learner = LocalLearner(
        load_model(tiny_actor, device), SurrogateLoss(0.2, 0.2, "token"), OptimizerSection(learning_rate=1e-3),
        TrainSettings(temperature=1.0, micro_batch_tokens=1024, max_grad_norm=1.0),
    )  # fmt: skip
    try:
        completion = await engine.generate(PROMPT, Sampling(8, ()), rng=1)
        trace = TokenTrace().with_context(PROMPT).with_sampled(completion)
        before = await engine.score(trace.ids)
        stats = await learner.step([Minibatch((TrainSample(trace, 1.0, 1.0),), 8)])
        assert stats.metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-5)
        handle = await learner.publish()
        await engine.update_weights(handle)
        after = await engine.score(trace.ids)
        assert engine.version == 1
        assert sum(after[-8:]) > sum(before[-8:])
    finally:
        await engine.aclose()
        await learner.aclose()
