"""Pages about runs: the list, one run, settings, log, and the comparison."""

from __future__ import annotations

from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from crl.errors import ConfigError
from crl.report.document import SECTIONS, ArmTables, Part
from crl.report.run_record import unique_names
from crl.serve.addresses import integer_of
from crl.serve.events import list_events, run_events
from crl.serve.pages.parts import TITLES, drawn_figures, part, record, row
from crl.serve.site import Site

MAX_COMPARED = 20
"""Maximum number of runs of a comparison."""

LOG_BYTES = 100_000
"""Bytes of the log that are shown at once."""

MAX_BYTE = 10**15
"""Largest position in a log."""


def runs(request: Request) -> Response:
    """Return the list of runs."""
    site: Site = request.app.state.site
    rows = [row(site, run) for run in site.runs()]
    return site.render(request, "runs.html", rows=rows)


def run_row(request: Request) -> Response:
    """Return the row of a run in the list."""
    site: Site = request.app.state.site
    found = site.listed(request.path_params["run"])
    return HTMLResponse(f"<table><tbody>{row(site, found)}</tbody></table>")


def overview(request: Request) -> Response:
    """Return the page of a run."""
    site: Site = request.app.state.site
    run = site.found(request.path_params["run"])
    parts = [part(site, run, name) for name in TITLES]
    return site.render(request, "overview.html", run=run, parts=parts)


def run_part(request: Request) -> Response:
    """Return a part of the page of a run."""
    site: Site = request.app.state.site
    run = site.found(request.path_params["run"])
    name = request.path_params["part"]
    if name not in TITLES:
        raise HTTPException(404, "There is no such part.")
    return HTMLResponse(part(site, run, name))


def settings(request: Request) -> Response:
    """Return the settings of a run."""
    site: Site = request.app.state.site
    read = record(site, site.found(request.path_params["run"]))
    faults, changes = {}, []
    try:
        changes = read.changes
    except ConfigError as error:
        faults["preset"] = str(error)
    return site.render(request, "settings.html", part=Part(read, None, None, [], changes, faults))


def log(request: Request) -> Response:
    """Return a part of the log of a run: the last one, or that up to the byte `to`."""
    site: Site = request.app.state.site
    path = site.run(request).log
    size = path.stat().st_size if path.is_file() else 0
    to = integer_of(request, "to", most=MAX_BYTE)
    end = size if to is None else min(size, to)
    start = max(0, end - LOG_BYTES)
    text = b""
    if size:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start)
    if start and (line_end := text.find(b"\n")) >= 0:  # parts begin with a line
        start += line_end + 1
        text = text[line_end + 1 :]
    shown = text.decode("utf-8", "replace")
    return site.render(request, "log.html", text=shown, start=start, end=end, size=size)


def compare(request: Request) -> Response:
    """Return the comparison of runs: arms, differences and curves."""
    site: Site = request.app.state.site
    ids = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(ids) == 1:
        return RedirectResponse(f"/runs/{site.found(ids[0]).id}", status_code=303)
    if not 2 <= len(ids) <= MAX_COMPARED:
        raise HTTPException(400, f"Choose 2 to {MAX_COMPARED} runs in the list.")
    found = [site.found(id) for id in ids]
    names = unique_names([run.dir.path for run in found])
    read = [replace(record(site, run), name=n) for run, n in zip(found, names, strict=True)]
    tables = ArmTables.of(read)
    sections = {title: drawn_figures(site, name, tables.arms) for name, title in SECTIONS.items()}
    rows = list(zip(found, read, strict=True))
    banks = [run for run in found if run.dir.bank.is_file()]
    return site.render(
        request, "compare.html", rows=rows, tables=tables, sections=sections, banks=banks
    )


ROUTES = [
    Route("/", runs),
    Route("/events", list_events),
    Route("/rows/{run}", run_row),
    Route("/compare", compare),
    Route("/runs/{run}", overview),
    Route("/runs/{run}/events", run_events),
    Route("/runs/{run}/parts/{part}", run_part),
    Route("/runs/{run}/settings", settings),
    Route("/runs/{run}/log", log),
]
