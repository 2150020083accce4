"""Server-sent events: the versions of the parts of a page.

An event "parts" has a JSON object of names and versions. The first event has all parts, the next
ones have those that changed, with null for removed parts. Nothing is sent about unchanged parts.
After a lost connection, the browser connects again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import anyio
from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from crl.serve.pages.parts import row_versions, versions
from crl.serve.site import Site

POLL_S = 2.0
"""Seconds between two looks at the files of a page."""

SHUTDOWN_S = 1
"""Seconds that an event stream has to end when the server does."""

SEND_TIMEOUT_S = 10
"""Seconds after which a browser that takes no events is given up."""


async def run_events(request: Request) -> EventSourceResponse:
    """Return the events of a run's page."""
    site: Site = request.app.state.site
    run = await to_thread.run_sync(site.found, request.path_params["run"])
    return _response(partial(versions, site, run))


async def list_events(request: Request) -> EventSourceResponse:
    """Return the events of the list of runs."""
    return _response(partial(row_versions, request.app.state.site))


def _response(look: Callable[[], Mapping[str, str]]) -> EventSourceResponse:
    ending = anyio.Event()
    return EventSourceResponse(
        changes(look, ending), send_timeout=SEND_TIMEOUT_S,
        shutdown_event=ending, shutdown_grace_period=SHUTDOWN_S,
    )  # fmt: skip


async def changes(
    look: Callable[[], Mapping[str, str]], ending: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    """Yield an event with all parts, then one after each change, until `ending` is set."""
    known: Mapping[str, str] = {}
    while not ending.is_set():
        found = await to_thread.run_sync(look)
        changed = {
            name: found.get(name)
            for name in (*found, *(known.keys() - found.keys()))
            if known.get(name) != found.get(name)
        }
        if changed:
            yield ServerSentEvent(json.dumps(changed), event="parts")
        known = found
        with anyio.move_on_after(POLL_S):
            await ending.wait()
