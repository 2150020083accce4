"""Frame of the dashboard: title, progress, tabs, one page, warnings and keys.

`draw` has no side effects. `pressed` returns the view after a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from crl.cli.dashboard.bank import bank
from crl.cli.dashboard.models import actor, extractor
from crl.cli.dashboard.overview import overview
from crl.cli.dashboard.parts import Body
from crl.cli.dashboard.system import system
from crl.cli.dashboard.tasks import tasks
from crl.cli.dashboard.texts import episode, log
from crl.cli.draw import DIM, GOOD, GUIDED, cell, one_line
from crl.monitor.snapshot import Snapshot
from crl.monitor.stages import Stage
from crl.wording import counted, duration

FRAME_LINES = 5
"""Lines of the frame without a warning: title, progress, stages, tabs and keys."""

STAGE_BAR_WIDTH = 16
"""Width of the progress bar of a stage."""

STATUS_WIDTH = 24
"""Maximum width of a state of a run in the title. A longer one has a line."""

STATUS = "bold yellow"
"""Style of the state of a run that has ended."""


class Page(NamedTuple):
    """Page of the dashboard."""

    name: str
    draw: Callable[[Snapshot, int, int], Body]
    """Function of the snapshot, the width, and the height of the page."""
    help: str


PAGES = (
    Page("overview", overview, "success, models, bank, time and notes at a glance"),
    Page("tasks", tasks, "training episodes, evaluations and advice probe of each task"),
    Page("actor", actor, "metrics of the actor's training"),
    Page("extractor", extractor, "metrics of the extractor's training"),
    Page("bank", bank, "growth, operations, searches, and experiences by lift"),
    Page("system", system, "time by part of a step, work under way, speed and totals"),
    Page("episode", lambda s, w, h: episode(s, w, h, 0), "last group of training episodes"),
    Page("log", log, "warnings and notes"),
)

EPISODE_PAGE = next(i for i, page in enumerate(PAGES) if page.name == "episode")


@dataclass(frozen=True)
class View:
    """Part of a snapshot that the window shows."""

    page: int = 0
    """Position in `PAGES`."""
    scroll: int = 0
    """Lines by which the page is scrolled, from its start, or from its end if it shows the end."""
    member: int = 0
    """Member of the group on the page of episodes."""
    help: bool = False
    """True if the help is shown instead of the page."""


class Keys(NamedTuple):
    """Keys that close the view, or stop or suspend the run, for the last line and the help."""

    hint: str
    """Hint in the last line."""
    help: Mapping[str, str]
    """Key and effect."""


NO_KEYS = Keys("", {})
"""Hints of a screen without a keyboard."""


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────

SCROLLS = {"up": -1, "k": -1, "down": 1, "j": 1}
SCREENS = {"page up": -1, "page down": 1, "space": 1}


def pressed(view: View, key: str, height: int) -> View:
    """Return the view after a key. `height`: lines of the window. Unknown keys change nothing."""
    if key == "?":
        return replace(view, help=not view.help)
    if view.help and key == "escape":
        return replace(view, help=False)
    shown = replace(view, help=False)
    if key.isdecimal() and 1 <= int(key) <= len(PAGES):
        return _turned(shown, int(key) - 1)
    if key in ("right", "tab", "left", "shift tab"):
        return _turned(shown, view.page + (1 if key in ("right", "tab") else -1))
    lines = SCROLLS.get(key, 0) + SCREENS.get(key, 0) * max(1, height - FRAME_LINES - 1)
    if lines:
        return replace(view, scroll=view.scroll + (-lines if _shows_end(view) else lines))
    if key in ("home", "end"):
        far = 10**9 if (key == "end") != _shows_end(view) else 0
        return replace(view, scroll=far)
    if key in ("n", "p") and view.page == EPISODE_PAGE:
        return replace(view, member=view.member + (1 if key == "n" else -1), scroll=0)
    return view


def _turned(view: View, page: int) -> View:
    page %= len(PAGES)
    return view if page == view.page else replace(view, page=page, scroll=0)


def _shows_end(view: View) -> bool:
    """Return whether the page of a view shows its end first."""
    return PAGES[view.page].draw is log


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────


def render(snapshot: Snapshot, width: int, height: int) -> Group:
    """Return a drawing of the overview in at most `height` lines of at most `width` cells."""
    return draw(snapshot, View(), width, height)[0]


def draw(
    s: Snapshot, view: View, width: int, height: int, keys: Keys = NO_KEYS
) -> tuple[Group, View]:
    """Return a drawing of at most `height` lines of at most `width` cells.

    Also return the view, whose scroll position is within the page.
    """
    head = [
        _title(s, width),
        _progress(s, width),
        _ending(s) or _stages(s.progress.stages, width),
        _tabs(view, width),
    ]
    foot = [*_warning(s, width), _keys(view, keys, width)]
    # In a very small window, the page is more important than the frame.
    head = head[: max(1, height - len(foot) - 8)]
    space = max(1, height - len(head) - len(foot))
    body = _help(keys) if view.help else _page(s, view, width, space)
    shown, scroll = _visible(body, view.scroll, space)
    lines = [*head, *shown, *([Text()] * (space - len(shown))), *foot][:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines), view if view.help else replace(view, scroll=scroll)


def _page(s: Snapshot, view: View, width: int, height: int) -> Body:
    if view.page == EPISODE_PAGE:
        return episode(s, width, height, view.member)
    return PAGES[view.page].draw(s, width, height)


def _visible(body: Body, scroll: int, height: int) -> tuple[list[Text], int]:
    """Return copies of the lines of a page that are visible, and the scroll position.

    The last line says how many lines are hidden, if any.
    """
    pinned = [line.copy() for line in body.pinned[: max(0, height - 2)]]
    space = height - len(pinned)
    hidden = len(body.lines) - space
    if hidden <= 0:
        return [*pinned, *(line.copy() for line in body.lines)], 0
    space, hidden = space - 1, hidden + 1
    scroll = min(max(0, scroll), hidden)
    start = hidden - scroll if body.tail else scroll
    above, below = start, len(body.lines) - start - space
    rest = [f"{n:,} more {side}" for n, side in ((above, "above ↑"), (below, "below ↓")) if n]
    more = Text(", ".join(rest), DIM)
    shown = [line.copy() for line in body.lines[start : start + space]]
    return [*pinned, *shown, more], scroll


def _title(s: Snapshot, width: int) -> Text:
    """Return the name of the run, its method, its tasks and its state."""
    name, task_names = one_line(s.run.name, width), one_line(", ".join(s.run.tasks), width)
    title = Text.assemble(
        ("crl ", DIM), (name, GOOD), "  ", one_line(s.run.method, width), (" on ", DIM), task_names
    )
    if not s.progress.status or len(s.progress.status) > STATUS_WIDTH:
        return title
    status = Text(f"  {one_line(s.progress.status, width)}", STATUS)
    title.truncate(max(0, width - status.cell_len), overflow="ellipsis")
    return title + status


def _ending(s: Snapshot) -> Text | None:
    """Return the state of a run that has ended, if it is too long for the title."""
    status = s.progress.status
    return Text(one_line(status, 200), STATUS) if len(status) > STATUS_WIDTH else None


def _progress(s: Snapshot, width: int) -> Text:
    """Return the progress of the run as a bar."""
    p, steps = s.progress, s.run.steps
    share = min(1.0, p.step / steps) if steps else 1.0
    before = Text.assemble(("step ", DIM), (f"{p.step:,}/{steps:,}", GOOD), f" {share:4.0%} ")
    after = Text.assemble(" ", cell("elapsed", duration(p.elapsed)))
    if not s.progress.status:
        after.append_text(Text.assemble("  ", cell("left", duration(p.remaining))))
    return _with_bar(before, share, after, width)


def _with_bar(before: Text, share: float, after: Text, width: int) -> Text:
    """Return two texts with a bar between them that fills the line."""
    space = width - before.cell_len - after.cell_len
    if space < 6:
        return Text.assemble(before, after)
    filled = min(space, round(space * share))
    return Text.assemble(before, ("━" * filled, GUIDED), ("─" * (space - filled), DIM), after)


def _stages(stages: Sequence[Stage], width: int) -> Text:
    """Return a line about the stages under way. It is empty if there are none."""
    line = Text()
    for stage in reversed(stages):
        item = _stage(stage)
        if line.cell_len and line.cell_len + 3 + item.cell_len > width:
            break
        line = Text.assemble(line, (" · ", DIM) if line.cell_len else "", item)
    return line if line.cell_len else Text("")


def _stage(stage: Stage) -> Text:
    """Return the progress of a stage, and an estimate of what is left."""
    left = () if stage.remaining is None else ("  ", cell("left", duration(stage.remaining)))
    time = Text.assemble(duration(stage.elapsed), *left)
    name = Text(one_line(stage.name, 60))
    if stage.total <= 1:
        return Text.assemble(name, ", ", time)
    filled = round(STAGE_BAR_WIDTH * min(1.0, stage.done / stage.total))
    return Text.assemble(
        name,
        f" {stage.done:,}/{stage.total:,} ",
        ("━" * filled, GUIDED),
        ("─" * (STAGE_BAR_WIDTH - filled), DIM),
        " ",
        time,
    )


def _tabs(view: View, width: int) -> Text:
    """Return the numbers and names of the pages. A narrow window shows only the current name."""
    for names in (True, False):
        tabs = Text()
        for number, page in enumerate(PAGES, start=1):
            current = number - 1 == view.page and not view.help
            text = f"{number} {page.name}" if names or current else f"{number}"
            tabs.append(f" {text} ", "reverse" if current else DIM)
        if tabs.cell_len <= width:
            break
    return tabs


def _warning(s: Snapshot, width: int) -> list[Text]:
    """Return a line with the last warning and the number of warnings, if there are any."""
    if not s.warnings:
        return []
    number = "" if len(s.warnings) == 1 else f"{counted(len(s.warnings), 'warning')}, the last: "
    return [Text(f"warning: {number}{one_line(s.warnings[-1], 2 * width)}", "yellow")]


def _keys(view: View, keys: Keys, width: int) -> Text:
    """Return the hints about keys, the most important ones first."""
    if not keys.hint:
        return Text("")
    member = ["n p other episode"] if view.page == EPISODE_PAGE else []
    hints = ["1–8 ← → page", "↑ ↓ scroll", *member, keys.hint, "? help"]
    line = "  ".join(hints)
    if len(line) > width:
        line = "  ".join(["1–8 page", keys.hint, "? help"])
    return Text(line, DIM)


def _help(keys: Keys) -> Body:
    """Return the help: all keys and pages, and the conditions of episodes."""
    rows = {
        "← →  tab": "previous and next page",
        "↑ ↓  j k": "scroll by a line",
        "PgUp PgDn": "scroll by a page",
        "Home End": "first and last line",
        "n p": "next and previous member of the group, on the page of episodes",
        "?": "open and close this help",
        **keys.help,
        "free": "episodes without experience",
        "guided": "episodes with the run's bank, which they search for experience",
        "online": "guided, with a copy of the bank that is also written during the evaluation",
        "alone": "the episodes of online without experience",
    }
    pages = {f"{n}": f"{page.name}: {page.help}" for n, page in enumerate(PAGES, start=1)}
    lines = [Text.assemble((f"{key:<11}", GOOD), text) for key, text in {**pages, **rows}.items()]
    return Body(lines)
