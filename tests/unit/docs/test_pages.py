"""Checks of the documentation: links, paths, syntax of commands, settings and widths.

test_commands.py runs the commands. `make docs` also builds the pages of docs/ and fails on a
warning.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import pytest
from typer.main import get_command

from crl.cli.main import app
from crl.config.reference import explained, sections, settings
from crl.config.renamed import RENAMED_KEYS
from crl.protocols import TrainSpec
from support.pages import PAGES, commands, prose
from support.paths import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "tools"))
    import measure  # pyright: ignore[reportMissingImports]

FOLDERS = ("crl", "benchmarks", "tests", "tasks", "examples", "docs", "tools")
NOT_IN_THE_TREE = frozenset({"crl/_tasks"})
"""Paths of the pages that exist only elsewhere: the folder of the tasks in a wheel."""
EXAMPLE_SECTION = "turn_cost."
"""Settings of the method that docs/methods.md defines as an example."""
PRESET_VALUES = frozenset({"bank.max_per_goal = 8", "complementary.lift_coef = 1"})
"""Values in the texts that are those of the preset `cpu` for tiny models, and not defaults."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ── links and paths ───────────────────────────────────────────────────────────────────────────────


@pages
def test_relative_links_and_their_anchors_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pages
def test_paths_of_the_repository_exist(page: Path) -> None:
    words = [word for command in commands(page) for word in command]
    spans = re.findall(r"`([^`\s]+)`", "\n".join(prose(page)))
    missing = [
        word
        for word in [*words, *spans]
        if re.match(rf"(?:{'|'.join(FOLDERS)})/[\w.]", word) and not exists(word)
    ]
    assert missing == []


def links(page: Path) -> Iterator[str]:
    """Yield the relative links outside code."""
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose(page)))
    for target in re.findall(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"", text):
        link = "".join(target)
        if not re.match(r"[a-z]+:", link):
            yield link


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the headings of a page, as GitHub and mkdocs make them."""
    headings = (line.lstrip("#").strip() for line in prose(page) if re.match("#+ ", line))
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    )


def exists(path: str) -> bool:
    """Return whether a path exists. Upper-case words such as NAME stand for any text."""
    pattern = re.sub(r"(?<![a-zA-Z])[A-Z]+(?![a-z])", "*", path.rstrip("/:,."))
    return path in NOT_IN_THE_TREE or any(ROOT.glob(pattern))


# ── commands and settings ─────────────────────────────────────────────────────────────────────────


@pages
def test_commands_can_be_parsed(page: Path) -> None:
    for words in commands(page):
        if PurePath(words[0]).name == "crl":
            parse(words[1:])


@pages
def test_settings_exist(page: Path) -> None:
    keys = re.findall(r"--set[ =]['\"]?([\w.]+)=", page.read_text("utf-8"))
    known = {setting.key for setting in settings()} | sections().keys()
    known |= {f"actor.{field.name}" for field in fields(TrainSpec)}  # parts of a method
    if page.name == "CHANGELOG.md":
        known |= RENAMED_KEYS.keys()
    first_parts = {key.partition(".")[0] for key in known}
    for span in re.findall(r"`(\w+(?:\.\w+)+)(?:=[^`]*)?`", "\n".join(prose(page))):
        is_file = re.search(r"\.(?:py|md|toml|jsonl?|sqlite|txt)$", span)
        if span.partition(".")[0] in first_parts and not is_file:
            keys.append(span)
    for key in keys:
        placeholder = re.search(r"\bNAME\b|^KEY$|^key$", key.removeprefix("tasks.NAME"))
        if not (key in known or placeholder or key.startswith(EXAMPLE_SECTION)):
            explained(key)  # raises an error with the nearest key


@pages
def test_defaults_in_texts_are_those_of_the_settings(page: Path) -> None:
    """Check values in the forms `KEY` = VALUE and `KEY` (VALUE)."""
    pattern = r"`([a-z_]+(?:\.[a-z_]+)+)`\s*(?:=\s*|\()(-?\d+(?:\.\d+)?)"
    wrong = [
        f"{key} = {value}"
        for key, value in re.findall(pattern, "\n".join(prose(page)))
        if f"{key} = {value}" not in PRESET_VALUES
        and float(value) != float(explained(key)[0].default)
    ]
    assert wrong == []


def test_the_table_of_switches_has_the_values_of_the_settings() -> None:
    tables = "\n".join(prose(ROOT / "docs" / "algorithm.md"))
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", tables, re.MULTILINE)
    assert len(rows) > 10
    for key, *cells in rows:
        setting, changes = explained(key)
        values = {change.origin: change.value for change in changes}
        tiny, node8 = (values.get(f"preset {name}") for name in ("cpu, compact profile", "node8"))
        named = [setting.default, tiny, node8]
        expected = ["–" if value is None else json.loads(value) for value in named]
        assert [value_in(cell) for cell in cells] == expected, key


def value_in(cell: str) -> object:
    """Return the value in a cell of the table of switches."""
    text = cell.strip("`").replace("−", "-")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None if text == "unset" else text


def test_the_changelog_has_every_renamed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert [old for old, new in RENAMED_KEYS.items() if f"| `{old}` | `{new}` |" not in text] == []


def test_the_table_of_commands_is_complete() -> None:
    table = "\n".join(prose(ROOT / "docs" / "quickstart.md"))
    rows = re.findall(r"^\| `crl ((?:[a-z-]+ ?)+)\b[^`]*` \|", table, re.MULTILINE)
    assert sorted(row.strip() for row in rows) == sorted(command_names(get_command(app)))


def test_the_table_of_extras_is_complete() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    section = page.partition("\n### Extras\n")[2].partition("\n### ")[0]
    names = re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert sorted(names) == sorted(project["optional-dependencies"])


def command_names(command: Any) -> Iterator[str]:
    """Yield the names of all commands below a group, such as `bank ls`."""
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from (f"{name} {below}" for below in command_names(child))
        else:
            yield name


@pages
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    spans = re.findall(r"`make ([a-z-]+)`", "\n".join(prose(page)))
    words = [command[1] for command in commands(page) if command[0] == "make"]
    assert [name for name in [*spans, *words] if f"\n{name}:" not in makefile] == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("trian --tasks room", "trian"),
        ("bank list RUN", "list"),
        ("train --task room", "--task"),
    ],
)
def test_a_wrong_command_is_found(words: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        parse(words.split())


def parse(words: Sequence[str]) -> None:
    """Parse a command of crl without running it. Raise an error if it is invalid."""
    words = list(words)
    command = get_command(app)
    path = ["crl"]
    while subcommands := getattr(command, "commands", None):
        if words in (["--version"], ["--install-completion"], ["--show-completion"]):
            return
        name = words.pop(0) if words else ""
        assert name in subcommands, f"{' '.join(path)} has no command {name!r}"
        path.append(name)
        command = subcommands[name]
    with command.make_context(" ".join(path), words):
        pass


# ── width ─────────────────────────────────────────────────────────────────────────────────────────


@pages
def test_lines_outside_tables_and_code_are_short(page: Path) -> None:
    assert list(measure.wide_lines(page)) == []
