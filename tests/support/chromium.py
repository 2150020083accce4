"""Chromium for tests of pages, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def launched() -> Iterator[Any]:
    """Yield a browser. Skip the test if playwright or Chromium is not installed.

    playwright has an event loop in this thread until the end. Train runs before.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def violations(page: Any) -> list[tuple[str, str, str]]:
    """Return what axe-core finds on a page: (rule, impact, element)."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [(v["id"], v["impact"], v["nodes"][0]["html"]) for v in found]
