"""Bytes that a trained or served model takes on one GPU.

The numbers are computed from model sizes alone, so a plan can be made on any machine. Model states
are counted as by Rajbhandari et al. (ZeRO, 2020, §3.1), but gradients are accumulated in fp32.
Activations are the tensors stored for the backward pass of a transformer. They are counted as by
Korthikanti et al. (2022, §4), for gated MLPs and an attention that stores no scores. The constants
are upper estimates; they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from crl.config.schema import LearnerSection
from crl.config.shapes import ModelShape
from crl.modeling import MAX_LOGITS

GIB = 2**30

PROCESS_BYTES = 1.0 * GIB
"""Bytes of a process on a GPU: CUDA context, NCCL buffers, work space of libraries."""

VLLM_WORK_BYTES = 3.0 * GIB
"""Bytes of vLLM apart from weights and cache.

They cover the forward pass of a full batch, CUDA graphs and the sampler's logits.
"""

EMBEDDER_WORK_BYTES = 2.0 * GIB
"""Bytes of the forward pass of an embedder's batch."""

OFFLOADED_PARAMETER_BYTES = 20
"""Bytes per parameter in the machine's memory if the optimizer is offloaded.

They are: fp32 weights 4, the optimizer's two moments 8, gradients 4, DeepSpeed's buffer at most 4.
"""

REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's bucket for reducing gradients (reduce_bucket_size).

The bucket for gathering updated parameters has the same size.
"""

MAX_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 holds gathered at a time (stage3_max_live_parameters)."""

