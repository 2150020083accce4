"""The production engine: vLLM, in processes and on GPUs of its own. Tokens go in, tokens come out; no text is made here.

Cast. `VllmEngine` is what a run sees: one or more replicas of a model behind the `Engine` protocol. `Replica` (vllm_replica.py) owns one
vLLM engine and starts it again, once, when it dies. `Receiver` (vllm_worker.py) runs in vLLM's workers and takes new weights in.

A swap of weights lets requests in flight finish on the old weights, holds new ones back, and clears the prefix cache: a key-value cache
of old weights makes wrong tokens without an error. What is in flight when an engine dies fails as a `TransientError`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from crl.config.shapes import require_context, require_divisible
from crl.engines.vllm_heads import WiderHeads
from crl.engines.vllm_replica import Replica, gpu_share, on_cpu, start_vllm, started
from crl.errors import ConfigError, EngineError, RolloutError
from crl.modeling import InProcessWeights, checksum, first_line
from crl.protocols import PublishHandle
from crl.scratch import scratch_folder
from crl.sync import MEETING, FileWeights, NcclWeights, beside, weight_bytes, weights_path
from crl.types import Completion, Sampling

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What the attention kernels of vLLM's CPU build are made for."""

CPU_CACHE_BYTES = 1 << 30
"""Size of the key-value cache of the CPU build, which is for tiny models; on a GPU it is what memory_fraction leaves."""

TRANSFER_S = 600.0
"""Seconds that new weights may take into an engine in which nothing decodes any more."""

SEED_BITS = 63
"""vLLM's seeds are signed 64-bit numbers."""


@dataclass(frozen=True)
class VllmSettings:
    """placements: the GPUs of each replica, as many as tensor_parallel, as CUDA_VISIBLE_DEVICES names them (of the CPU build: empty
    tuples); dtype: of the weights, the one that they are published in; memory_fraction: of a GPU that an engine may fill (None = as much as
    vLLM chooses); max_batch: requests decoded together by a replica; max_context: prompt and completion tokens of one request; threads: CPU
    threads of a worker of the CPU build.
    """

    placements: tuple[tuple[str, ...], ...]
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    transfer: Literal["file", "nccl"] = "file"
    max_batch: int = 256
    max_context: int = 32_768
    threads: int = 1


