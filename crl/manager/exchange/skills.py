"""Exports as Agent Skills (https://agentskills.io/specification), as coding agents read them.

An export is a directory with one folder for each skill:

    crl-room/SKILL.md                   front matter and page, see `crl.manager.exchange.pages`
    crl-room/assets/experiences.jsonl   the entries, see `crl.manager.exchange.jsonl`

A task with at most `MAX_GOALS` goals is one skill. An agent reads the descriptions of all skills
and then whole pages, so a skill per goal would be too many descriptions, and a skill of a large
task too long a page: the specification advises at most 500 lines. The goals of a larger task are
therefore put in an order in which goals with similar words are adjacent, and cut into equal parts.
Words are compared and not the vectors of the bank, so that an imported bank, which has no vectors,
is exported as the same skills.

A skill written by hand needs a `name`, a `description` and `task` in `metadata`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from crl.errors import ConfigError
from crl.manager.exchange.escapes import markdown, visible_line
from crl.manager.exchange.front_matter import write_front_matter
from crl.manager.exchange.jsonl import export_lines, parse_export
from crl.manager.exchange.markdown import read_lines
from crl.manager.exchange.origin import Origin, experiences_text
from crl.manager.exchange.pages import (
    Imported,
    Lesson,
    WrittenLesson,
    combined,
    goal_sections,
    lessons_by_goal,
    read_page,
)
from crl.manager.inspection.reading import EntryView
from crl.manager.records import Entry

PAGE, RECORDS = "SKILL.md", "assets/experiences.jsonl"
"""Paths of the files of a skill, in its folder."""

MAX_NAME, MAX_DESCRIPTION = 64, 1024
"""Maximum number of characters of a skill's name and description, by the specification."""

MAX_GOALS = 30
"""Maximum number of goals of a skill."""

COMPARED_GOALS = 2000
"""Maximum number of goals that are ordered together. Memory grows with its square."""

NAME_WORDS = 3
"""Number of words of the goals in the name of a skill of a large task."""

# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def write_skills(entries: Sequence[EntryView], origin: Origin) -> dict[str, str]:
    """Return the files of an export: their contents by their paths in its directory.

    Raise `ConfigError` if there are no entries.
    """
    if not entries:
        reason = "the bank has no active experiences"
        raise ConfigError("--format", "skills", reason, "Export another bank")
    files: dict[str, str] = {}
    names: set[str] = set()
    for task in sorted({entry.task for entry in entries}):
        by_goal = lessons_by_goal(entry for entry in entries if entry.task == task)
        parts = similar_goals(list(by_goal))
        for part in parts:
            words = _typical_words(part, by_goal) if len(parts) > 1 else []
            names.add(name := unused_name(" ".join([task[:MAX_NAME], *words]), names))
            lessons = {goal: by_goal[goal] for goal in by_goal if goal in set(part)}
            inside = [e for e in entries if e.task == task and e.goal in lessons]
            page = _page(name, task, inside, lessons, origin)
            files[f"{name}/{PAGE}"] = "\n".join(page) + "\n"
            records = map(json.dumps, export_lines(inside))
            files[f"{name}/{RECORDS}"] = "\n".join(records) + "\n"
    return files


def _page(
    name: str,
    task: str,
    entries: Sequence[EntryView],
    lessons: Mapping[str, Sequence[Lesson]],
    origin: Origin,
) -> Iterator[str]:
    """Yield the lines of a skill's page. `lessons`: those of `entries` by goal."""
    tried = sum(entry.counters.credited > 0 for entry in entries)
    metadata = {"task": visible_line(task)} | origin.fields(len(entries))
    description = _description(task, lessons, len(entries))
    yield from write_front_matter({"name": name, "description": description, "metadata": metadata})
    yield from ("", f"# Lessons for {markdown(visible_line(task))}", "")
    yield from origin.lines(sum(map(len, lessons.values())), len(entries), tried)
    yield from goal_sections(lessons, 2)


def _description(task: str, lessons: Mapping[str, Sequence[Lesson]], entries: int) -> str:
    """Return what the skill does and when to use it. It names as many goals as there is space.

    `entries`: number of entries of the lessons.
    """
    number = experiences_text(sum(map(len, lessons.values())), entries)
    name = visible_line(task[:100])
    text = (
        f"Gives {number} from training episodes for the task {name}, with their measured effect "
        f"on success. Use for the task {name} with goals such as: "
    )
    goals = " · ".join(visible_line(goal[:200]) for goal in sorted(lessons))
    cut = len(text) + len(goals) > MAX_DESCRIPTION
    text = f"{(text + goals)[: MAX_DESCRIPTION - 1]}…" if cut else text + goals
    # Some agents refuse angle brackets here, because a description becomes part of a prompt.
    return text.replace("<", "‹").replace(">", "›")


