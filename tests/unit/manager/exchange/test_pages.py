"""Exports as Markdown and as skills, and their import."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from crl.errors import ConfigError
from crl.manager.exchange.formats import read_export
from crl.manager.exchange.markdown import write_markdown
from crl.manager.exchange.origin import Origin
from crl.manager.exchange.skills import (
    MAX_GOALS,
    PAGE,
    RECORDS,
    similar_goals,
    unused_name,
    write_skills,
)
from crl.manager.inspection.reading import EntryView
from crl.types import Counters, Lift
from support.hostile import HOSTILE, entry, kept, texts

ORIGIN = Origin(bank="mine", step=4, method="complementary", actor="tiny-actor", crl="0.1.0")


def write_page(path: Path, entries: list[EntryView]) -> Path:
    text = "".join(f"{line}\n" for line in write_markdown(entries, ORIGIN))
    path.write_text(text, "utf-8", newline="\n")
    return path


def write_folder(path: Path, entries: list[EntryView]) -> Path:
    for name, text in write_skills(entries, ORIGIN).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, "utf-8", newline="\n")
    return path


banks = st.lists(
    st.tuples(texts, st.one_of(texts, st.just("")), texts), min_size=1, max_size=6
).map(
    lambda rows: [
        entry(number, text[:2000].strip() or "x", task, goal)
        for number, (task, goal, text) in enumerate(rows)
    ]
)


# ── round trips ───────────────────────────────────────────────────────────────────────────────────


@given(banks)
@settings(max_examples=200, deadline=None)
def test_any_entries_return_from_markdown(
    tmp_path_factory: pytest.TempPathFactory, entries: list[EntryView]
):
    found = read_export(write_page(tmp_path_factory.mktemp("page") / "a.md", entries))
    assert kept(found.entries) == kept(entries)
    assert (found.new, found.left_out) == (0, 0)


@given(banks)
@settings(max_examples=100, deadline=None)
def test_any_entries_return_from_skills(
    tmp_path_factory: pytest.TempPathFactory, entries: list[EntryView]
):
    folder = write_folder(tmp_path_factory.mktemp("skills"), entries)
    found = read_export(folder)
    assert sorted(kept(found.entries)) == sorted(kept(entries))
    assert (found.new, found.left_out) == (0, 0)
    for skill in folder.iterdir():
        check_skill(skill)


def check_skill(skill: Path) -> None:
    """Check a folder against the specification of Agent Skills."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", skill.name)
    assert len(skill.name) <= 64
    text = (skill / PAGE).read_text("utf-8")
    _, front, body = text.split("---\n", 2)
    values = yaml.safe_load(front)
    assert set(values) == {"name", "description", "metadata"}
    assert values["name"] == skill.name
    assert 1 <= len(values["description"]) <= 1024
    assert not set("<>") & set(values["description"])
    assert all(isinstance(v, str) and k for k, v in values["metadata"].items())
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(body)
    kinds = {t.type for t in tokens} | {c.type for t in tokens for c in t.children or ()}
    assert not kinds & {"html_block", "html_inline", "fence", "code_block", "link_open", "image"}
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert all(text.startswith("Goal:") for text in headings[1:])
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_skill_says_when_to_use_it_and_counts_different_experiences(tmp_path: Path):
    """Entries with equal texts are one experience."""
    entries = [entry(i, text) for i, text in enumerate(("Go west.", "Go west.", "Wait."))]
    (skill,) = write_folder(tmp_path / "skills", entries).iterdir()
    _, front, body = (skill / PAGE).read_text("utf-8").split("---\n", 2)
    assert yaml.safe_load(front)["description"] == (
        "Gives 2 different experiences (3 entries) from training episodes for the task room, with "
        "their measured effect on success. Use for the task room with goals such as: Get out."
    )
    assert "\n2 different experiences (3 entries) of the run **mine**" in body


