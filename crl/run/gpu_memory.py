"""What one GPU holds of a model that is trained or sampled from, in bytes: arithmetic on its sizes, so that a plan can be made anywhere.

States are counted as by Rajbhandari et al. (ZeRO, 2020, §3.1), but with gradients that are added up in fp32. Activations: what the backward
pass of a transformer keeps, counted as by Korthikanti et al. (2022, §4), for gated MLPs and an attention that keeps no scores.
The constants are allowances, on the safe side; they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from crl.config.schema import LearnerSection
from crl.config.shapes import ModelShape

GIB = 2**30

PROCESS = 1.0 * GIB
"""A process on a GPU: CUDA's context, NCCL's buffers, work space of the libraries."""

SERVING = 3.0 * GIB
"""vLLM beside weights and cache: the forward pass of a full batch, CUDA graphs, the sampler's logits."""

POOLING = 2.0 * GIB
"""The forward pass of an embedder's batch."""

LOGITS = 1 << 26
"""Logits that the training step computes at a time."""

OFFLOADED = 20
"""Bytes per parameter in the machine's memory: fp32 weights 4, the optimizer's means 8, gradients 4, the buffer at most 4."""

BUCKET = 500_000_000
"""Elements of DeepSpeed's bucket for reducing gradients (reduce_bucket_size), and of the one for gathering parameters again."""

LIVE = 1_000_000_000
"""Parameters that ZeRO-3 has gathered at a time (stage3_max_live_parameters)."""

PREFILL = 2048
"""Prompt tokens of one pass of the torch engine."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. cache: keys and values; other: buffers, copies on their way to an engine, the process itself."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    cache: float = 0.0
    activations: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def number_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Of the numbers that a learner on a GPU computes with, and the engine that gets its weights."""
    half = shape.half if learner.precision == "auto" else learner.precision == "bfloat16"
    return 2 if half else 4


def learner_memory(
    shape: ModelShape, learner: LearnerSection, tokens: int, *, reference: bool = False
) -> Memory:
    """Of one rank. tokens: of a micro-batch, at least of the longest sequence; reference: a frozen copy is kept for the KL term, whole on
    every rank.

    What is offloaded takes the gradients along.
    """
    n, width = shape.parameters, number_bytes(shape, learner)
    deepspeed, zero = (
        learner.kind == "deepspeed",
        learner.zero if learner.kind == "deepspeed" else 0,
    )
    away = deepspeed and learner.offload

    def cut(stage: int) -> int:
        return learner.ranks if zero >= stage else 1

    return Memory(
        weights=n * width / cut(3) + n * width * reference,
        gradients=0.0 if away and zero >= 2 else n * 4 / cut(2),
        optimizer=0.0 if away else n * _optimizer_bytes(zero, width) / cut(1),
        activations=_activations(
            shape, tokens, width, checkpointing=learner.activation_checkpointing
        )
        + _logits(shape, tokens),
        other=PROCESS
        + (
            _buckets(n, zero, width) if deepspeed else n * width
        ),  # the local learner publishes a copy
    )


def host_memory(shape: ModelShape, learner: LearnerSection) -> float:
    """Bytes of the machine's memory that all ranks of a learner take together: offloaded states, gradients for them, and a buffer that
    DeepSpeed keeps beside them (at stage 3 for fp32 gradients once more, below for weights)."""
    return (
        OFFLOADED * float(shape.parameters)
        if learner.kind == "deepspeed" and learner.offload
        else 0.0
    )


def state_memory(shape: ModelShape, learner: LearnerSection) -> float:
    """Bytes of weights, gradients and optimizer of all ranks together, wherever they are, each counted once."""
    width, zero = number_bytes(shape, learner), learner.zero if learner.kind == "deepspeed" else 0
    here = 4 + _optimizer_bytes(zero, width)
    return width * shape.parameters + (
        host_memory(shape, learner) or float(here * shape.parameters)
    )


def vllm_memory(shape: ModelShape, tensor_parallel: int, tokens: int, width: int) -> Memory:
    """Of one GPU of an engine: the least that it takes, with keys and values of one sequence of `tokens`; what more it gets is cache.

    width: bytes of its numbers.
    """
    heads = (
        max(1, shape.kv_heads // tensor_parallel) / shape.kv_heads
    )  # fewer heads than GPUs are copied to several
    return Memory(
        weights=width * shape.parameters / tensor_parallel, cache=tokens * shape.kv_bytes(width) * heads, other=PROCESS + SERVING
    )  # fmt: skip


def torch_engine_memory(shape: ModelShape, max_batch: int, tokens: int, width: int) -> Memory:
    """Of the in-process engine: rows for all of a batch, whose length doubles as needed, and as much for kept prefixes.

    width: bytes of its numbers.
    """
    longest = max(128, 1 << (tokens - 1).bit_length())
    return Memory(
        weights=width * shape.parameters,
        cache=2 * max_batch * longest * shape.kv_bytes(width),
        activations=PREFILL * _layer(shape, width) + 3 * 4 * max_batch * shape.vocabulary,
        other=PROCESS,
    )


def embedder_memory(shape: ModelShape, *, vllm: bool) -> Memory:
    """In the numbers of its checkpoint; vLLM wants keys and values of the longest text that the model reads."""
    width = 2 if shape.half else 4
    cache = shape.max_context * shape.kv_bytes(width) if vllm else 0
    return Memory(weights=width * shape.parameters, cache=cache, other=PROCESS + POOLING)


def _optimizer_bytes(zero: int, width: int) -> int:
    """Per parameter: its two means, and fp32 weights where the model's are in 16 bits, or where DeepSpeed flattens a copy of them."""
    return 12 if width == 2 or zero in (1, 2) else 8


def _layer(shape: ModelShape, width: int) -> int:
    """Bytes that one layer keeps of one token: of each norm its fp32 input and two results; queries, keys, values and the attention's
    output; of the MLP gate, its activation, up, and the product."""
    norms = 2 * (4 + 2 * width) * shape.hidden
    attention = 2 * width * (shape.heads + shape.kv_heads) * shape.head_dim
    return norms + attention + 4 * width * shape.intermediate


def _activations(shape: ModelShape, tokens: int, width: int, *, checkpointing: bool) -> float:
    """Kept for the backward pass, and the gradients of the MLP's hidden layer that is being gone back through. With checkpointing every
    layer's input, and one layer in full."""
    layers = (
        shape.layers * width * shape.hidden + _layer(shape, width)
        if checkpointing
        else shape.layers * _layer(shape, width)
    )
    return tokens * float(layers + 3 * width * shape.intermediate)


def _logits(shape: ModelShape, tokens: int) -> float:
    """In fp32: logits, log-probs, their gradient."""
    return 3.0 * 4 * min(LOGITS, tokens * shape.vocabulary)


def _buckets(parameters: int, zero: int, width: int) -> float:
    reduce, gather = min(BUCKET, parameters), min(LIVE if zero == 3 else BUCKET, parameters)
    return float(width * (reduce + gather)) if zero else 0.0
