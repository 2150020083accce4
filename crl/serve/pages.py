"""Pages about runs: the list, one run, settings, log, and the comparison."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from crl.serve.site import Site


def runs(request: Request) -> Response:
    """Return the list of runs."""
    site: Site = request.app.state.site
    return site.render(request, "runs.html", runs=site.runs())


def overview(request: Request) -> Response:
    """Return the page of a run."""
    site: Site = request.app.state.site
    return site.render(request, "overview.html")


ROUTES = [
    Route("/", runs),
    Route("/runs/{run}", overview),
]
