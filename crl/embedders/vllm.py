"""Embedders for encoders in Hugging Face format, computed by vLLM pooling engines.

An engine runs in separate processes.
"""

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
from crl.embedders.recipe import MODEL_KEY, EncoderSettings, Pooling
from crl.engines.vllm_replica import Replica, gpu_share, on_cpu, start_vllm
from crl.errors import ConfigError
from crl.modeling.loading import OWN_FILES, first_line

VLLM_POOLING: dict[Pooling, Literal["MEAN", "CLS", "LAST"]] = {
    "mean": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
}
"""vLLM's names of the poolings."""

CPU_CACHE_BYTES = 1 << 28
"""Bytes of vLLM's key-value cache on the CPU."""


class VllmEmbedder:
    """`crl.protocols.Embedder` that uses vLLM. Create it with `start`.

    `name` is derived from weights, tokenizer, settings and token limit, as in `EncoderEmbedder`. A
    text longer than the model's limit is truncated. If the engine dies, it is restarted and the
    request is repeated.
    """

    name: str
    dim: int

    def __init__(
        self,
        settings: EncoderSettings,
        gpus: Sequence[str],
        fraction: float | None,
        *,
        batch: int,
        threads: int,
    ) -> None:
        config = AutoConfig.from_pretrained(settings.folder, **OWN_FILES)
        self._settings, self._model_type = settings, config.model_type
        self._tokenizer = encoder_tokenizer(settings)
        self._max_tokens = token_limit(settings, self._tokenizer, config)
        # More requests would only wait in vLLM's queue.
        self._in_flight = asyncio.Semaphore(2 * batch)
        arguments = _engine_arguments(settings, self._max_tokens, batch, fraction, config)
        self._replica = Replica(partial(start_vllm, arguments, tuple(gpus), threads), _keep_weights)

    @classmethod
    async def start(
        cls, settings: EncoderSettings, gpus: Sequence[str] = (), fraction: float | None = None,
        *, batch: int = 32, threads: int = 1,
    ) -> VllmEmbedder:  # fmt: skip
        """Return the embedder once its engine serves.

        `gpus`: names as in CUDA_VISIBLE_DEVICES; empty means the first GPU, or vLLM's CPU build.
        `fraction`: share of a GPU's memory for the engine. `batch`: sequences that vLLM computes at
        the same time. `threads`: OpenMP threads of a worker of the CPU build.

        Raise `ConfigError` if vLLM does not support the encoder.
        """
        weights = await asyncio.to_thread(_weights_checksum, settings)
        embedder = cls(settings, gpus, fraction, batch=batch, threads=threads)
        try:
            embedder.dim = len(await embedder._embed_tokens(embedder._tokenize(["Go north?"])[0]))
        except asyncio.CancelledError:
            await embedder.aclose()
            raise
        except Exception as error:  # models that vLLM does not support fail in many ways
            await embedder.aclose()
            reason = f"vLLM cannot embed a text with this model ({first_line(error)})"
            raise ConfigError(
                MODEL_KEY,
                str(settings.folder),
                reason,
                "Remove embedder.kind, or use another encoder",
            ) from error
        fingerprint = settings.fingerprint(embedder._max_tokens, weights)
        embedder.name = f"{embedder._model_type}-{fingerprint:08x}-{embedder.dim}"
        return embedder

    async def aclose(self) -> None:
        await self._replica.aclose()

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of `texts`: float32 [len(texts), dim], unit norm.

        Raise `EngineError` if the engine is lost.
        """
        vectors = await asyncio.gather(*(self._embed_tokens(ids) for ids in self._tokenize(texts)))
        stacked = np.array(vectors, np.float32).reshape(len(texts), self.dim)
        return stacked / np.maximum(np.linalg.norm(stacked, axis=1, keepdims=True), 1e-12)

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(
            self._settings.prepare(texts), truncation=True, max_length=self._max_tokens
        )["input_ids"]

    async def _embed_tokens(self, ids: Sequence[int]) -> NDArray[np.float32]:
        def call(llm: AsyncLLM, name: str) -> AsyncIterator[PoolingRequestOutput]:
            return llm.encode(
                tokens_input(list(ids)), PoolingParams(task="embed", use_activation=False), name
            )

        async with self._in_flight:
            output = await self._replica.request(call)
        return output.outputs.data.float().numpy()


async def _keep_weights(llm: AsyncLLM) -> None:
    """Do nothing: the weights of an encoder never change."""


def _engine_arguments(
    settings: EncoderSettings, max_tokens: int, batch: int, fraction: float | None, config: Any
) -> dict[str, Any]:
    dtype = getattr(config, "dtype", None)
    return {
        "model": str(settings.folder),
        "runner": "pooling",
        "pooler_config": PoolerConfig(pooling_type=VLLM_POOLING[settings.pooling]),
        "dtype": str(dtype).removeprefix("torch.") if dtype is not None else "auto",
        "skip_tokenizer_init": True,
        "max_model_len": max_tokens,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | (
        {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        if on_cpu()
        else gpu_share(fraction)
    )


def _weights_checksum(settings: EncoderSettings) -> int:
    """Return the checksum of the files with weights, in the order of their names."""
    crc = 0
    for path in sorted(settings.folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                crc = zlib.crc32(block, crc)
    return crc
