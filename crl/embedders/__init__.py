"""Access to the embedder that a run's config names.

Torch is imported only for an embedder that needs it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from crl.config.models.shapes import ModelShape
from crl.config.schema import EmbedderSection
from crl.embedders.hash import HashEmbedder
from crl.embedders.recipe import read_encoder_settings
from crl.embedders.wordllama import WordLlamaEmbedder, wordllama_name
from crl.engines import prepare_vllm
from crl.errors import ConfigError, EngineError
from crl.extras import require_package
from crl.modeling.memory import GIB, PROCESS_BYTES, Memory
from crl.protocols import Embedder

if TYPE_CHECKING:
    from crl.embedders.endpoint import EndpointEmbedder


EMBEDDER_WORK_BYTES = 2.0 * GIB
"""Bytes of the forward pass of an embedder's batch."""


@asynccontextmanager
async def open_embedder(
    section: EmbedderSection, *, deterministic: bool = False, gpus: Sequence[str] = (),
    fraction: float | None = None,
) -> AsyncIterator[Embedder]:  # fmt: skip
    """Yield the configured embedder, loaded or connected, and close it at exit.

    If `deterministic` is true, an encoder reads texts one by one, so that the last bits of a vector
    do not depend on the other texts of a batch. `gpus` and `fraction` are for a pooling engine; see
    `VllmEmbedder.start`.

    Raise `ConfigError` if the embedder cannot be opened.
    """
    if section.model == "hash":
        yield HashEmbedder()
    elif section.model == "wordllama":
        _require_wordllama()
        yield WordLlamaEmbedder()
    elif section.is_url:
        from crl.embedders.endpoint import EndpointEmbedder

        with closing(
            EndpointEmbedder(section.model, section.name, _api_key(section), batch=section.batch)
        ) as endpoint:
            await _connect(endpoint, section)
            yield endpoint
    elif section.kind == "vllm":
        prepare_vllm("embedder.kind", "vllm")
        from crl.embedders.vllm import VllmEmbedder

        pooling = await VllmEmbedder.start(
            read_encoder_settings(Path(section.model)),
            gpus,
            fraction,
            batch=section.batch,
            threads=section.threads,
        )
        async with aclosing(pooling):
            yield pooling
    else:
        from crl.embedders.encoder import EncoderEmbedder

        batch = 1 if deterministic else section.batch
        encoder = EncoderEmbedder(
            read_encoder_settings(Path(section.model)),
            section.device,
            batch=batch,
            threads=section.threads,
        )
        with closing(encoder):
            yield encoder


async def _connect(endpoint: EndpointEmbedder, section: EmbedderSection) -> None:
    """Connect to the endpoint. Raise `ConfigError` if it cannot embed texts."""
    try:
        await endpoint.connect()
    except EngineError as error:
        remedy = (
            "Check embedder.model, embedder.name and embedder.key_env, "
            "and that the endpoint is running"
        )
        raise ConfigError("embedder.model", section.model, str(error), remedy) from error


def require_embedder(section: EmbedderSection) -> None:
    """Raise `ConfigError` for errors that can be found without loading a model or a request."""
    if section.is_url:
        _api_key(section)
    elif section.model == "wordllama":
        _require_wordllama()
    elif section.is_encoder:
        read_encoder_settings(Path(section.model))


def _require_wordllama() -> None:
    remedy = (
        "Run pip install 'crl[wordllama]', or add --set embedder.model=hash, which compares "
        "wording alone"
    )
    require_package("wordllama", "embedder.model", "wordllama", remedy)


def known_name(section: EmbedderSection) -> str | None:
    """Return the name of the embedder; None if it must be loaded first.

    Raise `ConfigError` if its package is not installed.
    """
    if section.model == "hash":
        return HashEmbedder().name
    if section.model == "wordllama":
        _require_wordllama()
        return wordllama_name()
    return None


def embedder_named(name: str | None) -> EmbedderSection:
    """Return the settings of the word embedder that made vectors, by its `Embedder.name`.

    Return those of hash if another embedder made them, or if there are none.
    """
    wordllama = name is not None and name.startswith("wordllama-")
    return EmbedderSection(model="wordllama" if wordllama else "hash")


def encoder_folder(path: Path) -> Path:
    """Return the folder with config.json and weights of the encoder in directory `path`.

    Raise `ConfigError` if there is none.
    """
    return read_encoder_settings(path).folder


def embedder_memory(shape: ModelShape, *, vllm: bool) -> Memory:
    """Return the memory of an embedder, in the precision of its checkpoint.

    With `vllm` a cache for the longest text that the model reads is included.
    """
    element_bytes = 2 if shape.half_precision else 4
    cache = shape.max_context * shape.kv_bytes(element_bytes) if vllm else 0
    return Memory(
        weights=element_bytes * shape.parameters,
        cache=cache,
        other=PROCESS_BYTES + EMBEDDER_WORK_BYTES,
    )


def _api_key(section: EmbedderSection) -> str:
    """Return the endpoint's key, empty if none is configured.

    Raise `ConfigError` if the variable is missing or its value cannot be sent. The message does not
    contain the key.
    """
    if not section.key_env:
        return ""
    key = os.environ.get(section.key_env)
    if not key:
        raise ConfigError(
            "embedder.key_env",
            section.key_env,
            "this environment variable is not set or is empty",
            "Export it, or remove the setting",
        )
    if not (key.isascii() and key.isprintable()):
        reason = (
            "the variable's value cannot be sent: it contains non-printable or non-ASCII "
            "characters, such as a line end"
        )
        raise ConfigError("embedder.key_env", section.key_env, reason, "Export only the key")
    return key
