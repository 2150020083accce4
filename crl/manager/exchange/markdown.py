"""Exports as one Markdown file: a page for readers, then the entries as JSON lines in a comment.

The page can be read, edited and imported again; `crl.manager.exchange.pages` describes it. A page
written by hand needs neither front matter nor comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from crl.manager.exchange.escapes import markdown, visible_line
from crl.manager.exchange.front_matter import write_front_matter
from crl.manager.exchange.jsonl import export_lines, line_error, parse_lines, read_bytes
from crl.manager.exchange.origin import Origin
from crl.manager.exchange.pages import Imported, combined, goal_sections, lessons_by_goal, read_page
from crl.manager.inspection.reading import EntryView
from crl.manager.records import Entry

RECORDS_START, RECORDS_END = "<!-- crl bank records", "-->"


def write_markdown(entries: Sequence[EntryView], origin: Origin) -> Iterator[str]:
    """Yield the lines of an export."""
    tried = sum(entry.counters.credited > 0 for entry in entries)
    tasks = sorted({entry.task for entry in entries})
    by_task = {task: lessons_by_goal(e for e in entries if e.task == task) for task in tasks}
    different = sum(len(lessons) for goals in by_task.values() for lessons in goals.values())
    yield from write_front_matter(origin.fields(len(entries)))
    yield from ("", f"# Experiences of {markdown(visible_line(origin.bank))}", "")
    yield from origin.lines(different, len(entries), tried)
    for task, goals in by_task.items():
        yield from ("", f"## Task: {markdown(visible_line(task))}")
        yield from goal_sections(goals, 3)
    yield from ("", RECORDS_START)
    yield from map(_in_comment, export_lines(entries))
    yield RECORDS_END


def _in_comment(record: object) -> str:
    """Return JSON in which nothing can end or nest a comment of HTML."""
    text = json.dumps(record).replace("<", r"\u003c").replace(">", r"\u003e")
    return text.replace("--", r"-\u002d")


def read_markdown(path: Path) -> Imported:
    """Return the entries of a Markdown file.

    Raise `ConfigError`, which names the file and the line, if the file cannot be read, holds no
    experiences, or lacks the records that its front matter announces.
    """
    lines = read_lines(path)
    records, page_lines = _split(path, lines)
    page = read_page(path, page_lines)
    if (expected := page.front.number("experiences")) not in (None, len(records)):
        reason = f"the file holds the records of {len(records)}, so it may be cut off"
        remedy = "Export the bank again, or remove this line to import without counters"
        raise page.front.error("experiences", reason, remedy)
    if not page.lessons and expected != 0:
        reason = "the file holds no experiences"
        remedy = "Write each experience as an item of a list below a heading `Goal: TEXT`"
        raise line_error(path, 1, "", lines[0], reason, remedy)
    return combined(page.lessons, records)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, of which there is at least one.

    Raise `ConfigError` if the file cannot be read or is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return re.split(r"\r\n?|\n", data.decode("utf-8-sig"))  # as Markdown splits them
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        value = data[error.start : error.start + 1].hex()
        reason = "is a byte that is not UTF-8"
        raise line_error(path, number, "", value, reason, "Save the file as UTF-8") from error


def _split(path: Path, lines: list[str]) -> tuple[list[Entry], list[str]]:
    """Return the entries in the comment, and the lines with empty lines in place of the comment."""
    if RECORDS_START not in lines:
        return [], lines
    start = lines.index(RECORDS_START)
    end = lines.index(RECORDS_END, start) if RECORDS_END in lines[start:] else None
    if end is None:
        reason = "the comment with the records has no end, so the file may be cut off"
        remedy = (
            "Export the bank again, or remove the comment and `experiences` in the front matter"
        )
        raise line_error(path, start + 1, "", RECORDS_START, reason, remedy)
    records = [line.encode() for line in lines[start + 1 : end]]
    page = lines[:start] + [""] * (end + 1 - start) + lines[end + 1 :]
    return parse_lines(path, records, start + 2), page
