"""Pages about changes of a bank: between steps, between two banks, and by the user.

The user's changes are those of `crl bank prune` and `crl bank dead --retry`. They need `--write`, a
confirmation, and the token of the server in the form.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from crl.errors import ConfigError, StoreError
from crl.manager.inspection.reading import (
    BankReader,
    EntryView,
    VersionView,
    compare_banks,
    open_reader,
)
from crl.manager.inspection.upkeep import evict, lowest_credit, not_used_since, retry_dead
from crl.serve.addresses import address, integer_of, text_of
from crl.serve.pages.bank import bank_of, episode_links
from crl.serve.site import Site

MAX_ROWS = 100
"""Maximum number of rows of a table."""

MAX_WORDS = 300
"""Maximum number of words of a text that are compared with another version."""

DEFAULT_STEPS = 10
"""Number of last steps whose changes are shown if no steps are chosen."""

MAX_FORM_BYTES = 1 << 16
"""Maximum size of a form."""


# ── two steps of one bank ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Written:
    """Version that was written, with its difference to the version before."""

    view: VersionView
    words: Sequence[tuple[str, str]]
    """Parts of the text: (same, removed or added; text). Empty for a new entry."""


def steps(request: Request) -> Response:
    """Return the page about the changes of a bank from one step to another, both included."""
    site: Site = request.app.state.site
    with open_reader(bank_of(request)) as bank:
        last = bank.step()
        to = integer_of(request, "to")
        to = last if to is None else to
        first = integer_of(request, "from")
        first = max(0, (to or 0) - DEFAULT_STEPS + 1) if first is None else first
        if text_of(request, "to") and to is not None and first > to:
            raise HTTPException(400, f"Step {first} is after step {to}. Exchange them.")
        found = {} if to is None else _changes(bank, first, to)
    return site.render(request, "steps.html", first=first, to=to, last=last, **found)


def _changes(bank: BankReader, first: int, last: int) -> dict[str, Any]:
    versions = bank.versions()
    texts = {f"{version.uid}@{version.version}": version.text for version in versions}
    written = [v for v in versions if v.step is not None and first <= v.step <= last][::-1]
    evictions = bank.evictions(first, last)[::-1]
    effects = bank.effects(first, last)
    newest = {version.uid: version.text for version in versions}
    return {
        "written": [_written(view, texts) for view in written[:MAX_ROWS]],
        "total_written": len(written),
        "evicted": evictions[:MAX_ROWS],
        "total_evicted": len(evictions),
        "effects": effects[:MAX_ROWS],
        "total_effects": len(effects),
        "texts": newest,
        "operations": bank.operations(first, last),
    }


def _written(view: VersionView, texts: Mapping[str, str]) -> Written:
    before = [texts[parent] for parent in view.parents[:1] if parent in texts]
    if view.kind != "update" or not before:
        return Written(view, ())
    return Written(view, word_difference(before[0], view.text))


def word_difference(before: str, after: str) -> list[tuple[str, str]]:
    """Return the parts of two texts: (same, removed or added; text).

    At most `MAX_WORDS` words of each text are compared.
    """
    old, new = (text[: 20 * MAX_WORDS].split()[:MAX_WORDS] for text in (before, after))
    parts: list[tuple[str, str]] = []
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("same", " ".join(old[a:b])))
            continue
        parts += [("removed", " ".join(old[a:b]))] if b > a else []
        parts += [("added", " ".join(new[c:d]))] if d > c else []
    return parts


# ── two banks ───────────────────────────────────────────────────────────────────────────────────


def difference(request: Request) -> Response:
    """Return the comparison of the active entries of two banks."""
    site: Site = request.app.state.site
    own = site.found(request.path_params["run"])
    others = [
        run
        for run in site.runs()
        if run.id != own.id and not run.foreign and run.dir.bank.is_file()
    ]
    name = text_of(request, "other")
    page = integer_of(request, "page", least=1) or 1
    context: dict[str, Any] = {"others": others, "other": None, "page": page, "pages": 1}
    if name:
        other = site.found(name)
        if other.id == own.id:
            raise HTTPException(400, "Choose another run: this is the same bank.")
        if not other.dir.bank.is_file():
            raise HTTPException(404, "The other run has no bank.")
        found = compare_banks(bank_of(request), other.dir.bank)
        longest = max(len(found.only_a), len(found.only_b), len(found.both))
        pages = max(1, -(-longest // MAX_ROWS))
        page = min(page, pages)
        part = slice((page - 1) * MAX_ROWS, page * MAX_ROWS)
        context |= {"other": other, "found": found, "part": part, "page": page, "pages": pages}
    return site.render(request, "diff.html", query=dict(request.query_params), **context)


# ── requests ────────────────────────────────────────────────────────────────────────────────────


def requests(request: Request) -> Response:
    """Return the page about episodes that wait for distillation, and those that failed."""
    site: Site = request.app.state.site
    run = site.run(request)
    with open_reader(bank_of(request)) as bank:
        counts = bank.queue()
        waiting, dead = bank.requests("leased", "pending"), bank.requests("dead")
        known = frozenset(bank.uids())
    links = episode_links(run, request.path_params["run"])

    def linked(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(row, links(row.id, row.step)) for row in rows[:MAX_ROWS]]

    return site.render(
        request, "requests.html",
        counts=counts,
        waiting=linked(waiting),
        dead=linked(dead),
        known=known,
        in_use=run.is_locked(),
        retried=integer_of(request, "retried"),
    )  # fmt: skip


async def retry(request: Request) -> Response:
    """Ask whether dead requests are to be distilled again (GET), and queue them again (POST)."""
    site, path = _writable(request), await run_in_threadpool(bank_of, request)
    form = await _form(request) if request.method == "POST" else None
    id = text_of(request, "id") if form is None else form.get("id", "")
    with_id = [id] if id else None
    found = await run_in_threadpool(_dead_ids, path)
    if with_id and id not in found:
        raise HTTPException(404, f"No dead request has the id {id[:100]!r}.")
    if form is not None:
        async with _change(request):
            retried = await retry_dead(path, with_id)
        target = f"/runs/{request.path_params['run']}/bank/requests"
        return RedirectResponse(address(target, retried=retried), 303)
    return await run_in_threadpool(
        lambda: site.render(
            request, "confirm_retry.html",
            id=id,
            number=1 if id else len(found),
            in_use=site.run(request).is_locked(),
        )
    )  # fmt: skip


def _dead_ids(path: Path) -> frozenset[str]:
    with open_reader(path) as bank:
        return frozenset(request.id for request in bank.requests("dead"))


# ── pruning ─────────────────────────────────────────────────────────────────────────────────────


async def prune(request: Request) -> Response:
    """Show the experiences that a criterion evicts (GET), and evict them (POST)."""
    site, path = _writable(request), await run_in_threadpool(bank_of, request)
    if request.method == "POST":
        form = await _form(request)
        criterion = _criterion(form.get("max_entries", ""), form.get("unused_since", ""))
        async with _change(request):
            to_evict, _ = await run_in_threadpool(_to_evict, path, criterion)
            if _digest(to_evict) != form.get("expected", ""):
                raise HTTPException(409, "The bank has changed since the preview. Prune it again.")
            evicted = await evict(path, [entry.unit for entry in to_evict])
        return RedirectResponse(address(request.url.path, evicted=evicted), 303)
    given = text_of(request, "max_entries"), text_of(request, "unused_since")
    context: dict[str, Any] = {"criterion": None, "evicted": integer_of(request, "evicted")}
    if any(given):
        criterion = _criterion(*given)
        to_evict, active = await run_in_threadpool(_to_evict, path, criterion)
        context |= {
            "criterion": criterion,
            "to_evict": to_evict[:MAX_ROWS],
            "total": len(to_evict),
            "active": active,
            "expected": _digest(to_evict),
        }
    return await run_in_threadpool(
        lambda: site.render(request, "prune.html", in_use=site.run(request).is_locked(), **context)
    )


def _criterion(max_entries: str, unused_since: str) -> tuple[str, int]:
    """Return the name and the value of the criterion. Raise `HTTPException` 400 for a wrong one."""
    given = [
        (name, text.strip())
        for name, text in (("max_entries", max_entries), ("unused_since", unused_since))
        if text.strip()
    ]
    if len(given) != 1:
        raise HTTPException(400, "Give exactly one criterion.")
    ((name, text),) = given
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise HTTPException(400, f"{name} = {text[:40]!r} is not a number.")
    if name == "max_entries" and int(text) < 1:
        raise HTTPException(400, "At least one experience must remain.")
    return name, int(text)


def _to_evict(path: Path, criterion: tuple[str, int]) -> tuple[list[EntryView], int]:
    """Return the entries that a criterion evicts, and the number of active entries."""
    with open_reader(path) as bank:
        entries = bank.entries()
    name, value = criterion
    choose = lowest_credit if name == "max_entries" else not_used_since
    return choose(entries, value), len(entries)


def _digest(entries: Sequence[EntryView]) -> str:
    """Return a digest of versions of entries, in their order."""
    text = "\n".join(f"{entry.uid}@{entry.version}" for entry in entries)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


# ── protection of changes ───────────────────────────────────────────────────────────────────────


def _writable(request: Request) -> Site:
    """Return the site. Raise `HTTPException` 403 if its banks may not be changed."""
    site: Site = request.app.state.site
    if not site.write:
        raise HTTPException(403, "This server only reads. Start it with --write to change banks.")
    return site


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form of this server.

    Raise `HTTPException` if the form comes from another site, or is too large.
    """
    site: Site = request.app.state.site
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "This is not a form.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, "The form is too large.")
    try:
        text = body.decode("utf-8", "replace")
        fields = parse_qs(text, keep_blank_values=True, max_num_fields=20)
    except ValueError as error:
        raise HTTPException(400, "The form has too many fields.") from error
    form = {name: values[0] for name, values in fields.items()}
    token = form.get("csrf", "").encode("utf-8", "replace")
    other_site = request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
    if other_site or not hmac.compare_digest(token, site.csrf.encode()):
        raise HTTPException(403, "The form is not one of this server. Open the page again.")
    return form


@asynccontextmanager
async def _change(request: Request) -> AsyncIterator[None]:
    """Lock the run of a request while the block changes its bank.

    Raise `HTTPException` 409 if a process trains the run, or if the bank cannot be changed.
    """
    site: Site = request.app.state.site
    try:
        with ExitStack() as stack:
            run = await run_in_threadpool(site.run, request)
            await run_in_threadpool(stack.enter_context, run.lock())
            yield
    except (ConfigError, StoreError) as error:
        raise HTTPException(409, f"The bank was not changed. {error}") from error


ROUTES = [
    Route("/runs/{run}/bank/steps", steps),
    Route("/runs/{run}/bank/diff", difference),
    Route("/runs/{run}/bank/requests", requests),
    Route("/runs/{run}/bank/retry", retry, methods=["GET", "POST"]),
    Route("/runs/{run}/bank/prune", prune, methods=["GET", "POST"]),
]
