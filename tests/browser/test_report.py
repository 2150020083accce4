"""The report in Chromium: `make test-browser`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chromium import launched, violations
from support.report_runs import train_for_report
from support.whole_runs import crl

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train_for_report(tmp_path_factory.mktemp("browser") / "first")
    assert crl("report", run).exit_code == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def browser(report: Path) -> Iterator[Any]:
    """Chromium. The report comes first: a run needs a thread without playwright's event loop."""
    with launched() as chromium:
        yield chromium


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The report in a new window, in which no error may appear."""
    opened, errors = browser.new_page(), []
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(report.as_uri())
    yield opened
    assert errors == []
    opened.close()


def test_tables_are_sorted_by_a_click_and_by_the_keyboard(page: Any) -> None:
    heading = page.locator("#lessons-1 th", has_text="episodes")
    cells = page.locator("#lessons-1 tbody tr td:nth-child(7)")
    heading.locator("button").click()
    values = [int(text) for text in cells.all_inner_texts()]
    assert len(values) > 1
    assert values == sorted(values)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").press("Enter")
    assert [int(text) for text in cells.all_inner_texts()] == sorted(values, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"


def test_tables_are_filtered(page: Any) -> None:
    page.locator("summary", has_text="All settings").click()
    rows = page.locator("#settings-1 tbody tr:visible")
    everything = rows.count()
    page.locator('input[data-filter="settings-1"]').fill("rollout GROUP_size")
    assert rows.count() == 1
    assert rows.first.inner_text().split() == ["rollout.group_size", "4"]
    page.locator('input[data-filter="settings-1"]').fill("")
    assert rows.count() == everything


def test_the_story_of_a_lesson_opens(page: Any) -> None:
    story = page.locator("#lessons details").first
    assert not story.locator("ol").is_visible()
    story.locator("summary").press("Enter")
    assert "add after step" in story.locator("ol").inner_text()
    assert "won" in story.inner_text()


def test_all_details_are_open_when_printing(page: Any) -> None:
    closed = page.locator("details:not([open])")
    assert closed.count() > 1
    page.pdf()
    assert closed.count() == 0
    assert page.locator("#lessons details ol").first.is_visible()


def test_a_guided_and_a_free_episode_are_side_by_side(page: Any) -> None:
    pair = page.locator("#episodes .pair").first
    guided, free = pair.locator(".episode").all()
    assert guided.bounding_box()["y"] == free.bounding_box()["y"]
    assert guided.locator(".guidance").count() >= 1
    assert free.locator(".guidance").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_accessible_at_every_width_and_in_both_schemes(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme, bypass_csp=True)
    page.goto(report.as_uri())
    for summary in page.locator("summary").all():
        if summary.locator("..").get_attribute("open") is None:
            summary.click()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
