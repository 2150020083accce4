"""Tests of the torch engine and the local learner on CUDA: `python -m pytest -m gpu tests/gpu`.

They need torch, transformers and pytest, but no other dependency of the project. They therefore run
on a bare machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import crl
from crl.engines.torch import TorchEngine
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import SurrogateLoss
from crl.modeling import MAX_LOGITS
from crl.modeling.loading import (
    TokenStats,
    checkpoint_activations,
    checksum,
    load_model,
    require_packing,
    resolve_device,
    token_logprobs,
)
from crl.modeling.packing import enable_packing
from crl.types import Minibatch, Sampling, TokenTrace, TrainSample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

TINY_ACTOR = Path(crl.__file__).parent / "tiny" / "tiny-actor"
PROMPT = tuple(range(5, 45))
VOCABULARY = 151_936


@dataclass(frozen=True)
class Optimizer:
    """Fields of `crl.config.schema.OptimizerSection` that a learner reads."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0


def new_learner(model: PreTrainedModel, **settings: Any) -> LocalLearner:
    chosen = TrainSettings(
        **({"temperature": 1.0, "micro_batch_tokens": 1024, "max_grad_norm": 1.0} | settings)
    )
    return LocalLearner(
        model,
        SurrogateLoss(0.2, 0.2, "token"),
        Optimizer(),  # pyright: ignore[reportArgumentType]
        chosen,
    )


