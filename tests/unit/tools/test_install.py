"""tools/install.py shows the stages of pip, and its errors in full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.paths import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "tools"))
    import install  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting torch==2.13.0 (from crl==0.1.0)", None),
        ("  Downloading typer-0.29.2-py3-none-any.whl (121 kB)", None),
        ("  Downloading nle-1.3.0-cp311-cp311-manylinux2014_x86_64.whl (3.3 MB)", None),
        (
            "  Downloading spacy-3.8.18-cp311-cp311-manylinux_2_24_x86_64.whl (34.7 MB)",
            "downloading spacy 3.8.18 (34.7 MB)",
        ),
        (
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.1 GB)",
            "downloading torch 2.13.0 (1.1 GB)",
        ),
        (
            "  Building wheel for fast-downward-textworld (setup.py): started",
            "building fast-downward-textworld",
        ),
        ("  Building wheel for hnswlib (pyproject.toml): finished with status 'done'", None),
        (
            "  Using cached PyStemmer-3.1.0.tar.gz (1.2 MB)",
            "preparing PyStemmer 3.1.0 from its source",
        ),
        ("Installing collected packages: numpy, torch, crl", "installing 3 packages"),
        (
            "WARNING: Location 'file:///a/b/' is ignored: it is neither a file nor a directory.",
            None,
        ),
        ("WARNING: The candidate is yanked", "WARNING: The candidate is yanked"),
    ],
)
def test_lines_of_pip(line: str, shown: str | None) -> None:
    assert install.Stages().text(line) == shown


def test_the_build_of_a_package_is_named() -> None:
    stages = install.Stages()
    lines = [
        "  Downloading fast_downward_textworld-20.6.4.tar.gz (660 kB)",
        "  Getting requirements to build wheel: started",
        "  Getting requirements to build wheel: still running...",
        "  Getting requirements to build wheel: finished with status 'done'",
        "  Building wheel for fast-downward-textworld (pyproject.toml): still running...",
    ]
    assert [text for line in lines if (text := stages.text(line))] == [
        "preparing fast_downward_textworld 20.6.4 from its source",
        "getting requirements to build wheel of fast_downward_textworld: still running",
        "building wheel for fast-downward-textworld (pyproject.toml): still running",
    ]


def test_a_failure_is_shown_from_the_first_error_on() -> None:
    lines = [
        "Collecting a",
        "  error: subprocess-exited-with-error",
        "  fatal: no compiler",
        "WARNING: Location 'x' is ignored: it is neither a file nor a directory.",
        "[notice] A new release of pip is available",
        "ERROR: Failed building wheel for a",
    ]
    assert install.failure(lines) == [lines[1], lines[2], lines[5]]
    assert install.failure(["something else"]) == ["something else"]


def test_a_failed_installation_has_pips_exit_code_error_and_log(tmp_path: Path) -> None:
    shown: list[str] = []
    arguments = ["--no-index", str(tmp_path / "missing.whl")]
    code = install.install(arguments, tmp_path / "install.log", shown.append)
    assert code == 1
    assert shown[0] == "finding packages"
    assert any("ERROR:" in line and "missing.whl" in line for line in shown)
    assert shown[-1].endswith(f"is in {tmp_path / 'install.log'}")
    assert "ERROR:" in (tmp_path / "install.log").read_text("utf-8")


def test_only_the_standard_library_is_imported() -> None:
    """The script runs before anything is installed."""
    names = {name.partition(".")[0] for name in vars(install) if not name.startswith("_")}
    modules = {name for name in names if getattr(install, name).__class__.__name__ == "module"}
    assert modules <= sys.stdlib_module_names
