"""Low-rank adapters: gradients, merged weights, reference, and saved adapters."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from crl.config.schema import LoraSection, OptimizerSection
from crl.engines.torch import Decoder
from crl.errors import ConfigError, LearnerError
from crl.learners.local import LocalLearner
from crl.learners.step import MetricAccumulator, MicroBatch, Trainer, TrainSettings, adamw
from crl.methods.parts.training import SurrogateLoss
from crl.modeling import loading
from crl.modeling.adapters import BaseModel
from crl.modeling.files import copy_model_files
from crl.modeling.gguf import converted, described
from crl.modeling.loading import (
    InProcessWeights,
    load_model,
    meta_model,
    named_weights,
    token_logprobs,
)
from crl.modeling.lora import (
    ADAPTER_WEIGHTS,
    Adapter,
    AdapterDropout,
    adapter_parameters,
    add_adapter,
    default_targets,
    dropout_layers,
    dropout_of,
    merged_weights,
    shared_base,
    without_adapter,
)
from crl.planning.model_checks import adapted_layers
from crl.planning.model_size import planned_shape
from crl.types import Minibatch, TokenTrace, TrainSample

CPU = torch.device("cpu")
LOSS = SurrogateLoss(clip_low=0.2, clip_high=0.2, ratio="token")
SETTINGS = TrainSettings(temperature=1.0, micro_batch_tokens=64, max_grad_norm=1e9)
SECTION = LoraSection(rank=4, alpha=8.0)


def adapted(path: Path, section: LoraSection = SECTION, *, seed: int = 3) -> PreTrainedModel:
    model = load_model(path, CPU)
    add_adapter(model, Adapter(section, BaseModel.of(path), seed))
    return model


def disturb(model: PreTrainedModel) -> None:
    """Give the matrices B random values. They are 0 at the start."""
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draws))


def minibatch(seed: int = 0) -> Minibatch:
    draw, samples = random.Random(seed), []
    for _ in range(5):
        ids = tuple(draw.randrange(3, 200) for _ in range(draw.randint(4, 20)))
        mask = (0, *[draw.randint(0, 1) for _ in ids[2:]], 1)
        trace = TokenTrace(ids, mask, (-5.0,) * len(ids), tuple(m - 1 for m in mask))
        samples.append(TrainSample(trace, draw.gauss(0, 1), 1.0))
    return Minibatch(tuple(samples), sum(sum(s.trace.mask) for s in samples))


IDS = torch.arange(3, 40)[None]
MASK = torch.ones_like(IDS, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)


def logp(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, IDS, MASK).logp


@asynccontextmanager
async def learning(
    model: PreTrainedModel, base: Path, *, merged: bool = True, **settings: Any
) -> AsyncIterator[LocalLearner]:
    optimizer = OptimizerSection(learning_rate=1e-2)
    learner = LocalLearner(
        model, LOSS, optimizer, replace(SETTINGS, **settings),
        adapter=Adapter(SECTION, BaseModel.of(base), 3, merged),
    )  # fmt: skip
    try:
        yield learner
    finally:
        await learner.aclose()


def test_a_new_adapter_does_not_change_the_model(tiny_actor: Path) -> None:
    model, other = adapted(tiny_actor), adapted(tiny_actor, seed=4)
    assert torch.equal(logp(model), logp(load_model(tiny_actor, CPU)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(adapter_parameters(model)) == 2 * 7 * model.config.num_hidden_layers
    first, again = adapter_parameters(model), adapter_parameters(adapted(tiny_actor))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name]), "drawn from the seed"
        same = torch.equal(parameter, adapter_parameters(other)[name])
        assert same == name.endswith("lora_B.weight"), "A is random, B is 0"


def test_gradients_are_those_of_peft(tiny_actor: Path) -> None:
    """Compare the packed training step with a plain step of a `PeftModel` on padded rows."""
    model = adapted(tiny_actor)
    disturb(model)
    batch = minibatch()
    optimizer, schedule = adamw(adapter_parameters(model).values(), OptimizerSection())
    Trainer(model, optimizer, schedule, LOSS, SETTINGS)._gradient(batch, MetricAccumulator(), None)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    reference = peft.get_peft_model(load_model(tiny_actor, CPU), config)
    peft.set_peft_model_state_dict(
        reference, {name: p.detach() for name, p in adapter_parameters(model).items()}
    )
    whole = MicroBatch.of(batch.samples, CPU)
    log_p = reference(input_ids=whole.ids).logits.log_softmax(-1)
    new = log_p[:, :-1].gather(2, whole.ids[:, 1:, None])[..., 0]
    loss, _ = LOSS(
        torch.nn.functional.pad(new, (1, 0)), whole.old_logp, whole.advantage, whole.mask,
        weights=whole.weights, total_tokens=batch.total_tokens,
    )  # fmt: skip
    weights = dict(reference.named_parameters())
    loss.backward()
    compared = 0
    for name, parameter in adapter_parameters(model).items():
        expected = weights[name.replace(".weight", ".default.weight")].grad
        assert expected is not None
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-5), name
        compared += float(expected.abs().max()) > 1e-3
    assert compared > 10


def test_merged_weights_give_the_probabilities_of_the_adapter(tiny_actor: Path) -> None:
    model, plain = adapted(tiny_actor), load_model(tiny_actor, CPU)
    disturb(model)
    merged = named_weights(model)
    assert list(merged) == list(named_weights(plain)), "an engine knows these names"
    plain.load_state_dict(merged, strict=False)
    assert not torch.allclose(logp(plain), logp(load_model(tiny_actor, CPU)), atol=0.01)
    assert torch.allclose(logp(plain), logp(model), atol=1e-5)


def test_the_base_model_is_the_reference(tiny_actor: Path) -> None:
    model = adapted(tiny_actor)
    disturb(model)
    with without_adapter(model):
        assert torch.equal(logp(model), logp(load_model(tiny_actor, CPU)))
    assert all(p.requires_grad for p in adapter_parameters(model).values())
    with torch.no_grad():
        own = token_logprobs(model, IDS, MASK, reference=model)
        copied = token_logprobs(model, IDS, MASK, reference=load_model(tiny_actor, CPU))
    assert float(own.kl.sum()) > 0.01
    assert torch.allclose(own.kl, copied.kl, atol=1e-6)


def test_models_with_adapters_share_their_base(tiny_actor: Path) -> None:
    actor, extractor = (shared_base(tiny_actor, CPU, torch.float32) for _ in range(2))
    for seed, model in enumerate((actor, extractor)):
        add_adapter(model, Adapter(SECTION, BaseModel.of(tiny_actor), seed))
    disturb(actor)
    for name, parameter in actor.named_parameters():
        other = extractor.get_parameter(name)
        shared = parameter.data_ptr() == other.data_ptr()
        assert shared != parameter.requires_grad, name
    assert torch.equal(logp(extractor), logp(load_model(tiny_actor, CPU)))
    assert not torch.equal(logp(actor), logp(extractor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_training_saves_and_restores_the_adapter(
    dtype: torch.dtype, tiny_actor: Path, tmp_path: Path
) -> None:
    def new() -> PreTrainedModel:
        model = load_model(tiny_actor, CPU, dtype)
        add_adapter(model, Adapter(SECTION, BaseModel.of(tiny_actor), 3))
        return model

    model, continued = new(), new()
    base = {n: p.clone() for n, p in load_model(tiny_actor, CPU, dtype).named_parameters()}
    async with (
        learning(model, tiny_actor, kl_coef=0.1) as learner,
        learning(continued, tiny_actor, kl_coef=0.1) as other,
    ):
        stats = await learner.step([minibatch()])
        assert (stats.updates, stats.metrics["reference_kl"]) == (1, 0.0)
        await learner.save(tmp_path)
        assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}
        await other.load(tmp_path)
        for trained in (learner, other):
            assert (await trained.step([minibatch(1)])).metrics["reference_kl"] > 0
        assert (await learner.publish()).checksum == (await other.publish()).checksum
        published = await learner.publish()
    assert (tmp_path / "adapter_config.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")]), "frozen"
    assert {t.dtype for t in published.tensors.values()} == {dtype}
    decoder = Decoder(load_model(tiny_actor, CPU, dtype), 2, 64)
    decoder.load(published)
    # In bfloat16, merging rounds the sum of weight and adapter.
    mismatch = float((logp(decoder.model) - logp(model)).abs().mean())
    assert mismatch < (1e-5 if dtype == torch.float32 else 0.2)


def test_a_snapshot_copies_no_merged_weight(
    tiny_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights are new. A second copy would double the memory of a snapshot."""
    model, merged = adapted(tiny_actor), {}
    disturb(model)
    monkeypatch.setattr(
        loading, "merged_weights", lambda model: merged.update(merged_weights(model)) or merged
    )
    snapshot = InProcessWeights.snapshot(model, 1)
    held = {parameter.data_ptr() for parameter in model.parameters()}
    assert snapshot.tensors.keys() == merged.keys()
    for name, tensor in snapshot.tensors.items():
        assert tensor.data_ptr() not in held, "training does not change a snapshot"
        assert (tensor is merged[name]) == name.endswith("_proj.weight")
        assert torch.equal(tensor, merged[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_adapter_is_published_alone(dtype: torch.dtype, tiny_actor: Path) -> None:
    """Check the matrices in the precision of the model, which the engine computes in."""
    model = load_model(tiny_actor, CPU, dtype)
    add_adapter(model, Adapter(SECTION, BaseModel.of(tiny_actor), 3))
    disturb(model)
    async with learning(model, tiny_actor, merged=False) as learner:
        published = await learner.publish()
        before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
        await learner.step([minibatch()])
    assert published.tensors.keys() == before.keys()
    for name, tensor in published.tensors.items():
        assert torch.equal(tensor, before[name].to(dtype)), name


def test_layers_with_an_adapter_are_those_of_peft(tiny_actor: Path) -> None:
    named = {name.split(".")[-3] for name in adapter_parameters(adapted(tiny_actor))}
    assert default_targets(meta_model(tiny_actor)) == sorted(named)


async def test_saved_adapters_are_read_by_peft_and_merged(tiny_actor: Path, tmp_path: Path) -> None:
    model, folder = adapted(tiny_actor), tmp_path / "adapter"
    folder.mkdir()
    disturb(model)
    async with learning(model, tiny_actor) as learner:
        await learner.save(folder)
    base = load_model(tiny_actor, CPU)
    for other in (
        peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).get_base_model(),
        AutoModelForCausalLM.from_pretrained(folder),
    ):
        assert torch.allclose(logp(other), logp(model), atol=1e-5)
    assert described(folder, "actor.model") == tiny_actor
    merged = converted(folder, "actor.model", print)
    assert torch.allclose(logp(load_model(merged, CPU)), logp(model), atol=1e-5)
    assert (merged / "crl.json").read_text() == (tiny_actor / "crl.json").read_text()
    assert not (merged / "adapter_config.json").exists()


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
async def test_a_merged_adapter_is_the_model_of_its_run(
    stored: str, trained: str, tiny_actor: Path, tmp_path: Path
) -> None:
    """The merged weights are those that the engine got, whatever the precision of the base."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    load_model(tiny_actor, CPU, getattr(torch, stored)).save_pretrained(base)
    copy_model_files(tiny_actor, base)
    folder.mkdir()
    model = load_model(base, CPU, getattr(torch, trained))
    add_adapter(model, Adapter(SECTION, BaseModel.of(base), 3))
    disturb(model)
    async with learning(model, base) as learner:
        await learner.save(folder)
        published = (await learner.publish()).tensors
    merged = converted(folder, "actor.model", print)
    assert json.loads((merged / "config.json").read_text("utf-8"))["dtype"] == trained
    weights = load_file(merged / "model.safetensors")
    assert published.keys() - weights.keys() <= {"lm_head.weight"}
    for name, tensor in weights.items():
        assert torch.equal(tensor, published[name]), name
    assert planned_shape(str(folder)).half_precision == (trained == "bfloat16")


def test_an_adapter_of_another_program_has_the_precision_of_its_base(
    tiny_actor: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    load_model(tiny_actor, CPU, torch.bfloat16).save_pretrained(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_model(base, CPU), config)
    model.save_pretrained(str(tmp_path / "adapter"))
    merged = converted(tmp_path / "adapter", "actor.model", print)
    assert json.loads((merged / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    assert planned_shape(str(tmp_path / "adapter")).half_precision


def test_adapters_that_are_refused(tiny_actor: Path, tmp_path: Path) -> None:
    for targets, reason in (
        ("nope", "Target modules"),
        ("q_proj,lm_head", "the output head cannot have an adapter"),
    ):
        with pytest.raises(ConfigError, match=rf"actor\.lora\.targets = '{targets}': .*{reason}"):
            adapted(tiny_actor, LoraSection(rank=2, targets=targets))
    (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"its adapter_config\.json cannot be read"):
        described(tmp_path, "actor.model")
    text = '{"base_model_name_or_path": "/no/such/model"}'
    (tmp_path / "adapter_config.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="the base model of this adapter, /no/such/model, is"):
        described(tmp_path, "actor.model")


@pytest.fixture
def gpt2(tiny_actor: Path, tmp_path: Path) -> Path:
    """Return the directory of a small GPT-2, whose linear layers are Conv1D."""
    config = GPT2Config(
        vocab_size=1024, n_embd=16, n_layer=2, n_head=2, n_positions=512,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder := tmp_path / "gpt2")
    copy_model_files(tiny_actor, folder)
    return folder


async def test_adapters_of_transposed_layers_are_trained_and_merged(
    gpt2: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    model = adapted(gpt2)
    disturb(model)
    async with learning(model, gpt2) as learner:
        await learner.step([minibatch()])
        await learner.save(folder)
        published = (await learner.publish()).tensors
    merged = load_model(converted(folder, "actor.model", print), CPU)
    assert torch.allclose(logp(merged), logp(model), atol=1e-5)
    weights = merged.state_dict()
    for name, tensor in published.items():
        assert torch.allclose(tensor, weights[name], atol=1e-6), name


def test_layers_of_a_model_that_names_them_otherwise(gpt2: Path) -> None:
    layers = adapted_layers(str(gpt2), LoraSection(rank=2), "actor")
    matrices = adapter_parameters(adapted(gpt2, LoraSection(rank=2))).values()
    assert 2 * sum(sum(dimensions) for _, dimensions in layers) == sum(m.numel() for m in matrices)
    assert dict(layers) == {"c_attn": (48, 16), "c_fc": (64, 16), "c_proj": (16, 64)}
    assert len(adapted_layers(str(gpt2), LoraSection(rank=2, targets="c_attn"), "actor")) == 2
    with pytest.raises(ConfigError, match=r"q_proj is not a linear.*Choose from c_attn, c_fc"):
        adapted_layers(str(gpt2), LoraSection(rank=2, targets="q_proj"), "actor")


@pytest.mark.parametrize("target", ["wte", "wpe"])
def test_embeddings_have_no_adapter(target: str, gpt2: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"{target}': transformer\.{target} is not a linear layer"
    ):
        adapted(gpt2, LoraSection(rank=2, targets=target))


async def test_saved_adapters_name_their_layers_in_order(tiny_actor: Path, tmp_path: Path) -> None:
    """Peft has a set, whose order differs from process to process."""
    async with learning(adapted(tiny_actor), tiny_actor) as learner:
        await learner.save(tmp_path)
    names = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))["target_modules"]
    assert len(names) == 7
    assert names == sorted(names)


async def test_checkpoints_of_other_learners_are_refused(tiny_actor: Path, tmp_path: Path) -> None:
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    for folder in (whole, adapter):
        folder.mkdir()
    plain = LocalLearner(load_model(tiny_actor, CPU), LOSS, OptimizerSection(), SETTINGS)
    await plain.save(whole)
    await plain.aclose()
    async with learning(adapted(tiny_actor), tiny_actor) as learner:
        with pytest.raises(LearnerError, match=r"contains no adapter_model\.safetensors"):
            await learner.load(whole)
        await learner.save(adapter)
    assert len(load_file(adapter / ADAPTER_WEIGHTS)) == len(adapter_parameters(learner.model))
    few = adapted(tiny_actor, LoraSection(rank=4, targets="q_proj"))
    async with learning(few, tiny_actor) as learner:
        with pytest.raises(LearnerError, match="is an adapter of other layers"):
            await learner.load(adapter)


# ── dropout ───────────────────────────────────────────────────────────────────────────────────────

DROPOUT = SECTION.model_copy(update={"dropout": 0.5})


async def outcome(
    path: Path, section: LoraSection, batches: Sequence[Minibatch], **settings: Any
) -> tuple[dict[str, torch.Tensor], Mapping[str, float]]:
    """Return the adapter after one step from an adapter with random matrices, and its metrics."""
    model = adapted(path, section)
    disturb(model)
    async with learning(model, path, **settings) as learner:
        stats = await learner.step(batches)
    assert stats.updates == len(batches)
    return {name: p.detach() for name, p in adapter_parameters(model).items()}, stats.metrics


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_dropout_keeps_the_mean_of_its_input() -> None:
    layer, x = AdapterDropout(0.3, seed=1), torch.ones(1, 400, 50)
    assert torch.equal(layer(x), x), "not outside the context"
    with dropout_of([layer], 4, 2):
        dropped, again = layer(x), layer(x)
    with dropout_of([layer], 4, 3):
        other = layer(x)
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, other)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.02)


def test_dropout_acts_in_the_passes_of_an_update_alone(tiny_actor: Path) -> None:
    """Check log-probs outside of an update, also of the reference and of recomputed samples."""
    model, plain = adapted(tiny_actor, DROPOUT), adapted(tiny_actor)
    layers = dropout_layers(model)
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert len({layer.seed for layer in layers}) == len(layers)
    assert not dropout_layers(plain)
    for disturbed in (model, plain):
        disturb(disturbed)
    expected = logp(plain)
    assert torch.equal(logp(model), expected)
    with dropout_of(layers, 0):
        assert not torch.allclose(logp(model), expected, atol=1e-3)
        with without_adapter(model):
            assert torch.equal(logp(model), logp(load_model(tiny_actor, CPU)))
    optimizer, schedule = adamw(adapter_parameters(model).values(), OptimizerSection())
    trainer = Trainer(model, optimizer, schedule, LOSS, replace(SETTINGS, recompute=True))
    recomputed = trainer._recompute_logprobs(minibatch(), MetricAccumulator(), 0)
    own = Trainer(plain, optimizer, schedule, LOSS, replace(SETTINGS, recompute=True))
    assert recomputed == own._recompute_logprobs(minibatch(), MetricAccumulator(), 0)


async def test_draws_of_dropout(tiny_actor: Path) -> None:
    """Check that draws depend on the number of updates, and not on recomputed activations."""
    batches = [minibatch()]
    without, _ = await outcome(tiny_actor, SECTION, batches)
    first, _ = await outcome(tiny_actor, DROPOUT, batches)
    again, _ = await outcome(tiny_actor, DROPOUT, batches, activation_checkpointing=True)
    assert not equal(first, without)
    for name, tensor in first.items():
        assert torch.allclose(tensor, again[name], atol=1e-6), name
    model = adapted(tiny_actor, DROPOUT)
    disturb(model)
    gradients: list[dict[str, Any]] = []
    async with learning(model, tiny_actor) as learner:
        trainer = learner._trainer
        for updates in (0, 0, 1):
            trainer._address = (updates, 0)
            trainer._gradient(minibatch(), MetricAccumulator(), None)
            gradients.append({name: p.grad for name, p in adapter_parameters(model).items()})
    assert equal(gradients[0], gradients[1])
    assert not equal(gradients[0], gradients[2])


async def test_a_resumed_adapter_continues_with_the_same_draws(
    tiny_actor: Path, tmp_path: Path
) -> None:
    model, continued = adapted(tiny_actor, DROPOUT), adapted(tiny_actor, DROPOUT)
    async with (
        learning(model, tiny_actor) as learner,
        learning(continued, tiny_actor) as other,
    ):
        await learner.step([minibatch(), minibatch(1)])
        await learner.save(tmp_path)
        await other.load(tmp_path)
        for trained in (learner, other):
            await trained.step([minibatch(2)])
        assert (await learner.publish()).checksum == (await other.publish()).checksum
    assert '"lora_dropout": 0.5' in (tmp_path / "adapter_config.json").read_text("utf-8")


async def test_the_mismatch_is_measured_without_dropout(tiny_actor: Path) -> None:
    """Check a sample with the log-probs of the policy: the mismatch is 0, but ratios are not 1."""
    model = adapted(tiny_actor, DROPOUT)
    disturb(model)
    own = (0.0, *logp(model)[0, 1:].tolist())
    trace = TokenTrace(tuple(IDS[0].tolist()), tuple(map(int, MASK[0])), own, (-1, *[0] * 36))
    batch = Minibatch((TrainSample(trace, 1.0, 1.0),), 36)
    _, dropped = await outcome(tiny_actor, DROPOUT, [batch])
    assert dropped["mismatch_kl"] == pytest.approx(0.0, abs=1e-8)
    assert abs(dropped["ratio_mean"] - 1) > 1e-3
    _, plain = await outcome(tiny_actor, SECTION, [batch])
    assert plain["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
