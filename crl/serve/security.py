"""Protection of the server: headers, requests of other sites, tokens, and sizes of responses."""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
from collections.abc import Collection
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy of all responses."""

MAX_BYTES = 8 << 20
"""Maximum size of a response. Event streams have no such bound."""


HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/]+)(:[0-9]{1,5})?")
"""Host header: a name or an address, and a port."""

OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site of requests that no other site makes; "none" is an entered address."""


def is_foreign(request: Request) -> bool:
    """Return whether another site makes a request. Old browsers do not say it."""
    return request.headers.get("sec-fetch-site", "none") not in OWN_SITES


class Headers:
    """Middleware that adds the security headers of all responses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, with_headers)


class Size:
    """Middleware that bounds the size of responses.

    A larger one raises an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent, most = 0, MAX_BYTES

        async def bounded(message: Message) -> None:
            nonlocal sent, most
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("Content-Type", "").startswith("text/event-stream"):
                    most = math.inf
                announced = int(headers.get("Content-Length", "0"))
            else:
                sent += len(message.get("body", b""))
                announced = 0
            if max(sent, announced) > most:
                raise RuntimeError(f"the response to {scope['path']!r} exceeds {most} bytes")
            await send(message)

        await self.app(scope, receive, bounded)


class OwnHost:
    """Middleware that refuses requests under a name that is not the server's (DNS rebinding).

    `hosts`: names and addresses of the server. `addresses`: also accept every IP address, with
    which no other site can name a server.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], *, addresses: bool) -> None:
        self.app, self._hosts, self._addresses = app, hosts, addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            given = Request(scope).headers.get("host", "").lower()
            name = HOST.fullmatch(given)
            if name is None or not self._accepts(name[1]):
                other = " or an IP address of the machine" * self._addresses
                text = (
                    f"The host {given[:100]!r} in the address is not this server. "
                    f"Use the address that crl serve has printed{other}.\n"
                )
                app = PlainTextResponse(text, status_code=400)
        await app(scope, receive, send)

    def _accepts(self, name: str) -> bool:
        return name in self._hosts or (self._addresses and _is_address(name))


def _is_address(name: str) -> bool:
    """Return whether a name is the IP address of a machine."""
    try:
        return not ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_unspecified
    except ValueError:
        return False


class OwnPages:
    """Middleware that refuses requests of other sites, such as for an image.

    Other sites may link to pages.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            request = Request(scope)
            if is_foreign(request) and request.headers.get("sec-fetch-mode") != "navigate":
                app = PlainTextResponse("Requests of other sites are refused.\n", status_code=403)
        await app(scope, receive, send)


class Token:
    """Middleware that answers only requests with the token of the server.

    The token comes once as a query parameter, in the address that the server prints. The response
    sets a cookie, which later requests carry, and continues without the parameter. `cookie`: name
    of the cookie, which differs between servers of one machine.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._matches(Request(scope).cookies.get(self._cookie)):
            await self.app(scope, receive, send)
            return
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._matches(given):
            # A redirect after a click on another site would not carry the cookie (SameSite=Strict).
            response = HTMLResponse(
                '<!doctype html><meta http-equiv="refresh" content="0; url=/">'
                '<title>crl serve</title><a href="/">Continue</a>'
            )
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        else:
            text = "Open the address that crl serve has printed: it has a token.\n"
            response = PlainTextResponse(text, status_code=403)
        await response(scope, receive, send)

    def _matches(self, text: str | None) -> bool:
        return hmac.compare_digest((text or "").encode("utf-8", "replace"), self._token.encode())
