"""Retriever behind an HTTP endpoint of the form of Search-R1's retrieval server.

Request: POST URL with `{"queries": [query], "topk": n, "return_scores": true}`. Response:
`{"result": [[{"document": {"contents": "TITLE\\nTEXT", …}, "score": s}, …]]}`, with one list for
each query. A document may also have `title` and `text` instead of `contents`.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from crl.envs.search_qa.data import read_document
from crl.envs.search_qa.questions import Document
from crl.errors import RolloutError, TransientError

ATTEMPTS = 3
"""Attempts per search."""
MAX_BYTES = 1 << 24
"""Maximum size of a response in bytes."""
MAX_QUOTED = 200
"""Maximum number of characters of a response that an error message quotes."""


class HttpRetriever:
    """`Retriever` that sends every search to `url`.

    A request that fails temporarily (429, 5xx, timeout, broken connection) is repeated, with
    `ATTEMPTS` attempts in total. Then the search raises `TransientError`. A refused request and a
    malformed response raise `RolloutError`. Both have the kind env.
    """

    def __init__(self, url: str, timeout: float, *, backoff: float = 0.5) -> None:
        """Prepare requests. `timeout` and `backoff`, the first pause, are in seconds."""
        self._url, self._timeout, self._backoff = url, timeout, backoff
        self._open = urllib.request.build_opener(_NoRedirect).open

    def search(self, query: str, n: int) -> list[Document]:
        body = json.dumps({"queries": [query], "topk": n, "return_scores": True}).encode()
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                return self._documents(self._post(body), n)
            except TransientError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        try:
            with self._open(request, timeout=self._timeout) as response:
                content = response.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            kind = TransientError if error.code == 429 or error.code >= 500 else RolloutError
            raise kind("env", self._message(f"{error.code} {error.reason}")) from error
        except urllib.error.URLError as error:
            raise TransientError("env", self._message(str(error.reason))) from error
        except (OSError, HTTPException) as error:  # raised while the response is read
            reason = f"{type(error).__name__}: {error}"
            raise TransientError("env", self._message(reason)) from error
        if len(content) > MAX_BYTES:
            raise RolloutError("env", self._message(f"the response has over {MAX_BYTES:,} bytes"))
        return content

    def _documents(self, response: bytes, n: int) -> list[Document]:
        try:
            (found,) = json.loads(response)["result"]
            return [read_document(_document(item)) for item in found[:n]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            quoted = response[:MAX_QUOTED].decode("utf-8", "replace")
            reason = f"the response is not of Search-R1's form ({error!r}): {quoted}"
            raise RolloutError("env", self._message(reason)) from error

    def _message(self, reason: str) -> str:
        return f"retriever {self._url}: {reason}"


def _document(item: dict[str, Any]) -> Any:
    """Return the document of a result. Some servers leave out the score and its wrapper."""
    return item.get("document", item)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects: queries are sent to the configured address only."""

    def redirect_request(self, *_: Any) -> None:
        return None
