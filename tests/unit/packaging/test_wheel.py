"""Files of the source distribution and of the wheel, built from it without network."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import crl
from support.paths import ROOT

pytestmark = pytest.mark.skipif(
    not (find_spec("build") and find_spec("hatchling")),
    reason="build and hatchling are not installed (make setup-dev)",
)

LEFT_OUT = ("__pycache__", ".pyc")
"""Parts of names of files that belong to no distribution."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both distributions, as `make wheel` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> zipfile.ZipFile:
    (path,) = distributions.glob("*.whl")
    return zipfile.ZipFile(path)


def files(folder: str) -> set[str]:
    """Return the paths of all files below a folder of the tree, relative to the root."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    names = {path.relative_to(ROOT).as_posix() for path in found}
    return {name for name in names if not any(part in name for part in LEFT_OUT)}


def test_the_wheel_has_the_package_and_the_tasks(wheel: zipfile.ZipFile) -> None:
    """Modules, bundled models, prompts, templates, SQL scripts, tasks and presets."""
    metadata = f"crl-{crl.__version__}.dist-info/"
    names = {name for name in wheel.namelist() if not name.startswith(metadata)}
    tasks = {name.replace("tasks/", "crl/_tasks/", 1) for name in files("tasks")}
    assert names == files("crl") | tasks


@pytest.mark.parametrize(
    "name",
    [
        "crl/tiny/tiny-actor/model.safetensors",
        "crl/tiny/tiny-extractor/tokenizer.json",
        "crl/_tasks/room.toml",
        "crl/_tasks/presets/cpu.toml",
        "crl/prompts/distil.txt",
        "crl/cli/templates/new_task/NAME.toml.txt",
        "crl/manager/storage/schema.sql",
        "crl/py.typed",
    ],
)
def test_each_kind_of_file_is_in_the_wheel(name: str, wheel: zipfile.ZipFile) -> None:
    assert wheel.getinfo(name).file_size > 0 or name.endswith("py.typed")


def test_the_wheel_has_the_command_and_the_license(wheel: zipfile.ZipFile) -> None:
    metadata = f"crl-{crl.__version__}.dist-info"
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(f"{metadata}/entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {"crl": "crl.cli.main:main"}
    assert wheel.read(f"{metadata}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert f"\nVersion: {crl.__version__}\n" in wheel.read(f"{metadata}/METADATA").decode()


def test_the_source_distribution_can_build_test_and_document_crl(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("crl", "tasks", "docs", "docker", "examples", "tests", "tools", ".github"):
        assert files(folder) <= names, folder
    assert {"Makefile", "constraints.txt", ".dockerignore", "pyproject.toml", "LICENSE"} <= names
