"""Limits on the style of the tree, and tests of tools/measure.py that measures it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.paths import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "tools"))
    import measure  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="module")
def sources() -> list[measure.Source]:
    return measure.read_package(ROOT)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def test_docstrings_begin_with_a_verb_or_a_noun(sources: list[measure.Source]) -> None:
    assert len(sources) > 200
    measured = measure.plain_docstrings(sources)
    assert measured.value >= 90, measured.places


def test_lines_are_short(sources: list[measure.Source]) -> None:
    measured = measure.long_lines(sources)
    assert measured.value < 1, measured.places


def test_packages_are_small(sources: list[measure.Source]) -> None:
    assert measure.crowded_packages(sources).places == ()


def test_constructors_have_few_parameters(sources: list[measure.Source]) -> None:
    assert measure.large_constructors(sources).places == ()


def test_the_readme_is_short() -> None:
    assert measure.readme_size(ROOT).value <= 10


# ── the measurements ──────────────────────────────────────────────────────────────────────────────


def source(text: str, name: str = "crl/part.py") -> measure.Source:
    return measure.Source(name, text, ast.parse(text))


def function(docstring: str, lines: int = 2) -> str:
    return f'def f(x):\n    """{docstring}"""\n' + "    x += 1\n" * (lines - 2)


def test_docstrings_are_judged_by_their_first_word() -> None:
    good = ["Return x.", "Size of x.", "`x` plus 1."]
    weak = ["The size of x.", "Whether x is large.", "*What* x is."]
    part = source("\n".join(function(text) for text in [*good, *weak]) + "\ndef g(): ...\n")
    measured = measure.plain_docstrings([part])
    assert measured.value == 50
    assert [place.partition(": ")[2] for place in measured.places] == weak


def test_empty_lines_are_not_counted() -> None:
    measured = measure.long_lines([source(f"x = 1\n\ny = 2\n# {'z' * 98}\n# {'z' * 99}\n")])
    assert (measured.value, measured.places) == (25, ("crl/part.py:5",))


def test_long_functions() -> None:
    parts = [source(function("Return x.", 60)), source(function("Return x.", 61), "crl/long.py")]
    assert measure.long_functions(parts).places == ("crl/long.py:1 f: 61",)


def test_parameters_of_a_constructor() -> None:
    names = [f"p{i}" for i in range(9)]
    init = f"    def __init__(self, {', '.join(names[:4])}, *, {', '.join(names[4:])}): ...\n"
    fields = [f"    {name}: int\n" for name in names]
    constant = "    total: ClassVar[int] = 0\n"
    text = (
        f"class Init:\n{init}"
        f"@dataclass(frozen=True)\nclass Fields:\n{constant}{''.join(fields)}"
        f"@dataclass\nclass Fewer:\n{constant}{''.join(fields[1:])}"
        f"class Plain:\n{''.join(fields)}"
    )
    found = ("crl/part.py:1 Init: 9", "crl/part.py:4 Fields: 9")
    assert measure.large_constructors([source(text)]).places == found
    assert measure.large_constructors([source(text, measure.CONFIG_RECORDS)]).places == ()


def test_modules_of_a_package() -> None:
    names = [f"{package}/m{i}.py" for package in ("crl", "crl/sub") for i in range(14)]
    parts = [source("", name) for name in [*names, "crl/__init__.py", "crl/sub/__init__.py"]]
    assert measure.crowded_packages(parts).value == 0
    measured = measure.crowded_packages([*parts, source("", "crl/sub/m14.py")])
    assert measured.places == ("crl/sub: 15",)


def test_documents(tmp_path: Path) -> None:
    wide = "x" * 101
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"{wide}\n```text\n{wide}\n```\n{wide[1:]}\n")
    (tmp_path / "docs" / "page.md").write_text(f"\n| {wide} |\n    {wide}\n{wide}\n")
    assert measure.wide_document_lines(tmp_path).places == ("README.md:1", "docs/page.md:4")
    assert measure.readme_size(tmp_path).value == (102 + 8 + 102 + 4 + 101) / 1024


def test_all_measurements_have_a_value() -> None:
    assert len({measurement.name for measurement in measure.measure(ROOT)}) == 7
