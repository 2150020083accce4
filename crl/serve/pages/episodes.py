"""Pages about recorded episodes: their list, and the viewer of one or of two members of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from crl.config.load import load_saved
from crl.errors import ConfigError, CrlError
from crl.manager.inspection.reading import VersionView, open_reader
from crl.monitor.run_dir import RunDir
from crl.records.shards import Record, read_records, shards
from crl.report.episodes import Message, episode
from crl.serve.addresses import address, choice_of, integer_of, text_of
from crl.serve.pages.bank import TextOf, text_part
from crl.serve.site import Site
from crl.wording import SEGMENT_TITLES

ROWS_PER_PAGE = 50
"""Number of episodes on a page of the list."""

MAX_STEPS_READ = 20
"""Maximum number of steps that are read for a page of the list."""

MAX_GOAL = 200
"""Number of characters of a goal that the list keeps."""

MAX_SEGMENTS = 400
"""Maximum number of texts of an episode on its page."""

MAX_TEXT = 6_000
"""Maximum number of characters of one text on the page of an episode."""

MAX_EPISODE_TEXT = 200_000
"""Maximum number of characters of all texts of an episode on its page."""

MIN_TEXT = 200
"""Number of characters of a text that are shown after `MAX_EPISODE_TEXT`."""


class Outcome(StrEnum):
    """Filters by outcome. An episode with an error is neither won nor lost."""

    won, lost, failed = "won", "lost", "failed"


class Condition(StrEnum):
    """Filters by condition."""

    guided, free = "guided", "free"


@dataclass(frozen=True, slots=True)
class Summary:
    """Episode in the list."""

    place: tuple[int, int, int]
    """Training step, from 1, group and member."""
    task: str
    goal: str
    """Goal, at most `MAX_GOAL` characters."""
    condition: str
    outcome: Outcome
    reward: float
    turns: int
    uids: tuple[str, ...]
    """Entries that guided the episode."""


@dataclass(frozen=True)
class Text:
    """Text of an episode on its page."""

    message: Message
    number: int
    """Number of the text in its episode, from 0."""
    shown: str
    """Start of the text."""

    @property
    def left_out(self) -> int:
        """Number of characters that are not shown."""
        return len(self.message.text) - len(self.shown)


@dataclass(frozen=True)
class View:
    """Episode on its page."""

    record: Record
    turns: Sequence[Sequence[Text]]
    """Texts of each turn. A turn ends with an answer; the last one may lack it."""
    left_out: int
    """Number of texts that are not on the page."""

    @property
    def answers(self) -> int:
        """Number of turns that end with an answer."""
        return sum(turn[-1].message.title == SEGMENT_TITLES["policy"] for turn in self.turns)

    @property
    def outcome(self) -> Outcome:
        return outcome(self.record)


# ── list ────────────────────────────────────────────────────────────────────────────────────────


def episodes(request: Request) -> Response:
    """Return the list of recorded episodes, those of the last step first."""
    site: Site = request.app.state.site
    run = site.run(request)
    found = shards(run.episodes)
    task = text_of(request, "task")
    only = integer_of(request, "step")
    start, skip = integer_of(request, "at"), integer_of(request, "skip") or 0
    steps = [step for step in sorted(found, reverse=True) if only in (None, step)]
    rows, faults, following = _page(
        site, request, {step: found[step] for step in steps if start is None or step <= start}, skip
    )
    query = dict(request.query_params)
    return site.render(
        request, "episodes.html",
        rows=rows,
        faults=faults,
        steps=sorted(found),
        older=address(request.url.path, query, **following) if following else "",
        task=task,
        tasks=sorted({row.task for row in rows} | set(_tasks(site, run)) | {task} - {""}),
        outcome=choice_of(request, "outcome", Outcome),
        condition=choice_of(request, "condition", Condition),
        only=only,
        is_start=start is None,
    )  # fmt: skip


def _tasks(site: Site, run: RunDir) -> Sequence[str]:
    """Return the tasks of a run; none if its settings cannot be read."""

    def read() -> list[str]:
        try:
            return list(load_saved(run.path).config.tasks)
        except ConfigError:
            return []

    return site.cache.get(("tasks", run.path), [run.config], read)


def _page(
    site: Site, request: Request, found: dict[int, Path], skip: int
) -> tuple[list[Summary], list[str], dict[str, int]]:
    """Return a page of episodes, the reasons for unreadable steps, and the next page's parameters.

    `found`: files of the steps, in the order of the list. The first `skip` matching episodes of the
    first step are left out. The parameters are empty at the end of the list.
    """
    rows: list[Summary] = []
    faults: list[str] = []
    for number, (step, path) in enumerate(found.items()):
        if number == MAX_STEPS_READ:
            return rows, faults, {"at": step, "skip": 0}
        try:
            summaries = site.cache.get(("episodes", path), [path], lambda p=path: summaries_of(p))
        except ConfigError as error:
            faults.append(str(error))
            continue
        first = skip if number == 0 else 0
        matching = [one for one in summaries if _matches(request, one)]
        room = ROWS_PER_PAGE - len(rows)
        rows += matching[first : first + room]
        if len(matching) > first + room:
            return rows, faults, {"at": step, "skip": first + room}
    return rows, faults, {}


def _matches(request: Request, one: Summary) -> bool:
    wanted = (
        (text_of(request, "task"), one.task),
        (choice_of(request, "outcome", Outcome), one.outcome),
        (choice_of(request, "condition", Condition), one.condition),
    )
    return all(not value or value == own for value, own in wanted)


def summaries_of(path: Path) -> list[Summary]:
    """Return the episodes of a shard for the list. Raise `ConfigError` if it is damaged."""
    found = [
        Summary(
            (r["step"], r["group"], r["member"]), r["task"][:MAX_GOAL], r["goal"][:MAX_GOAL],
            r["condition"], outcome(r), r["reward"], r["turns"],
            tuple(dict.fromkeys(use["uid"] for use in r["used"])),
        )
        for r in read_records(path)
    ]  # fmt: skip
    return sorted(found, key=lambda one: one.place)


def outcome(record: Record) -> Outcome:
    """Return the outcome of a recorded episode."""
    if record["error"]:
        return Outcome.failed
    return Outcome.won if record["success"] else Outcome.lost


# ── viewer ──────────────────────────────────────────────────────────────────────────────────────


def viewer(request: Request) -> Response:
    """Return the page of an episode, with another member of its group beside it if asked for."""
    site: Site = request.app.state.site
    members = _members(request)
    shown = [_member(members, int(request.path_params["member"]))]
    beside = integer_of(request, "beside")
    if beside is not None:
        shown.append(_member(members, beside))
    others = [record for record in members.values() if record is not shown[0]]
    free = [record for record in others if record["condition"] == "free" and not record["error"]]
    views = [view(record) for record in shown]
    return site.render(
        request, "episode.html",
        views=views,
        made=_made(site.run(request), shown[0]),
        total=max(len(one.turns) for one in views),
        answers=max(one.answers for one in views),
        others=others,
        free=free[0] if free and beside is None else None,
        beside=beside,
        outcome_of=outcome,
        folder=request.url.path.rpartition("/")[0],
    )  # fmt: skip


def _made(run: RunDir, record: Record) -> list[VersionView]:
    """Return the versions that were distilled from an episode; none without a readable bank."""
    try:
        with open_reader(run.bank) as bank:
            return bank.distilled_from(record["step"] - 1, record["group"], record["member"])
    except CrlError:
        return []


def segment(request: Request) -> Response:
    """Return a part of a whole text of an episode, or of its goal, as plain text."""
    record = _member(_members(request), int(request.path_params["member"]))
    if choice_of(request, "of", TextOf):
        return text_part(request, record["goal"])
    number = integer_of(request, "text") or 0
    if number >= len(record["segments"]):
        raise HTTPException(404, "The episode has no such text.")
    return text_part(request, record["segments"][number]["text"])


def _members(request: Request) -> dict[int, Record]:
    """Return the members of the group that a request names.

    Raise `HTTPException` 404 if the episode's step or group is not recorded.
    """
    site: Site = request.app.state.site
    names = [request.path_params[name] for name in ("step", "group", "member")]
    if not all(name.isascii() and name.isdigit() and len(name) <= 9 for name in names):
        raise HTTPException(404, "This is not the address of an episode.")
    step, group, _ = (int(name) for name in names)
    path = shards(site.run(request).episodes).get(step)
    if path is None:
        raise HTTPException(404, f"The episodes of step {step} are not recorded.")

    def read() -> dict[int, Record]:
        return {r["member"]: r for r in read_records(path) if r["group"] == group}

    found = site.records.get(("group", path, group), [path], read)
    if not found:
        raise HTTPException(404, f"Step {step} has no recorded group {group}.")
    return dict(sorted(found.items()))


def _member(members: dict[int, Record], number: int) -> Record:
    if number not in members:
        raise HTTPException(404, f"The group has no recorded member {number}.")
    return members[number]


def view(record: Record) -> View:
    """Return an episode for its page. Long texts, and the last of very many, are cut."""
    read = episode(record, MAX_SEGMENTS)
    return View(record, list(_turns(read.messages)), read.left_out)


def _turns(messages: Sequence[Message]) -> Iterator[list[Text]]:
    turn: list[Text] = []
    left = MAX_EPISODE_TEXT
    for number, message in enumerate(messages):
        shown = message.text[: max(MIN_TEXT, min(MAX_TEXT, left))]
        left -= len(shown)
        turn.append(Text(message, number, shown))
        if message.title == SEGMENT_TITLES["policy"]:
            yield turn
            turn = []
    if turn:
        yield turn


ROUTES = [
    Route("/runs/{run}/episodes", episodes),
    Route("/runs/{run}/episodes/{step}/{group}/{member}", viewer),
    Route("/runs/{run}/episodes/{step}/{group}/{member}/text", segment),
]
