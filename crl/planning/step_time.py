"""Estimate of the time of a training step on GPUs, from sizes and settings alone.

The estimate is an upper bound for the work: every episode is one sequence that fills the context of
its model, and every answer of the extractor is trained on once. Formulas, for a model with N
parameters, L layers and attention of width d = heads · head width:

* Forward pass: 2 N + 2 L T d FLOP per token, for a sequence of T tokens (Kaplan et al. 2020,
  arXiv 2001.08361, §2.1).
* Training: three times that, because the backward pass costs twice the forward pass (ibid.; 6 N
  without attention). With an adapter, the backward pass costs 2 N less, because the weights are
  frozen; the matrices of the adapter are not counted. Activation checkpointing, recomputed
  log-probs and a reference model cost one more forward pass each.
* Prefill: one forward pass for every token that is not sampled. The prefix cache keeps the tokens
  of earlier turns.
* Decode: a pass reads the weights and the keys and values of all sequences in the batch, with T / 2
  tokens each on average. Its time is the larger of the times of reading and computing (Pope et al.
  2022, arXiv 2211.05102, §2).

Roles on different GPUs work at the same time, and roles on the same GPU in turn. In a synchronous
run, training starts after sampling. Transfers of weights and of offloaded states, environments,
merges and evaluations are not included. Models below `MIN_PARAMETERS` are not estimated. The
estimate was not compared with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crl.config.models.shapes import ModelShape
from crl.config.schema import RunConfig
from crl.engines.backends import ENGINES
from crl.modeling.memory import GpuUser, dtype_bytes
from crl.planning.gpu_plan import GpuPlan
from crl.planning.model_checks import model_sections
from crl.wording import percent

FLOPS_SHARE = 0.4
"""Share of the peak FLOP/s that training and prefill reach.

PaLM's training reached 0.46 (Chowdhery et al. 2022, arXiv 2204.02311, table 3).
"""

BANDWIDTH_SHARE = 0.6
"""Share of the peak memory bandwidth that decoding reaches; an assumption."""

MIN_PARAMETERS = 100_000_000
"""Parameters from which on a step is estimated.

The time of smaller models is that of launching kernels, not of computing and reading.
"""


@dataclass(frozen=True)
class GpuSpeed:
    """Peak speeds of a GPU, from its data sheet."""

    name: str
    words: tuple[str, ...]
    """Words that the name in nvidia-smi contains."""
    bfloat16: float
    """FLOP/s of dense matrix products in bfloat16."""
    float32: float
    """FLOP/s in float32, without tensor cores."""
    bandwidth: float
    """Bytes per second of the GPU's memory."""


REFERENCE_GPU = GpuSpeed("H100 SXM", ("H100",), 989e12, 67e12, 3.35e12)
"""GPU of an estimate if the type of the run's GPUs is unknown."""

GPU_SPEEDS = (
    GpuSpeed("B200", ("B200",), 2250e12, 75e12, 7.7e12),
    GpuSpeed("H200", ("H200",), 989e12, 67e12, 4.8e12),
    GpuSpeed("H100 NVL", ("H100", "NVL"), 835e12, 60e12, 3.9e12),
    GpuSpeed("H100 PCIe", ("H100", "PCIe"), 756e12, 51e12, 2.0e12),
    REFERENCE_GPU,
    GpuSpeed("A100 80GB PCIe", ("A100", "80GB", "PCIe"), 312e12, 19.5e12, 1.935e12),
    GpuSpeed("A100 80GB SXM", ("A100", "80GB"), 312e12, 19.5e12, 2.039e12),
    GpuSpeed("A100 40GB", ("A100",), 312e12, 19.5e12, 1.555e12),
    GpuSpeed("L40S", ("L40S",), 362e12, 91.6e12, 0.864e12),
    GpuSpeed("L4", ("L4",), 121e12, 30.3e12, 0.3e12),
    GpuSpeed("A10", ("A10",), 125e12, 31.2e12, 0.6e12),
)
"""Data sheets of NVIDIA. The first entry whose words are all in a GPU's name applies."""


def speed_of(name: str) -> GpuSpeed | None:
    """Return the speeds of a GPU by its name in nvidia-smi; None if they are not known."""
    words = set(name.replace("-", " ").split())
    return next((speed for speed in GPU_SPEEDS if words.issuperset(speed.words)), None)


@dataclass(frozen=True)
class Work:
    """Sequences that a model samples and is trained on in one step."""

    sequences: int
    tokens: int
    """Tokens of a sequence."""
    sampled: int
    """Tokens of a sequence that are sampled."""


def actor_work(config: RunConfig) -> Work:
    """Return the actor's work: episodes that fill its context, equally many of each task."""
    tokens = config.actor.max_context_tokens
    sampled = [
        min(task.max_turns * task.max_response_tokens, tokens) for task in config.tasks.values()
    ]
    rollouts = config.rollout.groups * config.rollout.group_size
    return Work(rollouts, tokens, round(sum(sampled) / len(sampled)))


def extractor_work(config: RunConfig) -> Work:
    """Return the extractor's work: one answer about every episode, of the maximum length."""
    extractor = config.extractor
    rollouts = config.rollout.groups * config.rollout.group_size if config.distils else 0
    return Work(rollouts, extractor.max_context_tokens, extractor.max_response_tokens)


def forward_flops(shape: ModelShape, tokens: int) -> float:
    """Return the FLOP per token of a forward pass over sequences of `tokens`."""
    width = shape.attention.heads * shape.attention.head_dim
    attention = 2 * shape.layers * tokens * width
    return 2.0 * shape.parameters + attention


