"""Experiences as sections of a Markdown page, and back.

A page has a heading `Task: NAME` for each task, unless its front matter names the task, and a
heading `Goal: TEXT` for each goal. Every item of a list below a goal is an experience. A last line
that starts with `*Evidence:` is not part of its text:

    ## Task: room

    ### Goal: Reach the stairs down.

    - Go west.
      *Evidence: lift +0.25 [-0.21, +0.71] over 3 groups; won 3 of 4 guided episodes.*

Entries with the same task, goal and text are one item. The evidence is written for readers; the
counters of the entries are read from JSON lines that belong to the page. See `combined`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from crl.manager.exchange.escapes import (
    markdown,
    markdown_lines,
    plain,
    plain_text,
    visible,
    visible_line,
)
from crl.manager.exchange.front_matter import FrontMatter, read_front_matter
from crl.manager.exchange.jsonl import line_error, new_entry
from crl.manager.inspection.reading import EntryView, pooled_lift
from crl.manager.records import Entry
from crl.types import Lift, lift_order
from crl.wording import counted, lift_text, listed, times

EVIDENCE = "*Evidence:"
"""Start of the line about the evidence. In a text, `markdown` would escape the star."""

_BULLET = re.compile(r" {0,3}(?:[-+*]|[0-9]{1,9}[.)])(?: {1,4}(?! )| (?= )|$)")
_HEADING = re.compile(r"(Task|Goal):(.*)", re.DOTALL)

# ── lessons ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Lesson:
    """Entries with the same task, goal and text."""

    entries: tuple[EntryView, ...]
    """Entries, at least one, in the order in which they were written."""

    @property
    def text(self) -> str:
        return self.entries[0].text

    @property
    def goal(self) -> str:
        return self.entries[0].goal

    @property
    def lift(self) -> Lift | None:
        """Lift over the groups of all entries."""
        return pooled_lift(entry.counters.lift for entry in self.entries)

    @property
    def order(self) -> tuple[tuple[float, float], float]:
        """Sort key: best lift first (`lift_order`), then best credit."""
        return lift_order(self.lift), -sum(entry.counters.credit for entry in self.entries)

    @property
    def evidence(self) -> str:
        """Evidence in words, as Markdown."""
        counters = [entry.counters for entry in self.entries]
        credited, credit = sum(c.credited for c in counters), sum(c.credit for c in counters)
        votes, retrieved = sum(c.votes for c in counters), sum(c.retrieved for c in counters)
        steps = sorted({entry.step for entry in self.entries if entry.step is not None})
        sources = dict.fromkeys(
            markdown(visible_line(parent))
            for entry in self.entries
            for parent in entry.provenance.parents
        )
        number = len(self.entries)
        often = f" {times(number)}" if number > 1 and number != len(steps) else ""
        at = f" after step{'s' if len(steps) > 1 else ''} {listed(steps)}" if steps else ""
        parts = [
            _lift_words(self.lift) if self.lift else "",
            f"won {sum(c.won for c in counters):,} of {counted(credited, 'guided episode')}, "
            f"credit {credit:+g}"
            if credited
            else "no guided episode yet",
            f"retrieved {times(retrieved)}" if retrieved else "",
            f"votes {votes:+d}" if votes else "",
            f"written{often}{at}" if often or at else "",
            f"made from {', '.join(sources)}" if sources else "",
        ]
        return "; ".join(part for part in parts if part)


def _lift_words(lift: Lift) -> str:
    return f"lift {lift_text(lift)} over {counted(lift.groups, 'group')}"


def lessons_by_goal(entries: Iterable[EntryView]) -> dict[str, list[Lesson]]:
    """Return the lessons of one task by goal, the best first.

    The goal with the best lesson is first. Equally good goals are in alphabetical order.
    """
    same: dict[tuple[str, str], list[EntryView]] = {}
    for entry in entries:
        same.setdefault((entry.goal, entry.text), []).append(entry)
    lessons = sorted(
        (Lesson(tuple(group)) for group in same.values()), key=lambda one: (one.order, one.goal)
    )
    by_goal: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        by_goal.setdefault(lesson.goal, []).append(lesson)
    return by_goal


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def goal_sections(by_goal: Mapping[str, Sequence[Lesson]], level: int) -> Iterator[str]:
    """Yield the lines of lessons by goal. `level`: that of the goals' headings."""
    for goal, lessons in by_goal.items():
        yield from ("", f"{'#' * level} Goal: {markdown(visible_line(goal))}".rstrip(), "")
        for lesson in lessons:
            first, *others = markdown_lines(visible(lesson.text))
            yield f"- {first}".rstrip()
            yield from (f"  {line}".rstrip() for line in others)
            yield f"  {EVIDENCE} {lesson.evidence}.*"


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WrittenLesson:
    """Item of a page in plain text."""

    path: Path
    line: int
    """Line of the file at which the lesson starts."""
    task: str
    goal: str
    text: str


