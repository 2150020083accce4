"""Bytes that models take on GPUs, and the GPUs that parts of a run request.

The numbers are computed from model sizes alone, so a plan can be made on any machine. Model states
are counted as by Rajbhandari et al. (ZeRO, 2020, §3.1), but gradients are accumulated in fp32.
Activations are the tensors stored for the backward pass of a transformer. They are counted as by
Korthikanti et al. (2022, §4), for gated MLPs and an attention that stores no scores. The constants
are upper estimates; they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from crl.config.models.shapes import ModelShape
from crl.config.schema import LearnerSection, LoraSection
from crl.modeling import MAX_LOGITS

GIB = 2**30

PROCESS_BYTES = 1.0 * GIB
"""Bytes of a process on a GPU: CUDA context, NCCL buffers, work space of libraries."""

SAMPLED_LOGIT_BYTES = 28
"""Bytes per logit of the torch engine while it samples: `crl.engines.torch.sample`.

Logits, log-probs and probabilities take 4 each, and the running sum of the probabilities, before
and after, 8 each. Greedy decoding takes 12.
"""

TRUNCATED_LOGIT_BYTES = 56
"""Bytes per logit while the torch engine sorts the tokens for top-p and top-k.

The log-probs and their sorted copy take 24: logits 4, log-probs 4, truncated rows 4, sorted values
4 and ids 8. On CUDA the sort itself takes at most 32 (torch's SortStable.cu, 2 to 127 rows): two
arrays of segments and ids 8 each, sorted keys 4, and the radix sort's second copy of keys and
values 12. The rest of `crl.modeling.truncation.truncate` takes 38.
"""

GpuUser = Literal[
    "actor engine",
    "actor learner",
    "extractor engine",
    "extractor learner",
    "untrained extractor",
    "embedder",
]


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


@dataclass(frozen=True)
class VllmCache:
    """Key-value cache of a vLLM engine."""

    takes_free_memory: bool = False
    """True if the cache also takes the free memory of its GPUs."""
    token_bytes: float = 0.0
    """Bytes of one token on each GPU; 0 for an embedder."""


@dataclass(frozen=True)
class GpuRequest:
    """GPUs and memory that a role requests."""

    role: GpuUser
    gpus: int
    """Number of GPUs."""
    memory: Memory
    """Memory on each of these GPUs; for a vLLM engine the minimum."""
    description: str
    """Description for people."""
    key: str = "gpus"
    """Config key that sets the number of GPUs."""
    vllm_cache: VllmCache | None = None
    """Cache of a vLLM engine; None for other roles."""
    first_gpu: bool = False
    """True if the role must be on the first GPU."""
    host_bytes: float = 0.0
    """Bytes of the machine's memory."""

    @property
    def takes_free_memory(self) -> bool:
        """True if the role also takes the free memory of its GPUs."""
        return self.vllm_cache is not None and self.vllm_cache.takes_free_memory


@dataclass(frozen=True)
class GpuAssignment:
    """GPUs of this machine that are assigned to a role."""

    gpus: tuple[str, ...] = ()
    """UUIDs, usable in CUDA_VISIBLE_DEVICES. GPUs of one replica are adjacent."""
    fraction: float | None = None
    """Share of a GPU's memory for a vLLM engine; None for other roles and unknown GPU sizes."""


# ── parts of the memory ───────────────────────────────────────────────────────────────────────────


def dtype_bytes(shape: ModelShape, learner: LearnerSection) -> int:
    """Return the bytes, 2 or 4, of one of a learner's weights on a GPU.

    The engine that receives these weights uses the same precision.
    """
    half = shape.half_precision if learner.precision == "auto" else learner.precision == "bfloat16"
    return 2 if half else 4


def block_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes that one block stores for one token, for the backward pass.

    Norms: the fp32 input and two results of each of the two. Attention: queries, keys, values and
    the output. MLP: gate, activation of the gate, up projection and product.
    """
    norms = 2 * (4 + 2 * element_bytes) * shape.hidden
    heads = shape.attention.heads + shape.attention.kv_heads
    attention = 2 * element_bytes * heads * shape.attention.head_dim
    return norms + attention + 4 * element_bytes * shape.intermediate


@dataclass(frozen=True)
class AdapterSize:
    """Sizes of an adapter, for the memory of its training."""

    parameters: int = 0
    """Number of parameters; 0 without an adapter."""
    inputs: int = 0
    """Sum of the input dimensions of the adapted linear layers of a block."""
    ranks: int = 0
    """Sum of the ranks of the adapted linear layers of a block."""
    dropout: bool = False
    """True with dropout."""

    def block_bytes(self, element_bytes: int, adapter_bytes: int) -> int:
        """Return the bytes that the adapters of a block store for one token.

        They are the product A x of each layer; its input x, if it is converted to the precision of
        the adapter; and with dropout its mask. `adapter_bytes` are those of a number of the
        adapter, and `element_bytes` those of a number of the base model.
        """
        copies = (adapter_bytes != element_bytes) + self.dropout
        return adapter_bytes * (copies * self.inputs + self.ranks)


NO_ADAPTER = AdapterSize()
"""Size of no adapter."""


def training_bytes(
    shape: ModelShape, tokens: int, element_bytes: int, *, checkpointing: bool,
    adapter: AdapterSize = NO_ADAPTER, adapter_bytes: int = 4,
) -> float:  # fmt: skip
    """Return the bytes of a micro-batch of `tokens`: activations for the backward pass, and logits.

    The gradients of one MLP's hidden layer are included. With `checkpointing` the input of every
    layer and all activations of one layer are stored. Logits, log-probs and the logits' gradient
    are in fp32. `adapter_bytes` is that of `AdapterSize.block_bytes`.
    """
    layer = block_bytes(shape, element_bytes) + adapter.block_bytes(element_bytes, adapter_bytes)
    layers = (
        shape.layers * element_bytes * shape.hidden + layer
        if checkpointing
        else shape.layers * layer
    )
    activations = tokens * float(layers + 3 * element_bytes * shape.intermediate)
    return activations + 3.0 * 4 * min(MAX_LOGITS, tokens * shape.vocabulary)


def sampling_bytes(batch: int, vocabulary: int, *, truncated: bool) -> int:
    """Return the bytes in which the torch engine samples a token for each row of a batch.

    `truncated`: the tokens are sorted for top-p or top-k.
    """
    return (TRUNCATED_LOGIT_BYTES if truncated else SAMPLED_LOGIT_BYTES) * batch * vocabulary


def adapter_size(shape: ModelShape, section: LoraSection) -> AdapterSize:
    """Return the size of an adapter; `NO_ADAPTER` without one.

    A matrix of n × m has rank · (n + m) parameters. Names of layers are those of Llama and Qwen. A
    target with another name is counted like the largest layer.
    """
    if not section.rank:
        return NO_ADAPTER
    known = block_layers(shape)
    largest = max(known.values(), key=sum)
    layers = [known.get(name, largest) for name in section.target_names or tuple(known)]
    return AdapterSize(
        parameters=section.rank * shape.layers * sum(map(sum, layers)),
        inputs=sum(inputs for _, inputs in layers),
        ranks=section.rank * len(layers),
        dropout=section.dropout > 0,
    )


def block_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of the linear layers in a block, by their names in Llama."""
    query = shape.attention.heads * shape.attention.head_dim
    key = shape.attention.kv_heads * shape.attention.head_dim
    return {
        "q_proj": (query, shape.hidden),
        "k_proj": (key, shape.hidden),
        "v_proj": (key, shape.hidden),
        "o_proj": (shape.hidden, query),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }


# ── wording ───────────────────────────────────────────────────────────────────────────────────────


def size_text(shape: ModelShape) -> str:
    """Return the number of parameters for people. Example: 7.6 B."""
    return (
        f"{shape.parameters / 1e9:.1f} B"
        if shape.parameters >= 5e7
        else f"{shape.parameters / 1e6:.1f} M"
    )


def gib_text(size: float) -> str:
    """Return bytes as a number of GiB with one decimal."""
    return f"{size / GIB:.1f}"
