"""Comparison of real ZeRO, over gloo on the CPU, with the local learner.

The ranks must take the same step for every ZeRO stage and every number of ranks.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from crl.config.schema import LoraSection, OptimizerSection
from crl.engines.torch import TorchEngine
from crl.errors import ConfigError, LearnerError
from crl.learners.deepspeed import (
    DIAGNOSIS_DELAY_S,
    HEARTBEAT_S,
    HEARTBEAT_TIMEOUT_S,
    ComputeSettings,
    DeepSpeedLearner,
    RankModel,
    RankSettings,
    ZeroSettings,
)
from crl.learners.local import LocalLearner
from crl.learners.optimizer_file import OPTIMIZER_FILE
from crl.learners.step import MicroBatch, TrainSettings
from crl.methods.parts.training import CispoLoss, SurrogateLoss
from crl.modeling.adapters import BaseModel
from crl.modeling.loading import checksum, load_model, named_weights
from crl.modeling.lora import (
    ADAPTER_WEIGHTS,
    Adapter,
    adapter_parameters,
    add_adapter,
    write_merged,
)
from crl.modeling.weights import FileWeights
from crl.run.sync import sync_weights
from crl.types import KeptSet, Minibatch, Sampling, StepStats, TokenTrace, TrainSample
from support.kept_sets import kept_set

pytest.importorskip(
    "deepspeed", reason="the extra crl[deepspeed] is not installed: make test-engines installs it"
)

V = 1024
SURROGATE = SurrogateLoss(clip_low=0.2, clip_high=0.2, ratio="token")
SETTINGS = TrainSettings(temperature=1.0, micro_batch_tokens=64, max_grad_norm=1e9)
RATE = OptimizerSection(learning_rate=1e-3, warmup_steps=3)
NAN = math.nan

PACKING_METRICS = {"masked_fraction"}
"""Metrics that depend on how samples are packed into passes.

`masked_fraction` is a fraction of all positions, padding included.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model with tied embeddings.

    Its matrices are large enough that ZeRO stage 3 partitions them. Small matrices are not
    partitioned.
    """
    return tiny_model(tmp_path_factory.mktemp("model"), tied=True)


def tiny_model(path: Path, *, tied: bool) -> Path:
    config = Qwen2Config(
        vocab_size=V, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=1001, initializer_range=0.2,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def minibatch(seed: int, samples: int = 7) -> Minibatch:
    """Return samples of many lengths, with advantages of both signs and unequal weights.

    The default number of samples is odd, so that the shares of the ranks differ.
    """
    draw = random.Random(seed)
    rows = []
    for i in range(samples):
        length = draw.randint(4, 40)
        mask = (0, *(draw.randint(0, 1) for _ in range(length - 2)), 1)
        logprobs = tuple(-draw.uniform(5, 9) if m else 0.0 for m in mask)
        trace = TokenTrace(
            tuple(draw.randrange(V) for _ in mask),
            mask,
            logprobs,
            tuple(0 if m else -1 for m in mask),
        )
        advantage: Any = draw.gauss(0, 1) if i % 2 else tuple(draw.gauss(0, 1) for _ in mask)
        rows.append(TrainSample(trace, advantage, draw.random() / samples))
    return Minibatch(tuple(rows), sum(sum(r.trace.mask) for r in rows) + 5)


def with_nan(batch: Minibatch) -> Minibatch:
    first, *rest = batch.samples
    return replace(batch, samples=(replace(first, advantage=NAN), *rest))


def adapter_of(path: Path, *, rank: int = 4, merged: bool = True) -> Adapter:
    """Return an adapter of all linear layers. ZeRO stage 3 partitions it from rank 128 on."""
    return Adapter(
        LoraSection(rank=rank, alpha=2.0 * rank), BaseModel.of(path), seed=3, merged=merged
    )


@asynccontextmanager
async def local(
    path: Path,
    loss: Any = SURROGATE,
    settings: TrainSettings = SETTINGS,
    adapter: Adapter | None = None,
    dtype: torch.dtype = torch.float32,
) -> AsyncIterator[LocalLearner]:
    model = load_model(path, torch.device("cpu"), dtype)
    if adapter:
        add_adapter(model, adapter)
    learner = LocalLearner(model, loss, RATE, settings, adapter=adapter)
    try:
        yield learner
    finally:
        await learner.aclose()


@asynccontextmanager
async def ranks(
    path: Path,
    count: int = 2,
    loss: Any = SURROGATE,
    train: TrainSettings = SETTINGS,
    *,
    timeout: float = 120.0,
    precision: Literal["float32", "bfloat16"] = "float32",
    zero: int = 2,
    offload: bool = False,
    adapter: Adapter | None = None,
) -> AsyncIterator[DeepSpeedLearner]:
    rank_settings = RankSettings(
        model=RankModel(path, "actor.model", adapter),
        loss=loss,
        optimizer=RATE,
        train=train,
        compute=ComputeSettings("cpu", precision, threads=1, deterministic=False),
        zero=ZeroSettings(zero, offload),
        timeout=timeout,
    )
    learner = await DeepSpeedLearner.start(rank_settings, count)
    try:
        yield learner
    finally:
        await learner.aclose()


def any_learner(path: Path, stage_and_ranks: tuple[int, int] | None) -> Any:
    """Return the context of a learner with this stage and number of ranks; None = a local one."""
    if stage_and_ranks is None:
        return local(path)
    stage, count = stage_and_ranks
    return ranks(path, count, zero=stage)


@dataclass
class Outcome:
    """Step statistics, gradients and published weights of a learner."""

    stats: list[StepStats]
    gradients: Mapping[str, torch.Tensor]
    """First moments of the optimizer after the first step.

    They are proportional to the gradients of this step.
    """
    published: Mapping[str, torch.Tensor]


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def outcome(learner: Any, folder: Path, steps: Sequence[Sequence[Minibatch]]) -> Outcome:
    stats = [await learner.step(steps[0])]
    await learner.save(folder)
    stats += [await learner.step(step) for step in steps[1:]]
    handle = await published_file(learner)
    published = {name: tensor.clone() for name, tensor in handle.tensors.items()}
    assert handle.checksum == checksum(published)
    handle.discard()
    return Outcome(stats, moments(folder), published)


async def published_file(learner: Any) -> FileWeights:
    handle = await learner.publish()
    assert handle.transport in ("file", "in-process")
    return handle


def moments(folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the optimizer's first moments (`exp_avg`) by parameter name.

    After one update without clipping, a first moment is (1 - beta1) times the gradient.
    """
    return {
        name.removeprefix("exp_avg."): tensor
        for name, tensor in load_file(folder / "optimizer.safetensors").items()
        if name.startswith("exp_avg.")
    }


