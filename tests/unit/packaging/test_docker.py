"""Dockerfiles, as far as they can be checked without a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))

dockerfiles = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path, name: str) -> list[str]:
    """Return the arguments of the instructions `name`, each on one line."""
    text = re.sub(r"\\\n\s*", "", path.read_text("utf-8"))
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def hadolint() -> str | None:
    """Return the program that is installed beside Python or on the path."""
    folder = str(Path(sys.executable).parent)
    return shutil.which("hadolint", path=folder) or shutil.which("hadolint")


def test_there_are_two_images() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed (make setup-dev)")
def test_hadolint_finds_nothing() -> None:
    program = hadolint()
    assert program
    done = subprocess.run([program, *map(str, FILES)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@dockerfiles
def test_the_image_runs_crl_without_root(path: Path) -> None:
    assert instructions(path, "USER") == ["1001:1001"]
    assert instructions(path, "ENTRYPOINT") == ['["crl"]']
    last = path.read_text("utf-8").rpartition("USER 1001")[2]
    assert not re.search("^(?:RUN|COPY|ADD)", last, re.MULTILINE)


@dockerfiles
def test_dependencies_have_the_versions_of_the_constraints(path: Path) -> None:
    installs = [text for text in instructions(path, "RUN") if "pip install" in text]
    assert len(installs) == 2
    for text in installs:
        assert "--constraint constraints.txt" in text or "--no-deps" in text


@dockerfiles
def test_copied_files_exist_and_reach_the_builder(path: Path) -> None:
    sent = {line[1:] for line in ignored() if line.startswith("!")}
    copies = [text.split() for text in instructions(path, "COPY") if "--from" not in text]
    sources = {word for words in copies for word in words[:-1]}
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert {source.partition("/")[0] for source in sources} == sent


def test_only_listed_files_reach_the_builder() -> None:
    assert ignored()[0] == "*"


def ignored() -> list[str]:
    """Return the patterns of .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@dockerfiles
def test_extras_exist(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = path.read_text("utf-8")
    named = re.findall(r"'\.\[([a-z0-9,-]+)\]'|^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    extras = {extra for found in named for group in found for extra in group.split(",") if extra}
    assert extras
    assert extras <= project["optional-dependencies"].keys()
