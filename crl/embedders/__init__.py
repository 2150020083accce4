"""The embedder that a run's config names. Torch is imported only for one that needs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from crl.config.schema import EmbedderSection
from crl.embedders.recipe import read_recipe
from crl.engines import prepare_vllm
from crl.errors import ConfigError, EngineError
from crl.manager.embed import HashEmbedder
from crl.protocols import Embedder


@asynccontextmanager
async def open_embedder(
    section: EmbedderSection, *, deterministic: bool = False, gpus: Sequence[str] = (), fraction: float | None = None
) -> AsyncIterator[Embedder]:  # fmt: skip
    """The embedder, loaded or reached, and closed on the way out. Raises `ConfigError`.

    deterministic: an encoder reads texts one by one, so that a vector's last bits do not depend on who shared its batch. gpus, fraction:
    of a pooling engine, see `VllmEmbedder.start`.
    """
    if section.model == "hash":
        yield HashEmbedder()
    elif section.is_url:
        from crl.embedders.endpoint import EndpointEmbedder

        endpoint = EndpointEmbedder(section.model, section.name, _key(section), batch=section.batch)
        try:
            try:
                await endpoint.connect()
            except EngineError as error:
                remedy = "Check embedder.model, embedder.name and embedder.key_env, and that the endpoint is up"
                raise ConfigError("embedder.model", section.model, str(error), remedy) from error
            yield endpoint
        finally:
            endpoint.close()
    elif section.kind == "vllm":
        prepare_vllm("embedder.kind", "vllm")
        from crl.embedders.vllm import VllmEmbedder

        pooling = await VllmEmbedder.start(
            read_recipe(Path(section.model)),
            gpus,
            fraction,
            batch=section.batch,
            threads=section.threads,
        )
        try:
            yield pooling
        finally:
            await pooling.aclose()
    else:
        from crl.embedders.encoder import EncoderEmbedder

        batch = 1 if deterministic else section.batch
        encoder = EncoderEmbedder(
            read_recipe(Path(section.model)), section.device, batch=batch, threads=section.threads
        )
        try:
            yield encoder
        finally:
            encoder.close()


def require_embedder(section: EmbedderSection) -> None:
    """Raises `ConfigError` for what can be told without loading or asking anything."""
    if section.is_url:
        _key(section)
    elif section.model != "hash":
        read_recipe(Path(section.model))


def encoder_folder(path: Path) -> Path:
    """Where config.json and weights of the encoder in a directory are. Raises `ConfigError`."""
    return read_recipe(path).folder


def _key(section: EmbedderSection) -> str:
    """Raises `ConfigError`, which does not tell what the key is."""
    if not section.key_env:
        return ""
    key = os.environ.get(section.key_env)
    if not key:
        raise ConfigError(
            "embedder.key_env",
            section.key_env,
            "the environment holds no such variable",
            "Export it, or leave it out",
        )
    if not (key.isascii() and key.isprintable()):
        reason = "what that variable holds cannot be sent: of its characters some are no printable ASCII, such as the end of a line"
        raise ConfigError("embedder.key_env", section.key_env, reason, "Export the key alone")
    return key
