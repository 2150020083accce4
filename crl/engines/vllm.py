"""Production engine: vLLM in separate processes, on separate GPUs.

Input and output are token ids; this module handles no text.

* `VllmEngine` serves one or more replicas of a model behind the `Engine` protocol.
* `Replica` (vllm_replica.py) owns one vLLM engine and restarts it if it dies.
* `Receiver` (vllm_worker.py) runs in vLLM's worker processes and receives new weights.
* vllm_adapters.py sends adapters instead of whole weights.

During a swap of weights, running requests finish on the old weights and new requests wait. The
swap clears the prefix cache, because keys and values of old weights would give wrong tokens without
an error. Requests that are running when an engine dies are repeated with the restarted engine. They
fail with `EngineError` if it is not restarted.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import math
import os
import shutil
import socket
import tempfile
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig
from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from crl.config.models.shapes import require_context, require_divisible
from crl.config.schema import LoraSection
from crl.engines.backends import ENGINES
from crl.engines.vllm_adapters import (
    AdapterFile,
    adapter_arguments,
    adapter_request,
    add_initial_adapter,
    load_adapter,
    write_config,
)
from crl.engines.vllm_heads import WiderHeads
from crl.engines.vllm_replica import Replica, gpu_share, on_cpu, shut_down_on_error, start_vllm
from crl.errors import ConfigError, EngineError, RolloutError
from crl.modeling import ADAPTER_WEIGHTS, Precision
from crl.modeling.loading import OWN_FILES, InProcessWeights, checksum, not_loadable
from crl.modeling.weights import (
    LOOPBACK_ADDRESS,
    FileWeights,
    NcclWeights,
    sibling_path,
    weight_bytes,
    weights_path,
)
from crl.protocols import PublishHandle
from crl.scratch import scratch_folder
from crl.types import Completion, Sampling
from crl.wording import counted

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the attention kernels of vLLM's CPU build support."""

CPU_CACHE_BYTES = 1 << 30
"""Size of the key-value cache in vLLM's CPU build, which serves tiny models.

On a GPU the size follows from `VllmSettings.memory_fraction`.
"""

TRANSFER_TIMEOUT_S = 600.0
"""Timeout in seconds for a transfer of weights, counted after the running requests have ended."""

SEED_BITS = 63
"""Bits of a request's seed. vLLM's seeds are signed 64-bit numbers."""


@dataclass(frozen=True)
class WeightSettings:
    """Precision of an engine's weights, and how the weights reach the engine."""

    dtype: Precision = "float32"
    """Dtype of the weights. The learner publishes them in this dtype."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Source of the initial weights in vLLM: the model's directory, or dummy values."""
    transfer: Literal["file", "nccl"] = "file"
    """Transport of published weights."""
    adapter: LoraSection | None = None
    """Adapter that the engine receives instead of whole weights; None for whole weights."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of a `VllmEngine`."""

    placements: tuple[tuple[str, ...], ...]
    """GPUs of each replica, named as in CUDA_VISIBLE_DEVICES.

    Each tuple has `tensor_parallel` GPUs. For the CPU build each tuple is empty.
    """
    weights: WeightSettings = WeightSettings()
    tensor_parallel: int = 1
    """Number of GPUs over which the model of a replica is split."""
    memory_fraction: float | None = None
    """Fraction of a GPU's memory that an engine may use; None uses vLLM's default."""
    max_batch: int = 256
    """Maximum number of requests that a replica decodes together."""
    max_context: int = 32_768
    """Maximum number of prompt and completion tokens of one request."""
    threads: int = 1
    """CPU threads of a worker process in the CPU build."""
    structured_outputs: bool = False
    """True if requests may have a JSON schema. vLLM then loads the model's tokenizer."""


