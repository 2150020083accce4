"""Comparison of docs/metrics.md with the code that writes metrics.

The tests of whole runs compare the page with metrics.jsonl.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.documented_metrics import (
    DocumentedKey,
    documented_keys,
    placeholder_values,
    undocumented,
)
from support.paths import ROOT

PACKAGE = ROOT / "crl"
ROWS = documented_keys()
MODULES = sorted({row.module for row in ROWS})
INTERNAL = frozenset({"f'{kind}/won'"})
"""Keys of dictionaries in these modules that are no metrics."""
EXAMPLES = {name: values[0] for name, values in placeholder_values().items()} | {"task": "room"}
"""Example value of each placeholder."""


def test_the_tables_of_the_page_are_read() -> None:
    kinds = {row.kind for row in ROWS}
    assert kinds == {"", "train", "extractor", "bank", "eval", "probe", "warmup", "sft"}
    assert len({(row.kind, row.key) for row in ROWS}) == len(ROWS) > 150, "no key is listed twice"
    values = placeholder_values()
    assert {"not JSON", "near duplicate"} < set(values["reason"])
    assert {"exit", "wrong exit", "return", "malformed"} < set(values["lesson"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}:{row.key}")
def test_every_documented_key_is_in_its_module(row: DocumentedKey) -> None:
    assert (PACKAGE / row.module).is_file()
    key = example(row.key)
    assert any(composes(text, key) for text in texts(row.module)), f"{row.module} has no {row.key}"


@pytest.mark.parametrize("module", MODULES)
def test_every_key_in_a_module_is_documented(module: str) -> None:
    keys = [example(row.key) for row in ROWS]
    unknown = [
        ast.unparse(node)
        for node in dictionary_keys(module)
        if "/" in pattern(node) and ast.unparse(node) not in INTERNAL
        if not any(re.fullmatch(f"(?:.*/)?{pattern(node)}", key) for key in keys)
    ]
    assert unknown == [], "add a row to docs/metrics.md"


def test_a_key_without_a_row_is_found(tmp_path: Path) -> None:
    config = {"config": {"tasks": {"room": {}, "maze": {}}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    every_line = {"step": 1, "time": None}
    lines = [
        {**every_line, "kind": "train", "rollout/maze/success/free": 1, "rollout/shop/success": 1},
        {**every_line, "kind": "bank", "dropped/not JSON": 1, "dropped/no reason": 1},
        {**every_line, "kind": "probe", "rollout/success": 1},
        {**every_line, "kind": "survey"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert undocumented(tmp_path) == {
        ("train", "rollout/shop/success"),
        ("bank", "dropped/no reason"),
        ("probe", "rollout/success"),
        *(("survey", key) for key in ("step", "time", "kind")),
    }


# ── the code ──────────────────────────────────────────────────────────────────────────────────────


def example(key: str) -> str:
    """Return a documented key with a value in place of every placeholder."""
    return re.sub(r"\{(\w+)\}", lambda name: EXAMPLES[name[1]], key)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def is_text(node: ast.AST | None) -> bool:
    """Return whether a node is a string literal or an f-string."""
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


@cache
def texts(module: str) -> tuple[ast.AST, ...]:
    """Return the string literals of a module, f-strings included."""
    return tuple(node for node in ast.walk(tree(PACKAGE / module)) if is_text(node))


@cache
def words() -> frozenset[str]:
    """Return the parts of all literals of the package, and the values of placeholders."""
    values = (
        str(node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant)
    )
    return frozenset(word for value in values for word in value.split("/")) | {*EXAMPLES.values()}


def dictionary_keys(module: str) -> Iterator[ast.AST]:
    """Yield the string keys that a module writes into dictionaries."""
    for node in ast.walk(tree(PACKAGE / module)):
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        else:
            continue
        yield from (key for key in keys if key and is_text(key))


def pattern(text: ast.AST) -> str:
    """Return the pattern of a literal. A value in an f-string is a group of any text."""
    if isinstance(text, ast.JoinedStr):
        return "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "(.+)"
            for part in text.values
        )
    assert isinstance(text, ast.Constant)
    return re.escape(str(text.value))


def composes(text: ast.AST, key: str) -> bool:
    """Return whether a literal is the end of `key`, and all other parts of `key` are literals.

    An f-string without a word of its own is no evidence.
    """
    fixed = pattern(text)
    if not re.search("[a-z]{2}", fixed):
        return False
    match = re.fullmatch(f"(.*/)?{fixed}", key)
    parts = "/".join(part for part in match.groups() if part) if match else ""
    return match is not None and set(parts.split("/")) - {""} <= words()