def qwen2(dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """Return a random Qwen2 with grouped-query attention and a head size of 64.

    The family's real models have the same head size.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(Qwen2Config(**(sizes | changes)))
    return model.to("cuda", dtype).eval()


def batch(lengths: list[int], vocabulary: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask [b, t] of right-padded rows.

    In each row, training starts after a third of the tokens and leaves out the last token.
    """
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=draw)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, max(1, length // 3) : length - 1] = True
    return ids.cuda(), mask.cuda()


def weighted_sum(metrics: TokenStats) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return (
        torch.randn(metrics.logp.shape, generator=draw).cuda() * metrics.logp
    ).sum() + metrics.kl.sum()


def gradient(model: PreTrainedModel, value: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `value` for all parameters as one float32 vector."""
    model.zero_grad(set_to_none=True)
    value.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak number of bytes that `work` allocates in addition to existing allocations."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ── engine and learner ────────────────────────────────────────────────────────────────────────────


def test_greedy_output_equals_transformers() -> None:
    model = load_model(TINY_ACTOR, resolve_device("auto"))
    assert model.device.type == "cuda"

    async def generated() -> tuple[int, ...]:
        engine = TorchEngine(model, max_batch=8, max_context=256)
        try:
            return (await engine.generate(PROMPT, Sampling(16, (), 0.0))).ids
        finally:
            await engine.aclose()

    expected = model.generate(  # pyright: ignore[reportCallIssue]
        torch.tensor([PROMPT], device="cuda"), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert list(asyncio.run(generated())) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("dtype", "mismatch"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
def test_a_step_and_a_sync(dtype: torch.dtype, mismatch: float) -> None:
    """Check that a positive advantage raises the log-probs of its tokens.

    After the sync, the engine must use the new weights.
    """

    async def trained() -> None:
        device = resolve_device("auto")
        engine = TorchEngine(load_model(TINY_ACTOR, device, dtype), max_batch=8, max_context=256)
        learner = new_learner(load_model(TINY_ACTOR, device, dtype))
        try:
            completion = await engine.generate(PROMPT, Sampling(8, ()), rng=1)
            trace = TokenTrace().with_context(PROMPT).with_sampled(completion)
            before = await engine.score(trace.ids)
            stats = await learner.step([Minibatch((TrainSample(trace, 1.0, 1.0),), 8)])
            assert stats.metrics["mismatch_kl"] == pytest.approx(0.0, abs=mismatch)
            handle = await learner.publish()
            assert set(handle.manifest.dtypes) == {str(dtype)}
            await engine.update_weights(handle)
            after = await engine.score(trace.ids)
            assert engine.version == 1
            assert sum(after[-8:]) > sum(before[-8:])
        finally:
            await engine.aclose()
            await learner.aclose()

    asyncio.run(trained())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_learner_takes_the_same_step(tmp_path: Path, dtype: torch.dtype) -> None:
    """Check that a resumed learner has bit-identical weights.

    Its next step is the same up to the order in which a GPU adds.
    """
    samples = tuple(
        TrainSample(
            TokenTrace(tuple(range(5, 5 + n)), (0, *(1,) * (n - 1)), (-6.0,) * n, (0,) * n),
            1.0 - n / 20,
            0.1,
        )
        for n in (30, 21, 12, 5)
    )
    step = [Minibatch(samples, 64)]

    async def resumed() -> None:
        device = resolve_device("auto")
        learner, other = (new_learner(load_model(TINY_ACTOR, device, dtype)) for _ in range(2))
        try:
            await learner.step(step)
            await learner.save(tmp_path)
            await other.load(tmp_path)
            assert (await other.publish()).checksum == (await learner.publish()).checksum
            uninterrupted, resumed = [
                (await trained.step(step)).metrics for trained in (learner, other)
            ]
            assert resumed["loss"] == pytest.approx(uninterrupted["loss"], rel=1e-2, abs=1e-4)
            assert resumed["grad_norm"] == pytest.approx(uninterrupted["grad_norm"], rel=1e-2)
        finally:
            await learner.aclose()
            await other.aclose()

    asyncio.run(resumed())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str
)
@pytest.mark.parametrize("size", [0, 3, 4096, 9_000_001])
def test_a_checksum_equals_that_of_the_cpu(dtype: torch.dtype, size: int) -> None:
    """Check that a checksum on the GPU equals the checksum on the CPU.

    The sum is computed on the GPU, in blocks of 16 MiB.
    """
    tensor = torch.randint(-1000, 1000, (size + 1,), generator=torch.Generator().manual_seed(0)).to(
        dtype
    )
    there = tensor.cuda()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    assert checksum({"a": there[1:]}) == checksum({"a": tensor[1:]}), (
        "also for a tensor that does not begin at a whole word"
    )
    assert torch.cuda.max_memory_allocated() - held < 80 << 20


# ── packing and log-probs in parts ────────────────────────────────────────────────────────────────


def test_packed_sequences_are_read_like_padded_rows_in_float32() -> None:
    ids, mask = batch([97, 95, 40, 7, 3])
    plain, packed = qwen2(torch.float32), qwen2(torch.float32)
    require_packing(packed, Path("qwen2"))
    expected, found = token_logprobs(plain, ids, mask), token_logprobs(packed, ids, mask)
    torch.testing.assert_close(found.logp, expected.logp, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-4, atol=1e-4)
    assert (
        distance(gradient(packed, weighted_sum(found)), gradient(plain, weighted_sum(expected)))
        < 1e-4
    )


@pytest.mark.parametrize("lengths", [[200], [97, 95, 40, 7, 3], [64, 64, 64]], ids=str)
def test_the_kernel_for_unequal_lengths_is_as_precise_as_padded_rows_in_bfloat16(
    lengths: list[int],
) -> None:
    """Compare the errors against float32 with those of plain bfloat16, forward and backward."""
    ids, mask = batch(lengths)
    exact, plain, packed = qwen2(torch.float32), qwen2(torch.bfloat16), qwen2(torch.bfloat16)
    exact.load_state_dict(plain.state_dict())  # the same rounded weights
    require_packing(packed, Path("qwen2"))
    metrics = [token_logprobs(model, ids, mask) for model in (exact, plain, packed)]
    truth, theirs, ours = (f.logp[mask].detach() for f in metrics)
    assert ours.dtype == torch.float32
    assert distance(ours, truth) < max(1.5 * distance(theirs, truth), 1e-3)
    truth, theirs, ours = (
        gradient(m, weighted_sum(f)) for m, f in zip((exact, plain, packed), metrics, strict=True)
    )
    assert distance(ours, truth) < max(1.5 * distance(theirs, truth), 1e-2) < 0.1


def test_sequences_do_not_influence_each_other_in_bfloat16() -> None:
    model = qwen2(torch.bfloat16)
    enable_packing(model)
    ids, mask = batch([60, 59, 20])
    before = token_logprobs(model, ids, mask).logp
    ids[0] = (ids[0] + 1) % 1000
    after = token_logprobs(model, ids, mask).logp
    assert after[1:].equal(before[1:])
    assert not after[0].equal(before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_large_vocabulary_are_computed_in_parts(dtype: torch.dtype) -> None:
    """Check the peak memory for about 8,000 tokens and a large vocabulary.

    All logits in float32 take 4.6 GiB, and plain autograd stores several copies. In parts, the
    logits take at most 1.5 GiB.
    """
    ids, mask = batch([2048] * 6, VOCABULARY)
    model = qwen2(dtype, vocab_size=VOCABULARY, num_hidden_layers=1)
    enable_packing(model)
    tokens = int(mask.sum())
    assert tokens * VOCABULARY > 17 * MAX_LOGITS
    weights = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    used = peak_bytes(lambda: weighted_sum(token_logprobs(model, ids, mask)).backward())
    assert used - weights < 6 * 4 * MAX_LOGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_in_parts_equal_those_of_the_whole_softmax(dtype: torch.dtype) -> None:
    ids, mask = batch([300, 250, 200, 100, 100], VOCABULARY)
    model, plain = (qwen2(dtype, vocab_size=VOCABULARY, num_hidden_layers=1) for _ in range(2))
    assert int(mask.sum()) * VOCABULARY > MAX_LOGITS, "more than one part"
    found = token_logprobs(model, ids, mask, 0.8)
    p = (plain(input_ids=ids).logits[:, :-1].float() / 0.8).log_softmax(-1)
    expected = torch.nn.functional.pad(p.gather(-1, ids[:, 1:, None])[..., 0], (1, 0)) * mask
    torch.testing.assert_close(found.logp, expected, rtol=1e-3, atol=1e-3)
    draw = torch.Generator().manual_seed(2)
    theirs = (torch.randn(expected.shape, generator=draw).cuda() * expected).sum()
    assert distance(gradient(model, weighted_sum(found)), gradient(plain, theirs)) < (
        1e-4 if dtype == torch.float32 else 2e-2
    )


def test_recomputed_activations_need_less_memory_for_the_same_gradient() -> None:
    ids, mask = batch([4000, 3900, 100])
    grads, used = [], []
    for checkpointing in (False, True):
        model = qwen2(torch.bfloat16, num_hidden_layers=8)
        enable_packing(model)
        if checkpointing:
            checkpoint_activations(model)
        used.append(
            peak_bytes(
                lambda model=model: grads.append(
                    gradient(model, weighted_sum(token_logprobs(model, ids, mask)))
                )
            )
        )
    assert used[1] < used[0] / 2
    assert distance(grads[1], grads[0]) < 1e-2