def test_control_characters_and_html_reach_no_page(tmp_path: Path):
    entries = [
        entry(len(HOSTILE) * i + j, text, task, goal)
        for i, (task, goal) in enumerate(pairwise(HOSTILE))
        for j, text in enumerate(HOSTILE)
        if task.strip()
    ]
    folder = write_folder(tmp_path / "skills", entries)
    for skill in folder.iterdir():
        check_skill(skill)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.parent.parent == folder or path.parent.name == "assets" for path in files)
    page = write_page(tmp_path / "a.md", entries).read_text("utf-8")
    assert all(c.isprintable() or c == "\n" for c in page)
    tokens = MarkdownIt("commonmark", {"html": True}).parse(page.split("---\n", 2)[2])
    html = [t.content for t in tokens if t.type == "html_block"]
    assert len(html) == 1, "the records"
    assert html[0].count("<") == html[0].count(">") == 1
    assert not any(c.type == "html_inline" for t in tokens for c in t.children or ())
    assert sorted(kept(read_export(tmp_path / "a.md").entries)) == sorted(kept(entries))
    assert sorted(kept(read_export(folder).entries)) == sorted(kept(entries))


@pytest.mark.parametrize(
    "text", ["Go west. " * 1_200_000, "*[`<" * 250_000], ids=["10 MB", "markup"]
)
def test_a_huge_lesson_is_exported_and_refused(text: str, tmp_path: Path):
    """Check a lesson of 10 MB. No run writes it, and an import refuses it as in JSON lines."""
    entries = [entry(0, text)]
    for path in (write_page(tmp_path / "a.md", entries), write_folder(tmp_path / "b", entries)):
        with pytest.raises(ConfigError, match=r"text = .*at most 2000 characters") as error:
            read_export(path)
        assert len(str(error.value)) < 600


def test_lone_surrogates_are_escaped(tmp_path: Path):
    bad = entry(0, "a\ud800b", goal="\udfff", task="t\ud900")
    page = write_page(tmp_path / "a.md", [bad]).read_text("utf-8")
    assert "- a\\ud800b\n" in page
    skill = next(iter(write_folder(tmp_path / "b", [bad]).iterdir()))
    check_skill(skill)
    for path in (tmp_path / "a.md", tmp_path / "b"):
        with pytest.raises(ConfigError, match="invalid JSON"):
            read_export(path)


# ── contents ──────────────────────────────────────────────────────────────────────────────────────


def test_a_page_shows_evidence_best_first(tmp_path: Path):
    nothing = Counters()
    entries = [
        entry(0, "Wait.", counters=nothing),
        entry(1, "Go west.", counters=Counters(4, 2, 3, 3.0, 1, Lift(2, 0.5, 0.0))),
        entry(2, "Go west.", counters=Counters(1, 2, 1, 1.0, 0, Lift(2, 0.75, 0.1))),
        entry(3, "Go east.", goal="First.", counters=nothing),
    ]
    page = write_page(tmp_path / "a.md", entries).read_text("utf-8")
    lift = Lift(2, 0.5, 0.0) + Lift(2, 0.75, 0.1)
    assert page.split("\n## ")[1].split("\n<!--")[0] == (
        "Task: room\n\n### Goal: Get out.\n\n- Go west.\n"
        f"  *Evidence: lift +{lift.mean:.2f} ± {lift.half_width:.2f} over 4 groups; won 4 of 4 "
        "guided episodes, credit +4; retrieved 5 times; votes +1; written after steps 1 and 2; "
        "made from a#1@2, a#2@2.*\n"
        "- Wait.\n  *Evidence: no guided episode yet; written after step 0; made from a#0@2.*\n\n"
        "### Goal: First.\n\n- Go east.\n"
        "  *Evidence: no guided episode yet; written after step 3; made from a#3@2.*\n"
    )
    front = yaml.safe_load(page.split("---\n")[1])
    assert front["run"] == "mine"
    assert (front["step"], front["experiences"], front["actor"]) == ("4", "4", "tiny-actor")
    assert "3 different experiences (4 entries) of the run **mine** after 4 steps" in page
    assert "; 2 of the entries guided an episode." in page
    assert "half its 95 % interval" in page


