"""GPU memory of a model, compared with numbers worked by hand and published numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from crl.config.models.shapes import PUBLISHED_SHAPES, AttentionShape, ModelShape
from crl.config.schema import EngineSection, LearnerSection, LoraSection
from crl.embedders import EMBEDDER_WORK_BYTES, embedder_memory
from crl.engines import PREFILL_TOKENS
from crl.engines.backends import ENGINES, VLLM_WORK_BYTES
from crl.learners.backends import LEARNERS
from crl.modeling import MAX_LOGITS
from crl.modeling.adapters import BaseModel
from crl.modeling.loading import load_model, token_logprobs
from crl.modeling.lora import Adapter, add_adapter, dropout_layers, dropout_of
from crl.modeling.memory import (
    GIB,
    NO_ADAPTER,
    PROCESS_BYTES,
    AdapterSize,
    Memory,
    adapter_size,
    training_bytes,
)
from crl.modeling.packing import enable_packing
from crl.planning.model_size import planned_shape

SMALL = ModelShape(
    1_000_000_000, layers=2, hidden=8, intermediate=32,
    attention=AttentionShape(heads=4, kv_heads=2, head_dim=2),
    vocabulary=100, max_context=512, half_precision=True
)  # fmt: skip


def deepspeed(**settings) -> LearnerSection:
    return LearnerSection(**{"kind": "deepspeed", "ranks": 4, "zero": 3, **settings})


def learner_memory(
    shape: ModelShape, section: LearnerSection, tokens: int, *, reference: bool = False
) -> Memory:
    return LEARNERS[section.kind].memory(section, shape, tokens, reference=reference)


def host_bytes(shape: ModelShape, section: LearnerSection) -> float:
    return LEARNERS[section.kind].host_bytes(section, shape)


def state_bytes(shape: ModelShape, section: LearnerSection) -> float:
    return LEARNERS[section.kind].state_bytes(section, shape)


def engine_memory(shape: ModelShape, tokens: int, element_bytes: int, **settings) -> Memory:
    section = EngineSection(**settings)
    request = ENGINES[section.kind].request("actor engine", section, shape, tokens, element_bytes)
    return request.memory


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_published_sizes_match_the_architecture(name: str):
    """Compare the number of parameters with the number on the model's page.

    The architecture of transformers is created with these sizes and without weights.
    """
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape = PUBLISHED_SHAPES[name]
    settings: dict[str, Any] = dict(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.attention.heads,
        num_key_value_heads=shape.attention.kv_heads, tie_word_embeddings="7B" not in name,
    )  # fmt: skip
    with torch.device("meta"):
        if "Qwen2.5" in name:
            assert shape.attention.head_dim * shape.attention.heads == shape.hidden
            model = Qwen2ForCausalLM(Qwen2Config(**settings))
        elif name == "smollm2":
            assert shape.attention.head_dim * shape.attention.heads == shape.hidden
            model = LlamaForCausalLM(LlamaConfig(**settings))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=shape.attention.head_dim))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_cache_bytes_per_token():
    # 2 · 28 layers · 4 heads · 128 · 2 bytes
    assert PUBLISHED_SHAPES["Qwen/Qwen2.5-7B-Instruct"].kv_bytes(2) == 56 * 1024
    assert (
        PUBLISHED_SHAPES["Qwen/Qwen3-4B-Thinking-2507"].kv_bytes(2) == 144 * 1024
    )  # 2 · 36 · 8 · 128 · 2


# ── learners ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_match_the_zero_paper(zero: int, gigabytes: float):
    """Compare with figure 1 of the ZeRO paper: 7.5 B parameters on 64 GPUs."""
    shape = replace(SMALL, parameters=7_500_000_000)
    memory = learner_memory(shape, deepspeed(zero=zero, ranks=64), 1)
    in_16_bits = memory.gradients / 2  # the paper has gradients in 16 bits
    assert (memory.weights + in_16_bits + memory.optimizer) / 1e9 == pytest.approx(
        gigabytes, rel=4e-3
    )


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        ({"zero": 0}, (2, 4, 12)),
        ({"zero": 1}, (2, 4, 3)),
        ({"zero": 2}, (2, 1, 3)),
        ({"zero": 3}, (0.5, 1, 3)),
        ({"zero": 3, "offload": True}, (0.5, 0, 0)),
        ({"zero": 1, "offload": True}, (2, 4, 0)),
        ({"zero": 3, "precision": "float32"}, (1, 1, 2)),
        ({"zero": 2, "precision": "float32"}, (4, 1, 3)),
        ({"kind": "local", "ranks": 1}, (2, 4, 12)),
        ({"kind": "local", "ranks": 1, "precision": "float32"}, (4, 4, 8)),
    ],
)
def test_states_of_a_billion_parameters_on_four_ranks(settings: dict, gigabytes: tuple[float, ...]):
    memory = learner_memory(SMALL, deepspeed(**settings), 1)
    assert (memory.weights / 1e9, memory.gradients / 1e9, memory.optimizer / 1e9) == gigabytes


def test_an_adapter_of_a_billion_parameters() -> None:
    section = LearnerSection(kind="local")
    memory = LEARNERS["local"].memory(
        section, SMALL, 1, reference=True, adapter=AdapterSize(10_000_000)
    )
    # A float32 adapter beside 16-bit weights, with gradients and two moments; no reference.
    assert (memory.weights, memory.gradients, memory.optimizer) == (2e9 + 4e7, 4e7, 8e7)
    assert memory.other == PROCESS_BYTES + 2e9, "a copy of the merged weights is published"
    alone = LEARNERS["local"].memory(
        section, SMALL, 1, adapter=AdapterSize(10_000_000), merged=False
    )
    assert alone.other == PROCESS_BYTES + 2e7, "the adapter alone is published, in 16 bits"
    assert LEARNERS["local"].state_bytes(section, SMALL, AdapterSize(10_000_000)) == 2e9 + 16e7


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        # A 16-bit base model with an adapter of 10 M parameters. Of the adapter: 16-bit weights,
        # and gradients, two moments and weights in float32. No reference.
        ({"zero": 1}, (2.02, 0.04, 0.03)),
        ({"zero": 2}, (2.02, 0.01, 0.03)),
        ({"zero": 3}, (0.505, 0.01, 0.03)),
        ({"zero": 3, "offload": True}, (0.505, 0, 0)),
        ({"zero": 0, "precision": "float32"}, (4.04, 0.04, 0.08)),
    ],
)
def test_an_adapter_on_four_ranks(settings: dict, gigabytes: tuple[float, ...]) -> None:
    learner, section = LEARNERS["deepspeed"], deepspeed(**settings)
    memory = learner.memory(section, SMALL, 1, reference=True, adapter=AdapterSize(10_000_000))
    assert (memory.weights, memory.gradients, memory.optimizer) == pytest.approx(
        [part * 1e9 for part in gigabytes]
    )
    assert learner.starting_bytes(
        section, SMALL, reference=True, adapter=AdapterSize(10_000_000)
    ) == (4 * 4e9 if "precision" in settings else 0)


def test_states_and_buckets_of_an_adapter_on_ranks() -> None:
    learner = LEARNERS["deepspeed"]
    assert learner.state_bytes(deepspeed(), SMALL, AdapterSize(10_000_000)) == 2.02e9 + 16e7
    assert learner.host_bytes(deepspeed(offload=True), SMALL, AdapterSize(10_000_000)) == 20e7
    assert (
        learner.state_bytes(deepspeed(offload=True), SMALL, AdapterSize(10_000_000))
        == 2.02e9 + 20e7
    )
    # Gradients of the adapter alone are reduced. Stage 3 also gathers weights of the base model.
    for zero, elements in ((2, 2e7), (3, 1e9 + 1e7)):
        memory = learner.memory(deepspeed(zero=zero), SMALL, 1, adapter=AdapterSize(10_000_000))
        assert memory.other == PROCESS_BYTES + 2 * elements


@pytest.mark.parametrize(
    ("targets", "rank", "elements"),
    [
        # hidden 8, queries 8, keys and values 4, MLP 32; 2 layers. Rank 16 is reserved for rank 9.
        ("o_proj", 9, 2 * 16 * (8 + 8)),
        ("q_proj", 9, 2 * 16 * (16 + 12 + 12)),  # one layer with keys and values
        ("up_proj,down_proj", 16, 2 * 16 * 3 * 40),
        ("", 64, 2 * 64 * (16 + 12 + 12 + 16 + 3 * 40)),
    ],
)
def test_vllm_reserves_memory_for_an_adapter(targets: str, rank: int, elements: int) -> None:
    section, adapter = EngineSection(kind="vllm"), LoraSection(rank=rank, targets=targets)
    request = ENGINES["vllm"].request("actor engine", section, SMALL, 9, 2, adapter)
    assert request.memory.weights == 2e9 + 2 * elements
    assert f", an adapter of rank {rank}, vLLM" in request.description


@pytest.mark.parametrize("targets", ["", "q_proj,down_proj"])
def test_the_size_of_an_adapter_is_that_of_its_parameters(targets: str, tiny_actor: Path) -> None:
    section = LoraSection(rank=3, targets=targets)
    model = load_model(tiny_actor, torch.device("cpu"))
    add_adapter(model, Adapter(section, BaseModel.of(tiny_actor), 0))
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_size(planned_shape("tiny-actor"), section).parameters == parameters
    assert adapter_size(planned_shape("tiny-actor"), LoraSection()).parameters == 0


def test_activations_of_an_adapter_by_hand() -> None:
    # q_proj and down_proj have 8 and 32 inputs. A float32 adapter of a 16-bit model stores both
    # inputs in float32, and 3 numbers for each layer; dropout adds a mask of the inputs.
    size = adapter_size(SMALL, LoraSection(rank=3, targets="q_proj,down_proj"))
    assert (size.block_bytes(2, 4), size.block_bytes(4, 4)) == (4 * (40 + 6), 4 * 6)
    assert replace(size, dropout=True).block_bytes(2, 4) == 4 * (40 + 40 + 6)
    assert size.block_bytes(2, 2) == 2 * 6, "DeepSpeed has a 16-bit adapter"
    for checkpointing, layers in ((False, 2), (True, 1)):
        section = LearnerSection(kind="local", activation_checkpointing=checkpointing)
        with_adapter, without = (
            LEARNERS["local"].memory(section, SMALL, 10, adapter=adapter).activations
            for adapter in (size, NO_ADAPTER)
        )
        assert with_adapter - without == 10 * layers * 4 * 46


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pass_with_an_adapter_stores_no_more_than_planned(
    dtype: torch.dtype, dropout: float
) -> None:
    tokens, section = 128, LoraSection(rank=8, dropout=dropout)
    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=320, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    enable_packing(model)
    add_adapter(model, Adapter(section, BaseModel(Path(), ""), 0))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(64, (1, tokens))
    with (
        dropout_of(dropout_layers(model), 0),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        token_logprobs(model, ids, torch.arange(tokens)[None] > 0)
    shape = ModelShape(0, 4, 64, 320, AttentionShape(4, 2, 16), 64, 2048, half_precision=True)
    found = sum(storage.nbytes() for storage in stored.values())
    planned, without = (
        training_bytes(shape, tokens, dtype.itemsize, checkpointing=False, adapter=adapter)
        for adapter in (adapter_size(shape, section), NO_ADAPTER)
    )
    assert found <= planned <= 1.6 * found
    assert dtype == torch.float32 or found > without, "the adapter has activations of its own"


def test_a_reference_is_a_whole_copy_of_the_weights_on_every_rank():
    assert learner_memory(SMALL, deepspeed(zero=3), 1, reference=True).weights == 0.5e9 + 2e9
    assert learner_memory(SMALL, deepspeed(zero=0), 1, reference=True).weights == 4e9


def test_precision_follows_the_checkpoint():
    assert learner_memory(SMALL, deepspeed(zero=0), 1).weights == 2e9
    assert learner_memory(replace(SMALL, half_precision=False), deepspeed(zero=0), 1).weights == 4e9
    assert (
        learner_memory(
            replace(SMALL, half_precision=False), deepspeed(zero=0, precision="bfloat16"), 1
        ).weights
        == 2e9
    )


def test_offloaded_states_are_in_host_bytes():
    assert host_bytes(SMALL, deepspeed(offload=True)) == 20e9
    assert state_bytes(SMALL, deepspeed(offload=True)) == 22e9  # the 16-bit weights stay there
    assert host_bytes(SMALL, deepspeed()) == 0
    assert state_bytes(SMALL, deepspeed()) == 18e9
    assert state_bytes(SMALL, LearnerSection(precision="float32")) == 16e9


def test_buckets_and_copies():
    # 0.5 B elements are reduced. 0.5 B are gathered at stages 1 and 2, and 1 B at stage 3.
    for zero, elements in (
        (0, 0),
        (1, 1e9),
        (2, 1e9),
        (3, 1.5e9),
    ):
        assert learner_memory(SMALL, deepspeed(zero=zero), 1).other == PROCESS_BYTES + 2 * elements
    assert (
        learner_memory(SMALL, LearnerSection(), 1).other == PROCESS_BYTES + 2e9
    )  # the published copy
    assert (
        learner_memory(SMALL, LearnerSection(precision="float32"), 1).other == PROCESS_BYTES + 4e9
    )


def test_activations_by_hand():
    """Check the activations in bf16.

    Bytes per token and layer:

    * norms 2 · (4 + 2 + 2) · 8 = 128
    * attention 2 · (8 + 4 + 4 + 8) = 48
    * MLP 2 · 4 · 32 = 256
    """
    logits = 3 * 4 * 1000 * 100
    full_activations = learner_memory(SMALL, deepspeed(), 1000).activations
    assert full_activations == 1000 * (2 * 432 + 3 * 2 * 32) + logits
    checkpointed_activations = learner_memory(
        SMALL, deepspeed(activation_checkpointing=True), 1000
    ).activations
    # Inputs of two layers, activations of one layer, and gradients of its MLP.
    assert checkpointed_activations == 1000 * (2 * 2 * 8 + 432 + 3 * 2 * 32) + logits


def test_a_long_sequence_needs_activation_checkpointing():
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    full_activations = learner_memory(shape, deepspeed(), 32_768).activations
    # 28 · 225,280 B per token; 113,664 B per token; 12 B per logit
    assert full_activations / GIB == pytest.approx(192.5 + 3.47 + 0.75, abs=0.1)
    checkpointed_activations = learner_memory(
        shape, deepspeed(activation_checkpointing=True), 32_768
    ).activations
    assert checkpointed_activations / GIB == pytest.approx(
        6.125 + 6.875 + 3.47 + 12 * MAX_LOGITS / GIB, abs=0.1
    )


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


def test_a_vllm_engine():
    shape = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    memory = engine_memory(shape, 32_768, 2, kind="vllm")
    assert (memory.weights, memory.cache, memory.other) == (
        2 * 7_615_616_512,
        1.75 * GIB,
        PROCESS_BYTES + VLLM_WORK_BYTES,
    )
    two_gpus = engine_memory(shape, 32_768, 2, kind="vllm", tensor_parallel=2)
    assert (two_gpus.weights, two_gpus.cache) == (7_615_616_512, 0.875 * GIB)
    # Two heads cannot be split into four parts.
    two, four = (engine_memory(SMALL, 1000, 2, kind="vllm", tensor_parallel=n) for n in (2, 4))
    assert four.cache == two.cache


def test_the_torch_engine_caches_a_full_batch_and_prefixes():
    memory = engine_memory(SMALL, 5000, 4, max_batch=16)
    # 64 = 2 · 2 layers · 2 heads · 2 · 4 bytes. The rows grow by doubling.
    assert memory.cache == 2 * 16 * 8192 * 64
    assert memory.weights == 4e9
    # fp32: 2 · 12 · 8 + 8 · (4 + 2) · 2 + 16 · 32 = 192 + 96 + 512
    assert memory.activations == PREFILL_TOKENS * 800 + 28 * 16 * 100
    assert engine_memory(SMALL, 5000, 2, max_batch=16).cache == memory.cache / 2


def test_an_embedder():
    assert embedder_memory(SMALL, vllm=False).total == 2e9 + PROCESS_BYTES + EMBEDDER_WORK_BYTES
    assert embedder_memory(SMALL, vllm=True).cache == 512 * 32  # one text of the maximum length
    assert embedder_memory(replace(SMALL, half_precision=False), vllm=False).weights == 4e9