def with_probe(batch: Minibatch) -> Minibatch:
    """Return the batch with a trace that is probed but not trained.

    Only one rank gets the trace.
    """
    return replace(batch, probe=(minibatch(6, samples=1).samples[0].trace,))


STEPS = [
    [with_probe(minibatch(0))],
    [minibatch(1), with_nan(minibatch(2)), minibatch(3, samples=1)],
    [minibatch(4), minibatch(5)],
]
"""Minibatches of three steps.

The second step contains a minibatch that is rejected and a minibatch with a single sample, which
leaves a rank without work.
"""


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        pytest.param(0, {}, marks=pytest.mark.soak, id="0"),
        pytest.param(1, {}, marks=pytest.mark.soak, id="1"),
        pytest.param(2, {}, marks=pytest.mark.soak, id="2"),
        pytest.param(3, {}, id="3"),
        pytest.param(2, {"offload": True}, marks=pytest.mark.soak, id="offload"),
        pytest.param(
            3,
            {
                "train": replace(SETTINGS, recompute=True, importance_cap=2.0, kl_coef=0.3),
                "loss": CispoLoss(0.5, 2.0),
            },
            marks=pytest.mark.soak,
            id="recompute, kl and cispo at 3",
        ),
        pytest.param(
            2,
            {"train": replace(SETTINGS, kl_coef=0.3, max_grad_norm=0.05), "count": 3},
            marks=pytest.mark.soak,
            id="kl and clipping on three ranks",
        ),
        pytest.param(
            2,
            {"train": replace(SETTINGS, activation_checkpointing=True)},
            marks=pytest.mark.soak,
            id="recomputed activations",
        ),
        pytest.param(
            3,
            {
                "train": replace(SETTINGS, activation_checkpointing=True, kl_coef=0.3),
                "offload": True,
            },
            marks=pytest.mark.soak,
            id="recomputed activations, offloaded, at 3",
        ),
        pytest.param(0, {"adapter": 4}, marks=pytest.mark.soak, id="adapter at 0"),
        pytest.param(1, {"adapter": 4}, marks=pytest.mark.soak, id="adapter at 1"),
        pytest.param(
            2,
            {"train": replace(SETTINGS, kl_coef=0.3, max_grad_norm=0.05), "count": 3, "adapter": 4},
            marks=pytest.mark.soak,
            id="adapter with kl and clipping on three ranks",
        ),
        pytest.param(
            3,
            {
                "train": replace(SETTINGS, activation_checkpointing=True, kl_coef=0.3),
                "offload": True,
                "adapter": 128,
            },
            id="adapter with kl, recomputed activations, offloaded, at 3",
        ),
    ],
)
async def test_ranks_train_as_one_process_does(
    model: Path, tmp_path: Path, zero: int, options: dict[str, Any]
) -> None:
    adapter = adapter_of(model, rank=options["adapter"]) if "adapter" in options else None
    options = {**options, "adapter": adapter}
    async with local(
        model, options.get("loss", SURROGATE), options.get("train", SETTINGS), adapter
    ) as learner:
        alone = await outcome(learner, new_folder(tmp_path / "local"), STEPS)
    async with ranks(model, zero=zero, **options) as learner:
        together = await outcome(learner, new_folder(tmp_path / "ranks"), STEPS)
        assert learner.version == 3
        details = [re.sub(r"\d+ s ago", "now", line) for line in learner.details()]
        expected = range(options.get("count", 2))
        assert details == [f"rank {rank}: idle, last heartbeat now" for rank in expected]
    assert [(s.updates, s.skipped) for s in together.stats] == [(1, 0), (2, 1), (2, 0)]
    for stats, other in zip(together.stats, alone.stats, strict=True):
        assert stats.metrics.keys() == other.metrics.keys()
        for name, value in other.metrics.items():
            if name not in PACKING_METRICS:
                assert stats.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert together.stats[0].metrics["loss"] == pytest.approx(
        alone.stats[0].metrics["loss"], rel=1e-5, abs=1e-5
    )
    assert together.gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(
            together.gradients[name] * 10, gradient * 10, rtol=1e-5, atol=1e-5
        )
    assert together.published.keys() == alone.published.keys()
    for name, weight in alone.published.items():
        torch.testing.assert_close(together.published[name], weight, rtol=0, atol=2e-4)