def test_skill_names_are_safe_folders():
    used: set[str] = set()
    for text in (*HOSTILE, "room", "Room", "ro om", "x" * 100, "x" * 101, "", "a" * 59 + "-b"):
        name = unused_name(text, used)
        assert re.fullmatch(r"crl(-[a-z0-9]+)*", name)
        assert len(name) <= 64
        assert name not in used
        used.add(name)
    assert {"crl-room", "crl-room-2", "crl-ro-om", "crl-uber-große"} - used == {"crl-uber-große"}
    assert unused_name("Über Größe", set()) == "crl-uber-gro-e"


def test_a_task_with_many_goals_is_split_by_similar_words():
    kinds = (("find", "red shirt"), ("heat", "cold mug"))
    goals = [f"{verb} the {thing} {verb}{i}" for i in range(20) for verb, thing in kinds]
    parts = similar_goals(goals)
    assert sorted(goal for part in parts for goal in part) == sorted(goals)
    assert [len(part) for part in parts] == [20, 20]
    assert [{goal.split()[0] for goal in part} for part in parts] in (
        [{"find"}, {"heat"}],
        [{"heat"}, {"find"}],
    )
    assert parts == similar_goals(goals[::-1])
    entries = [entry(i, "Go.", goal=goal) for i, goal in enumerate(goals)]
    names = {Path(name).parts[0] for name in write_skills(entries, ORIGIN)}
    assert names == {"crl-room-find-red-shirt", "crl-room-cold-heat-mug"}
    same = [" " * i + "!" for i in range(3 * MAX_GOALS)]
    assert [len(part) for part in similar_goals(same)] == [MAX_GOALS] * 3
    assert similar_goals(goals[:3]) == [goals[:3]]


# ── edits ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["markdown", "skills"])
def test_edits_decide_which_lessons_are_imported(form: str, tmp_path: Path):
    entries = [
        entry(i, text, goal="Get\nout <now>.") for i, text in enumerate(("West.", "East.", "Up."))
    ]
    if form == "markdown":
        path = page = write_page(tmp_path / "a.md", entries)
    else:
        path = write_folder(tmp_path / "a", entries)
        page = path / "crl-room" / PAGE
    text = page.read_text("utf-8").replace("- East.", "* East, then north.\\\n  *Quick* `ls` \\<b>")
    start = text.index("- Up.")
    text = text[:start] + "- New.\n\n  - nested\n" + text[text.index(".*\n", start) + 3 :]
    page.write_text(text, "utf-8")
    found = read_export(path)
    assert kept(found.entries[:1]) == kept(entries[:1])
    assert [(e.task, e.goal, e.text) for e in found.entries[1:]] == [
        ("room", "Get\nout <now>.", "East, then north.\n*Quick* `ls` <b>"),
        ("room", "Get\nout <now>.", "New.\n\n- nested"),
    ]
    assert [e.counters for e in found.entries[1:]] == [Counters()] * 2
    assert (found.new, found.left_out) == (2, 2)


HAND = """---
name: my-room
description: Lessons of a person.
metadata:
  task: room
---

# My room

- not a lesson

## Goal: Reach the *stairs* (\\>).

1. Follow the wall.
2. Look
   at dark cells:

   ```
   - north
   ```

Text between lessons.

### Details

- Deeper headings stay in the goal.

## See also

- not a lesson either

## Task: maze
### Goal:
- No goal is a goal too.
  *Evidence: I tried it.*
"""


def test_a_skill_can_be_written_by_hand(tmp_path: Path):
    (tmp_path / PAGE).write_bytes(b"\xef\xbb\xbf" + HAND.replace("\n", "\r\n").encode())
    for path in (tmp_path, tmp_path / PAGE):
        found = read_export(path)
        assert [(e.task, e.goal, e.text) for e in found.entries] == [
            ("room", "Reach the *stairs* (>).", "Follow the wall."),
            ("room", "Reach the *stairs* (>).", "Look\nat dark cells:\n\n```\n- north\n```"),
            ("room", "Reach the *stairs* (>).", "Deeper headings stay in the goal."),
            ("maze", "", "No goal is a goal too."),
        ]
        assert (found.new, {e.counters for e in found.entries}) == (4, {Counters()})
        assert len({e.uid for e in found.entries}) == 4