class VllmEngine:
    """`crl.protocols.Engine` over vLLM.

    Create an engine with `start`. Use and close it from the same event loop only.
    """

    def __init__(self, model: Path, settings: VllmSettings, config: PreTrainedConfig) -> None:
        self._settings, self._vocabulary = settings, config.vocab_size
        self._folder = Path(tempfile.mkdtemp(prefix="engine-", dir=scratch_folder()))
        self._heads = wider_heads(config)
        self._current_weights: FileWeights | None = None
        self._failure: EngineError | None = None
        self._receiver = NcclReceiver(settings.tensor_parallel)
        self.version = 0
        self._timer = _BusyTimer()
        served = self._widened(model) if self._heads else model
        arguments = engine_arguments(served, settings, tokenizer=model)
        self._replicas = [
            Replica(partial(self._start, arguments, gpus), self._restore)
            for gpus in settings.placements
        ]

    @classmethod
    async def start(
        cls, model: Path, settings: VllmSettings, key: str = "actor.model"
    ) -> VllmEngine:
        """Start an engine for the model directory `model`. Return when every replica is ready.

        `key` is the setting that names the model. Raise `ConfigError` if vLLM cannot serve the
        model with these settings, and `EngineError` if a replica does not start.
        """
        config = _config(model, key)
        require_fit(config, settings, model, key)
        engine = cls(model, settings, config)
        try:
            await asyncio.gather(*(replica.ready() for replica in engine._replicas))
        except BaseException:
            await engine.aclose()
            raise
        return engine

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one request was running."""
        return self._timer.seconds

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        """Sample one completion of `ids`. See `crl.protocols.Engine`.

        All requests of a session are sent to the same replica. Raise `ValueError` if `rng` is None
        and the temperature is above 0, if top-p is used without top-k, or for a JSON schema without
        `VllmSettings.structured_outputs`.
        """
        self._check(ids, sampling.max_tokens)
        if sampling.json_schema and not self._settings.structured_outputs:
            raise ValueError("a JSON schema needs VllmSettings.structured_outputs")
        if sampling.truncated and not sampling.top_k:
            raise ValueError("vLLM returns kept tokens only with top_k: pass top_k")
        if rng is None and sampling.temperature > 0:
            raise ValueError("sampling at a temperature above 0 needs a seed: pass rng")
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            # vLLM rejects ids outside the vocabulary.
            stop_token_ids=[token for token in sampling.stop_ids if token < self._vocabulary],
            ignore_eos=True,  # the caller passes all stop tokens
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if rng is None else rng % 2**SEED_BITS,
            # 0: only the log-prob of the sampled token.
            logprobs=min(sampling.top_k, self._vocabulary) if sampling.truncated else 0,
            structured_outputs=(
                StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None
            ),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return completion(
            await self._generate(ids, parameters, session), truncated=sampling.truncated
        )

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Return the log-probs of `ids`. See `crl.protocols.Engine`.

        vLLM also samples one token after `ids`. Therefore `ids` must be at least one token shorter
        than `max_context`. Raise `RolloutError` otherwise.
        """
        self._check(ids, 1)
        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._generate(ids, parameters, None)
        assert output.prompt_logprobs is not None
        positions = list(output.prompt_logprobs)[1:]
        return [
            by_token[token].logprob
            for token, by_token in zip(ids[1:], positions, strict=True)
            if by_token
        ]

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swap the weights. See `crl.protocols.Engine`.

        Running requests finish on the old weights. New requests wait for the swap. Raise
        `EngineError` if the transfer fails or the weights cannot be stored in a file; the engine
        cannot be used afterwards. Raise the sender's `LearnerError` if the sender fails.
        """
        await self.health()
        try:
            if isinstance(handle, NcclWeights):
                await self._receive_broadcast(handle)
            else:
                await self._load_file(await asyncio.to_thread(self._store_weights, handle))
        except EngineError as error:
            self._failure = error
            raise
        except OSError as error:
            self._failure = EngineError(
                f"the weights of version {handle.version} cannot be stored in a file: {error}"
            )
            raise self._failure from error
        self.version = handle.version

    async def health(self) -> None:
        """Wait until all replicas are ready, including those that are being restarted.

        Raise the `EngineError` that ended the engine, if there is one.
        """
        if self._failure is not None:
            raise self._failure
        await asyncio.gather(*(replica.ready() for replica in self._replicas))

    def details(self) -> list[str]:
        return [
            f"replica {number}: {counted(replica.in_flight, 'request')} in flight"
            for number, replica in enumerate(self._replicas)
        ]

    async def aclose(self) -> None:
        self._failure = self._failure or EngineError("the engine is closed")
        await asyncio.gather(*(replica.aclose() for replica in self._replicas))
        if self._current_weights is not None:
            self._current_weights.discard()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _generate(
        self, ids: Sequence[int], parameters: SamplingParams, session: str | None
    ) -> RequestOutput:
        """Return vLLM's output for one request."""
        if self._failure is not None:
            raise self._failure

        adapter = adapter_request() if self._settings.weights.adapter else None

        def call(llm: AsyncLLM, name: str) -> AsyncIterator[RequestOutput]:
            return llm.generate(tokens_input(list(ids)), parameters, name, lora_request=adapter)

        with self._timer.running():
            return await self._replica(session).request(call)

    def _replica(self, session: str | None) -> Replica:
        """Return the replica for a request.

        All turns of a session use the same replica, because it caches their prefix. A request
        without a session uses the replica with the fewest running requests.
        """
        if session is not None:
            return self._replicas[zlib.crc32(session.encode()) % len(self._replicas)]
        return min(self._replicas, key=lambda replica: replica.in_flight)

    def _check(self, ids: Sequence[int], new_tokens: int) -> None:
        """Raise `RolloutError` if `ids` and `new_tokens` further tokens cannot be processed."""
        if not ids or len(ids) + new_tokens > self._settings.max_context:
            raise RolloutError(
                "engine",
                f"{len(ids)} prompt tokens and {new_tokens} new tokens do not fit into the "
                f"context of {self._settings.max_context} tokens",
            )
        if not (min(ids) >= 0 and max(ids) < self._vocabulary):
            raise RolloutError(
                "engine",
                f"the prompt contains a token id outside the model's vocabulary of "
                f"{self._vocabulary} tokens",
            )

    async def _start(self, arguments: dict[str, Any], gpus: tuple[str, ...]) -> AsyncLLM:
        """Start one vLLM engine on `gpus` and set its weight version."""
        llm = await start_vllm(arguments, gpus, self._settings.threads)
        async with shut_down_on_error(llm):
            if self._settings.weights.adapter:
                await add_initial_adapter(llm)
            await llm.update_weight_version(str(self.version))
            await llm.get_supported_tasks()  # otherwise the first request would make this call
        return llm

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _store_weights(self, handle: PublishHandle) -> FileWeights:
        """Return the published weights in a file that belongs to this engine.

        The file stays valid after the sender removes its own file, so a restarted vLLM engine can
        read it. Raise `EngineError` for an unsupported handle, or for tensors whose checksum is
        not the handle's.
        """
        if not isinstance(handle, InProcessWeights | FileWeights):
            raise EngineError(f"the vLLM engine cannot receive weights over {handle.transport}")
        if isinstance(handle, FileWeights) and not self._heads:
            path = self._file_path(sibling_path(handle.path))
            link_or_copy(handle.path, path)
            # The workers compute the checksum of the file.
            return self._stored_type(path, handle.version, handle.checksum, handle.manifest)
        tensors = handle.tensors
        if checksum(tensors) != handle.checksum:
            raise EngineError(
                f"the weights of version {handle.version} arrived with a different checksum"
            )
        path = self._file_path(weights_path(weight_bytes(handle.manifest)))
        if self._heads:
            widen = (
                self._heads.widen_adapter if self._settings.weights.adapter else self._heads.widen
            )
            tensors = widen(tensors)
        return self._stored_type.write(path, tensors, handle.version)

    @property
    def _stored_type(self) -> type[FileWeights]:
        return AdapterFile if self._settings.weights.adapter else FileWeights

    def _file_path(self, path: Path) -> Path:
        """Return the path of a file for weights: `path`, or in a new directory for an adapter."""
        if self._settings.weights.adapter is None:
            return path
        folder = path.with_suffix("")
        folder.mkdir()
        write_config(self._settings.weights.adapter, folder)
        return folder / ADAPTER_WEIGHTS

    def _widened(self, model: Path) -> Path:
        """Write a copy of the model with wider heads. Return its directory."""
        assert self._heads is not None
        folder = self._folder / "model"
        folder.mkdir()
        self._heads.write_config(model, folder)
        save_file(
            self._heads.widen(load_file(model / "model.safetensors")),
            folder / "model.safetensors",
            {"format": "pt"},
        )
        return folder

    async def _load_file(self, weights: FileWeights) -> None:
        """Load the file into all replicas.

        A replica that dies during the transfer loads the file after its restart.
        """
        previous, self._current_weights = self._current_weights, weights
        await asyncio.gather(
            *(replica.apply(partial(swap, weights=weights)) for replica in self._replicas)
        )
        if previous is not None:
            previous.discard()

    async def _restore(self, llm: AsyncLLM) -> None:
        """Load the current weights into a restarted engine.

        A restart loads the model's directory, which may hold older weights. Raise `EngineError` if
        the current weights were received over NCCL, because then no file holds them.
        """
        if self._current_weights is not None:
            await swap(llm, self._current_weights)
        elif self.version:
            raise EngineError(
                "vLLM died and cannot be restarted: its weights were received over NCCL, so no "
                "file holds them. Resume the run from a checkpoint"
            )

    async def _receive_broadcast(self, weights: NcclWeights) -> None:
        """Receive weights over NCCL in all replicas.

        Raise `EngineError` if the number of workers differs from the learner's or vLLM dies.
        """
        ranks = self._settings.tensor_parallel
        if weights.world_size != 1 + ranks * len(self._replicas):
            raise EngineError(
                f"the learner sends weights to {weights.world_size - 1} workers, "
                f"but vLLM has {ranks * len(self._replicas)} workers"
            )
        engines = [await replica.ready() for replica in self._replicas]
        try:
            await self._receiver.receive(engines, weights)
        except EngineDeadError as error:
            raise EngineError(
                "vLLM died while it received weights over NCCL and cannot be restarted, because no "
                "file holds them. Resume the run from a checkpoint"
            ) from error


