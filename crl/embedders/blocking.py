"""Embedders for code without an event loop, such as the games of environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from crl.config.schema import EmbedderSection
from crl.embedders import open_embedder
from crl.errors import EngineError, TransientError

EmbedTexts = Callable[[Sequence[str]], Any]

_never_closed: list[AsyncExitStack] = []
"""Contexts of the opened embedders. A context that nothing refers to would close its embedder."""


def open_blocking(section: EmbedderSection) -> EmbedTexts:
    """Open an embedder for the rest of the process, and return its function of texts.

    The function may be called from any thread. It returns float32 [len(texts), dim] of unit norm,
    and raises `TransientError` of kind env if the embedder fails. Raise `ConfigError` if the
    embedder cannot be opened. An embedder with equal settings is opened once.
    """
    return _open(section.model_dump_json())


@cache
def _open(settings: str) -> EmbedTexts:
    section, loop = EmbedderSection.model_validate_json(settings), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking embedder", daemon=True).start()
    stack = AsyncExitStack()
    opened = stack.enter_async_context(open_embedder(section))
    embedder = asyncio.run_coroutine_threadsafe(opened, loop).result()
    _never_closed.append(stack)

    def embed(texts: Sequence[str]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(embedder.embed(texts), loop).result()
        except EngineError as error:
            raise TransientError("env", str(error)) from error

    return embed