# ── names and groups ──────────────────────────────────────────────────────────────────────────────


def unused_name(text: str, used: Collection[str]) -> str:
    """Return a name for a skill that is not in `used`.

    A name is a safe folder: it starts with `crl`, followed by words of ASCII letters and digits of
    the text after hyphens, and has at most `MAX_NAME` characters. Equal names are numbered.
    """
    decomposed = unicodedata.normalize("NFKD", text[: 4 * MAX_NAME]).lower()
    words = re.findall("[a-z0-9]+", "".join(c for c in decomposed if not unicodedata.combining(c)))
    name = _shortened("-".join(["crl", *words]), MAX_NAME)
    number = 1
    candidate = name
    while candidate in used:
        number += 1
        candidate = f"{_shortened(name, MAX_NAME - len(f'-{number}'))}-{number}"
    return candidate


def _shortened(name: str, limit: int) -> str:
    return name[:limit].rstrip("-")


def similar_goals(goals: Sequence[str]) -> list[list[str]]:
    """Return the goals in parts of at most `MAX_GOALS`, of about equal size and similar words."""
    if len(goals) <= MAX_GOALS:
        return [list(goals)]
    by_name = sorted(goals)
    ordered = [
        goal
        for start in range(0, len(goals), COMPARED_GOALS)
        for goal in _by_similarity(by_name[start : start + COMPARED_GOALS])
    ]
    parts = -(-len(ordered) // MAX_GOALS)
    size = -(-len(ordered) // parts)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _by_similarity(goals: Sequence[str]) -> list[str]:
    """Return the goals in the order of the leaves of their hierarchical clustering.

    Their vectors are the counts of their words, weighted by rarity (TF-IDF), and clusters are
    joined by Ward's criterion.
    """
    if len(goals) < 3:
        return list(goals)
    from sklearn.cluster import AgglomerativeClustering  # these imports take a second
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

    counts = HashingVectorizer(
        token_pattern=r"\w+", n_features=2**12, alternate_sign=False
    ).transform(goal[:1000] for goal in goals)
    vectors = TfidfTransformer().fit_transform(counts).toarray()
    leaves = [[goal] for goal in goals]
    for first, second in AgglomerativeClustering().fit(vectors).children_:
        leaves.append(leaves[first] + leaves[second])
    return leaves[-1]


def _typical_words(part: Collection[str], goals: Collection[str]) -> list[str]:
    """Return words that many goals of `part` and few of the other `goals` have."""
    inside, everywhere = (
        Counter(word for goal in some for word in set(re.findall("[a-z0-9]+", goal[:1000].lower())))
        for some in (part, goals)
    )
    typical = [
        word for word, number in everywhere.items() if word in inside and number < len(goals)
    ]
    return sorted(typical, key=lambda w: (everywhere[w] - 2 * inside[w], w))[:NAME_WORDS]


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def read_skills(path: Path) -> Imported:
    """Return the entries of a directory of skills, or of one skill.

    Raise `ConfigError`, which names the file and the line, if a file cannot be read, or if there
    are no experiences.
    """
    lessons: list[WrittenLesson] = []
    records: dict[str, Entry] = {}
    for folder in _folders(path):
        page = read_page(folder / PAGE, read_lines(folder / PAGE))
        expected = page.front.number("experiences")
        found = parse_export(folder / RECORDS) if (folder / RECORDS).exists() else []
        if expected not in (None, len(found)):
            reason = f"the file {RECORDS} beside it holds {len(found)}"
            remedy = "Restore this file, or remove the line to import without counters"
            raise page.front.error("experiences", reason, remedy)
        for entry in found:
            if entry.uid in records:
                reason = "another skill has an experience with the same uid"
                remedy = "Remove one of the skills, or give the experience another uid"
                raise ConfigError(f"{folder / RECORDS}.uid", entry.uid, reason, remedy)
            records[entry.uid] = entry
        lessons += page.lessons
    if not lessons:
        reason = "the skills hold no experiences"
        remedy = "Write each experience as an item of a list below a heading `Goal: TEXT`"
        raise ConfigError("file", str(path), reason, remedy)
    return combined(lessons, list(records.values()))


def _folders(path: Path) -> list[Path]:
    """Return the folders of skills in a directory, or the directory if it is a skill itself."""
    if (path / PAGE).exists():
        return [path]
    folders = sorted(page.parent for page in path.glob(f"*/{PAGE}"))
    if not folders:
        reason = f"contains no {PAGE}, and no folders with one"
        remedy = "Give a directory of skills that crl bank export wrote, or a skill's own folder"
        raise ConfigError("file", str(path), reason, remedy)
    return folders
