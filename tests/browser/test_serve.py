"""The pages of `crl serve` in Chromium: `make test-browser`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from support.chromium import launched, violations
from support.paths import python_environment
from support.report_runs import train_for_report

pytestmark = pytest.mark.browser

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_for_report(tmp_path_factory.mktemp("browser") / "first")


@pytest.fixture(scope="module")
def chromium(trained: Path) -> Iterator[Any]:
    """Chromium. The run comes first: it needs a thread without playwright's event loop."""
    with launched() as browser:
        yield browser


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A directory with two runs that differ in a setting. A test may change them."""
    root = tmp_path / "runs"
    shutil.copytree(trained, root / "first")
    other = Path(shutil.copytree(trained, root / "other"))
    saved = json.loads((other / "config.json").read_text())
    saved["config"]["actor"]["optimizer"]["learning_rate"] = 0.125
    (other / "config.json").write_text(json.dumps(saved))
    return root


def start(root: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "crl", "serve", str(root), "--port", str(port)],
        env=python_environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    return process, process.stdout.readline().split()[0]


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    process, address = start(root)
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Any]:
    """The list of runs in a new window, in which no error may appear."""
    opened, errors = chromium.new_page(), []
    opened.on("console", lambda message: errors.append(message.text))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(address)
    yield opened
    assert errors == []
    opened.close()


def wait_until_live(page: Any) -> None:
    page.locator("#live", has_text="Live.").wait_for()


def test_runs_are_chosen_and_compared(page: Any) -> None:
    page.get_by_role("link", name="first").click()
    assert page.locator("h1").inner_text() == "first"
    assert "step 3 of 3" in page.locator("#state-title + *").inner_text()
    page.get_by_role("link", name="All runs").click()
    for name in ("first", "other"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    assert page.locator("#arms", has_text="actor.optimizer.learning_rate").count() == 1
    assert page.locator("#differences tbody tr").count() > 0


def test_the_list_is_filtered_and_sorted(page: Any) -> None:
    rows = page.locator("#runs tbody tr:visible")
    assert rows.count() == 2
    page.locator('input[data-filter="runs"]').fill("oth")
    assert rows.count() == 1
    page.locator('input[data-filter="runs"]').fill("")
    heading = page.locator("#runs th", has_text="run").first.locator("button")
    heading.click()
    assert rows.locator("a").all_inner_texts() == ["first", "other"]
    heading.click()
    assert rows.locator("a").all_inner_texts() == ["other", "first"]


def test_a_removed_run(page: Any, root: Path, chromium: Any, address: str) -> None:
    """Its row vanishes, and its page says that the run is gone."""
    wait_until_live(page)
    other = chromium.new_page()
    other.goto(f"{address}runs/other")
    wait_until_live(other)
    shutil.rmtree(root / "other")
    page.locator('tr[data-part="other"]').wait_for(state="detached")
    assert page.locator('tr[data-part="first"]').count() == 1
    other.locator("#live", has_text="This run is no longer there.").wait_for()
    other.close()


def test_a_part_that_cannot_be_fetched_is_fetched_again(
    chromium: Any, address: str, root: Path
) -> None:
    page = chromium.new_page()  # the console has the failed request
    page.goto(address)
    failing = ["/rows/other"]

    def fail_once(route: Any) -> None:
        if failing:
            failing.clear()
            route.fulfill(status=503)
        else:
            route.continue_()

    page.route("**/rows/other", fail_once)
    wait_until_live(page)
    with (root / "other" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "kind": "train", "time": 9.0}\n')
    page.locator('tr[data-part="other"]', has_text="9 of 3").wait_for()
    assert failing == []
    page.close()


def test_settings_and_log(page: Any) -> None:
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="Settings").click()
    page.locator("summary", has_text="All settings").click()
    page.locator('input[data-filter="settings-1"]').fill("rollout group_size")
    assert page.locator("#settings-1 tbody tr:visible").count() == 1
    page.get_by_role("link", name="Log").click()
    assert "report: crl report" in page.locator("pre").inner_text()


def test_a_run_is_followed(page: Any, root: Path) -> None:
    """New steps, warnings and the end of a run appear without a reload."""
    run = RunDir(root / "first")
    page.get_by_role("link", name="first").click()
    wait_until_live(page)
    page.evaluate("window.marked = true")
    run.metrics.unlink()
    with run.lock():
        monitor = FileMonitor(run)
        monitor.log(0, "eval", {"eval/room/seen/success/free": 0.25, "time/eval": 2.0})
        for step in (1, 2):
            monitor.log(step, "train", {"rollout/success/free": step / 4, "time/train": 1.0})
        monitor.note(f"warning: {HOSTILE}")
        monitor.progress("evaluation", 3, 8)
        page.locator(".badge.active", has_text="under way").wait_for()
        page.locator("#state-title ~ *", has_text="step 2 of 3").first.wait_for()
        assert page.locator(".warnings script, .warnings img").count() == 0
        assert page.locator(".stages", has_text="3 of 8").count() == 1
        monitor.log(3, "train", {"rollout/success/free": 0.75})
        page.locator("#state-title ~ *", has_text="step 3 of 3").first.wait_for()
        monitor.close()
    page.locator(".badge", has_text="unfinished").wait_for()
    assert page.locator("section[data-part=success] circle").count() > 3
    assert page.evaluate("window.marked")


def test_the_list_is_live(page: Any, root: Path) -> None:
    """A run that starts later appears; ticked boxes and the filter stay."""
    wait_until_live(page)
    page.get_by_label("compare first").check()
    page.get_by_label("compare first").focus()
    page.locator('input[data-filter="runs"]').fill("i")
    page.get_by_label("compare first").focus()
    shutil.copytree(root / "other", root / "third")
    page.locator("#runs a", has_text="third").wait_for()
    with RunDir(root / "first").lock():
        page.locator(".badge.active").wait_for()
        assert page.get_by_label("compare first").is_checked()
        assert page.evaluate("document.activeElement.value") == "first"
    page.locator(".badge.active").wait_for(state="detached")
    assert page.get_by_label("compare first").is_checked()


def test_the_connection_is_made_again(chromium: Any, root: Path) -> None:
    process, address = start(root)
    page = chromium.new_page()
    page.goto(f"{address}runs/first")
    wait_until_live(page)
    process.kill()
    process.wait()
    page.locator("#live", has_text="Not connected").wait_for()
    with (root / "first" / "log.txt").open("a") as file:
        file.write("2026-01-01 00:00:00 warning: said while nobody listened\n")
    process, _ = start(root, int(address.rstrip("/").rpartition(":")[2]))
    wait_until_live(page)
    page.locator(".warnings", has_text="said while nobody listened").wait_for()
    page.close()
    process.kill()
    process.wait()


def test_without_javascript(chromium: Any, address: str) -> None:
    page = chromium.new_page(java_script_enabled=False)
    page.goto(address)
    for name in ("first", "other"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    assert "B − A" in page.locator("#differences").inner_text()
    page.goto(f"{address}runs/first")
    assert "step 3 of 3" in page.locator("main").inner_text()
    page.close()


def test_another_site_reads_nothing(chromium: Any, address: str, tmp_path: Path) -> None:
    """A page of another origin can neither read a page nor show it in a frame."""
    other = tmp_path / "evil.html"
    other.write_text(
        f"<iframe src='{address}'></iframe><script>fetch('{address}').then("
        "(r) => r.text()).then((t) => (document.title = 'read'), () => (document.title = 'no'))"
        "</script>"
    )
    page = chromium.new_page()
    page.goto(other.as_uri())
    page.wait_for_function("document.title")
    assert page.title() == "no"
    assert "Runs" not in page.frames[1].content()
    page.close()


PAGES = ("", "runs/first", "runs/first/settings", "runs/first/log", "compare?run=first&run=other",
         "runs/none")  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_accessible_at_every_width_and_in_both_schemes(
    chromium: Any, root: Path, address: str, width: int, scheme: str
) -> None:
    """Also of a run under way, whose page has the most parts."""
    size = {"width": width, "height": 900}
    page = chromium.new_page(viewport=size, color_scheme=scheme, bypass_csp=True)
    run = RunDir(root / "first")
    with run.lock():
        monitor = FileMonitor(run)
        monitor.note(f"warning: {HOSTILE} {'x' * 300}")
        monitor.progress("distillation of many episodes " * 4, 3, 8)
        for name in PAGES:
            page.goto(address + name)
            for summary in page.locator("summary").all():
                summary.click()
            assert violations(page) == [], name
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        monitor.close()
    page.close()