def test_new_lessons_get_unused_uids(tmp_path: Path):
    recorded = [entry(0, "West.")]
    recorded[0].uid = "import/0/0/1#0"
    page = write_page(tmp_path / "a.md", recorded)
    page.write_text(page.read_text("utf-8").replace("- West", "- East.\n- West"), "utf-8")
    assert [e.uid for e in read_export(page).entries] == ["import/0/0/1#0", "import/0/0/2#0"]


# ── errors ────────────────────────────────────────────────────────────────────────────────────────

GOOD = "## Task: room\n## Goal: Out.\n- West.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1 = '': the file holds no experiences. Write each experience as an item"),
        ("# Hi\n- West.\n", ":1 = '# Hi': the file holds no experiences"),
        (
            "\n## Goal: Out.\n- West.\n",
            ":3.task = None: the experience belongs to no task. Add a head",
        ),
        ("---\ntask: room\n", ":1 = '---': the front matter has no end. Add a line ---"),
        ("---\na: 1\nb: [\n---\n" + GOOD, ":3 = '---': is not valid YAML"),
        ("---\n- a\n---\n" + GOOD, ":2 = '- a': is not a YAML mapping"),
        ("---\na: 1\ntask: [a]\n---\n" + GOOD, ":3.task = ['a']: is not a text"),
        ("---\na: " + "[" * 100_000 + "\n---\n" + GOOD, ":2 = "),
        ("---\na: !!python/object/apply:os.system [ls]\nexperiences: x\n---\n" + GOOD, ":3.exper"),
        (
            "---\nexperiences: '2'\n---\n" + GOOD,
            ":2.experiences = '2': the file holds the records ",
        ),
        (GOOD + "<!-- crl bank records\n", ":4 = '<!-- crl bank records': the comment with the"),
        (GOOD + "<!-- crl bank records\n-->\n", ":5 = '': this is not an exported bank"),
        (
            GOOD + '<!-- crl bank records\n{"crl_bank": 3}\n{}\n-->',
            ":6.task = None: field required",
        ),
        (
            GOOD + '<!-- crl bank records\n{"crl_bank": 3, "entries": 1}\n-->',
            ":5.entries = 1: the ",
        ),
        (GOOD + "- " + "x" * 2001, ":4.text = 'xxx"),
        (GOOD + "-\n", ":4.text = '': must not be empty"),
        (GOOD.encode() + b"\xff", ":4 = 'ff': is a byte that is not UTF-8. Save the file"),
    ],
)
def test_an_invalid_page_is_named(text: str | bytes, message: str, tmp_path: Path):
    file = tmp_path / "a.md"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as error:
        read_export(file)
    assert f"{file}{message}" in str(error.value)


def test_an_incomplete_folder_of_skills_is_named(tmp_path: Path):
    folder = write_folder(tmp_path / "skills", [entry(0, "West.")])
    records = folder / "crl-room" / RECORDS
    copy = write_folder(tmp_path / "copies", [entry(0, "West.")]) / "crl-room"
    copy.rename(folder / "copied")
    with pytest.raises(ConfigError, match=r"another skill has an experience with the same uid"):
        read_export(folder)
    content = records.read_text("utf-8")
    records.write_text(content + json.dumps([]), "utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"{records}:3 = '[]'")):
        read_export(folder)
    records.unlink()
    with pytest.raises(ConfigError, match=r"SKILL\.md:\d+\.experiences = '1': the file assets/"):
        read_export(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"contains no SKILL\.md"):
        read_export(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no active experiences"):
        write_skills([], ORIGIN)


def test_a_truncated_page_is_refused(tmp_path: Path):
    page = write_page(tmp_path / "a.md", [entry(i, f"West {i}.") for i in range(2)])
    whole = page.read_bytes()
    for end in range(len(whole) - 1):
        page.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"a\.md:\d+[^ ]* = "):
            read_export(page)