@pytest.mark.soak
async def test_ranks_renormalise_over_kept_sets(model: Path) -> None:
    draw = random.Random(5)
    whole = minibatch(9)
    samples = tuple(
        replace(sample, trace=replace(sample.trace, kept=random_kept_sets(sample.trace, draw)))
        for sample in whole.samples
    )
    settings = replace(SETTINGS, kl_coef=0.3)
    steps = [[replace(whole, samples=samples)]] * 2
    async with local(model, SURROGATE, settings) as learner:
        alone = [await learner.step(step) for step in steps]
    async with ranks(model, zero=3, train=settings) as learner:
        together = [await learner.step(step) for step in steps]
    assert alone[0].metrics["entropy"] < 0.5 * math.log(V)
    for stats, other in zip(together, alone, strict=True):
        for name in ("entropy", "reference_kl", "ratio_mean", "loss", "grad_norm"):
            assert stats.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-5)


def random_kept_sets(trace: TokenTrace, draw: random.Random) -> tuple[KeptSet, ...]:
    """Return kept sets of four tokens for most sampled tokens."""
    return tuple(
        kept_set(token, *((token + i * 7) % V for i in (1, 2, 3)))
        if mask and draw.random() < 0.8
        else b""
        for token, mask in zip(trace.ids, trace.mask, strict=True)
    )


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 2), (3, 3), marks=pytest.mark.soak),
        pytest.param(None, (2, 2), marks=pytest.mark.soak),
        ((1, 2), None),
        pytest.param((3, 2), (1, 1), marks=pytest.mark.soak),
        pytest.param((1, 3), (0, 2), marks=pytest.mark.soak),
    ],
)
async def test_a_checkpoint_resumes_with_other_ranks_and_another_stage(
    model: Path,
    tmp_path: Path,
    before: tuple[int, int] | None,
    after: tuple[int, int] | None,
) -> None:
    """Check that a resumed learner takes the same step as an uninterrupted learner.

    `before` and `after` are the (stage, ranks) of the learner that saves and of the learner that
    resumes; None = a local learner.
    """
    async with any_learner(model, before) as learner:
        await learner.step(STEPS[0])
        await learner.save(tmp_path)
        state = learner.state()
        uninterrupted = await learner.step(STEPS[2])
        expected = dict((await published_file(learner)).tensors)
    async with any_learner(model, after) as learner:
        await learner.load(tmp_path)
        learner.load_state(state)
        resumed = await learner.step(STEPS[2])
        handle = await published_file(learner)
        assert learner.version == handle.version == 2
        found = dict(handle.tensors)
    assert resumed.metrics["learning_rate"] == uninterrupted.metrics["learning_rate"]
    for name, value in uninterrupted.metrics.items():
        if name not in PACKING_METRICS:
            assert resumed.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-4)


