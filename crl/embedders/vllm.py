"""Encoders in Hugging Face format as embedders, computed by a vLLM pooling engine in processes of its own."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig
from vllm.config import PoolerConfig
from vllm.inputs import tokens_input
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

from crl.embedders.encoder import encoder_tokenizer, token_limit
from crl.embedders.recipe import KEY, Pooling, Recipe
from crl.engines.vllm_replica import Replica, gpu_share, on_cpu, start_vllm
from crl.errors import ConfigError, TransientError
from crl.modeling import first_line

POOLING: dict[Pooling, Literal["MEAN", "CLS", "LAST"]] = {
    "mean": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
}
"""vLLM's names of them."""

CPU_CACHE_BYTES = 1 << 28
"""Size of what it takes for a cache on the CPU."""


class VllmEmbedder:
    """`crl.protocols.Embedder` over vLLM; made by `start`. `name` follows from weights, tokenizer and recipe, as `EncoderEmbedder`'s.

    A text that is longer than the model reads is cut. An engine that dies is started again once, and asked again.
    """

    name: str
    dim: int

    def __init__(
        self,
        recipe: Recipe,
        gpus: Sequence[str],
        fraction: float | None,
        *,
        batch: int,
        threads: int,
    ) -> None:
        config = AutoConfig.from_pretrained(recipe.folder, local_files_only=True)
        self._recipe, self._kind = recipe, config.model_type
        self._tokenizer = encoder_tokenizer(recipe)
        self._limit = token_limit(recipe, self._tokenizer, config)
        self._gate = asyncio.Semaphore(2 * batch)  # more would wait in vLLM's queue only
        arguments = _engine_arguments(recipe, self._limit, batch, fraction, config)
        self._replica = Replica(partial(start_vllm, arguments, tuple(gpus), threads), _as_it_was)

    @classmethod
    async def start(
        cls, recipe: Recipe, gpus: Sequence[str] = (), fraction: float | None = None, *, batch: int = 32, threads: int = 1
    ) -> VllmEmbedder:  # fmt: skip
        """Returns when it serves. gpus: as CUDA_VISIBLE_DEVICES names them; none = the first one, or vLLM's CPU build; fraction: of a GPU's
        memory that it takes. Raises `ConfigError` for an encoder that vLLM does not serve."""
        weights = await asyncio.to_thread(_checksum, recipe)
        embedder = cls(recipe, gpus, fraction, batch=batch, threads=threads)
        try:
            embedder.dim = len(await embedder._vector(embedder._ids(["Go north?"])[0]))
        except asyncio.CancelledError:
            await embedder.aclose()
            raise
        except Exception as error:  # a model that vLLM does not know fails in many ways
            await embedder.aclose()
            reason = f"vLLM cannot embed a text with it ({first_line(error)})"
            raise ConfigError(
                KEY, str(recipe.folder), reason, "Leave out embedder.kind, or use another encoder"
            ) from error
        embedder.name = (
            f"{embedder._kind}-{recipe.fingerprint(embedder._limit, weights):08x}-{embedder.dim}"
        )
        return embedder

    async def aclose(self) -> None:
        await self._replica.aclose()

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm. Raises `EngineError`."""
        vectors = await asyncio.gather(*(self._vector(ids) for ids in self._ids(texts)))
        stacked = np.array(vectors, np.float32).reshape(len(texts), self.dim)
        return stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-12)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(
            self._recipe.prepared(texts), truncation=True, max_length=self._limit
        )["input_ids"]

    async def _vector(self, ids: Sequence[int]) -> NDArray[np.float32]:
        def call(llm: AsyncLLM, name: str) -> AsyncIterator[PoolingRequestOutput]:
            return llm.encode(
                tokens_input(list(ids)), PoolingParams(task="embed", use_activation=False), name
            )

        async with self._gate:
            try:
                output = await self._replica.ask(call)
            except TransientError:
                output = await self._replica.ask(call)
        return output.outputs.data.float().numpy()


async def _as_it_was(llm: AsyncLLM) -> None:
    """An encoder's weights never change."""


def _engine_arguments(
    recipe: Recipe, limit: int, batch: int, fraction: float | None, config: Any
) -> dict[str, Any]:
    dtype = getattr(config, "dtype", None)
    return {
        "model": str(recipe.folder),
        "runner": "pooling",
        "pooler_config": PoolerConfig(pooling_type=POOLING[recipe.pooling]),
        "dtype": str(dtype).removeprefix("torch.") if dtype is not None else "auto",
        "skip_tokenizer_init": True,
        "max_model_len": limit,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | (
        {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        if on_cpu()
        else gpu_share(fraction)
    )


def _checksum(recipe: Recipe) -> int:
    """Of the files with weights, read as they lie."""
    crc = 0
    for path in sorted(recipe.folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                crc = zlib.crc32(block, crc)
    return crc