class NcclReceiver:
    """Receiving side of weight transfers over NCCL.

    The workers of one `VllmEngine` are ranks of the learner's NCCL group. They join the group
    before the first transfer.

    This class has not been run, because no GPUs were available when it was written. It was checked
    against the source of vLLM 0.32.0.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._workers_per_engine, self._port = tensor_parallel, 0

    async def receive(self, engines: Sequence[AsyncLLM], weights: NcclWeights) -> None:
        """Swap the weights of all `engines` together while the learner sends them.

        Wait for the running requests first, as in `swap`.
        """
        await asyncio.gather(*(_drain(llm) for llm in engines))
        async with _transfer_timeout(weights.version):
            # Choose the port late, so that no other process takes it before the ranks meet.
            join, self._port = not self._port, self._port or _free_port()
            await asyncio.gather(
                weights.send(self._port), self._receive_weights(engines, weights, join)
            )

    async def _receive_weights(
        self, engines: Sequence[AsyncLLM], weights: NcclWeights, join: bool
    ) -> None:
        """Receive the weights. If `join` is true, join the learner's NCCL group first."""
        if join:
            group = {
                "master_address": LOOPBACK_ADDRESS,
                "master_port": self._port,
                "world_size": weights.world_size,
                "packed": True,
            }
            offsets = range(1, weights.world_size, self._workers_per_engine)
            requests = [
                WeightTransferInitRequest(init_info={**group, "rank_offset": offset})
                for offset in offsets
            ]
            await asyncio.gather(
                *(_join_group(llm, r) for llm, r in zip(engines, requests, strict=True))
            )
        await asyncio.gather(*(_load_weights(llm, weights) for llm in engines))


