"""Packed sequences against padded rows, and log-probs in chunks against the whole softmax.

Values and gradients must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import crl.modeling.loading
from crl.errors import ConfigError
from crl.modeling.loading import (
    TokenStats,
    checkpoint_activations,
    precision,
    require_packing,
    token_logprobs,
)
from crl.modeling.packing import MAX_PADDING_RATIO, Packing, enable_packing, reads_packed

SMALL = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2,
    "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_model(
    family: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    config, model = FAMILIES[family]
    extra = {"head_dim": 8} if family == "qwen3" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(config(**(SMALL | extra | changes))).to(dtype).eval()


def batch(
    lengths: list[int], seed: int = 0, vocabulary: int = 48
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [b, t] and the mask [b, t] of the trained tokens.

    The padding token also occurs inside the rows. The trained tokens form stretches, and some rows
    end with tokens that are not trained.
    """
    draw = random.Random(seed)
    width = max(lengths)
    ids = torch.tensor(
        [[draw.randrange(vocabulary) for _ in range(n)] + [7] * (width - n) for n in lengths]
    )
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, n in enumerate(lengths):
        for t in range(1, n):
            mask[row, t] = draw.random() < 0.4
        mask[row, draw.randrange(1, n)] = True
    return ids, mask


def weighted_sum(metrics: TokenStats, seed: int = 1) -> torch.Tensor:
    """Return a scalar in which every log-prob and every KL has its own random weight."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(metrics.logp.shape, generator=draw).to(metrics.logp.device) for _ in range(2)
    )
    return (a * metrics.logp).sum() + (b * metrics.kl).sum()


def gradients(model: PreTrainedModel, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_stats(ours: TokenStats, theirs: TokenStats, tolerance: float = 1e-5) -> None:
    for name, a, b in zip(TokenStats._fields, ours, theirs, strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal_gradients(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert ours.keys() == theirs.keys()
    for name, theirs_ in theirs.items():
        assert float((ours[name] - theirs_).norm()) <= tolerance * max(
            float(theirs_.norm()), 1e-3
        ), name


# ── packing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lengths", [[9], [6, 6, 6], [33, 31, 30, 12, 11, 5, 2], [2, 40, 3, 17]], ids=str
)
def test_packed_sequences_are_read_like_padded_rows(family: str, lengths: list[int]) -> None:
    ids, mask = batch(lengths)
    plain, packed, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    enable_packing(packed)
    assert reads_packed(packed)
    assert not reads_packed(plain)
    expected = token_logprobs(plain, ids, mask, 0.7, reference=other)
    found = token_logprobs(packed, ids, mask, 0.7, reference=other)
    assert_equal_stats(found, expected)
    assert_equal_gradients(
        gradients(packed, weighted_sum(found)), gradients(plain, weighted_sum(expected))
    )
    enable_packing(other)
    assert_equal_stats(token_logprobs(packed, ids, mask, 0.7, reference=other), expected)


def test_neither_padding_nor_tokens_after_the_last_trained_token_are_read() -> None:
    model, read = tiny_model(), []
    enable_packing(model)
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: read.append(inputs[0].shape)
    )
    ids = torch.randint(48, (3, 50))
    mask = torch.zeros(3, 50, dtype=torch.bool)
    # The third row has no trained token. One of its positions is still read.
    mask[0, [3, 49]] = mask[1, 7] = True
    metrics = token_logprobs(model, ids, mask)
    assert read == [(1, 49 + 7 + 1)]
    assert (metrics.logp != 0).equal(mask)


def test_sequences_do_not_influence_each_other() -> None:
    model = tiny_model()
    enable_packing(model)
    ids, mask = batch([12, 11, 4])
    before = token_logprobs(model, ids, mask).logp
    ids[0, :12] = (ids[0, :12] + 1) % 48
    after = token_logprobs(model, ids, mask).logp
    assert after[1:].equal(before[1:])
    assert not after[0].equal(before[0])


def test_a_batch_without_trained_tokens_is_no_error() -> None:
    """Check that a rank without samples takes part in the step, with zero gradients."""
    model = tiny_model()
    enable_packing(model)
    ids = torch.tensor([[3, 4, 5]])
    found = token_logprobs(model, ids, torch.zeros_like(ids, dtype=torch.bool))
    assert not found.logp.any()
    grads = gradients(model, weighted_sum(found))
    assert grads
    assert not any(g.any() for g in grads.values())


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_buckets_cover_the_whole_row_with_little_padding(lengths: list[int]) -> None:
    packing = Packing(lengths, torch.device("cpu"))
    assert [n for bucket in packing.buckets for n in bucket.lengths] == lengths
    begin = 0
    for bucket in packing.buckets:
        assert bucket.tokens == slice(begin, begin + sum(bucket.lengths))
        assert len(bucket.lengths) == 1 or max(bucket.lengths) * len(
            bucket.lengths
        ) <= MAX_PADDING_RATIO * sum(bucket.lengths)
        begin = bucket.tokens.stop
    assert packing.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packing.rows.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert packing.positions.tolist() == [t for n in lengths for t in range(n)]


def test_a_model_whose_attention_cannot_be_replaced_still_reads_padded_rows() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BloomForCausalLM(
            BloomConfig(vocab_size=48, hidden_size=16, n_layer=1, n_head=2)
        ).eval()
    ids, mask = batch([9, 5])
    before = token_logprobs(model, ids, mask).logp
    require_packing(model, Path("bloom"))
    assert not reads_packed(model)
    assert token_logprobs(model, ids, mask).logp.equal(before)


def test_a_model_that_mixes_packed_sequences_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    require_packing(tiny_model(), Path("sound"))

    def mixing(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setattr("crl.modeling.packing.attend", mixing)
    with pytest.raises(ConfigError, match=r"actor\.model.*packed sequences influence each other"):
        require_packing(tiny_model(), Path("mixing"))


def test_unsupported_attention_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    attention.sliding_window = 4
    with pytest.raises(
        ConfigError,
        match=r"cannot be trained on packed sequences \(packed sequences do not support "
        r"sliding_window\)",
    ):
        require_packing(model, Path("sliding"))


# ── log-probs in chunks ───────────────────────────────────────────────────────────────────────────


def autograd_stats(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    reference: PreTrainedModel | None,
) -> TokenStats:
    """Return the reference values, computed by autograd through the softmax of all positions."""
    p = (model(input_ids=ids).logits[:, :-1].float() / temperature).log_softmax(-1)
    keep = mask[:, 1:]
    logp = p.gather(-1, ids[:, 1:, None])[..., 0] * keep
    entropy = (-(p.exp() * p).sum(-1) * keep).detach()
    kl = torch.zeros_like(logp)
    if reference is not None:
        q = (reference(input_ids=ids).logits[:, :-1].detach().float() / temperature).log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1) * keep
    return TokenStats(*(torch.nn.functional.pad(x, (1, 0)) for x in (logp, entropy, kl)))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("tokens_at_a_time", [1, 5, 1000])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_logprobs_in_parts_equal_those_of_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    with_reference: bool,
    tokens_at_a_time: int,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(crl.modeling.loading, "MAX_LOGITS", 48 * tokens_at_a_time)
    ids, mask = batch([14, 9, 9, 3])
    assert int(mask.sum()) > 10
    model, same = tiny_model(**changes), tiny_model(**changes)
    reference = tiny_model(seed=1) if with_reference else None
    found, expected = (
        token_logprobs(model, ids, mask, temperature, reference=reference),
        autograd_stats(same, ids, mask, temperature, reference),
    )
    assert_equal_stats(found, expected)
    assert not found.entropy.requires_grad
    assert_equal_gradients(
        gradients(model, weighted_sum(found)), gradients(same, weighted_sum(expected))
    )


def test_a_head_with_a_bias_and_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crl.modeling.loading, "MAX_LOGITS", 48 * 3)
    ids, mask = batch([14, 9])
    models = [tiny_model(), tiny_model()]
    for model in models:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model.set_output_embeddings(torch.nn.Linear(32, 48, bias=True))
    found, expected = (
        token_logprobs(models[0], ids, mask),
        autograd_stats(models[1], ids, mask, 1.0, None),
    )
    ours = gradients(models[0], weighted_sum(found))
    assert "lm_head.bias" in ours
    assert_equal_gradients(ours, gradients(models[1], weighted_sum(expected)))
    models[0].get_submodule("lm_head").requires_grad_(False)
    frozen = gradients(models[0], weighted_sum(token_logprobs(models[0], ids, mask)))
    assert_equal_gradients(
        frozen, {name: g for name, g in ours.items() if not name.startswith("lm_head")}
    )


def test_the_head_is_called_once_and_as_a_module() -> None:
    """Check that the number of calls does not depend on the number of chunks.

    Hooks on the calls of a module gather sharded weights, and the number of chunks differs by rank.
    """
    model, calls = tiny_model(), []
    head = model.get_submodule("lm_head")
    head.register_forward_pre_hook(lambda *_: calls.append("before"))
    head.register_forward_hook(lambda *_: calls.append("after"))
    ids, mask = batch([9, 9])
    weighted_sum(token_logprobs(model, ids, mask)).backward()
    assert calls == ["before", "after"]
    assert "forward" not in head.__dict__
    assert model(input_ids=ids).logits.shape == (2, 9, 48), "the original forward is restored"


class Largest(TorchDispatchMode):
    """Dispatch mode that records the size of the largest output of any operation, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_large_vocabulary_never_exist_for_all_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Check that no tensor has more elements than `MAX_LOGITS` or than the weights.

    The logits [b, t, V] would have 24 million elements, those of the selected tokens 18 million.
    """
    vocabulary, hidden = 151_936, 8
    monkeypatch.setattr(crl.modeling.loading, "MAX_LOGITS", 16 * vocabulary)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model, reference = (tiny_model(seed=seed, dtype=dtype, **sizes) for seed in (0, 1))
    enable_packing(model)
    enable_packing(reference)
    ids = torch.randint(vocabulary, (4, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    mask[:, 30:] = False
    assert int(mask.sum()) * vocabulary > 17e6
    with Largest() as largest:
        metrics = token_logprobs(model, ids, mask, reference=reference)
        weighted_sum(metrics).backward()
    assert all(values.dtype == torch.float32 for values in metrics)
    assert largest.elements == 16 * vocabulary


# ── precision ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.bfloat16),
        ("auto", "float32", "cuda", torch.float32),
        ("auto", None, "cuda", torch.float32),
        ("auto", "bfloat16", "cpu", torch.float32),
        ("float32", "bfloat16", "cuda", torch.float32),
        ("bfloat16", "float32", "cpu", torch.bfloat16),
    ],
)
def test_precision_by_setting_checkpoint_and_device(
    tmp_path: Path, name: str, stored: str | None, device: str, expected: torch.dtype
) -> None:
    for field in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(
            "{}" if stored is None else f'{{"{field}": "{stored}"}}'
        )
        assert precision(name, tmp_path, torch.device(device)) == expected


# ── activation checkpointing ──────────────────────────────────────────────────────────────────────


def test_recomputed_activations_give_the_same_gradient() -> None:
    ids, mask = batch([14, 9, 9, 3])
    models = [tiny_model(), tiny_model()]
    counts = []
    for model in models:
        enable_packing(model)
    checkpoint_activations(models[1])
    grads = []
    for model in models:
        calls = []
        model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        metrics = token_logprobs(model, ids, mask)
        grads.append(gradients(model, weighted_sum(metrics)))
        counts.append(len(calls))
    assert counts == [1, 2]
    assert_equal_gradients(grads[1], grads[0], tolerance=1e-7)


def test_checkpointing_rejects_models_with_dropout() -> None:
    with pytest.raises(
        ConfigError,
        match=r"learner\.activation_checkpointing.*attention_dropout is 0\.1.*"
        r"Set attention_dropout to 0",
    ):
        checkpoint_activations(tiny_model(attention_dropout=0.1))