@pytest.mark.soak
async def test_a_checkpoint_is_written_while_training_goes_on(model: Path, tmp_path: Path) -> None:
    """Write to a pipe that nothing reads yet: a step is trained before the writing can end."""
    async with ranks(model, zero=2) as learner:
        await learner.step(STEPS[0])
        await learner.save(before := new_folder(tmp_path / "before"))
        later = new_folder(tmp_path / "later")
        os.mkfifo(later / OPTIMIZER_FILE)
        wait = await learner.prepare_save(later)
        await learner.step(STEPS[2])
        written = learner._ranks[0].written
        assert written
        assert not written.done()
        read = await asyncio.to_thread((later / OPTIMIZER_FILE).read_bytes)
        await asyncio.to_thread(wait)
        assert read == (before / OPTIMIZER_FILE).read_bytes()
    saved, expected = ((folder / "model.safetensors").read_bytes() for folder in (later, before))
    assert saved == expected, "the weights as they were before the step"


@pytest.mark.soak
async def test_a_checkpoint_that_cannot_be_written_leaves_the_ranks_running(
    model: Path, tmp_path: Path
) -> None:
    async with ranks(model) as learner:
        with pytest.raises(LearnerError, match="rank 0 cannot write the files: "):
            await learner.save(Path("/dev/null/checkpoint"))
        await learner.step(STEPS[0])
        await learner.save(tmp_path)
    assert (tmp_path / OPTIMIZER_FILE).exists()


@pytest.mark.soak
async def test_a_rank_that_dies_while_it_writes_ends_the_wait(model: Path, tmp_path: Path) -> None:
    async with ranks(model) as learner:
        os.mkfifo(tmp_path / OPTIMIZER_FILE)
        wait = await learner.prepare_save(tmp_path)
        process = learner._ranks[0]._process
        assert process is not None
        process.kill()
        with pytest.raises(LearnerError, match="the process has ended"):
            await asyncio.to_thread(wait)


async def test_a_saved_model_is_a_hugging_face_model(model: Path, tmp_path: Path) -> None:
    async with ranks(model, zero=3) as learner:
        await learner.step(STEPS[0])
        await learner.save(tmp_path)
        alone = new_folder(tmp_path / "alone")
        await asyncio.to_thread(await learner.prepare_save(alone, optimizer=False))
        published = (await published_file(learner)).tensors
    assert not (alone / OPTIMIZER_FILE).exists()
    weights = [folder / "model.safetensors" for folder in (tmp_path, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    saved = named_weights(load_model(tmp_path, torch.device("cpu")))
    assert list(saved) == list(published)
    assert all(torch.equal(saved[name], published[name]) for name in saved)


async def test_a_model_without_an_optimizer_is_rejected(model: Path) -> None:
    async with ranks(model, 1, zero=1) as learner:
        with pytest.raises(LearnerError, match=r"contains no optimizer\.safetensors"):
            await learner.load(model)


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.soak, id="1"),
        pytest.param(2, {}, marks=pytest.mark.soak, id="2"),
        pytest.param(
            3,
            {"offload": True, "train": replace(SETTINGS, activation_checkpointing=True)},
            marks=pytest.mark.soak,
            id="3, offloaded, recomputed activations",
        ),
    ],
)
async def test_bfloat16_ranks_train_float32_weights_and_save_them(
    model: Path, tmp_path: Path, zero: int, options: dict[str, Any]
) -> None:  # fmt: skip
    async with local(model) as learner:
        alone = await learner.step(STEPS[1])
    async with ranks(model, zero=zero, precision="bfloat16", **options) as learner:
        stats = await learner.step(STEPS[1])
        await learner.save(tmp_path)
        uninterrupted = await learner.step(STEPS[2])
        expected = dict((await published_file(learner)).tensors)
    assert (stats.updates, stats.skipped) == (2, 1)
    assert stats.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=0.05, abs=0.02)
    assert stats.metrics["entropy"] == pytest.approx(alone.metrics["entropy"], rel=0.01)
    saved, rounded = (
        load_file(tmp_path / "optimizer.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    for name, weight in rounded.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(saved[f"weight.{name}"].bfloat16(), weight), name
    assert any(
        not torch.equal(saved[f"weight.{name}"], weight.float()) for name, weight in rounded.items()
    )
    async with ranks(model, 1, zero=3, precision="bfloat16") as learner:
        await learner.load(tmp_path)
        resumed = await learner.step(STEPS[2])
        found = dict((await published_file(learner)).tensors)
    assert resumed.metrics["loss"] == pytest.approx(
        uninterrupted.metrics["loss"], rel=0.05, abs=0.02
    )
    differing = sum(int((found[name] != weight).sum()) for name, weight in expected.items())
    assert differing < 0.1 * sum(weight.numel() for weight in expected.values()), (
        "the same up to rounding"
    )


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────


async def disturbed(path: Path, adapter: Adapter, folder: Path) -> Path:
    """Save an adapter whose matrices B are not 0, so that all gradients differ from 0."""
    draws = torch.Generator().manual_seed(5)
    async with local(path, adapter=adapter) as learner:
        with torch.no_grad():
            for parameter in adapter_parameters(learner.model).values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draws))
        await learner.save(new_folder(folder))
    return folder