class VllmEngine:
    """`crl.protocols.Engine` over vLLM. Made by `start`; must be used from that event loop; `aclose` it there."""

    def __init__(self, model: Path, settings: VllmSettings, config: PreTrainedConfig) -> None:
        self._settings, self._vocabulary = settings, config.vocab_size
        self._folder = Path(tempfile.mkdtemp(prefix="engine-", dir=scratch_folder()))
        self._heads = wider_heads(config)
        self._current: FileWeights | None = None
        self._dead: EngineError | None = None
        self._receiver = NcclReceiver(settings.tensor_parallel)
        self.version = 0
        self._meter = _Meter()
        arguments = engine_arguments(self._widened(model) if self._heads else model, settings)
        self._replicas = [
            Replica(partial(self._start, arguments, gpus), self._restore)
            for gpus in settings.placements
        ]

    @classmethod
    async def start(
        cls, model: Path, settings: VllmSettings, key: str = "actor.model"
    ) -> VllmEngine:
        """Returns when every replica serves. key: the setting that named the model. Raises `ConfigError`, `EngineError`."""
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
    def busy(self) -> float:
        """Seconds in which at least one request was in flight."""
        return self._meter.seconds

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        """See `crl.protocols.Engine`. `rng` is required unless the temperature is 0; a session's requests go to one replica."""
        self._check(ids, sampling.max_tokens)
        if rng is None and sampling.temperature > 0:
            raise ValueError("sampling needs a seed: pass rng")
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=[
                token for token in sampling.stop_ids if token < self._vocabulary
            ],  # vLLM refuses others
            ignore_eos=True,  # the caller knows what ends a turn
            seed=None if rng is None else rng % 2**SEED_BITS,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return completion(await self._ask(ids, parameters, session))

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """See `crl.protocols.Engine`. vLLM samples one token after the prompt: ids must leave room for it."""
        self._check(ids, 1)
        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(ids, parameters, None)
        assert output.prompt_logprobs is not None
        found = list(output.prompt_logprobs)[1:]
        return [at[token].logprob for token, at in zip(ids[1:], found, strict=True) if at]

    async def update_weights(self, handle: PublishHandle) -> None:
        """See `crl.protocols.Engine`. Requests in flight finish on the old weights; new ones wait for the swap."""
        await self.health()
        try:
            if isinstance(handle, NcclWeights):
                await self._broadcast(handle)
            else:
                await self._read(await asyncio.to_thread(self._adopt, handle))
        except EngineError as error:
            self._dead = error
            raise
        except OSError as error:
            self._dead = EngineError(
                f"there is no room for the weights of version {handle.version}: {error}"
            )
            raise self._dead from error
        self.version = handle.version

    async def health(self) -> None:
        """Waits for an engine that is being started again. Raises the `EngineError` that ended the engine, if one did."""
        if self._dead is not None:
            raise self._dead
        await asyncio.gather(*(replica.ready() for replica in self._replicas))

    async def aclose(self) -> None:
        self._dead = self._dead or EngineError("the engine is closed")
        await asyncio.gather(*(replica.aclose() for replica in self._replicas))
        if self._current is not None:
            self._current.discard()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _ask(
        self, ids: Sequence[int], parameters: SamplingParams, session: str | None
    ) -> RequestOutput:
        if self._dead is not None:
            raise self._dead

        def call(llm: AsyncLLM, name: str) -> AsyncIterator[RequestOutput]:
            return llm.generate(tokens_input(list(ids)), parameters, name)

        with self._meter.running():
            return await self._replica(session).ask(call)

    def _replica(self, session: str | None) -> Replica:
        """The same one for all turns of a session, whose prefix it has; else the least busy one."""
        if session is not None:
            return self._replicas[zlib.crc32(session.encode()) % len(self._replicas)]
        return min(self._replicas, key=lambda replica: replica.in_flight)

    def _check(self, ids: Sequence[int], more: int) -> None:
        if not ids or len(ids) + more > self._settings.max_context:
            raise RolloutError(
                "engine",
                f"{len(ids)} prompt + {more} new tokens do not fit {self._settings.max_context}",
            )
        if not (min(ids) >= 0 and max(ids) < self._vocabulary):
            raise RolloutError(
                "engine", f"the prompt holds a token id outside the model's {self._vocabulary}"
            )

    async def _start(self, arguments: dict[str, Any], gpus: tuple[str, ...]) -> AsyncLLM:
        llm = await start_vllm(arguments, gpus, self._settings.threads)
        async with started(llm):
            await llm.update_weight_version(str(self.version))
            await llm.get_supported_tasks()  # which the first request would ask
        return llm

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _adopt(self, handle: PublishHandle) -> FileWeights:
        """The published weights in a file of this engine's own, which outlives the sender's: an engine that dies starts from it."""
        if not isinstance(handle, InProcessWeights | FileWeights):
            raise EngineError(f"the vLLM engine cannot receive weights over {handle.transport}")
        if isinstance(handle, FileWeights) and not self._heads:
            path = beside(handle.path)
            link_or_copy(handle.path, path)
            return replace(handle, path=path)  # which the workers compare with the checksum
        tensors = handle.tensors
        if checksum(tensors) != handle.checksum:
            raise EngineError(
                f"the weights of version {handle.version} arrived with another checksum"
            )
        path = weights_path(weight_bytes(handle.manifest))
        return FileWeights.write(
            path, self._heads.widened(tensors) if self._heads else tensors, handle.version
        )

    def _widened(self, model: Path) -> Path:
        """The model's directory as vLLM is shown it."""
        assert self._heads is not None
        folder = self._folder / "model"
        folder.mkdir()
        self._heads.write_config(model, folder)
        save_file(
            self._heads.widened(load_file(model / "model.safetensors")),
            folder / "model.safetensors",
            {"format": "pt"},
        )
        return folder

    async def _read(self, weights: FileWeights) -> None:
        """Every replica takes the file in; one that dies over it has it from its second start."""
        before, self._current = self._current, weights
        await asyncio.gather(
            *(replica.carry_out(partial(swap, weights=weights)) for replica in self._replicas)
        )
        if before is not None:
            before.discard()

    async def _restore(self, llm: AsyncLLM) -> None:
        """Brings an engine that was started again from the model's directory to the weights of its predecessor."""
        if self._current is not None:
            await swap(llm, self._current)
        elif self.version:
            raise EngineError(
                "vLLM died, and the weights that it had came over NCCL: only the learner has them. Resume from a checkpoint"
            )

    async def _broadcast(self, weights: NcclWeights) -> None:
        ranks = self._settings.tensor_parallel
        if weights.world_size != 1 + ranks * len(self._replicas):
            raise EngineError(
                f"the learner sends to {weights.world_size - 1} workers, but there are {ranks * len(self._replicas)}"
            )
        engines = [await replica.ready() for replica in self._replicas]
        try:
            await self._receiver.receive(engines, weights)
        except EngineDeadError as error:
            raise EngineError(
                "vLLM died while it received weights over NCCL: only the learner has them"
            ) from error