@dataclass(frozen=True)
class Page:
    """Contents of a Markdown file."""

    front: FrontMatter
    lessons: Sequence[WrittenLesson]


def read_page(path: Path, lines: list[str]) -> Page:
    """Return the lessons in the lines of a page.

    Raise `ConfigError`, which names the file and the line, if the front matter cannot be read, or
    if a lesson has no task.
    """
    front = read_front_matter(path, lines)
    body = [""] * len(front.lines) + lines[len(front.lines) :]  # keeps the numbers of lines
    tokens = MarkdownIt("commonmark").disable("inline").parse("\n".join(body))
    return Page(front, list(_lessons(front, body, tokens)))


def _lessons(front: FrontMatter, lines: list[str], tokens: list[Token]) -> Iterator[WrittenLesson]:
    """Yield the items of lists below a goal."""
    task, goal, level = front.text("task"), front.text("goal"), 0
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.level == 0:
            # The content of a heading is the next token.
            depth, found = int(token.tag[1:]), _HEADING.fullmatch(tokens[number + 1].content)
            value = plain(found[2].strip()) if found else ""
            if found and found[1] == "Goal":
                goal, level = value, depth
            elif found:
                task, goal = value, front.text("goal")
            elif depth <= level:  # the section of the goal ends
                goal = front.text("goal")
        elif token.type == "list_item_open" and token.level == 1 and goal is not None and token.map:
            start, end = token.map
            if not task:
                reason = "the experience belongs to no task"
                remedy = "Add a heading `Task: NAME` above it, or the task to the front matter"
                raise line_error(front.path, start + 1, ".task", None, reason, remedy)
            yield WrittenLesson(front.path, start + 1, task, goal, _item_text(lines[start:end]))


def _item_text(lines: list[str]) -> str:
    """Return the text of an item of a list, without its evidence."""
    first = lines[0].expandtabs(4)
    bullet = _BULLET.match(first)
    start = len(bullet[0]) if bullet else 0
    indent = start + (start == len(first))  # an item may start with an empty line
    rest = [line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in lines[1:]]
    text = [first[start:], *rest]
    while text and not text[-1].strip():
        text.pop()
    if text and text[-1].startswith(EVIDENCE):
        text.pop()
    return plain_text(text)


# ── lessons and their records ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Imported:
    """Entries for a new bank."""

    entries: Sequence[Entry]
    """Entries with their counters in the order of the records, then new ones without counters."""
    new: int = 0
    """Number of entries that were written by hand or edited, so that they have no counters."""
    left_out: int = 0
    """Number of recorded entries without an item on a page."""


def combined(lessons: Sequence[WrittenLesson], records: Sequence[Entry]) -> Imported:
    """Return the entries of the items on pages.

    Only experiences on the pages are imported. An item has the records with its task, goal and
    text; texts are compared as a page shows them. An item without a record, such as an edited one,
    is a new entry without counters.

    Raise `ConfigError` if a bank cannot hold a new entry.
    """
    recorded = {_key(entry) for entry in records}
    exact = {key[:2]: (entry.task, entry.goal) for entry in records for key in [_key(entry)]}
    shown = {_key(lesson) for lesson in lessons}
    kept = [entry for entry in records if _key(entry) in shown]
    uids, new = {entry.uid for entry in records}, []
    for lesson in lessons:
        if (key := _key(lesson)) in recorded:
            continue
        number = len(new) + 1
        while (uid := f"import/0/0/{number}#0") in uids:
            number += 1
        uids.add(uid)
        task, goal = exact.get(key[:2], (lesson.task, lesson.goal))
        fields = {"task": task, "goal": goal, "text": lesson.text}
        new.append(new_entry(lesson.path, lesson.line, uid, fields))
    return Imported([*kept, *new], len(new), len(records) - len(kept))


def _key(lesson: WrittenLesson | Entry) -> tuple[str, str, str]:
    return visible_line(lesson.task), visible_line(lesson.goal), visible(lesson.text)