PREFILL_TOKENS = 2048
"""Prompt tokens of one forward pass of the torch engine."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by use."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    cache: float = 0.0
    """Keys and values."""
    activations: float = 0.0
    other: float = 0.0
    """Buffers, a published copy of the weights, and the process itself."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def dtype_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes, 2 or 4, of one of a learner's weights on a GPU.

    The engine that receives these weights uses the same precision.
    """
    half = shape.half_precision if learner.precision == "auto" else learner.precision == "bfloat16"
    return 2 if half else 4


def learner_memory(
    shape: ModelShape, learner: LearnerSection, tokens: int, *, reference: bool = False
) -> Memory:
    """Return the memory of one rank of a learner.

    `tokens` is the size of a micro-batch; it must cover the longest sequence. With `reference`
    every rank also holds a whole frozen copy of the model, for the KL term. An offloaded optimizer
    takes no GPU memory. At ZeRO stage 2 or 3 its gradients take none either.
    """
    n, element_bytes = shape.parameters, dtype_bytes(shape, learner)
    deepspeed, zero = (
        learner.kind == "deepspeed",
        learner.zero if learner.kind == "deepspeed" else 0,
    )
    offloaded = deepspeed and learner.offload

    def shards(stage: int) -> int:
        return learner.ranks if zero >= stage else 1

    return Memory(
        weights=n * element_bytes / shards(3) + n * element_bytes * reference,
        gradients=0.0 if offloaded and zero >= 2 else n * 4 / shards(2),
        optimizer=0.0 if offloaded else n * _optimizer_bytes(zero, element_bytes) / shards(1),
        activations=_activation_bytes(
            shape, tokens, element_bytes, checkpointing=learner.activation_checkpointing
        )
        + _logit_bytes(shape, tokens),
        # The local learner publishes a copy of the weights.
        other=PROCESS_BYTES
        + (_bucket_bytes(n, zero, element_bytes) if deepspeed else n * element_bytes),
    )


def host_memory(shape: ModelShape, learner: LearnerSection) -> float:
    """Return the bytes of the machine's memory that all ranks of a learner take together.

    They hold the offloaded states, the gradients, and a buffer of DeepSpeed. The buffer is a second
    copy of the fp32 gradients at stage 3, and a copy of the weights at lower stages. Return 0
    without offload.
    """
    return (
        OFFLOADED_PARAMETER_BYTES * float(shape.parameters)
        if learner.kind == "deepspeed" and learner.offload
        else 0.0
    )


def state_memory(shape: ModelShape, learner: LearnerSection) -> float:
    """Return the bytes of weights, gradients and optimizer of all ranks together.

    GPU memory and the machine's memory are included. Each state is counted once.
    """
    element_bytes, zero = (
        dtype_bytes(shape, learner),
        learner.zero if learner.kind == "deepspeed" else 0,
    )
    state_bytes = 4 + _optimizer_bytes(zero, element_bytes)
    return element_bytes * shape.parameters + (
        host_memory(shape, learner) or float(state_bytes * shape.parameters)
    )


def vllm_memory(shape: ModelShape, tensor_parallel: int, tokens: int, element_bytes: int) -> Memory:
    """Return the minimum memory of one GPU of a vLLM engine.

    The minimum has a cache for one sequence of `tokens`. All memory above it becomes cache.
    `element_bytes` is the size of one weight.
    """
    # With fewer KV heads than GPUs, each head is replicated on several GPUs.
    kv_heads = shape.attention.kv_heads
    share = max(1, kv_heads // tensor_parallel) / kv_heads
    return Memory(
        weights=element_bytes * shape.parameters / tensor_parallel,
        cache=tokens * shape.kv_bytes(element_bytes) * share,
        other=PROCESS_BYTES + VLLM_WORK_BYTES,
    )


def torch_engine_memory(
    shape: ModelShape, max_batch: int, tokens: int, element_bytes: int
) -> Memory:
    """Return the memory of the in-process engine.

    The cache has rows for a full batch, and as much again for stored prefixes. Row lengths are
    powers of two, at least 128, because a row doubles when it is full. `element_bytes` is the size
    of one weight.
    """
    row_tokens = max(128, 1 << (tokens - 1).bit_length())
    return Memory(
        weights=element_bytes * shape.parameters,
        cache=2 * max_batch * row_tokens * shape.kv_bytes(element_bytes),
        activations=PREFILL_TOKENS * _layer_bytes(shape, element_bytes)
        + 3 * 4 * max_batch * shape.vocabulary,
        other=PROCESS_BYTES,
    )


def embedder_memory(shape: ModelShape, *, vllm: bool) -> Memory:
    """Return the memory of an embedder, in the precision of its checkpoint.

    With `vllm` a cache for the longest text that the model reads is included.
    """
    element_bytes = 2 if shape.half_precision else 4
    cache = shape.max_context * shape.kv_bytes(element_bytes) if vllm else 0
    return Memory(
        weights=element_bytes * shape.parameters,
        cache=cache,
        other=PROCESS_BYTES + EMBEDDER_WORK_BYTES,
    )


def _optimizer_bytes(zero: int, element_bytes: int) -> int:
    """Return the bytes per parameter of the optimizer.

    They are the two moments (8), plus fp32 weights (4) if the model is in 16 bits or DeepSpeed
    makes a flat copy of the weights (ZeRO stage 1 and 2).
    """
    return 12 if element_bytes == 2 or zero in (1, 2) else 8


def _layer_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes that one layer stores for one token, for the backward pass.

    Norms: the fp32 input and two results of each of the two. Attention: queries, keys, values and
    the output. MLP: gate, activation of the gate, up projection and product.
    """
    norms = 2 * (4 + 2 * element_bytes) * shape.hidden
    heads = shape.attention.heads + shape.attention.kv_heads
    attention = 2 * element_bytes * heads * shape.attention.head_dim
    return norms + attention + 4 * element_bytes * shape.intermediate


def _activation_bytes(
    shape: ModelShape, tokens: int, element_bytes: int, *, checkpointing: bool
) -> float:
    """Return the bytes of the activations stored for the backward pass.

    The gradients of one MLP's hidden layer are included. With `checkpointing` the input of every
    layer and all activations of one layer are stored.
    """
    layers = (
        shape.layers * element_bytes * shape.hidden + _layer_bytes(shape, element_bytes)
        if checkpointing
        else shape.layers * _layer_bytes(shape, element_bytes)
    )
    return tokens * float(layers + 3 * element_bytes * shape.intermediate)


def _logit_bytes(shape: ModelShape, tokens: int) -> float:
    """Return the bytes of logits, log-probs and the logits' gradient, all in fp32."""
    return 3.0 * 4 * min(MAX_LOGITS, tokens * shape.vocabulary)


def _bucket_bytes(parameters: int, zero: int, element_bytes: int) -> float:
    reduced = min(REDUCE_BUCKET, parameters)
    gathered = min(MAX_LIVE_PARAMETERS if zero == 3 else REDUCE_BUCKET, parameters)
    return float(element_bytes * (reduced + gathered)) if zero else 0.0