def training_seconds(
    shape: ModelShape, work: Work, *, extra_passes: int, gpus: int, flops: float,
    frozen: bool = False,
) -> float:  # fmt: skip
    """Return the time of a training step on `work`.

    `extra_passes`: forward passes in addition to forward and backward pass. `flops`: FLOP/s of one
    GPU. `frozen`: an adapter is trained.
    """
    by_token = (3 + extra_passes) * forward_flops(shape, work.tokens)
    if frozen:
        by_token -= 2.0 * shape.parameters
    return work.sequences * work.tokens * by_token / (gpus * flops)


@dataclass(frozen=True)
class SamplingReplica:
    """Copy of a model that samples."""

    gpus: int
    """GPUs that the weights are split across."""
    batch: int
    """Sequences that are decoded at the same time."""
    element_bytes: int
    """Bytes of a weight, and of a number in the cache."""


def sampling_seconds(
    shape: ModelShape, work: Work, replica: SamplingReplica, *, flops: float, bandwidth: float
) -> float:
    """Return the time in which one replica samples `work`.

    `flops` and `bandwidth`: FLOP/s and bytes per second of one GPU.
    """
    if not work.sequences:
        return 0.0
    forward = forward_flops(shape, work.tokens)
    prefill = work.sequences * (work.tokens - work.sampled) * forward / (replica.gpus * flops)
    batch = min(replica.batch, work.sequences)
    cached = batch * work.tokens / 2 * shape.kv_bytes(replica.element_bytes)
    bytes_read = replica.element_bytes * shape.parameters / replica.gpus
    bytes_read += cached / min(replica.gpus, shape.attention.kv_heads)
    decode_pass = max(bytes_read / bandwidth, batch * forward / (replica.gpus * flops))
    return prefill + work.sequences * work.sampled / batch * decode_pass


def role_seconds(
    config: RunConfig, plan: GpuPlan, shapes: Mapping[str, ModelShape], speed: GpuSpeed
) -> dict[GpuUser, float]:
    """Return the time of each engine and learner of `plan` in one step, by role."""
    seconds: dict[GpuUser, float] = {}
    for placement in plan.placements:
        role = placement.request.role
        model, _, part = role.partition(" ")
        if model not in ("actor", "extractor"):
            continue
        shape = shapes[model]
        section = config.actor if model == "actor" else config.extractor
        work = actor_work(config) if model == "actor" else extractor_work(config)
        element_bytes = dtype_bytes(shape, config.learner)
        flops = FLOPS_SHARE * (speed.bfloat16 if element_bytes == 2 else speed.float32)
        if part == "learner":
            recomputed = model == "actor" and config.actor.old_logp == "recompute"
            extra = config.learner.activation_checkpointing + recomputed + bool(section.kl_coef)
            gpus = len(placement.gpus)
            seconds[role] = training_seconds(
                shape, work, extra_passes=extra, gpus=gpus, flops=flops,
                frozen=section.lora.rank > 0,
            )  # fmt: skip
            continue
        engine = ENGINES[config.engine.kind]
        gpus, replicas = engine.gpus_per_replica(config.engine), engine.replicas(config.engine)
        kv_bytes = shape.kv_bytes(element_bytes) / min(gpus, shape.attention.kv_heads)
        fitting = int(placement.memory.cache / (kv_bytes * work.tokens / 2))
        replica = SamplingReplica(
            gpus, max(1, min(config.engine.max_batch, fitting)), element_bytes
        )
        share = Work(math.ceil(work.sequences / replicas), work.tokens, work.sampled)
        seconds[role] = sampling_seconds(
            shape, share, replica, flops=flops, bandwidth=BANDWIDTH_SHARE * speed.bandwidth
        )
    return seconds


def step_seconds(config: RunConfig, plan: GpuPlan, seconds: Mapping[GpuUser, float]) -> float:
    """Return the time of a step: that of the GPU with the most work.

    In a synchronous run it is at least the time of sampling and training of the actor.
    """
    by_gpu = [
        sum(seconds.get(placement.request.role, 0.0) for placement in plan.placements
            if gpu in placement.gpus)
        for gpu in range(plan.count)
    ]  # fmt: skip
    in_turn = seconds.get("actor engine", 0.0) + seconds.get("actor learner", 0.0)
    return max(*by_gpu, 0.0 if config.rollout.max_staleness else in_turn)


def estimate(
    config: RunConfig, plan: GpuPlan, shapes: Mapping[str, ModelShape], gpu_name: str | None
) -> str:
    """Return the estimate with its assumptions, as two lines for people.

    Return an empty text if a model has fewer than `MIN_PARAMETERS`. `gpu_name`: name of the run's
    GPUs in nvidia-smi; None if they are not in this machine.
    """
    if min(shapes[role].parameters for role in model_sections(config)) < MIN_PARAMETERS:
        return ""
    known = speed_of(gpu_name) if gpu_name else None
    speed = known or REFERENCE_GPU
    seconds = role_seconds(config, plan, shapes, speed)
    parts = ", ".join(f"{role} {_duration(time)}" for role, time in seconds.items())
    half = dtype_bytes(shapes["actor"], config.learner) == 2
    peak = (speed.bfloat16 if half else speed.float32) / 1e12
    return (
        f"{'time of a step':<19} about {_duration(step_seconds(config, plan, seconds))} if all "
        f"episodes fill their context of {actor_work(config).tokens:,} tokens: {parts}\n"
        f"{'':<19} estimate, not measured, for "
        f"{speed.name}{'' if known else ' (assumed)'}, at {percent(FLOPS_SHARE)} of "
        f"{peak:,.0f} TFLOP/s and {percent(BANDWIDTH_SHARE)} of {speed.bandwidth / 1e12:.2f} TB/s"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
