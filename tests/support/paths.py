"""Paths of the tree, its benchmarks, and the environment of processes that tests start."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
"""Root of the tree."""
GOLDEN = ROOT / "tests" / "golden"
"""Folder of the golden files."""
WEBSHOP_DATA = ROOT / "tests" / "webshop_data"
"""Folder of a small catalogue in the format of WebShop's own files."""
SEARCH_QA_DATA = ROOT / "tests" / "search_qa_data"
"""Folder of small question files and a corpus in the format of Search-QA's official data."""


def benchmark(name: str) -> ModuleType:
    """Import a script of benchmarks/, which is not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)


def python_environment(**changes: str) -> dict[str, str]:
    """Return environment variables for a Python process that imports crl and these helpers."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, **changes}
