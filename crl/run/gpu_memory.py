"""What one GPU holds of a model that is trained or sampled from, in bytes: arithmetic on its sizes, so that a plan can be made anywhere.

States: 16 bytes a parameter (Rajbhandari et al., ZeRO, 2020, §3.1), cut by ZeRO's stage. Activations: what the backward pass of a
transformer keeps, counted as Korthikanti et al. do (2022, §4), for gated MLPs and an attention that keeps no scores. The constants are
allowances, on the safe side; they were not measured.
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

POOLING = 1.0 * GIB
"""The forward pass of an embedder's batch."""

LOGITS_CHUNK = 1024
"""Tokens whose logits are there at a time."""

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


def learner_memory(shape: ModelShape, learner: LearnerSection, tokens: int, *, reference: bool = False) -> Memory:
    """Of one rank. tokens: of a micro-batch, at least of the longest sequence; reference: a frozen copy is kept for the KL term."""
    n, deepspeed, bf16 = shape.parameters, learner.kind == "deepspeed", learner.precision != "float32"
    width = 2 if bf16 else 4
    # DeepSpeed computes with bf16 weights and keeps fp32 ones with the optimizer; the local learner has fp32 ones and casts.
    weights, gradients, optimizer = (2, 2, 12) if deepspeed and bf16 else (4, 4, 8)
    ranks = learner.ranks if deepspeed else 1

    def cut(stage: int) -> int:
        return ranks if deepspeed and learner.zero >= stage else 1

    return Memory(
        weights=n * (weights + (weights if reference else 0)) / cut(3),
        gradients=n * gradients / cut(2),
        optimizer=0.0 if deepspeed and learner.offload else n * optimizer / cut(1),
        activations=_activations(shape, tokens, width, checkpointing=learner.activation_checkpointing) + _logits(shape),
        other=PROCESS + (_buckets(n, learner.zero, width) if deepspeed else n * (4 + (2 if bf16 else 0))),  # published copy; casts
    )


def host_memory(shape: ModelShape, learner: LearnerSection) -> float:
    """Bytes of the machine's memory that all ranks of a learner take together: offloaded states, and gradients on their way to them."""
    return 16.0 * shape.parameters if learner.kind == "deepspeed" and learner.offload else 0.0


def vllm_memory(shape: ModelShape, tensor_parallel: int, tokens: int) -> Memory:
    """Of one GPU of an engine: the least that it takes, with keys and values of one sequence of `tokens`; what more it gets is cache."""
    heads = max(1, shape.kv_heads // tensor_parallel) / shape.kv_heads  # fewer heads than GPUs are copied to several
    return Memory(
        weights=2 * shape.parameters / tensor_parallel, cache=tokens * shape.kv_bytes(2) * heads, other=PROCESS + SERVING
    )  # fmt: skip


def torch_engine_memory(shape: ModelShape, max_batch: int, tokens: int) -> Memory:
    """Of the in-process engine, in float32: rows for all of a batch, whose length doubles as needed, and as much for kept prefixes."""
    longest = max(128, 1 << (tokens - 1).bit_length())
    return Memory(
        weights=4 * shape.parameters,
        cache=2 * max_batch * longest * shape.kv_bytes(4),
        activations=PREFILL * _layer(shape, 4) + 3 * 4 * max_batch * shape.vocabulary,
        other=PROCESS,
    )


def embedder_memory(shape: ModelShape) -> Memory:
    """In the numbers of its checkpoint, at most four bytes each for an encoder of this process, two for vLLM: two are counted."""
    return Memory(weights=2 * shape.parameters, other=PROCESS + POOLING)


def _layer(shape: ModelShape, width: int) -> int:
    """Bytes that one layer keeps of one token: of each norm its fp32 input and two results; queries, keys, values and the attention's
    output; of the MLP gate, its activation, up, and the product."""
    norms = 2 * (4 + 2 * width) * shape.hidden
    attention = 2 * width * (shape.heads + shape.kv_heads) * shape.head_dim
    return norms + attention + 4 * width * shape.intermediate


def _activations(shape: ModelShape, tokens: int, width: int, *, checkpointing: bool) -> float:
    """Kept for the backward pass, and the gradients of the MLP's hidden layer that is being gone back through. With checkpointing every
    layer's input, and one layer in full."""
    layers = shape.layers * width * shape.hidden + _layer(shape, width) if checkpointing else shape.layers * _layer(shape, width)
    return tokens * float(layers + 3 * width * shape.intermediate)


def _logits(shape: ModelShape) -> float:
    """In fp32: logits, log-probs, their gradient."""
    return 3.0 * 4 * LOGITS_CHUNK * shape.vocabulary


def _buckets(parameters: int, zero: int, width: int) -> float:
    reduce, gather = min(BUCKET, parameters), min(LIVE if zero == 3 else BUCKET, parameters)
    return float(width * (reduce + gather)) if zero else 0.0
