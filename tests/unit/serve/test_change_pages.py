"""Pages about changes of a bank: between steps, between banks, and by the user."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from crl.manager.inspection.reading import compare_banks, open_reader
from crl.manager.inspection.upkeep import lowest_credit, not_used_since
from crl.manager.storage.writer import WriterLock
from crl.monitor.run_dir import RunDir
from crl.serve.pages.changes import word_difference
from support.bank_commands import open_bank, parsed
from support.browsed_banks import browser_of, directory_of_runs
from support.html_pages import Page
from support.managers import hit, request


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of_runs(tmp_path_factory.mktemp("changes") / "runs")


@pytest.fixture(scope="module")
def browser(root: Path) -> Iterator[TestClient]:
    with browser_of(root) as client:
        yield client


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    """A copy of the directory, which a test may change."""
    return Path(shutil.copytree(root, tmp_path / "runs"))


@contextmanager
def writable(runs: Path) -> Iterator[TestClient]:
    with browser_of(runs, write=True) as client:
        yield client


def page(browser: TestClient, path: str, status: int = 200) -> Page:
    response = browser.get(path)
    assert response.status_code == status, response.text
    return Page(response.text)


def fields(found: Page) -> dict[str, str]:
    """Return the hidden fields of the form that changes something."""
    assert [a.get("method") for tag, a in found.tags if tag == "form"] == ["post"]
    return {
        a["name"] or "": a["value"] or ""
        for tag, a in found.tags
        if tag == "input" and a.get("type") == "hidden"
    }


# ── comparisons ─────────────────────────────────────────────────────────────────────────────────


def test_changes_between_two_steps(browser: TestClient):
    found = page(browser, "/runs/run/bank/steps?from=1&to=1")
    assert "updated 1 " in found.text
    assert "credited 2 " in found.text
    assert "retrieved" not in found.text, "it was at step 2"
    rows = [text for text in found.texts if text in ("Go west.", "Mind the trap.", "west.")]
    assert rows == ["west."], "only the changed words of the update"
    assert ("del", {}) in found.tags
    assert ("ins", {}) in found.tags
    assert "southwest." in found.texts
    first = page(browser, "/runs/run/bank/steps?from=0&to=0")
    assert {"Go west.", "Mind the trap.", "Follow the left wall."} <= set(first.texts)
    last = page(browser, "/runs/run/bank/steps")
    assert "The last step of the bank is 2." in last.text
    assert "+0.38" in last.text, "the lift over the groups of these steps"
    assert "bounds (run/2/0/0)" in last.text
    assert "Nothing was changed" in page(browser, "/runs/run/bank/steps?from=7&to=9").text
    reversed_range = page(browser, "/runs/run/bank/steps?from=2&to=1", 400)
    assert "Step 2 is after step 1. Exchange them." in reversed_range.text


def test_effects_of_some_steps(root: Path):
    with open_reader(root / "run" / "bank.sqlite") as bank:
        (first,) = bank.effects(1, 1)
        (both,) = bank.effects(1, 2)
        assert bank.effects(3, 9) == []
        evicted = bank.evictions(0, 9)
        assert [(uid, bank.eviction(uid)) for uid, _ in evicted] == evicted
    assert (first.won, first.credited, first.lift and first.lift.mean) == (1, 2, 0.25)
    assert (both.won, both.credited, both.lift and both.lift.groups) == (2, 3, 2)


def test_differences_of_words():
    assert word_difference("go west now", "go south now") == [
        ("same", "go"), ("removed", "west"), ("added", "south"), ("same", "now"),
    ]  # fmt: skip
    assert word_difference("", "a") == [("added", "a")]
    assert word_difference("a", "a") == [("same", "a")]
    word_difference("x " * 10**6, "y " * 10**6)


def test_difference_of_two_banks(browser: TestClient, root: Path):
    expected = compare_banks(root / "run" / "bank.sqlite", root / "other" / "bank.sqlite")
    found = page(browser, "/runs/run/bank/diff?other=other")
    assert expected.only_a
    assert expected.only_b
    assert (
        f"only in A {len(expected.only_a)} only in B {len(expected.only_b)} "
        f"in both {len(expected.both)}" in found.text
    )
    for lesson in (*expected.only_a, *expected.only_b, *(pair[0] for pair in expected.both)):
        assert lesson.text in found.texts
    links = [a.get("href") or "" for tag, a in found.tags if tag == "a"]
    for link in [link for link in links if "?q=" in link]:
        assert "&task=" in link
        assert page(browser, link).text.count("No experience matches") == 0
    page(browser, "/runs/run/bank/diff?other=run", 400)
    page(browser, "/runs/run/bank/diff?other=none", 404)
    page(browser, "/runs/run/bank/diff?other=../other", 404)
    names = [a["value"] for tag, a in found.tags if tag == "option"]
    assert names == ["asked", "merged", "other"]


# ── requests ────────────────────────────────────────────────────────────────────────────────────


def test_requests(browser: TestClient, root: Path):
    dead, waiting = parsed("dead", root / "run"), parsed("queue", root / "run")
    assert dead
    assert waiting
    found = page(browser, "/runs/run/bank/requests")
    for one in (*dead, *waiting):
        assert one["id"] in found.text
    assert dead[0]["reason"] in found.texts
    assert "pending 1" in found.text
    assert "--write" in found.text
    assert not [a for tag, a in found.tags if tag == "a" and "retry" in (a.get("href") or "")]


def test_without_write_nothing_can_be_changed(browser: TestClient, root: Path):
    before = (root / "run" / "bank.sqlite").read_bytes()
    csrf = browser.app.state.site.csrf  # type: ignore[attr-defined]
    for path in ("retry", "prune"):
        for response in (
            browser.get(f"/runs/run/bank/{path}?max_entries=1"),
            browser.post(f"/runs/run/bank/{path}", data={"csrf": csrf, "max_entries": "1"}),
        ):
            assert response.status_code == 403
            assert "--write" in response.text
            assert csrf not in response.text
    assert (root / "run" / "bank.sqlite").read_bytes() == before
    assert "prune" not in browser.get("/runs/run/bank").text


def test_retry_of_all_dead_requests(runs: Path):
    dead = len(parsed("dead", runs / "run"))
    with writable(runs) as client:
        assert "Retry all 1" in page(client, "/runs/run/bank/requests").texts
        ask = page(client, "/runs/run/bank/retry")
        assert "Queue all 1 dead request again? crl resume returns to the last" in ask.text
        assert len(parsed("dead", runs / "run")) == dead, "nothing is changed by the question"
        done = client.post("/runs/run/bank/retry", data=fields(ask))
        assert done.status_code == 303
        found = page(client, done.headers["location"])
        assert f"{dead} dead request queued again" in found.text
        assert parsed("dead", runs / "run") == []
        assert "There are no dead requests." in page(client, "/runs/run/bank/retry").text
    assert "bank.sqlite-writer" not in os.listdir(runs / "run")


def test_retry_of_one_request(runs: Path):
    (dead,) = parsed("dead", runs / "run")
    with writable(runs) as client:
        page(client, "/runs/run/bank/retry?id=none", 404)
        ask = page(client, f"/runs/run/bank/retry?id={dead['id']}")
        form = fields(ask)
        assert form["id"] == dead["id"]
        assert client.post("/runs/run/bank/retry", data=form | {"id": "x"}).status_code == 404
        assert client.post("/runs/run/bank/retry", data=form).status_code == 303
        assert client.post("/runs/run/bank/retry", data=form).status_code == 404, "it is not dead"
    assert parsed("dead", runs / "run") == []


# ── pruning ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("criterion", ["max_entries=2", "unused_since=2", "unused_since=1"])
def test_prune(runs: Path, criterion: str):
    name, _, value = criterion.partition("=")
    with open_reader(runs / "run" / "bank.sqlite") as bank:
        entries = bank.entries()
    choose = lowest_credit if name == "max_entries" else not_used_since
    expected = choose(entries, int(value))
    assert expected
    with writable(runs) as client:
        preview = page(client, f"/runs/run/bank/prune?{criterion}")
        assert f"This evicts {len(expected)} of {len(entries)} active experiences." in preview.text
        for entry in expected:
            assert entry.text in preview.texts
        done = client.post("/runs/run/bank/prune", data=fields(preview))
        assert done.status_code == 303
        assert "evicted." in page(client, done.headers["location"]).text
        again = page(client, f"/runs/run/bank/prune?{criterion}")
        assert "Nothing to evict" in again.text
    with open_reader(runs / "run" / "bank.sqlite") as bank:
        left = {entry.uid for entry in bank.entries()}
        assert left == {entry.uid for entry in entries} - {entry.uid for entry in expected}
        assert {bank.eviction(entry.uid).why for entry in expected} == {"pruned"}  # type: ignore[union-attr]


def test_a_bank_that_changed_after_the_preview(runs: Path):
    with writable(runs) as client:
        form = fields(page(client, "/runs/run/bank/prune?max_entries=2"))
        shutil.copy(runs / "other" / "bank.sqlite", runs / "run" / "bank.sqlite")
        before = (runs / "run" / "bank.sqlite").read_bytes()
        answer = client.post("/runs/run/bank/prune", data=form)
        assert answer.status_code == 409
        assert "changed since the preview" in answer.text
        for change in (
            {"max_entries": "1"}, {"unused_since": "1"}, {"expected": ""}, {"expected": "é"},
            {f"x{i}": "y" for i in range(30)},
        ):  # fmt: skip
            assert client.post("/runs/run/bank/prune", data=form | change).status_code in (400, 409)
    assert (runs / "run" / "bank.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    "criterion",
    ["max_entries=0", "max_entries=-1", "max_entries=x", "unused_since=1&max_entries=1",
     f"max_entries={'9' * 5000}", "unused_since=²"],
)  # fmt: skip
def test_wrong_criteria(runs: Path, criterion: str):
    with writable(runs) as client:
        page(client, f"/runs/run/bank/prune?{criterion}", 400)


# ── protection ──────────────────────────────────────────────────────────────────────────────────


def test_forms_of_other_sites_are_refused(runs: Path):
    before = (runs / "run" / "bank.sqlite").read_bytes()
    with writable(runs) as client:
        form = fields(page(client, "/runs/run/bank/prune?max_entries=2"))
        target = "/runs/run/bank/prune"
        for token in ("", "x", form["csrf"][:-1], "\ud800ä"):
            data = form | {"csrf": token.encode("utf-8", "replace").decode()}
            assert client.post(target, data=data).status_code == 403
        assert client.post(target, json=form).status_code == 415
        assert (
            client.post(target, data=form, headers={"Sec-Fetch-Site": "cross-site"}).status_code
            == 403
        )
        assert client.post(target, data=form, headers={"Host": "evil.example"}).status_code == 400
        assert client.post(target, data=form | {"x": "y" * 100_000}).status_code == 413
        assert (
            client.get(f"{target}?csrf={form['csrf']}&expected={form['expected']}").status_code
            == 200
        )
        assert client.put(target, data=form).status_code == 405
        with writable(runs) as another:
            assert another.post(target, data=form).status_code == 403, "the token of another server"
    assert (runs / "run" / "bank.sqlite").read_bytes() == before


def test_a_bank_that_a_run_has_open(runs: Path):
    bank = runs / "run" / "bank.sqlite"
    with writable(runs) as client:
        prune = fields(page(client, "/runs/run/bank/prune?max_entries=2"))
        retry = fields(page(client, "/runs/run/bank/retry"))
        lock = WriterLock(bank)
        try:
            with RunDir(runs / "run").lock():
                for path in ("prune?max_entries=2", "retry", "requests"):
                    found = page(client, f"/runs/run/bank/{path}")
                    assert "A run has this bank open" in found.text
                    assert not [a for tag, a in found.tags if a.get("method") == "post"]
            for path, form in (("prune", prune), ("retry", retry)):
                answer = client.post(f"/runs/run/bank/{path}", data=form)
                assert answer.status_code == 409
                assert "The bank was not changed." in answer.text
                assert re.search(r"process \d+ on .* is writing to the bank", answer.text)
        finally:
            lock.release()
        assert client.post("/runs/run/bank/prune", data=prune).status_code == 303


def test_a_run_that_has_not_opened_its_bank_yet(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crl.monitor.run_dir.LOCK_WAIT_S", 0.05)
    before = (runs / "run" / "bank.sqlite").read_bytes()
    with writable(runs) as client:
        forms = {
            "prune": fields(page(client, "/runs/run/bank/prune?max_entries=2")),
            "retry": fields(page(client, "/runs/run/bank/retry")),
        }
        with RunDir(runs / "run").lock():
            for path, form in forms.items():
                answer = client.post(f"/runs/run/bank/{path}", data=form)
                assert answer.status_code == 409
                assert "another process is training this run" in answer.text
            assert (runs / "run" / "bank.sqlite").read_bytes() == before
        for path, form in forms.items():
            assert client.post(f"/runs/run/bank/{path}", data=form).status_code == 303


async def test_pages_while_a_run_writes(tmp_path: Path):
    """Neither side waits for the other, and the pages leave no file beside the bank."""
    bank = tmp_path / "run" / "bank.sqlite"
    os.mkdir(bank.parent)
    manager = await open_bank(bank)
    await manager.submit(request(0, note="west"))
    await manager.drain()
    statuses: list[int] = []
    paths = ("", "?q=go", "/lesson?uid=run/0/0/0%230", "/steps", "/requests", "?q=a&by=meaning")

    def read() -> None:
        with browser_of(tmp_path) as client:
            for path in paths * 3:
                statuses.append(client.get(f"/runs/run/bank{path}").status_code)

    reading = [asyncio.create_task(asyncio.to_thread(read)) for _ in range(2)]
    step = 1
    while not all(task.done() for task in reading):
        manager.advance(step)
        await manager.submit(request(step, note="west"))
        await manager.drain()
        await manager.credit([hit("run/0/0/0#0").use], True, episode=f"run/{step}/5/0")
        step += 1
    await asyncio.gather(*reading)
    await manager.aclose()
    assert set(statuses) == {200}
    assert len(statuses) == 2 * 3 * len(paths)
    assert os.listdir(bank.parent) == ["bank.sqlite"]
