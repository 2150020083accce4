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
TIMEOUT = 60.0
"""Timeout of one answer in seconds."""

CONNECTIONS = 8
"""Requests that may be in flight at the same time."""
SHOWN = 300
"""Maximal length of an answer quoted in an error message, in characters."""


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
        self._threads = ThreadPoolExecutor(CONNECTIONS, "embedder")

    async def connect(self) -> None:
        """Embed one text to find the dimension of the vectors."""
        self.dim = len((await self._request(["Go north?"]))[0])
        self.name = f"{self._model}-{self.dim}"

    def close(self) -> None:
        """Close the connections without waiting for pending answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of `texts`: float32 [len(texts), dim], unit norm."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), self._batch):
            part = await self._request(texts[start : start + self._batch])
            if part.shape[1] != self.dim:
                raise self._error(
                    f"vectors of {part.shape[1]} numbers came, not of {self.dim} as at first"
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
                answer = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._post, body.encode()
                )
                return self._vectors(answer, len(texts))
            except _Unavailable as error:
                if attempt == ATTEMPTS:
                    raise self._error(f"{error}, {ATTEMPTS} times in a row") from error
            await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        try:
            with self._open(
                urllib.request.Request(self._url, body, headers), timeout=TIMEOUT
            ) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.reason}: {self._quoted(_what_came(error))}"
            if error.code == 429 or error.code >= 500:
                raise _Unavailable(said) from error
            raise self._error(said) from error
        except urllib.error.URLError as error:
            raise _Unavailable(str(error.reason)) from error
        except (OSError, HTTPException) as error:  # raised while the answer is read
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        except ValueError as error:  # raised for an invalid URL
            raise self._error(f"it cannot be asked ({error})") from error

    def _vectors(self, answer: bytes, n: int) -> NDArray[np.float32]:
        try:
            rows: dict[int, Any] = {
                row["index"]: row["embedding"] for row in json.loads(answer)["data"]
            }
            with np.errstate(over="ignore"):  # values that are too large are rejected below
                vectors = np.array([rows[i] for i in range(n)], np.float32)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._error(
                f"the answer holds no embeddings of {n} texts: {self._quoted(answer)}"
            ) from error
        if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
            raise self._error(
                f"the answer's embeddings are no vectors of finite numbers: {self._quoted(answer)}"
            )
        return vectors

    def _quoted(self, answer: bytes) -> str:
        text = answer.decode("utf-8", "replace")
        return (text.replace(self._key, "…") if self._key else text)[:SHOWN]

    def _error(self, text: str) -> EngineError:
        return EngineError(f"embedder {self._url}: {text}")


def _what_came(answer: urllib.error.HTTPError) -> bytes:
    """Return the body of `answer`, or the part that was received before the connection broke."""
    try:
        return answer.read()
    except IncompleteRead as error:
        return error.partial
    except (OSError, HTTPException):
        return b""


class _Unavailable(Exception):
    """Temporary failure of a request that may succeed on retry."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, because the key is for the configured host only."""

    def redirect_request(self, *_: Any) -> None:
        return None
