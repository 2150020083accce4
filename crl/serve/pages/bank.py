"""Pages about a bank: the list of experiences with search and filters, and one experience."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from crl.errors import ConfigError
from crl.intervals import wilson_interval
from crl.manager.inspection.reading import (
    BankReader,
    EntryView,
    LiftView,
    RefinementView,
    UseView,
    VersionView,
    open_reader,
)
from crl.manager.records import UnitKey
from crl.monitor.run_dir import RunDir
from crl.records.shards import shards
from crl.report.charts import Line, LineChart, Point
from crl.report.lessons import lift_curve
from crl.serve.addresses import MAX_INTEGER, address, choice_of, integer_of, text_of
from crl.serve.pages.bank_list import (
    ROWS_PER_PAGE,
    Effect,
    Filters,
    Kind,
    Listing,
    Order,
    Selection,
    Status,
    open_list,
)
from crl.serve.security import is_foreign
from crl.serve.site import Site
from crl.wording import printable_lines

MAX_VERSIONS = 40
"""Maximum number of versions, and of derived versions, in a story."""

MAX_USES = 100
"""Maximum number of guided episodes on a page of a story."""

MAX_QUESTIONS = 30
"""Maximum number of answered questions in a story."""

MAX_POINTS = 60
"""Maximum number of points of a curve over steps."""

PART_CHARACTERS = 250_000
"""Number of characters of a part of a long text."""

EPISODE_ID = re.compile(r"[^/]+/([0-9]{1,9})/([0-9]{1,9})/([0-9]{1,9})")
"""Id of an episode: run/step/group/member. The step counts from 0."""


class TextOf(StrEnum):
    """Texts that can be read as a whole, besides the text of a version."""

    goal = "goal"


class SearchBy(StrEnum):
    """Ways of a search."""

    words, meaning = "words", "meaning"


# ── list ────────────────────────────────────────────────────────────────────────────────────────


async def bank(request: Request) -> Response:
    """Return the list of a bank's experiences."""
    site: Site = request.app.state.site
    path = await run_in_threadpool(bank_of, request)
    selection = _selection(request)
    by = choice_of(request, "by", SearchBy) or SearchBy.words
    cosines: dict[str, float] = {}
    problem = ""
    if by is SearchBy.meaning and selection.filters.words.strip():
        if is_foreign(request):
            raise HTTPException(403, "Another site may not start this search. Open the bank here.")
        found, cosines, problem = await _by_meaning(site, path, selection)
    else:
        async with open_list(path) as entries:
            found = await entries.listing(selection)
    context = {
        "found": found,
        "selection": selection,
        "filters": selection.filters,
        "by": by,
        "cosines": cosines,
        "problem": problem,
        "query": dict(request.query_params),
        "choices": {"kind": Kind, "status": Status, "effect": Effect, "order": Order},
        "first": (found.page - 1) * ROWS_PER_PAGE + 1,
    }
    return await run_in_threadpool(lambda: site.render(request, "bank.html", **context))


def bank_of(request: Request) -> Path:
    """Return the bank of the run of a request. Raise `HTTPException` 404 if it has none."""
    site: Site = request.app.state.site
    path = site.run(request).bank
    if not path.is_file():
        raise HTTPException(404, "This run has no bank.")
    return path


def _selection(request: Request) -> Selection:
    filters = Filters(
        words=text_of(request, "q"),
        task=text_of(request, "task"),
        kind=choice_of(request, "kind", Kind),
        status=choice_of(request, "status", Status) or Status.active,
        effect=choice_of(request, "effect", Effect),
        min_credit=integer_of(request, "min_credit", least=-MAX_INTEGER),
        min_age=integer_of(request, "min_age"),
        max_age=integer_of(request, "max_age"),
    )
    return Selection(
        filters,
        order=choice_of(request, "order", Order) or Order.lift,
        reverse=text_of(request, "reverse") == "1",
        page=integer_of(request, "page", least=1) or 1,
    )