def peft_gradients(path: Path, saved: Path, batch: Minibatch) -> Mapping[str, torch.Tensor]:
    """Return the gradients of a `PeftModel` for the whole minibatch in padded rows."""
    model: Any = peft.PeftModel.from_pretrained(
        load_model(path, torch.device("cpu")), str(saved), is_trainable=True
    )
    whole = MicroBatch.of(batch.samples, torch.device("cpu"))
    log_p = model(input_ids=whole.ids).logits.log_softmax(-1)
    new = log_p[:, :-1].gather(2, whole.ids[:, 1:, None])[..., 0]
    loss, _ = SURROGATE(
        torch.nn.functional.pad(new, (1, 0)), whole.old_logp, whole.advantage, whole.mask,
        weights=whole.weights, total_tokens=batch.total_tokens,
    )  # fmt: skip
    loss.backward()
    return {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(("zero", "rank"), [(2, 4), pytest.param(3, 128, marks=pytest.mark.soak)])
async def test_gradients_of_adapters_are_those_of_peft(
    model: Path, tmp_path: Path, zero: int, rank: int
) -> None:
    adapter = adapter_of(model, rank=rank)
    start = await disturbed(model, adapter, tmp_path / "start")
    expected = peft_gradients(model, start, minibatch(0))
    async with ranks(model, zero=zero, adapter=adapter) as learner:
        await learner.load(start)
        await learner.step([minibatch(0)])
        await learner.save(new_folder(tmp_path / "saved"))
    found = moments(tmp_path / "saved")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] * 10, gradient, rtol=1e-5, atol=1e-5)
    assert sum(float(gradient.abs().max()) > 1e-3 for gradient in expected.values()) > 10


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 2), (3, 3), marks=pytest.mark.soak),
        (None, (3, 2)),
        pytest.param((3, 2), None, marks=pytest.mark.soak),
    ],
)
async def test_a_checkpoint_of_an_adapter_resumes_with_other_ranks(
    model: Path, tmp_path: Path, before: tuple[int, int] | None, after: tuple[int, int] | None
) -> None:
    """Compare a resumed learner with an uninterrupted one. The adapters are equal to the bit."""
    adapter = adapter_of(model, rank=128)
    train = replace(SETTINGS, kl_coef=0.3)

    def learner_of(stage_and_ranks: tuple[int, int] | None) -> Any:
        if stage_and_ranks is None:
            return local(model, settings=train, adapter=adapter)
        return ranks(
            model, stage_and_ranks[1], train=train, zero=stage_and_ranks[0], adapter=adapter
        )

    first, again = new_folder(tmp_path / "first"), new_folder(tmp_path / "again")
    async with learner_of(before) as learner:
        await learner.step(STEPS[0])
        await learner.save(first)
        uninterrupted = await learner.step(STEPS[2])
        expected = dict((await published_file(learner)).tensors)
    names = {path.name for path in first.iterdir()}
    assert names >= {"adapter_config.json", ADAPTER_WEIGHTS, OPTIMIZER_FILE}
    assert not names & {"model.safetensors", "config.json"}
    async with learner_of(after) as learner:
        await learner.load(first)
        await learner.save(again)
        resumed = await learner.step(STEPS[2])
        found = dict((await published_file(learner)).tensors)
    for file in (ADAPTER_WEIGHTS, OPTIMIZER_FILE):
        saved, kept = (load_file(folder / file) for folder in (first, again))
        assert saved.keys() == kept.keys()
        assert all(torch.equal(saved[name], kept[name]) for name in saved)
    for name, value in uninterrupted.metrics.items():
        if name not in PACKING_METRICS:
            assert resumed.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-4)
    write_merged(first, model, tmp_path / "merged", "merge")
    merged = named_weights(load_model(tmp_path / "merged", torch.device("cpu")))
    assert merged.keys() == expected.keys()