class NcclReceiver:
    """The workers of one `VllmEngine` as ranks of a learner's NCCL group, which they join before its first transfer.

    Not run where this was written, for want of GPUs: read against the source of vLLM 0.32.0.
    """

    def __init__(self, tensor_parallel: int) -> None:
        self._workers, self._port = tensor_parallel, 0

    async def receive(self, engines: Sequence[AsyncLLM], weights: NcclWeights) -> None:
        """As `swap` does it, but all engines together, and the learner sends meanwhile."""
        await asyncio.gather(*(_drain(llm) for llm in engines))
        async with _deadline(weights.version):
            first, self._port = (
                not self._port,
                self._port or _free_port(),
            )  # now, so that nobody else takes it before they meet
            await asyncio.gather(weights.send(self._port), self._take_in(engines, weights, first))

    async def _take_in(
        self, engines: Sequence[AsyncLLM], weights: NcclWeights, first: bool
    ) -> None:
        if first:
            group = {
                "master_address": MEETING,
                "master_port": self._port,
                "world_size": weights.world_size,
                "packed": True,
            }
            offsets = range(1, weights.world_size, self._workers)
            requests = [
                WeightTransferInitRequest(init_info={**group, "rank_offset": offset})
                for offset in offsets
            ]
            await asyncio.gather(*(_join(llm, r) for llm, r in zip(engines, requests, strict=True)))
        await asyncio.gather(*(_renew(llm, weights) for llm in engines))


async def _join(llm: AsyncLLM, request: WeightTransferInitRequest) -> None:
    with _failing(llm, "the learner and vLLM do not meet over NCCL"):
        await llm.init_weight_transfer_engine(request)


async def swap(llm: AsyncLLM, weights: FileWeights) -> None:
    """New weights into a running vLLM, once the requests in flight have ended. Raises `EngineError` unless version and checksum are those
    that were sent, or when that takes longer than `TRANSFER_S`."""
    await _drain(llm)
    async with _deadline(weights.version):
        await _renew(llm, weights)


async def _drain(llm: AsyncLLM) -> None:
    await llm.pause_generation(mode="wait", clear_cache=True)


@asynccontextmanager
async def _deadline(version: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TRANSFER_S):
            yield
    except TimeoutError as error:
        raise EngineError(
            f"the transfer of the weights of version {version} took more than {TRANSFER_S:g} s"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((MEETING, 0))
        return probe.getsockname()[1]


async def _renew(llm: AsyncLLM, weights: FileWeights | NcclWeights) -> None:
    with _failing(llm, f"the weights of version {weights.version} did not arrive"):
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=_update(weights)))
        await llm.finish_weight_update(weight_version=str(weights.version))
        received = await llm.collective_rpc("received_checksum")
        version = await llm.get_weight_version()
    if set(received) != {weights.checksum} or version != str(weights.version):
        found = f"version {version} with the checksums {received}"
        raise EngineError(
            f"of version {weights.version} with the checksum {weights.checksum} arrived {found}"
        )
    if not await llm.reset_prefix_cache():
        raise EngineError("vLLM kept a prefix cache of the old weights")
    await llm.resume_generation()


