"""Bundled models with widened heads: they compute the same function. vLLM is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from crl.config.schema import LoraSection
from crl.engines.vllm_heads import WiderHeads
from crl.modeling.adapters import BaseModel
from crl.modeling.loading import load_model, named_weights, token_logprobs
from crl.modeling.lora import Adapter, adapter_parameters, add_adapter


@pytest.mark.parametrize("wide", [32, 64])
def test_wider_heads_compute_the_same_function(tiny_actor: Path, tmp_path: Path, wide: int) -> None:
    heads = WiderHeads.of(AutoConfig.from_pretrained(tiny_actor), wide)
    assert heads is not None
    heads.write_config(tiny_actor, tmp_path)
    save_file(
        heads.widen(load_file(tiny_actor / "model.safetensors")),
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    small = load_model(tiny_actor, torch.device("cpu"))
    large = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert large.config.head_dim == wide
    ids = torch.randint(
        0, small.config.vocab_size, (2, 700), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        torch.testing.assert_close(
            token_logprobs(large, ids, mask).logp,
            token_logprobs(small, ids, mask).logp,
            atol=1e-4,
            rtol=0,
        )


def test_grouped_queries_and_biases_are_widened_too(tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    source, target = tmp_path / "small", tmp_path / "large"
    target.mkdir()
    model.save_pretrained(source)
    heads = WiderHeads.of(AutoConfig.from_pretrained(source), 32)
    assert heads is not None
    heads.write_config(source, target)
    save_file(
        heads.widen(load_file(source / "model.safetensors")),
        target / "model.safetensors",
        {"format": "pt"},
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(ids).logits
        torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_widened_adapter_changes_the_widened_weights(tiny_actor: Path) -> None:
    """Compare the widened adapter with the widening of the merged weights."""
    heads = WiderHeads.of(AutoConfig.from_pretrained(tiny_actor), 32)
    assert heads is not None
    model = load_model(tiny_actor, torch.device("cpu"))
    before = heads.widen(named_weights(model))
    add_adapter(model, Adapter(LoraSection(rank=2, alpha=4.0), BaseModel.of(tiny_actor), 0))
    matrices = adapter_parameters(model)
    with torch.no_grad():
        for matrix in matrices.values():
            torch.nn.init.normal_(matrix, std=0.3)
    after = heads.widen(named_weights(model))
    wide = heads.widen_adapter({name: matrix.detach() for name, matrix in matrices.items()})
    assert wide.keys() == matrices.keys()
    for name, b in wide.items():
        if name.endswith("lora_B.weight"):
            weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
            change = 2 * b @ wide[name.replace("lora_B", "lora_A")]
            torch.testing.assert_close(before[weight] + change, after[weight])


def test_unsupported_models_are_not_widened() -> None:
    assert WiderHeads.of(Qwen2Config(use_sliding_window=True), 32) is None
    assert (
        WiderHeads.of(
            Qwen2Config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            32,
        )
        is None
    )
    assert WiderHeads.of(Qwen2Config(), 32) is not None
