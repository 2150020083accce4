"""Real ZeRO over gloo on the CPU, held against the local learner: the same step, whatever is cut up among how many ranks."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from crl.config.schema import OptimizerSection
from crl.learners.deepspeed import DeepSpeedLearner, RankSettings
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import CispoLoss, SurrogateLoss
from crl.modeling import checksum, load_model, named_weights
from crl.types import Minibatch, StepStats, TokenTrace, TrainSample

pytest.importorskip("deepspeed", reason="the extra crl[deepspeed] is not installed")

V = 1024
SURROGATE = SurrogateLoss(clip_low=0.2, clip_high=0.2, ratio="token")
SETTINGS = TrainSettings(temperature=1.0, micro_batch_tokens=64, max_grad_norm=1e9)
RATE = OptimizerSection(learning_rate=1e-3, warmup_steps=3)
NAN = math.nan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tied embeddings, and matrices large enough to be cut up at stage 3, where small ones are not."""
    return written(tmp_path_factory.mktemp("model"), tied=True)


def written(path: Path, *, tied: bool) -> Path:
    config = Qwen2Config(
        vocab_size=V, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1001,
        initializer_range=0.2, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def minibatch(seed: int, samples: int = 7) -> Minibatch:
    """Samples of many lengths with advantages of both signs and unequal weights; an odd number, so that ranks' shares differ."""
    draw = random.Random(seed)
    rows = []
    for i in range(samples):
        length = draw.randint(4, 40)
        mask = (0, *(draw.randint(0, 1) for _ in range(length - 2)), 1)
        logprobs = tuple(-draw.uniform(5, 9) if m else 0.0 for m in mask)
        trace = TokenTrace(tuple(draw.randrange(V) for _ in mask), mask, logprobs, tuple(0 if m else -1 for m in mask))
        advantage: Any = draw.gauss(0, 1) if i % 2 else tuple(draw.gauss(0, 1) for _ in mask)
        rows.append(TrainSample(trace, advantage, draw.random() / samples))
    return Minibatch(tuple(rows), sum(sum(r.trace.mask) for r in rows) + 5)


def spoiled(batch: Minibatch) -> Minibatch:
    first, *rest = batch.samples
    return replace(batch, samples=(replace(first, advantage=NAN), *rest))


@asynccontextmanager
async def local(path: Path, loss: Any = SURROGATE, settings: TrainSettings = SETTINGS) -> AsyncIterator[LocalLearner]:
    learner = LocalLearner(load_model(path, torch.device("cpu")), loss, RATE, settings)
    try:
        yield learner
    finally:
        await learner.aclose()


@asynccontextmanager
async def ranks(
    path: Path, count: int = 2, loss: Any = SURROGATE, train: TrainSettings = SETTINGS, *, deadline: float = 120.0, **settings: Any
) -> AsyncIterator[DeepSpeedLearner]:
    given: dict[str, Any] = {"device": "cpu", "precision": "float32", "threads": 1, "zero": 2, "offload": False, "deterministic": False}
    filled = RankSettings(model=path, key="actor.model", loss=loss, optimizer=RATE, train=train, deadline=deadline, **(given | settings))
    learner = await DeepSpeedLearner.start(filled, count, deadline=deadline)
    try:
        yield learner
    finally:
        await learner.aclose()


@dataclass
class Outcome:
    """gradients: of the first step, as the optimizer's first moments after it hold them."""

    stats: list[StepStats]
    gradients: Mapping[str, torch.Tensor]
    published: Mapping[str, torch.Tensor]


def close(value: float, other: float) -> bool:
    return value == pytest.approx(other, rel=1e-5, abs=1e-5)


async def outcome(learner: Any, folder: Path, steps: Sequence[Sequence[Minibatch]]) -> Outcome:
    stats = [await learner.step(steps[0])]
    folder.mkdir()
    await learner.save(folder)
    stats += [await learner.step(step) for step in steps[1:]]
    handle = await learner.publish()
    published = {name: tensor.clone() for name, tensor in handle.tensors.items()}
    assert handle.checksum == checksum(published)
    handle.discard()
    return Outcome(stats, moments(folder), published)


def moments(folder: Path) -> Mapping[str, torch.Tensor]:
    """exp_avg by parameter; after one update without clipping it is (1 - beta1) times the gradient."""
    if (folder / "optimizer.safetensors").is_file():
        saved = load_file(folder / "optimizer.safetensors")
        return {name.removeprefix("exp_avg."): tensor for name, tensor in saved.items() if name.startswith("exp_avg.")}
    saved = torch.load(folder / "optimizer.pt", weights_only=True)["optimizer"]["state"]
    names = named_weights(load_model(folder, torch.device("cpu")))
    return {name: saved[i]["exp_avg"] for i, name in enumerate(names)}


STEPS = [[minibatch(0)], [minibatch(1), spoiled(minibatch(2)), minibatch(3, samples=1)], [minibatch(4), minibatch(5)]]
"""In the second one a minibatch that is refused, and one that leaves a rank with nothing to do."""


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"offload": True}),
        (3, {"train": replace(SETTINGS, recompute=True, importance_cap=2.0, kl_coef=0.3), "loss": CispoLoss(0.5, 2.0)}),
        (2, {"train": replace(SETTINGS, kl_coef=0.3, max_grad_norm=0.05), "count": 3}),
    ],
    ids=["0", "1", "2", "3", "offload", "recompute, kl and cispo at 3", "kl and clipping on three ranks"],
)
async def test_ranks_train_as_one_process_does(model: Path, tmp_path: Path, zero: int, options: dict[str, Any]) -> None:
    async with local(model, options.get("loss", SURROGATE), options.get("train", SETTINGS)) as learner:
        alone = await outcome(learner, tmp_path / "local", STEPS)
    async with ranks(model, zero=zero, **options) as learner:
        together = await outcome(learner, tmp_path / "ranks", STEPS)
        assert learner.version == 3
    assert [(s.updates, s.skipped) for s in together.stats] == [(1, 0), (2, 1), (2, 0)]
    for stats, other in zip(together.stats, alone.stats, strict=True):
        assert stats.metrics.keys() == other.metrics.keys()
        for name, value in other.metrics.items():
            tolerance = {"rel": 1e-4, "abs": 1e-5}
            if name != "masked_fraction":  # of positions, padding among them: it depends on the cut
                assert stats.metrics[name] == pytest.approx(value, **tolerance), name
    assert together.stats[0].metrics["loss"] == pytest.approx(alone.stats[0].metrics["loss"], rel=1e-5, abs=1e-5)
    assert together.gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(together.gradients[name] * 10, gradient * 10, rtol=1e-5, atol=1e-5)
    assert together.published.keys() == alone.published.keys()
    for name, weight in alone.published.items():
        torch.testing.assert_close(together.published[name], weight, rtol=0, atol=2e-4)