@contextmanager
def _failing(llm: AsyncLLM, what: str) -> Iterator[None]:
    """Whatever vLLM raises, as an `EngineError` that begins with `what`, or as vLLM's own word for a death."""
    try:
        yield
    except Exception as error:  # workers, NCCL and files fail in many ways
        if llm.errored:
            raise EngineDeadError() from error
        raise EngineError(f"{what}: {error}") from error


def _update(weights: FileWeights | NcclWeights) -> dict[str, Any]:
    manifest = weights.manifest
    if isinstance(weights, FileWeights):
        return {"path": str(weights.path), "names": list(manifest.names)}
    return {
        "names": list(manifest.names),
        "dtype_names": [dtype.removeprefix("torch.") for dtype in manifest.dtypes],
        "shapes": [list(shape) for shape in manifest.shapes],
    }


def completion(output: RequestOutput) -> Completion:
    """What vLLM sampled. Raises `RolloutError` when it gave the request up."""
    (sampled,) = output.outputs
    if sampled.finish_reason not in ("stop", "length"):
        raise RolloutError("engine", f"vLLM gave the request up ({sampled.finish_reason})")
    ids = tuple(sampled.token_ids)
    assert sampled.logprobs is not None
    assert sampled.weight_versions is not None
    logprobs = tuple(
        at[token].logprob for token, at in zip(ids, sampled.logprobs, strict=True) if at
    )
    versions = tuple(
        int(span.version) for span in sampled.weight_versions for _ in range(span.start, span.end)
    )
    return Completion(ids, logprobs, versions, sampled.finish_reason)


# ── what vLLM is told, and what it is not asked for ─────────────────────────────────────────────────────────────────


def engine_arguments(model: Path, settings: VllmSettings) -> dict[str, Any]:
    """Fields of vLLM's `AsyncEngineArgs`."""
    return (
        {
            "model": str(model),
            "dtype": settings.dtype,
            "load_format": settings.load_format,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # none of the model's own sampling defaults, which truncate
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from, temperature included
            "max_model_len": settings.max_context,
            "max_num_seqs": settings.max_batch,
            "tensor_parallel_size": settings.tensor_parallel,
            "enable_prefix_caching": True,
            "weight_transfer_config": WeightTransferConfig(backend=f"crl-{settings.transfer}"),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        | (_cpu_arguments(settings) if on_cpu() else gpu_share(settings.memory_fraction))
    )


def _cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        "enable_chunked_prefill": False,  # vLLM 0.32.0 dies over a prompt in parts that has a seed: it winds back a CUDA generator
        "max_num_batched_tokens": max(2048, settings.max_context),
    }


def require_fit(config: PreTrainedConfig, settings: VllmSettings, model: Path, key: str) -> None:
    """Raises `ConfigError` for a model that vLLM's kernels are not made for, or that cannot be cut into so many parts."""
    if on_cpu() and head_size(config) not in CPU_HEAD_SIZES and not wider_heads(config):
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        reason = f"its attention heads have {head_size(config)} numbers, and vLLM's CPU build serves {sizes}"
        raise ConfigError(key, str(model), reason, "Use another model, or engine.kind=torch")
    role = key.partition(".")[0]
    require_context(role, settings.max_context, getattr(config, "max_position_embeddings", None))
    require_divisible(role, settings.tensor_parallel, config.num_attention_heads)


def head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def wider_heads(config: PreTrainedConfig) -> WiderHeads | None:
    """How vLLM's CPU build can serve a model with smaller heads than it serves, such as the bundled ones; None where that is not so."""
    larger = [size for size in CPU_HEAD_SIZES if size > head_size(config)]
    if not on_cpu() or head_size(config) in CPU_HEAD_SIZES or not larger:
        return None
    return WiderHeads.of(config, larger[0])


def _config(model: Path, key: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except Exception as error:  # a broken file fails in many ways
        reason = f"its config.json cannot be read ({first_line(error)})"
        raise ConfigError(key, str(model), reason, "Give a directory with a causal LM") from error


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same bytes, which stay when the first one goes; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class _Meter:
    """How long something has been running, whatever runs at the same time."""

    def __init__(self) -> None:
        self._running, self._begin, self._past = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        return self._past + (time.perf_counter() - self._begin if self._running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._running:
            self._begin = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._past += time.perf_counter() - self._begin
