"""Embedder for an OpenAI-compatible endpoint: vLLM, Ollama, text-embeddings-inference, OpenAI."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, IncompleteRead
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crl.errors import EngineError

ATTEMPTS = 5
"""Attempts per request."""
TIMEOUT_S = 60.0
"""Timeout of one response in seconds."""

CONNECTIONS = 8
"""Requests that may be in flight at the same time."""
MAX_QUOTED = 300
"""Maximal length of a response quoted in an error message, in characters."""


class EndpointEmbedder:
    """`crl.protocols.Embedder` that sends POST {url}/embeddings.

    `dim` and `name` are set by `connect`. `name` identifies the vectors in the bank. It consists of
    the model's name and the dimension. The URL is not part of it, because a model gives the same
    vectors wherever it is served. Two endpoints that use one name for different models cannot be
    distinguished.

    A request that fails temporarily (429, 5xx, broken connection) is retried, with ATTEMPTS
    attempts in total. Methods raise `EngineError` with the endpoint's message.
    """

    name: str
    dim: int

    def __init__(
        self, url: str, model: str, key: str = "", *, batch: int = 32, backoff: float = 0.5
    ) -> None:
        """Prepare requests to `url` for `model`, the model's name at the endpoint.

        `key`: bearer token, empty for none; it is never written anywhere. `batch`: texts per
        request. `backoff`: pause in seconds after the first failed attempt; each further pause is
        twice as long.
        """
        self._url, self._model, self._key = f"{url.rstrip('/')}/embeddings", model, key
        self._batch, self._backoff = batch, backoff
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._executor = ThreadPoolExecutor(CONNECTIONS, "embedder")

    async def connect(self) -> None:
        """Embed one text to find the dimension of the vectors."""
        self.dim = len((await self._request(["Go north?"]))[0])
        self.name = f"{self._model}-{self.dim}"

    def close(self) -> None:
        """Close the connections without waiting for pending responses."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of `texts`: float32 [len(texts), dim], unit norm."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), self._batch):
            part = await self._request(texts[start : start + self._batch])
            if part.shape[1] != self.dim:
                raise self._error(
                    f"the vectors now have dimension {part.shape[1]}, not {self.dim} "
                    "as in the first response"
                )
            vectors[start : start + self._batch] = part
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    async def _request(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the endpoint's vectors of `texts`, not normalised: [len(texts), dim]."""
        # The API rejects empty texts.
        body = json.dumps(
            {
                "model": self._model,
                "input": [text or " " for text in texts],
                "encoding_format": "float",
            }
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._post, body.encode()
                )
                return self._parse(response, len(texts))
            except _TemporaryFailure as error:
                if attempt == ATTEMPTS:
                    raise self._error(f"{error} ({ATTEMPTS} attempts failed)") from error
            await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        try:
            with self._open(
                urllib.request.Request(self._url, body, headers), timeout=TIMEOUT_S
            ) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            message = f"{error.code} {error.reason}: {self._quote(_body_received(error))}"
            if error.code == 429 or error.code >= 500:
                raise _TemporaryFailure(message) from error
            raise self._error(message) from error
        except urllib.error.URLError as error:
            raise _TemporaryFailure(str(error.reason)) from error
        except (OSError, HTTPException) as error:  # raised while the response is read
            raise _TemporaryFailure(f"{type(error).__name__}: {error}") from error
        except ValueError as error:  # raised for an invalid URL
            raise self._error(f"invalid URL ({error})") from error

    def _parse(self, response: bytes, n: int) -> NDArray[np.float32]:
        try:
            rows: dict[int, Any] = {
                row["index"]: row["embedding"] for row in json.loads(response)["data"]
            }
            with np.errstate(over="ignore"):  # values that are too large are rejected below
                vectors = np.array([rows[i] for i in range(n)], np.float32)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._error(
                f"the response does not contain embeddings of {n} texts: {self._quote(response)}"
            ) from error
        if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
            raise self._error(
                "the response's embeddings are not vectors of finite numbers: "
                f"{self._quote(response)}"
            )
        return vectors

    def _quote(self, body: bytes) -> str:
        text = body.decode("utf-8", "replace")
        return (text.replace(self._key, "…") if self._key else text)[:MAX_QUOTED]

    def _error(self, text: str) -> EngineError:
        return EngineError(f"embedder {self._url}: {text}")


def _body_received(response: urllib.error.HTTPError) -> bytes:
    """Return the body of `response`, or the part that was received before the connection broke."""
    try:
        return response.read()
    except IncompleteRead as error:
        return error.partial
    except (OSError, HTTPException):
        return b""


class _TemporaryFailure(Exception):
    """Temporary failure of a request that may succeed on retry."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, because the key is for the configured host only."""

    def redirect_request(self, *_: Any) -> None:
        return None