@pytest.mark.soak
@pytest.mark.parametrize("zero", [2, 3])
async def test_bfloat16_ranks_train_float32_adapters(
    model: Path, tmp_path: Path, zero: int
) -> None:
    adapter = adapter_of(model, rank=128)
    train = replace(SETTINGS, kl_coef=0.3)
    start = await disturbed(model, adapter, tmp_path / "start")
    async with local(model, settings=train, adapter=adapter, dtype=torch.bfloat16) as learner:
        await learner.load(start)
        alone = await learner.step(STEPS[1])
    async with ranks(
        model, zero=zero, precision="bfloat16", train=train, adapter=adapter
    ) as learner:
        await learner.load(start)
        await learner.save(new_folder(tmp_path / "loaded"))
        stats = await learner.step(STEPS[1])
        await learner.save(new_folder(tmp_path / "saved"))
        published = dict((await published_file(learner)).tensors)
        with pytest.raises(LearnerError, match=rf"contains no {ADAPTER_WEIGHTS}"):
            await learner.load(await whole_checkpoint(model, tmp_path / "whole"))
    assert (stats.updates, stats.skipped) == (2, 1)
    for name in ("loss", "entropy", "reference_kl"):
        assert stats.metrics[name] == pytest.approx(alone.metrics[name], rel=0.05, abs=0.02)
    loaded, saved = (tmp_path / name / ADAPTER_WEIGHTS for name in ("loaded", "saved"))
    exact, kept = load_file(start / ADAPTER_WEIGHTS), load_file(loaded)
    assert kept.keys() == exact.keys()
    assert all(torch.equal(kept[name], exact[name]) for name in exact), "not rounded"
    tensors = load_file(saved)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors.values())
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    base = named_weights(load_model(model, torch.device("cpu"), torch.bfloat16))
    changed = {name for name, weight in base.items() if not torch.equal(published[name], weight)}
    assert len(changed) == 2 * 7, "the weights of the linear layers"


@pytest.mark.soak
async def test_one_rank_has_the_dropout_of_one_process(model: Path, tmp_path: Path) -> None:
    """Compare gradients with recomputed activations, and the next step after a resume."""
    adapter = adapter_of(model)
    adapter = replace(adapter, section=adapter.section.model_copy(update={"dropout": 0.4}))
    start = await disturbed(model, adapter, tmp_path / "start")
    train = replace(SETTINGS, activation_checkpointing=True)
    async with local(model, adapter=adapter) as learner:
        await learner.load(start)
        alone = await outcome(learner, new_folder(tmp_path / "local"), STEPS)
    for number, (stage, source) in enumerate(((2, start), (3, tmp_path / "0"))):
        async with ranks(model, 1, train=train, zero=stage, adapter=adapter) as learner:
            await learner.load(source)
            steps = STEPS[number:]
            together = await outcome(learner, new_folder(tmp_path / str(number)), steps)
        for stats, other in zip(together.stats, alone.stats[number:], strict=True):
            for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
                assert stats.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4), name
        if not number:
            for name, gradient in alone.gradients.items():
                torch.testing.assert_close(
                    together.gradients[name] * 10, gradient * 10, rtol=1e-5, atol=1e-5
                )


