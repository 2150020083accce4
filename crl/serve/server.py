"""Process of `crl serve`: address, token, and the end by Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import uvicorn

from crl.errors import ConfigError
from crl.serve.app import LOOPBACK, create_app
from crl.serve.site import Site
from crl.wording import printable_lines

NICENESS = 10
"""Priority of the server below that of a run."""

HOST_REMEDY = (
    "Use an address of this machine (ip addr lists them), 0.0.0.0 or :: for all of them, or leave "
    "out --host for 127.0.0.1"
)
"""Advice about an address that cannot be used."""

_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)
"""Errors that another port avoids."""

MAX_PORT = 65535
"""Largest port."""

CONNECTIONS = 256
"""Maximum number of open connections. Further requests are refused."""

SHUTDOWN_S = 3
"""Seconds for which open requests may continue after Ctrl-C."""


def serve(site: Site, host: str, port: int, show: Callable[[str], object]) -> None:
    """Serve a site until Ctrl-C. `show` gets the address, as soon as it can be opened.

    The address has a token, unless only this machine can reach it. Raise `ConfigError` if the
    address cannot be used.
    """
    with bound(host, port) as listener:
        port = listener.getsockname()[1]
        bound_to = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
        token = "" if bound_to.is_loopback else secrets.token_urlsafe(32)
        names = list(_names()) if bound_to.is_unspecified else [_shown(host)]
        app = create_app(site, hosts=(*LOOPBACK, *names), token=token, cookie=f"crl-serve-{port}")
        _lower_priority()
        _log_to_stderr()
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, ws="none",
            timeout_graceful_shutdown=SHUTDOWN_S, limit_concurrency=CONNECTIONS,
        )  # fmt: skip
        listener.listen(config.backlog)
        show(f"http://{names[0]}:{port}/" + (f"?token={token}" if token else ""))
        uvicorn.Server(config).run(sockets=[listener])


def _lower_priority() -> None:
    """Leave the cores to runs, as far as the system allows it."""
    os.nice(NICENESS)
    if hasattr(os, "SCHED_BATCH"):  # Linux: a thread that wakes up does not interrupt another one
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Escaped(logging.Formatter):
    """Format of messages: characters that a terminal would interpret are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _log_to_stderr() -> None:
    """Print warnings and errors of the server, such as tracebacks, on stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not _is_cancellation(record))
    handler.setFormatter(_Escaped("%(levelname)s: %(message)s"))
    logger = logging.getLogger("uvicorn")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING)


def _is_cancellation(record: logging.LogRecord) -> bool:
    """Return whether a record is the traceback of a cancelled request."""
    return bool(record.exc_info) and isinstance(record.exc_info[1], asyncio.CancelledError)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raise `ConfigError` if this is impossible."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError("--port", port, "is not a port", f"Choose 1 to {MAX_PORT}, or 0 for any")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = f"is not the name or the address of this machine ({_reason(error)})"
        raise ConfigError("--host", host, reason, HOST_REMEDY) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno in _OF_THE_PORT:
            remedy = "Choose another --port, or --port 0 for a free one"
            raise ConfigError("--port", port, _reason(error).lower(), remedy) from error
        reason = f"cannot be used ({_reason(error)})"
        raise ConfigError("--host", host, reason, HOST_REMEDY) from error
    return listener


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _names() -> Iterator[str]:
    """Yield the hosts with which browsers can name this machine: its names, then its addresses."""
    name = socket.gethostname()
    yield name
    yield socket.getfqdn()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # the machine's own name has no address
        return
    for *_, address in found:
        yield _shown(str(address[0]))


def _shown(host: str) -> str:
    """Return a host as it stands in an address."""
    return f"[{host}]" if ":" in host else host
