"""Measurements of the style of the package and its documents.

    python tools/measure.py --list

Every line has one measurement. `--list` adds the places in the code. The sources are only read:
nothing of the package is imported. tests/unit/tools/test_measure.py holds the limits.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_MODULES = 14
CONFIG_RECORDS = "crl/config/schema.py"
"""Module whose classes have one field per setting. Their number is not limited."""

WEAK_WORDS = frozenset(
    " ".join(
        (
            "a an the",
            "what who whom whoever which how when where whether if",
            "it this that those one all every some somebody nobody",
            "of by as from in at for with on to after before beside until",
        )
    ).split()
)
"""First words of a docstring that name neither an action nor a value."""


@dataclass(frozen=True)
class Source:
    """Python file of the package."""

    name: str
    """Path below the root, with slashes."""
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Measurement:
    """Result of one measurement."""

    name: str
    value: float
    places: tuple[str, ...] = ()
    """Lines of code or of documents that the value counts."""


def read_package(root: Path, package: str = "crl") -> list[Source]:
    """Return the Python files of a package, sorted by name."""
    texts = {path: path.read_text("utf-8") for path in sorted((root / package).rglob("*.py"))}
    return [
        Source(path.relative_to(root).as_posix(), text, ast.parse(text))
        for path, text in texts.items()
    ]


def plain_docstrings(sources: Sequence[Source]) -> Measurement:
    """Measure the share of function docstrings that begin with a verb or a noun, in percent."""
    docs = [
        (f"{source.name}:{function.lineno} {function.name}: {text.splitlines()[0]}", text)
        for source in sources
        for function in functions(source)
        if (text := ast.get_docstring(function))
    ]
    weak = [place for place, text in docs if text.split()[0].strip("`*").lower() in WEAK_WORDS]
    share = 100 * (1 - len(weak) / len(docs)) if docs else 100.0
    return Measurement("function docstrings that begin with a verb or a noun, %", share, (*weak,))


def long_lines(sources: Sequence[Source]) -> Measurement:
    """Measure the share of lines with more than `MAX_COLUMNS` characters, in percent."""
    lines = [
        (f"{source.name}:{number}", line)
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if line.strip()
    ]
    long = [place for place, line in lines if len(line) > MAX_COLUMNS]
    share = 100 * len(long) / len(lines) if lines else 0.0
    return Measurement(f"lines over {MAX_COLUMNS} columns, %", share, (*long,))


def long_functions(sources: Sequence[Source]) -> Measurement:
    """Count the functions with more than `MAX_FUNCTION_LINES` lines."""
    lengths = [
        ((function.end_lineno or 0) - function.lineno + 1, source, function)
        for source in sources
        for function in functions(source)
    ]
    long = [
        f"{source.name}:{function.lineno} {function.name}: {length}"
        for length, source, function in lengths
        if length > MAX_FUNCTION_LINES
    ]
    return Measurement(f"functions over {MAX_FUNCTION_LINES} lines", len(long), (*long,))


def large_constructors(sources: Sequence[Source]) -> Measurement:
    """Count the constructors with more than `MAX_PARAMETERS` parameters, except config records."""
    large = [
        f"{source.name}:{node.lineno} {node.name}: {count}"
        for source in sources
        if source.name != CONFIG_RECORDS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and (count := parameters(node)) > MAX_PARAMETERS
    ]
    return Measurement(f"constructors over {MAX_PARAMETERS} parameters", len(large), (*large,))


def crowded_packages(sources: Sequence[Source]) -> Measurement:
    """Count the packages with more than `MAX_MODULES` modules. Subpackages count separately."""
    modules = [source.name for source in sources if not source.name.endswith("/__init__.py")]
    counts = Counter(name.rpartition("/")[0] for name in modules)
    crowded = [f"{package}: {n}" for package, n in counts.items() if n > MAX_MODULES]
    return Measurement(f"packages over {MAX_MODULES} modules", len(crowded), (*crowded,))


def readme_size(root: Path) -> Measurement:
    """Measure the size of the README in KB of 1,024 bytes."""
    return Measurement("README, KB", (root / "README.md").stat().st_size / 1024)


def wide_document_lines(root: Path) -> Measurement:
    """Count the wide lines of the README and of docs/, see `wide_lines`."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    places = tuple(
        f"{page.relative_to(root)}:{number}" for page in pages for number in wide_lines(page)
    )
    return Measurement(f"document lines over {MAX_COLUMNS} columns", len(places), places)


def wide_lines(page: Path) -> Iterator[int]:
    """Yield the numbers of lines over `MAX_COLUMNS` columns outside tables, pictures and code."""
    in_code = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        excepted = in_code or line.startswith(("    ", "|", "![", "<"))
        if len(line) > MAX_COLUMNS and not excepted:
            yield number


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a file, nested ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(node: ast.ClassDef) -> int:
    """Return the number of parameters of a class: those of `__init__`, or a dataclass's fields."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            given = statement.args
            return len(given.posonlyargs + given.args + given.kwonlyargs) - 1  # without self
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0
    annotations = [ast.unparse(s.annotation) for s in node.body if isinstance(s, ast.AnnAssign)]
    return sum(not re.match(r"(typing\.)?ClassVar\b", text) for text in annotations)


def measure(root: Path) -> list[Measurement]:
    """Return all measurements of the tree at `root`."""
    sources = read_package(root)
    code = (plain_docstrings, long_lines, long_functions, large_constructors, crowded_packages)
    documents = (readme_size, wide_document_lines)
    return [*(part(sources) for part in code), *(part(root) for part in documents)]


def main(
    places: Annotated[bool, typer.Option("--list", help="Print the places too.")] = False,
) -> None:
    """Print the measurements of this tree."""
    for measurement in measure(Path(__file__).resolve().parents[1]):
        typer.echo(f"{measurement.name:<56}{measurement.value:>6.1f}")
        for place in measurement.places if places else ():
            typer.echo(f"    {place}")


if __name__ == "__main__":
    typer.run(main)