async def whole_checkpoint(path: Path, folder: Path) -> Path:
    async with local(path) as learner:
        await learner.save(new_folder(folder))
    return folder


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.soak), 3])
async def test_ranks_publish_the_adapter_alone(model: Path, tmp_path: Path, zero: int) -> None:
    adapter = adapter_of(model, rank=128, merged=False)
    async with ranks(model, zero=zero, adapter=adapter) as learner:
        await learner.step(STEPS[0])
        handle = await published_file(learner)
        await learner.save(tmp_path)
        published = dict(handle.tensors)
        handle.discard()
    saved = load_file(tmp_path / ADAPTER_WEIGHTS)
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("zero", "tied"),
    [
        (2, True),
        pytest.param(3, True, marks=pytest.mark.soak),
        pytest.param(3, False, marks=pytest.mark.soak),
    ],
)
async def test_a_synced_engine_samples_like_an_engine_with_the_saved_weights(
    tmp_path: Path, zero: int, tied: bool
) -> None:
    path = tiny_model(tmp_path / "model", tied=tied)
    prompt, greedy = (
        [random.Random(0).randrange(V) for _ in range(200)],
        Sampling(16, (), temperature=0.0),
    )
    engine = TorchEngine(load_model(path, torch.device("cpu")), max_batch=4, max_context=512)
    async with ranks(path, zero=zero) as learner:
        await engine.generate(prompt, greedy, session="kept")
        await learner.step(STEPS[0])
        handle = await published_file(learner)
        names = handle.manifest.names
        assert ("lm_head.weight" in names) != tied, "tied embeddings are published once"
        assert len(names) == len(set(names))
        assert await learner._command("publish", None) == (handle.checksum, handle.manifest), (
            "the values announced for a broadcast"
        )
        handle.discard()
        await sync_weights(learner, engine)
        assert not handle.path.exists(), "nothing is left in shared memory"
        folder = new_folder(tmp_path / "saved")
        await learner.save(folder)
    assert engine.version == learner.version == 1
    fresh = TorchEngine(load_model(folder, torch.device("cpu")), max_batch=4, max_context=512)
    assert (await engine.generate(prompt, greedy, session="kept")).ids == (
        await fresh.generate(prompt, greedy)
    ).ids
    await engine.aclose()
    await fresh.aclose()


# ── lost ranks ────────────────────────────────────────────────────────────────────────────────────


def pid(learner: DeepSpeedLearner, rank: int) -> int:
    process = learner._ranks[rank]._process
    assert process is not None
    return process.pid


async def error_of(work: Any) -> LearnerError:
    """Return the `LearnerError` that `work` raises within 120 s."""
    with pytest.raises(LearnerError) as raised:
        async with asyncio.timeout(120):
            await work
    return raised.value


def test_a_lost_rank_is_detected_within_ten_seconds() -> None:
    """Check the longest possible time until a lost rank is detected.

    The last heartbeat may arrive just before the rank hangs. A check may run just before the
    timeout is exceeded.
    """
    assert HEARTBEAT_S + HEARTBEAT_TIMEOUT_S + DIAGNOSIS_DELAY_S < 10


def long_step() -> list[Minibatch]:
    """Return minibatches that take minutes to train."""
    return [minibatch(i, samples=60) for i in range(400)]


def all_ranks_ended(learner: DeepSpeedLearner) -> bool:
    return all(
        rank._process is not None and rank._process.returncode is not None
        for rank in learner._ranks
    )


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_killed_during_a_step_ends_the_learner(model: Path, victim: int) -> None:
    async with ranks(model) as learner:
        step = asyncio.create_task(learner.step(long_step()))
        await asyncio.sleep(2)
        os.kill(pid(learner, victim), signal.SIGKILL)
        error = await error_of(step)
        assert f"rank {victim} of 2 was killed by SIGKILL" in str(error)
        assert all_ranks_ended(learner)
        again = await error_of(learner.publish())
        assert str(again) == str(error)


@pytest.mark.soak
async def test_the_death_of_an_idle_rank_is_detected(model: Path) -> None:
    async with ranks(model) as learner:
        watch = asyncio.create_task(learner.watch())
        await asyncio.sleep(0.1)
        os.kill(pid(learner, 1), signal.SIGTERM)
        error = await error_of(watch)
        assert "rank 1 of 2 was killed by SIGTERM" in str(error)


@pytest.mark.soak
async def test_a_stopped_rank_ends_the_learner(model: Path) -> None:
    async with ranks(model) as learner:
        step = asyncio.create_task(learner.step(long_step()))
        await asyncio.sleep(2)
        os.kill(pid(learner, 1), signal.SIGSTOP)
        error = await error_of(step)
        assert "rank 1 of 2 hangs: no heartbeat" in str(error)
        assert all_ranks_ended(learner)


class Hanging(SurrogateLoss):
    """Loss that never returns in the second rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            self.wait_forever()
        return super().__call__(*args, **kwargs)

    def wait_forever(self) -> None:
        threading.Event().wait()


class Skipping(SurrogateLoss):
    """Loss that excludes the second rank from gathering the weights after its first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1":
            sys.modules["__main__"].Rank._weights = lambda self: iter(())
        return super().__call__(*args, **kwargs)