async def _by_meaning(
    site: Site, path: Path, selection: Selection
) -> tuple[Listing, dict[str, float], str]:
    """Return the page of active entries, the most similar first, with their cosine similarities.

    The last value is the reason if the embedder is not available; then there are no entries.
    """
    filters = replace(selection.filters, words="", status=Status.active)
    async with open_list(path) as entries:
        empty = replace(await entries.listing(Selection(filters)), rows=[], total=0, page=1)
        uids = await entries.uids(filters)
    try:
        ranked = await site.meaning.search(selection.filters.words, path, uids)
    except TimeoutError:
        return empty, {}, "it has not answered in time. The next search may find it ready."
    except Exception as error:  # packages of embedders raise errors of many types
        return empty, {}, str(error) or type(error).__name__
    pages = max(1, -(-len(ranked) // ROWS_PER_PAGE))
    page = min(selection.page, pages)
    shown = dict(ranked[(page - 1) * ROWS_PER_PAGE : page * ROWS_PER_PAGE])
    async with open_list(path) as entries:
        rows = await entries.rows(list(shown))
    return replace(empty, rows=rows, total=len(ranked), page=page), shown, ""


# ── story of an experience ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EpisodeLink:
    """Id of an episode with the address of its page."""

    id: str
    href: str
    """Address; empty if the episode is not recorded."""
    label: str = ""
    """Step from 1, group and member of a recorded episode, as on its page."""


@dataclass(frozen=True)
class Version:
    """Version of an entry in a story."""

    view: VersionView
    origin: EpisodeLink | None
    """Episode that the version was distilled from; None for a merge or an import."""


def lesson(request: Request) -> Response:
    """Return the page of an experience."""
    site: Site = request.app.state.site
    run = site.run(request)
    uid = text_of(request, "uid")
    page = integer_of(request, "page", least=1) or 1
    with open_reader(bank_of(request)) as bank:
        entry = found_entry(bank, uid)
        links = episode_links(run, request.path_params["run"])
        uses, lifts = bank.uses(entry.uid), bank.lifts(entry.uid)
        refinements = bank.refinements(entry.uid)
        pages = max(1, -(-len(uses) // MAX_USES))
        page = min(page, pages)
        lineage, offspring = bank.lineage(entry.unit), bank.offspring(entry.uid)
        newest = uses[::-1][(page - 1) * MAX_USES : page * MAX_USES]
        context = {
            "entry": entry,
            "eviction": bank.eviction(entry.uid),
            "generation": bank.generation(entry.unit),
            "lineage": _versions(lineage[:MAX_VERSIONS], links),
            "lineage_left_out": max(0, len(lineage) - MAX_VERSIONS),
            "offspring": _versions(offspring[::-1][:MAX_VERSIONS], links),
            "offspring_left_out": max(0, len(offspring) - MAX_VERSIONS),
            "known": frozenset(bank.uids()),
            "uses": [(use, links(use.episode, use.step)) for use in newest],
            "total_uses": len(uses),
            "page": page,
            "pages": pages,
            "questions": _questions(bank, refinements, links),
            "questions_left_out": max(0, len(refinements) - MAX_QUESTIONS),
            "charts": history_charts(uses, lifts),
            "query": {"uid": entry.uid},
            "split": split_unit,
        }
    return site.render(request, "lesson.html", **context)


def found_entry(bank: BankReader, uid: str) -> EntryView:
    """Return the entry with a uid, or with a unique beginning of one.

    Raise `HTTPException` 404 if there is none.
    """
    try:
        return bank.find(uid)
    except ConfigError as error:
        raise HTTPException(404, f"{error.reason[:300]}: {uid[:100]!r}") from error


def episode_links(run: RunDir, run_id: str) -> Callable[[str, int | None], EpisodeLink]:
    """Return a function that links the id of an episode, with the step of its operation.

    An operation of another run has no step. The episodes of other runs, and of steps whose files
    were removed, are not recorded here.
    """
    recorded: Collection[int] = shards(run.episodes).keys()

    def link(id: str, step: int | None) -> EpisodeLink:
        match = EPISODE_ID.fullmatch(id)
        if match is None or step is None or int(match[1]) + 1 not in recorded:
            return EpisodeLink(id, "")
        number, group, member = (int(part) for part in match.groups())
        label = f"{number + 1}/{group}/{member}"
        return EpisodeLink(id, f"/runs/{run_id}/episodes/{label}", label)

    return link


def _versions(
    views: Sequence[VersionView], links: Callable[[str, int | None], EpisodeLink]
) -> list[Version]:
    return [
        Version(view, links(view.by, view.step) if EPISODE_ID.fullmatch(view.by) else None)
        for view in views
    ]


def _questions(
    bank: BankReader,
    refinements: Sequence[RefinementView],
    links: Callable[[str, int | None], EpisodeLink],
) -> list[tuple[RefinementView, list[tuple[UseView, EpisodeLink]]]]:
    """Return the last answered questions with the episodes that read the answers."""
    return [
        (view, [(use, links(use.episode, use.step)) for use in bank.uses(view.id)])
        for view in refinements[::-1][:MAX_QUESTIONS]
    ]


def split_unit(text: str) -> tuple[str, str]:
    """Return uid and version of `uid@version`."""
    uid, _, version = text.rpartition("@")
    return uid, version


def history_charts(uses: Sequence[UseView], lifts: Sequence[LiftView]) -> list[LineChart]:
    """Return the charts of credit and of lift over the steps of the run, over all versions."""
    charts = []
    if credit := _credit(uses):
        note = "Share of the guided episodes so far, with the Wilson interval."
        charts.append(LineChart("Won episodes", "share", [Line("won", credit)], 0, 1, note))
    if lift := some_of(lift_curve(lifts)):
        note = "Mean over the groups so far, with the 95 % credible interval."
        charts.append(LineChart("Lift", "guided − free", [Line("lift", lift, 1)], -1, 1, note))
    return charts


def _credit(uses: Sequence[UseView]) -> Sequence[Point]:
    """Return the share of won episodes after each step."""
    points, won, n = [], 0, 0
    for step, group in groupby(uses, key=lambda use: use.step):
        outcomes = [use.reward > 0 for use in group]
        won, n = won + sum(outcomes), n + len(outcomes)
        if step is not None:
            points.append(Point(step, won / n, *wilson_interval(won / n, n)))
    return some_of(points)


def some_of(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most `MAX_POINTS` points of a cumulative curve, the last one among them."""
    return points[:: -max(1, math.ceil(len(points) / MAX_POINTS))][::-1]


# ── whole texts ─────────────────────────────────────────────────────────────────────────────────


def text(request: Request) -> Response:
    """Return a part of a version, of an answer to a question, or of a goal as plain text."""
    uid, version = text_of(request, "uid"), integer_of(request, "version", least=1)
    with open_reader(bank_of(request)) as bank:
        if choice_of(request, "of", TextOf):
            texts = [found_entry(bank, uid).goal]
        elif version is None:
            refinement = bank.refinement(uid)
            texts = [] if refinement is None else [refinement.text or ""]
        else:
            unit = UnitKey(uid, version)
            texts = [v.text for v in bank.lineage(unit) if (v.uid, v.version) == unit]
            texts = texts or [e.text for e in bank.entries(None) if e.unit == unit]
    if not texts:
        raise HTTPException(404, "There is no such text.")
    return text_part(request, texts[0])


def text_part(request: Request, whole: str) -> Response:
    """Return the part of a text that the query parameter `part` names, from 1, as plain text.

    Characters that are not printable are escaped. The last line names the next part.
    """
    parts = number_of_parts(whole)
    part = integer_of(request, "part", least=1) or 1
    if part > parts:
        raise HTTPException(404, f"The text has only {parts} parts.")
    shown = printable_lines(whole[(part - 1) * PART_CHARACTERS : part * PART_CHARACTERS])
    headers = {}
    if part < parts:
        following = address(request.url.path, dict(request.query_params), part=part + 1)
        shown += f"\n… part {part} of {parts}. The next part: {following}"
        headers["Link"] = f'<{following}>; rel="next"'
    return PlainTextResponse(shown + "\n", headers=headers)


def number_of_parts(whole: str) -> int:
    """Return the number of parts of a text; at least 1."""
    return max(1, -(-len(whole) // PART_CHARACTERS))


ROUTES = [
    Route("/runs/{run}/bank", bank),
    Route("/runs/{run}/bank/lesson", lesson),
    Route("/runs/{run}/bank/text", text),
]
