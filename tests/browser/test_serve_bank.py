"""The bank browser and the episode viewer of `crl serve` in Chromium: `make test-browser`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crl.records.shards import read_records, shards
from support.browsed_banks import directory_of_runs
from support.chromium import launched, violations
from support.paths import python_environment
from support.report_runs import train_for_report

pytestmark = pytest.mark.browser

PATHS = (
    "/runs/first/bank?status=all&kind=add", "/runs/run/bank", "/runs/run/bank?q=go&by=meaning",
    "/runs/run/bank/lesson?uid=run/0/0/0%230", "/runs/asked/bank/lesson?uid=run/0/0/0%230",
    "/runs/run/bank/steps?from=0&to=2", "/runs/run/bank/diff?other=other",
    "/runs/run/bank/requests", "/runs/run/bank/retry", "/runs/run/bank/prune",
    "/runs/run/bank/prune?max_entries=1", "/runs/first/episodes", "/runs/first/bank?q=nothing",
)  # fmt: skip
"""Pages that are checked for accessibility."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = directory_of_runs(tmp_path_factory.mktemp("browser") / "runs")
    train_for_report(folder / "first")
    return folder


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Yield the address of a server of the directory with `--write`, without a slash."""
    process = subprocess.Popen(
        [sys.executable, "-m", "crl", "serve", str(root), "--port", "0", "--write"],
        env=python_environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    yield process.stdout.readline().split()[0].rstrip("/")
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def browser(root: Path) -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served(root) as found:
        yield found


Open = Callable[[str], Any]


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Open]:
    """A function that opens a path in a new window, in which no error may appear."""
    pages, errors = [], []

    def open_page(path: str) -> Any:
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path if "://" in path else address + path)
        pages.append(page)
        return page

    yield open_page
    assert errors == []
    for page in pages:
        page.close()


def test_search_and_filter(opened: Open) -> None:
    page = opened("/runs/run")
    page.get_by_role("link", name="Bank", exact=True).click()
    everything = page.locator("#lessons tbody tr").count()
    assert everything > 1
    page.get_by_label("Search").fill("SOUTHWEST")
    page.get_by_label("Search").press("Enter")
    assert page.locator("#lessons tbody tr td.text").all_inner_texts() == ["Go southwest."]
    page.get_by_role("link", name="Reset").click()
    page.locator("summary", has_text="Filters").click()
    page.get_by_label("Task").first.select_option("maze")
    page.get_by_label("Status").select_option("all")
    page.get_by_role("button", name="Search").click()
    assert page.locator("#lessons tbody tr td.text").all_inner_texts() == ["Follow the left wall."]
    assert page.get_by_label("Status").is_visible(), "chosen filters stay open"
    page.get_by_role("link", name="Reset").click()
    assert page.locator("#lessons tbody tr").count() == everything


def test_search_by_meaning(opened: Open) -> None:
    page = opened("/runs/run/bank")
    page.get_by_label("Search").fill("Follow the wall on the left.")
    page.locator("select[name=by]").select_option("meaning")
    page.get_by_role("button", name="Search").click()
    assert page.locator("#lessons tbody tr td.text").first.inner_text() == "Follow the left wall."
    cosines = [float(text) for text in page.locator("#lessons td:first-child").all_inner_texts()]
    assert cosines == sorted(cosines, reverse=True)


def test_sort(opened: Open) -> None:
    page = opened("/runs/first/bank")

    def column() -> list[int]:
        return [int(text) for text in page.locator("#lessons td:nth-child(5)").all_inner_texts()]

    page.get_by_role("link", name="retrieved").click()
    values = column()
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    heading = page.locator("th", has_text="retrieved")
    assert heading.get_attribute("aria-sort") == "descending"
    page.get_by_role("link", name="retrieved").press("Enter")
    assert column()[0] <= column()[-1]
    assert heading.get_attribute("aria-sort") == "ascending"


def test_follow_a_lineage(opened: Open) -> None:
    page = opened("/runs/merged/bank")
    page.locator("#lessons a", has_text="Go west or south.").click()
    assert page.locator("blockquote").inner_text() == "Go west or south."
    merged = page.url
    page.locator("#lineage a", has_text="run/0/0/0#1@1").first.click()
    assert page.locator("blockquote").inner_text() == "Go south."
    assert "merged" in page.locator("dl").inner_text()
    page.locator("#offspring a", has_text="merge/0").first.click()
    assert page.url == merged


def test_from_a_lesson_to_the_episode_that_it_guided_and_back(opened: Open) -> None:
    page = opened("/runs/first/bank?order=episodes")
    page.locator("#lessons tbody a").first.click()
    lesson = page.locator("blockquote").inner_text()
    page.locator("#uses tbody a").first.click()
    assert lesson in page.locator(".message.guidance").first.inner_text()
    page.locator("dl a").first.click()
    assert page.locator("blockquote").inner_text() == lesson


def test_step_through_an_episode(opened: Open, root: Path) -> None:
    record = max(
        (r for path in shards(root / "first" / "episodes").values() for r in read_records(path)
         if r["condition"] == "guided"),
        key=lambda r: r["turns"],
    )  # fmt: skip
    page = opened(f"/runs/first/episodes/{record['step']}/{record['group']}/{record['member']}")
    turns = page.locator(".turn")
    status = page.locator(".stepper [role=status]")
    total = turns.count()
    assert total > 2

    def visible() -> list[int]:
        return [i for i in range(total) if turns.nth(i).is_visible()]

    assert visible() == [0]
    assert page.get_by_role("button", name="Previous").is_disabled()
    page.keyboard.press("ArrowRight")
    assert visible() == [1]
    assert status.inner_text().startswith("Turn 2 of ")
    page.get_by_role("button", name="Next").click()
    assert visible() == [2]
    page.keyboard.press("ArrowLeft")
    assert visible() == [1]
    assert page.url.endswith("#turn-2")
    page.reload()
    assert visible() == [1], "the address has the turn"
    page.get_by_role("button", name="Last").click()
    assert visible() == [total - 1]
    page.keyboard.press("ArrowRight")
    assert visible() == [total - 1]
    page.get_by_role("button", name="All turns").click()
    assert visible() == list(range(total))
    page.get_by_role("link", name="Side by side with member", exact=False).first.click()
    columns = page.locator(".episode").all()
    assert len(columns) == 2
    assert columns[0].bounding_box()["y"] == columns[1].bounding_box()["y"]
    assert columns[1].locator(".guidance").count() == 0
    assert len([t for t in page.locator(".turn").all() if t.is_visible()]) == 2


def test_without_javascript(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/runs/first/episodes")
    page.locator("#episodes a").first.click()
    assert all(turn.is_visible() for turn in page.locator(".turn").all())
    assert not page.locator(".stepper").is_visible()
    page.goto(f"{address}/runs/run/bank")
    page.get_by_label("Search").fill("southwest")
    page.get_by_role("button", name="Search").click()
    assert page.locator("#lessons tbody tr").count() == 1
    context.close()


def test_prune_asks_first(opened: Open, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "runs" / "run")
    with served(tmp_path / "runs") as address:
        page = opened(f"{address}/runs/run/bank/prune")
        page.get_by_label("Experiences to keep").fill("2")
        page.get_by_role("button", name="Preview").first.click()
        evicted = page.locator("#to-evict tbody tr").count()
        assert evicted > 0
        page.get_by_role("button", name=f"Evict {evicted} experience").click()
        assert f"{evicted} experiences evicted." in page.locator("main").inner_text()
        page.get_by_role("link", name="Experiences").click()
        assert page.locator("#lessons tbody tr").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_accessible_at_every_width_and_in_both_schemes(
    browser: Any, address: str, root: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme, bypass_csp=True)
    page.goto(f"{address}/runs/first/episodes")
    episode = page.locator("#episodes a").first.get_attribute("href")
    for path in (*PATHS, episode, f"{episode}?beside=1"):
        page.goto(address + path)
        for summary in page.locator("summary").all():
            if summary.locator("..").get_attribute("open") is None:
                summary.click()
        assert violations(page) == [], path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.close()