@pytest.mark.soak
async def test_a_hanging_rank_is_named_and_all_ranks_dump_their_stacks(
    model: Path,
) -> None:
    """Check that only the hanging rank is named, although the other rank waits for it in gloo."""
    async with ranks(model, loss=Hanging(0.2, 0.2, "token"), timeout=3) as learner:
        error = await error_of(learner.step(STEPS[0]))
        assert str(error) == "rank 1 of 2 made no progress within learner.timeout = 3 s (in step)"
        first, second = str(error.__cause__).split("output of rank 0:")
        assert first.startswith("output of rank 1:")
        assert "in wait_forever" in first
        assert "all_reduce" in second
        assert all_ranks_ended(learner)


@pytest.mark.soak
async def test_a_rank_that_waits_in_an_operation_the_other_skipped_is_named(model: Path) -> None:
    async with ranks(model, loss=Skipping(0.2, 0.2, "token"), zero=3, timeout=3) as learner:
        await learner.step(STEPS[0])
        error = await error_of(learner.publish())
        assert (
            str(error) == "rank 0 of 2 made no progress within learner.timeout = 3 s (in publish)"
        )
        first, second = str(error.__cause__).split("output of rank 1:")
        assert "in _weights" in first, "rank 0 waits there"
        assert "in command" in second, "rank 1 waits for the next command"
        assert all_ranks_ended(learner)


class Slow(SurrogateLoss):
    """Loss that takes at least half a second per micro-batch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return super().__call__(*args, **kwargs)


@pytest.mark.soak
async def test_a_step_may_take_longer_than_the_timeout(model: Path) -> None:
    """Check that a step may exceed the timeout while it makes progress.

    It has 14 minibatches of at least half a second each. The timeout is 6 s.
    """
    async with ranks(model, loss=Slow(0.2, 0.2, "token"), timeout=6) as learner:
        stats = await learner.step([minibatch(i) for i in range(14)])
        assert stats.updates == 14


async def test_an_error_in_a_rank_is_raised_with_its_traceback(model: Path) -> None:
    invalid_sample = TrainSample(TokenTrace((1, V + 7), (0, 1), (0.0, -1.0), (-1, 0)), 1.0, 1.0)
    async with ranks(model) as learner:
        error = await error_of(learner.step([Minibatch((invalid_sample,), 1)]))
        assert "rank 0 of 2 failed: RuntimeError: index 1031 is out of bounds" in str(error)
        assert str(error).endswith("(in step)")
        assert "Traceback (most recent call last)" in str(error.__cause__)
        assert "token_logprobs" in str(error.__cause__)


class PickledSample(TrainSample):
    """Sample that records the threads that pickle it."""

    threads: ClassVar[list[threading.Thread]] = []

    def __reduce__(self) -> Any:
        self.threads.append(threading.current_thread())
        return TrainSample, (self.trace, self.advantage, self.weight)


@pytest.mark.soak
async def test_the_samples_of_a_step_are_not_pickled_on_the_event_loop(model: Path) -> None:
    batch = minibatch(0)
    samples = tuple(
        PickledSample(sample.trace, sample.advantage, sample.weight) for sample in batch.samples
    )
    async with ranks(model) as learner:
        await learner.step([replace(batch, samples=samples)])
    assert len(PickledSample.threads) == len(samples)
    assert threading.main_thread() not in PickledSample.threads


async def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"actor\.model"):
        async with ranks(tmp_path, 1):
            pass


@pytest.mark.soak
async def test_a_cancelled_caller_does_not_interrupt_the_ranks(model: Path) -> None:
    """Check that the ranks still work after a caller has cancelled a step.

    A run that is interrupted during a step writes its checkpoint after the step.
    """
    async with ranks(model, zero=3) as learner:
        step = asyncio.create_task(learner.step([minibatch(i) for i in range(20)]))
        await asyncio.sleep(0.2)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        handle = await published_file(learner)
        assert handle.version == learner.version == 1


async def test_ranks_end_with_their_parent(model: Path) -> None:
    async with ranks(model) as learner:
        pids = [pid(learner, rank) for rank in range(2)]
        for rank in learner._ranks:
            assert rank._process is not None
            assert rank._process.stdin is not None
            rank._process.stdin.close()  # the system closes it when the parent dies
        await asyncio.wait_for(
            asyncio.gather(*(rank._process.wait() for rank in learner._ranks if rank._process)), 5
        )
        for p in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(p, 0)
        assert not learner._folder.exists()
