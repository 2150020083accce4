"""Application of the server: routes, static files and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files

from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from crl.errors import ConfigError, StoreError
from crl.serve.pages import bank, changes, episodes, runs
from crl.serve.security import Headers, OwnHost, OwnPages, Size, Token
from crl.serve.site import Site

THREADS = 4
"""Maximum number of threads that read files. Functions of pages without `async` run in them."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Hosts of addresses that only this machine can reach."""

STATIC: Mapping[str, Sequence[tuple[str, str]]] = {
    "icon.svg": (("crl.serve", "static/icon.svg"),),
    "style.css": (
        ("crl.report", "templates/style.css"),
        ("crl.serve", "static/serve.css"),
        ("crl.serve", "static/browse.css"),
    ),
    "tables.js": (("crl.report", "templates/tables.js"),),
    "live.js": (("crl.serve", "static/live.js"),),
    "episode.js": (("crl.serve", "static/episode.js"),),
}
"""Static files: (package, path) of their parts, by name."""

TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Media types of static files by the ending of their names."""


def create_app(
    site: Site, *, hosts: Sequence[str] = LOOPBACK, token: str = "", cookie: str = "crl-serve"
) -> Starlette:
    """Return the application.

    `hosts`: accepted hosts in addresses. `token`: required of all requests; empty = none.
    `cookie`: name of the cookie with the token.
    """
    middleware = [
        Middleware(Size),
        Middleware(OwnHost, hosts=[host.lower() for host in hosts], addresses=bool(token)),
        Middleware(OwnPages),
    ]
    if token:
        middleware.append(Middleware(Token, token=token, cookie=cookie))
    app = _Application(
        routes=[
            *runs.ROUTES, *bank.ROUTES, *changes.ROUTES, *episodes.ROUTES,
            Route("/static/{file}", static),
        ],
        middleware=middleware,
        exception_handlers={
            HTTPException: _failure, ConfigError: _failure, StoreError: _failure, OSError: _failure,
            Exception: _unexpected,
        },
        lifespan=_lifespan,
    )  # fmt: skip
    app.state.site = site
    for name in STATIC:
        _static(name)  # no request waits for a disk
    return app


class _Application(Starlette):
    """Application whose responses all have the security headers, also those about errors."""

    def build_middleware_stack(self) -> ASGIApp:
        return Headers(super().build_middleware_stack())


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield
    app.state.site.meaning.close()


async def static(request: Request) -> Response:
    """Return a file of the fixed set of static files."""
    name = request.path_params["file"]
    if name not in STATIC:
        raise HTTPException(404, "There is no such file.")
    media_type = TYPES[name.rpartition(".")[2]]
    return Response(_static(name), media_type=media_type, headers={"Cache-Control": "no-cache"})


@cache
def _static(name: str) -> bytes:
    parts = [files(package).joinpath(path).read_bytes() for package, path in STATIC[name]]
    return b"".join(parts)


def _failure(request: Request, error: Exception) -> Response:
    """Return a page about an error: of the address, or of files that cannot be read."""
    if isinstance(error, HTTPException):
        code, reason = error.status_code, error.detail
    else:
        code, reason = 500, str(error)
    site: Site = request.app.state.site
    try:
        run = site.found(request.path_params["run"])
    except (KeyError, HTTPException):  # the address is not one of a run
        run = None
    response = site.render(request, "error.html", code=code, reason=reason, run=run)
    response.status_code = code
    return response


def _unexpected(request: Request, error: Exception) -> Response:
    """Return a text about an unexpected error, which the terminal shows."""
    return PlainTextResponse("An error of the server; see its terminal.\n", status_code=500)
