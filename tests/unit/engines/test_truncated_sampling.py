"""Truncated sampling of the torch engine: its log-probs are those of the trainer."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from crl.algo.losses import NextTokenLoss
from crl.config.schema import OptimizerSection
from crl.engines.torch import Request, sample
from crl.learners.step import Trainer, TrainSettings, adamw
from crl.modeling.memory import SAMPLED_LOGIT_BYTES, TRUNCATED_LOGIT_BYTES, sampling_bytes
from crl.types import Minibatch, Sampling, TokenTrace, TrainSample
from support.torch_engines import NEVER, prompts, qwen2, serving, true_logprobs

SETTINGS = {"top-p": (0.9, 0), "top-k": (1.0, 5), "both": (0.9, 5)}
each_truncation = pytest.mark.parametrize(
    ("top_p", "top_k"), SETTINGS.values(), ids=SETTINGS.keys()
)


async def sampled_traces(top_p: float, top_k: int, temperature: float) -> list[TokenTrace]:
    """Return traces of three completions by the model `qwen2()`."""
    async with serving(qwen2()) as engine:
        completions = await asyncio.gather(
            *(
                engine.generate(p, Sampling(30, NEVER, temperature, top_p, top_k), rng=i)
                for i, p in enumerate(prompts(9, 4, 17))
            )
        )
    return [
        TokenTrace().with_context(prompt).with_sampled(completion)
        for prompt, completion in zip(prompts(9, 4, 17), completions, strict=True)
    ]


@each_truncation
async def test_log_probs_equal_the_trainers(top_p: float, top_k: int) -> None:
    traces = await sampled_traces(top_p, top_k, 0.7)
    settings = TrainSettings(temperature=0.7, micro_batch_tokens=64, max_grad_norm=1.0)
    model = qwen2()
    optimizer, schedule = adamw(model.parameters(), OptimizerSection())
    trainer = Trainer(model, optimizer, schedule, NextTokenLoss(), settings)

    @torch.no_grad()
    def largest_difference(traces: list[TokenTrace]) -> float:
        samples = tuple(TrainSample(trace, 1.0, 1.0) for trace in traces)
        differences = [
            (trainer._token_stats(batch).logp - batch.old_logp)[batch.mask].abs().max()
            for _, batch in trainer._micro_batches(Minibatch(samples, 90))
        ]
        return max(float(difference) for difference in differences)

    assert all(all(trace.kept[-30:]) for trace in traces)
    assert largest_difference(traces) < 1e-4
    # Without the kept sets, the trainer would use the probabilities of the whole vocabulary.
    assert largest_difference([replace(trace, kept=()) for trace in traces]) > 0.05
    minibatch = Minibatch(tuple(TrainSample(trace, 1.0, 1.0) for trace in traces), 90)
    assert trainer.step([minibatch], 0).metrics["mismatch_kl"] < 1e-8


@each_truncation
async def test_only_kept_tokens_are_sampled(top_p: float, top_k: int) -> None:
    for trace in await sampled_traces(top_p, top_k, 1.0):
        start = trace.mask.index(1)
        whole = true_logprobs(qwen2(), trace.ids[:start], trace.ids[start:])
        for token, kept, logp, full in zip(
            trace.ids[start:], trace.kept[start:], trace.logprobs[start:], whole, strict=True
        ):
            ids = np.frombuffer(kept, np.int32)
            assert token in ids
            assert 1 <= len(ids) <= (top_k or 47)
            assert logp >= full  # dropped tokens had a part of the mass


def test_rows_of_one_batch_are_truncated_each_in_its_own_way() -> None:
    p = (0.2, 0.4, 0.1, 0.3)
    samplings = {
        "whole": Sampling(1, NEVER),
        "two": Sampling(1, NEVER, top_k=2),
        "one": Sampling(1, NEVER, top_p=0.3),
        "greedy": Sampling(1, NEVER, 0.0, top_p=0.3, top_k=1),
    }
    requests = [
        Request((1,), sampling, random.Random(i), future=None)  # pyright: ignore[reportArgumentType]
        for i, sampling in enumerate(samplings.values())
    ]
    logits = torch.tensor([p] * 4).log()
    counts = {name: Counter[int]() for name in samplings}
    for _ in range(2000):
        tokens, logprobs, kept = sample(logits, requests)
        for name, token in zip(samplings, tokens, strict=True):
            counts[name][token] += 1
    sizes = [len(ids) // 4 for ids in kept]
    assert sizes == [0, 2, 1, 0]
    assert math.exp(logprobs[1]) == pytest.approx({1: 4 / 7, 3: 3 / 7}[tokens[1]])
    assert logprobs[2:] == pytest.approx([0.0, math.log(0.4)], abs=1e-6)
    assert set(counts["whole"]) == {0, 1, 2, 3}
    assert set(counts["two"]) == {1, 3}
    assert counts["two"][1] / 2000 == pytest.approx(4 / 7, abs=0.04)
    assert set(counts["one"]) == set(counts["greedy"]) == {1}


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [(1.0, 0, SAMPLED_LOGIT_BYTES), (0.9, 0, 38), (1.0, 5, 38)],
)
def test_the_plan_counts_the_memory_of_sampling(top_p: float, top_k: int, expected: int) -> None:
    """The CPU sorts within its outputs. CUDA takes at most 32 bytes more, while 24 are in use."""
    rows, vocabulary = 8, 20_000
    sampling = Sampling(9, NEVER, 1.0, top_p, top_k)
    requests: list[Any] = [
        Request((1,), sampling, random.Random(row), future=None)  # pyright: ignore[reportArgumentType]
        for row in range(rows)
    ]
    logits = torch.randn(rows, vocabulary)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sample(logits, requests)
    results: Any = profiled.profiler
    events = results.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = max(accumulate(size for _, size in changes)) / logits.numel() + 4  # of `logits`
    assert peak == pytest.approx(expected, abs=0.5)
    assert sampling_bytes(1, 1, truncated=expected == 38) >= expected
    assert TRUNCATED_LOGIT_BYTES == 24 + 32