async def _join_group(llm: AsyncLLM, request: WeightTransferInitRequest) -> None:
    with _as_engine_error(llm, "the learner and vLLM cannot connect over NCCL"):
        await llm.init_weight_transfer_engine(request)


async def swap(llm: AsyncLLM, weights: FileWeights) -> None:
    """Load new weights into a running vLLM engine after its running requests have ended.

    Raise `EngineError` if the version or the checksum differs from the sender's, or if the transfer
    takes longer than `TRANSFER_TIMEOUT_S`.
    """
    await _drain(llm)
    async with _transfer_timeout(weights.version):
        await _load_weights(llm, weights)


async def _drain(llm: AsyncLLM) -> None:
    """Pause the engine after its running requests have ended, and clear its caches."""
    await llm.pause_generation(mode="wait", clear_cache=True)


@asynccontextmanager
async def _transfer_timeout(version: int) -> AsyncIterator[None]:
    """Raise `EngineError` if the body takes longer than `TRANSFER_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(TRANSFER_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise EngineError(
            f"the transfer of the weights of version {version} took longer than "
            f"{TRANSFER_TIMEOUT_S:g} s"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK_ADDRESS, 0))
        return probe.getsockname()[1]


async def _load_weights(llm: AsyncLLM, weights: FileWeights | NcclWeights) -> None:
    """Load new weights into a paused engine, verify them and resume the engine.

    Raise `EngineError` if the transfer fails, the version or a checksum differs, or vLLM does not
    reset its prefix cache. Raise vLLM's `EngineDeadError` if vLLM dies.
    """
    with _as_engine_error(llm, f"vLLM cannot load the weights of version {weights.version}"):
        if isinstance(weights, AdapterFile):
            received = await load_adapter(llm, weights)
        else:
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info=_update_info(weights)))
            await llm.finish_weight_update(weight_version=str(weights.version))
            received = await llm.collective_rpc("received_checksum")
        version = await llm.get_weight_version()
    if set(received) != {weights.checksum} or version != str(weights.version):
        raise EngineError(
            f"the learner sent version {weights.version} with the checksum {weights.checksum}, "
            f"but vLLM received version {version} with the checksums {received}"
        )
    if not await llm.reset_prefix_cache():
        raise EngineError("vLLM did not clear its prefix cache, which belongs to the old weights")
    await llm.resume_generation()


@contextmanager
def _as_engine_error(llm: AsyncLLM, message: str) -> Iterator[None]:
    """Convert every error of the body to an `EngineError` whose message begins with `message`.

    Raise vLLM's `EngineDeadError` instead if the engine is dead.
    """
    try:
        yield
    except Exception as error:  # workers, NCCL and files raise many types of errors
        if llm.errored:
            raise EngineDeadError() from error
        raise EngineError(f"{message}: {error}") from error


def _update_info(weights: FileWeights | NcclWeights) -> dict[str, Any]:
    """Return the description of a transfer that vLLM passes to its workers."""
    manifest = weights.manifest
    if isinstance(weights, FileWeights):
        return {"path": str(weights.path), "names": list(manifest.names)}
    return {
        "names": list(manifest.names),
        "dtype_names": [dtype.removeprefix("torch.") for dtype in manifest.dtypes],
        "shapes": [list(shape) for shape in manifest.shapes],
    }


def completion(output: RequestOutput, *, truncated: bool) -> Completion:
    """Convert vLLM's output to a `Completion`. Raise `RolloutError` if vLLM aborted the request.

    If `truncated` is true, the output has the log-probs of the top k tokens. Those above −inf are
    the kept set. vLLM may also have kept tokens that are exactly as probable as the last one.
    Therefore the log-prob of the sampled token is renormalised over the kept set.

    vLLM's own `return_sampling_mask` is not used: an engine with this option refuses greedy
    requests, and vLLM's CPU build does not support the option.
    """
    (sampled,) = output.outputs
    if sampled.finish_reason not in ("stop", "length"):
        raise RolloutError("engine", f"vLLM aborted the request ({sampled.finish_reason})")
    ids = tuple(sampled.token_ids)
    assert sampled.logprobs is not None
    assert sampled.weight_versions is not None
    kept = [
        {token: entry.logprob for token, entry in by_token.items() if entry.logprob > -math.inf}
        for by_token in sampled.logprobs
        if by_token
    ]
    logprobs = tuple(by_token[token] for token, by_token in zip(ids, kept, strict=True))
    versions = tuple(
        int(span.version) for span in sampled.weight_versions for _ in range(span.start, span.end)
    )
    if not truncated:
        return Completion(ids, logprobs, versions, sampled.finish_reason)
    masses = (math.fsum(map(math.exp, by_token.values())) for by_token in kept)
    return Completion(
        ids,
        tuple(logp - math.log(mass) for logp, mass in zip(logprobs, masses, strict=True)),
        versions,
        sampled.finish_reason,
        tuple(array("i", by_token).tobytes() for by_token in kept),
    )


# ── vLLM's arguments and supported models ─────────────────────────────────────────────────────────


def engine_arguments(model: Path, settings: VllmSettings, tokenizer: Path) -> dict[str, Any]:
    """Return fields of vLLM's `AsyncEngineArgs` for `model` and `settings`.

    `tokenizer`: directory with the model's tokenizer. It is read only for structured outputs.
    """
    weights = settings.weights
    return {
        "model": str(model),
        "dtype": weights.dtype,
        "load_format": weights.load_format,
        "tokenizer": str(tokenizer),
        "skip_tokenizer_init": not settings.structured_outputs,
        # Named, because "auto" may choose another library, with another meaning of the schema.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
        # Ignore the sampling defaults of the model, which may include truncation.
        "generation_config": "vllm",
        # Log-probs are those of the sampling distribution, including the temperature.
        "logprobs_mode": "processed_logprobs",
        # No limit. A truncated request asks for the log-probs of its top k tokens.
        "max_logprobs": -1,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_batch,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": True,
        "weight_transfer_config": WeightTransferConfig(backend=f"crl-{weights.transfer}"),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(adapter_arguments(model, weights.adapter) if weights.adapter else {}),
    } | (_cpu_arguments(settings) if on_cpu() else gpu_share(settings.memory_fraction))


def _cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        # vLLM 0.32.0 crashes if a seeded request's prompt is split: it rewinds a CUDA generator.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, settings.max_context),
    }


def require_fit(config: PreTrainedConfig, settings: VllmSettings, model: Path, key: str) -> None:
    """Raise `ConfigError` if vLLM cannot serve the model with these settings.

    Check the head size (CPU build only), the precision of a model with an adapter, the context
    length, and that `tensor_parallel` divides the number of attention heads.
    """
    if on_cpu() and head_size(config) not in CPU_HEAD_SIZES and not wider_heads(config):
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        reason = (
            f"its attention heads have the size {head_size(config)}, "
            f"but vLLM's CPU build supports only {sizes}"
        )
        raise ConfigError(key, str(model), reason, "Use another model, or engine.kind=torch")
    role = key.partition(".")[0]
    weights = settings.weights
    if weights.adapter:
        float32_on_gpu = weights.dtype == "float32" and not on_cpu()
        ENGINES["vllm"].require_adapter(role, weights.adapter, float32_on_gpu=float32_on_gpu)
    require_context(role, settings.max_context, getattr(config, "max_position_embeddings", None))
    require_divisible(role, settings.tensor_parallel, config.num_attention_heads)


def head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def wider_heads(config: PreTrainedConfig) -> WiderHeads | None:
    """Return the wider heads with which vLLM's CPU build can serve a model with small heads.

    The bundled models need them. Return None if the model needs no wider heads or cannot have them.
    """
    larger = [size for size in CPU_HEAD_SIZES if size > head_size(config)]
    if not on_cpu() or head_size(config) in CPU_HEAD_SIZES or not larger:
        return None
    return WiderHeads.of(config, larger[0])


def _config(model: Path, key: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model, **OWN_FILES)
    except Exception as error:  # a broken file raises many types of errors
        raise not_loadable(key, model, error, part="its config.json") from error


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` as a hard link to `source`, or as a copy if a link is not possible.

    In both cases `target` stays valid after `source` is removed.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class _BusyTimer:
    """Total time during which at least one request is running. Overlapping time counts once."""

    def __init__(self) -> None:
        self._running, self._begin, self._total = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, including the current interval."""
        return self._total + (time.perf_counter() - self._begin if self._running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the body."""
        if not self._running:
            self._begin = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._total += time.perf_counter() - self._begin
