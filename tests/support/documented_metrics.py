"""Keys of metrics.jsonl as docs/metrics.md documents them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"

PLACEHOLDERS = {
    "n": tuple(map(str, range(1, 17))),
    "split": ("seen", "unseen"),
    "condition": ("free", "guided", "online", "alone"),
    "visit": tuple("12345"),
    "device": tuple(map(str, range(16))),
}
"""Values of the placeholders with few values."""


class DocumentedKey(NamedTuple):
    """Row of a table of metrics."""

    kind: str
    """Kind of the line, or "" for the fields of every line."""
    key: str
    """Key, with placeholders such as {task}."""
    module: str
    """Module that writes the value, below crl/."""


def documented_keys() -> list[DocumentedKey]:
    """Return the rows of all tables of metrics, in order."""
    rows, kind = [], ""
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kind = line.removeprefix("## ")
        if row := re.fullmatch(r"\| `(.+?)` \|.* \| `([\w/]+\.py)` \|", line):
            rows.append(DocumentedKey("" if kind == "File format" else kind, *row.groups()))
    return rows


def placeholder_values() -> dict[str, tuple[str, ...]]:
    """Return the values of the placeholders except {task}, as the page lists them."""
    reasons = _first_cells("### Refused operations")
    kinds = re.findall(r"`([^`]+)`", _section("### Kinds of lessons"))
    modes = _first_cells("### Failure modes")
    more = {"reason": tuple(reasons), "lesson": tuple(kinds), "mode": tuple(modes)}
    return PLACEHOLDERS | more


def undocumented(run: Path) -> set[tuple[str, str]]:
    """Return (kind of line, key) of the metrics of a run that the page does not list."""
    tasks = json.loads((run / "config.json").read_text("utf-8"))["config"]["tasks"]
    values = placeholder_values() | {"task": tuple(tasks)}
    patterns = {kind: _pattern(kind, values) for kind in {row.kind for row in documented_keys()}}
    return {
        (kind, key)
        for kind, key in _written_keys(run)
        if not (kind in patterns and patterns[kind].fullmatch(key))
    }


def _written_keys(run: Path) -> Iterator[tuple[str, str]]:
    for text in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        line = json.loads(text)
        yield from ((line["kind"], key) for key in line)


def _pattern(kind: str, values: Mapping[str, Iterable[str]]) -> re.Pattern[str]:
    """Return a pattern of all keys of a kind of line."""
    keys = [row.key for row in documented_keys() if row.kind in (kind, "")]
    return re.compile("|".join(_key_pattern(key, values) for key in keys))


def _key_pattern(key: str, values: Mapping[str, Iterable[str]]) -> str:
    texts = re.split(r"\{(\w+)\}", key)  # fixed text and name of a placeholder, in turn
    return "".join(
        f"(?:{'|'.join(map(re.escape, values[text]))})" if i % 2 else re.escape(text)
        for i, text in enumerate(texts)
    )


def _section(heading: str) -> str:
    """Return the text under a heading, up to the next heading."""
    text = PAGE.read_text("utf-8").partition(f"\n{heading}\n")[2]
    return re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]


def _first_cells(heading: str) -> list[str]:
    return re.findall(r"^\| `(.+?)` \|", _section(heading), flags=re.MULTILINE)
