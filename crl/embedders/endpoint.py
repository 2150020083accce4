"""An OpenAI-compatible endpoint as an embedder: vLLM, Ollama, text-embeddings-inference, OpenAI itself."""

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
TIMEOUT = 60.0
"""Seconds that one answer may take."""

CONNECTIONS = 8
SHOWN = 300
"""Characters of an answer that an error quotes."""


class EndpointEmbedder:
    """`crl.protocols.Embedder` by POST {url}/embeddings. `dim` and `name` are known once `connect` has returned.

    `name` is what the bank knows its vectors by: the model's name and their dimension, and not the URL, since a model gives the same
    vectors wherever it is served. Two endpoints that call different models the same are not told apart.

    model: its name there; key: sent as a bearer token, and never written anywhere, empty = none; batch: texts of one request. One that is
    refused for now (429, 5xx), or breaks, is sent again, ATTEMPTS times in all, with a pause of `backoff` seconds after the first and
    twice as long after each further one. Raises `EngineError`, with what the endpoint said.
    """

    name: str
    dim: int

    def __init__(
        self, url: str, model: str, key: str = "", *, batch: int = 32, backoff: float = 0.5
    ) -> None:
        self._url, self._model, self._key = f"{url.rstrip('/')}/embeddings", model, key
        self._batch, self._backoff = batch, backoff
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._threads = ThreadPoolExecutor(CONNECTIONS, "embedder")

    async def connect(self) -> None:
        """Embeds one text, to learn what the vectors are like."""
        self.dim = len((await self._request(["Go north?"]))[0])
        self.name = f"{self._model}-{self.dim}"

    def close(self) -> None:
        """Waits for no answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm."""
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
        """[len(texts), what the model's vectors have], as they came."""
        body = json.dumps(
            {
                "model": self._model,
                "input": [text or " " for text in texts],
                "encoding_format": "float",
            }
        )  # none may be empty
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
        except (OSError, HTTPException) as error:  # while the answer is read
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        except ValueError as error:  # of what the URL holds
            raise self._error(f"it cannot be asked ({error})") from error

    def _vectors(self, answer: bytes, n: int) -> NDArray[np.float32]:
        try:
            rows: dict[int, Any] = {
                row["index"]: row["embedding"] for row in json.loads(answer)["data"]
            }
            with np.errstate(over="ignore"):  # what is too large is refused below
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
    """Of its body: it may break off."""
    try:
        return answer.read()
    except IncompleteRead as error:
        return error.partial
    except (OSError, HTTPException):
        return b""


class _Unavailable(Exception):
    """What may go well when it is tried again."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for this host alone."""

    def redirect_request(self, *_: Any) -> None:
        return None
