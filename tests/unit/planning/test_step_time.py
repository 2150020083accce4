"""Estimated time of a step, with numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from crl.config.load import load
from crl.config.models.shapes import AttentionShape, ModelShape
from crl.config.schema import RunConfig
from crl.planning import gpu_plan as gpu_plan_module
from crl.planning.gpu_plan import gpu_plan, model_shapes
from crl.planning.step_time import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    REFERENCE_GPU,
    SamplingReplica,
    Work,
    actor_work,
    estimate,
    extractor_work,
    forward_flops,
    role_seconds,
    sampling_seconds,
    speed_of,
    step_seconds,
    training_seconds,
)


@pytest.fixture(autouse=True)
def no_gpus_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gpu_plan_module, "visible_gpus", list)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


SHAPE = ModelShape(
    parameters=1_000_000, layers=10, hidden=80, intermediate=320,
    attention=AttentionShape(heads=4, kv_heads=2, head_dim=20),
    vocabulary=100, max_context=4096, half_precision=True,
)  # fmt: skip


def test_a_forward_pass() -> None:
    # 2 · 1,000,000 + 2 · 10 layers · 50 tokens · 80
    assert forward_flops(SHAPE, 50) == 2_080_000


def test_training() -> None:
    # 3 sequences · 50 tokens · 2,080,000 FLOP · 3 passes / (2 GPUs · 1e9 FLOP/s)
    work = Work(sequences=3, tokens=50, sampled=10)
    seconds = training_seconds(SHAPE, work, extra_passes=0, gpus=2, flops=1e9)
    assert seconds == pytest.approx(3 * 50 * 2_080_000 * 3 / 2e9) == pytest.approx(0.468)
    # One more pass with activation checkpointing: 4 instead of 3.
    more = training_seconds(SHAPE, work, extra_passes=1, gpus=2, flops=1e9)
    assert more == pytest.approx(seconds * 4 / 3)


def test_training_costs_six_flop_per_parameter_and_token_without_attention() -> None:
    shape, work = replace(SHAPE, layers=0), Work(1, 7, 0)
    assert training_seconds(shape, work, extra_passes=0, gpus=1, flops=1) == 6 * 1_000_000 * 7


def test_training_of_an_adapter_needs_no_gradients_of_weights() -> None:
    shape, work = replace(SHAPE, layers=0), Work(1, 7, 0)
    seconds = training_seconds(shape, work, extra_passes=0, gpus=1, flops=1, frozen=True)
    assert seconds == 4 * 1_000_000 * 7


def test_sampling_that_the_bandwidth_limits() -> None:
    # Prefill: 4 sequences · 40 tokens · 2,080,000 FLOP at 1e12 FLOP/s = 0.3328 ms.
    # A decode pass of 2 sequences reads 2,000,000 bytes of weights, and 2 · 25 tokens of
    # 2 · 10 layers · 2 heads · 20 · 2 bytes = 1,600 bytes: 2,080,000 bytes at 1e9 = 2.08 ms.
    # 4 · 10 tokens in batches of 2 take 20 passes.
    work, replica = Work(sequences=4, tokens=50, sampled=10), SamplingReplica(1, 2, 2)
    seconds = sampling_seconds(SHAPE, work, replica, flops=1e12, bandwidth=1e9)
    assert seconds == pytest.approx(0.000_332_8 + 20 * 0.002_08)


def test_sampling_that_the_flops_limit() -> None:
    # A decode pass of 2 sequences takes 2 · 2,080,000 FLOP at 1e9 FLOP/s: 4.16 ms.
    work, replica = Work(4, 50, 10), SamplingReplica(1, 2, 2)
    seconds = sampling_seconds(SHAPE, work, replica, flops=1e9, bandwidth=1e15)
    assert seconds == pytest.approx(4 * 40 * 0.002_08 + 20 * 0.004_16)


def test_a_replica_of_several_gpus_and_a_batch_that_is_never_full() -> None:
    # 4 GPUs read a fourth of the weights each, but 2 key-value heads are split in two at most. The
    # batch has 3 sequences: (500,000 + 3 · 25 · 1,600 / 2) bytes, 10 passes.
    work, replica = Work(3, 50, 10), SamplingReplica(4, 64, 2)
    seconds = sampling_seconds(SHAPE, work, replica, flops=1e15, bandwidth=1e9)
    assert seconds == pytest.approx(10 * 560_000 / 1e9, rel=1e-3)
    nothing = Work(0, 50, 10)
    assert sampling_seconds(SHAPE, nothing, replica, flops=1, bandwidth=1) == 0


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def node8(*sets: str, method: str | None = None) -> RunConfig:
    return load(
        ["room", "webshop"], preset="node8", sets=sets, options={"method": method} if method else {}
    )


def test_the_work_of_a_step() -> None:
    config = node8("tasks.room.max_turns=4", "tasks.room.max_response_tokens=1024")
    # 48 · 8 rollouts; the room samples 4 · 1,024 tokens, webshop at most its context.
    assert actor_work(config) == Work(384, 32_768, (4096 + 32_768) // 2)
    assert extractor_work(config) == Work(384, 65_536, 16_384)
    assert extractor_work(node8(method="grpo")).sequences == 0


def test_the_times_of_a_node() -> None:
    config = node8()
    plan, shapes = gpu_plan(config, []), model_shapes(config)
    assert plan is not None
    seconds = role_seconds(config, plan, shapes, REFERENCE_GPU)
    assert list(seconds) == ["actor engine", "actor learner", "extractor engine",
                             "extractor learner"]  # fmt: skip
    # Two ranks, with activation checkpointing: 4 passes. 384 · 32,768 tokens.
    # 2 · 7,615,616,512 + 2 · 28 · 32,768 · 28 · 128 FLOP.
    forward = 2 * 7_615_616_512 + 2 * 28 * 32_768 * 3584
    expected = 384 * 32_768 * 4 * forward / (2 * FLOPS_SHARE * 989e12)
    assert seconds["actor learner"] == pytest.approx(expected)
    assert expected == pytest.approx(1389, rel=0.01)
    # The engine's cache of 940,069 tokens holds 57 sequences of 16,384 tokens on average.
    batch = 57
    bytes_read = 2 * 7_615_616_512 + batch * 16_384 * 56 * 1024
    reading = bytes_read / (BANDWIDTH_SHARE * 3.35e12)
    assert reading > batch * forward / (FLOPS_SHARE * 989e12), "the bandwidth limits"
    assert seconds["actor engine"] == pytest.approx(192 * 32_768 / batch * reading)
    assert step_seconds(config, plan, seconds) == max(seconds.values())


def test_roles_on_one_gpu_work_in_turn() -> None:
    config = load(["room"], preset="gpu1", sets=["gpu_memory=80"])
    plan, shapes = gpu_plan(config, []), model_shapes(config)
    assert plan is not None
    seconds = role_seconds(config, plan, shapes, REFERENCE_GPU)
    assert step_seconds(config, plan, seconds) == pytest.approx(sum(seconds.values()))


def test_a_synchronous_run_samples_before_it_trains() -> None:
    config = node8("rollout.max_staleness=0", method="grpo")
    plan, shapes = gpu_plan(config, []), model_shapes(config)
    assert plan is not None
    seconds = role_seconds(config, plan, shapes, REFERENCE_GPU)
    assert step_seconds(config, plan, seconds) == pytest.approx(sum(seconds.values()))
    ahead = node8(method="grpo")
    assert step_seconds(ahead, plan, seconds) == pytest.approx(max(seconds.values()))


def test_more_passes_of_the_learner() -> None:
    def learner(*sets: str) -> float:
        config = node8(*sets, method="grpo")
        plan = gpu_plan(config, [])
        assert plan is not None
        return role_seconds(config, plan, model_shapes(config), REFERENCE_GPU)["actor learner"]

    usual = learner()
    assert learner("actor.old_logp=recompute") == pytest.approx(usual * 5 / 4)
    assert learner("actor.kl_coef=0.1") == pytest.approx(usual * 5 / 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_speeds_by_the_name_in_nvidia_smi(name: str, expected: str | None) -> None:
    speed = speed_of(name)
    assert (speed.name if speed else None) == expected


def test_the_estimate_states_its_assumptions() -> None:
    config = node8(method="grpo")
    plan, shapes = gpu_plan(config, []), model_shapes(config)
    assert plan is not None
    first, second = estimate(config, plan, shapes, None).splitlines()
    assert first == (
        "time of a step      about 62 min if all episodes fill their context of 32,768 tokens: "
        "actor engine 62 min, actor learner 23 min"
    )
    assert second.strip() == (
        "estimate, not measured, for H100 SXM (assumed), at 40 % of 989 TFLOP/s and "
        "60 % of 3.35 TB/s"
    )
    known = estimate(config, plan, shapes, "NVIDIA H200").splitlines()[1]
    assert "for H200, at 40 % of 989 TFLOP/s and 60 % of 4.80 TB/s" in known


def test_tiny_models_are_not_estimated() -> None:
    config = load(["room"], sets=["gpus=1", "gpu_memory=40"])
    plan = gpu_plan(config, [])
    assert plan is not None
    assert estimate(config, plan, model_shapes(config), None) == ""
