"""Requests to an ASGI application as a hostile client could send them, without normalisation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def request(
    app: ASGIApp,
    target: str,
    *,
    method: str = "GET",
    host: str = "127.0.0.1:8300",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send a request with `target` as its path and query. Raise the errors of the application."""
    return asyncio.run(_request(app, target, method, {"host": host, **(headers or {})}))


async def _request(app: ASGIApp, target: str, method: str, headers: dict[str, str]) -> Answer:
    raw, _, query = target.encode("utf-8", "surrogatepass").partition(b"?")
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote_to_bytes(raw).decode("utf-8", "replace"),
        "raw_path": raw, "query_string": query, "root_path": "",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8300),
    }  # fmt: skip
    sent: list[Message] = []
    done = asyncio.Event()
    requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        for message in requests:
            return message
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    done.set()
    start = sent[0]
    return Answer(
        start["status"],
        {key.decode(): value.decode("latin-1") for key, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )
