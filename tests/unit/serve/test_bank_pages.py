"""Pages about a bank: list, search, story of an experience, whole texts, and hostile banks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from crl.manager.inspection.upkeep import create_bank
from crl.manager.records import Entry
from crl.report.charts import Point
from crl.serve.pages.bank import PART_CHARACTERS, some_of
from crl.serve.security import MAX_BYTES
from crl.types import Counters, Lift, Place, Provenance
from crl.wording import printable_lines
from support.bank_commands import parsed
from support.browsed_banks import browser_of, directory_of_runs
from support.hostile_texts import FORBIDDEN, HOSTILE
from support.html_pages import Page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of_runs(tmp_path_factory.mktemp("bank") / "runs")


@pytest.fixture(scope="module")
def browser(root: Path) -> Iterator[TestClient]:
    with browser_of(root) as client:
        yield client


def page(browser: TestClient, path: str, status: int = 200) -> Page:
    response = browser.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    return Page(response.text)


def links(found: Page) -> list[str]:
    return [attributes["href"] or "" for tag, attributes in found.tags if tag == "a"]


def lessons(found: Page) -> list[str]:
    """Return the uids of the lessons that a page links, in order."""
    start = "/bank/lesson?uid="
    return [link.partition(start)[2].replace("%2F", "/").replace("%23", "#")
            for link in links(found) if start in link]  # fmt: skip


# ── list ────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_is_that_of_the_command(browser: TestClient, root: Path):
    entries = parsed("ls", root / "run", "--limit", "0")
    found = page(browser, "/runs/run/bank")
    assert lessons(found) == [entry["uid"] for entry in entries]
    assert f"{len(entries)} experiences" in found.text
    assert all(entry["text"] in found.texts for entry in entries)
    for order in ("credit", "retrieved"):
        entries = parsed("ls", root / "run", "--sort", order, "--limit", "0")
        values = [entry[order] for entry in entries]
        assert [
            {entry["uid"]: entry[order] for entry in entries}[uid]
            for uid in lessons(page(browser, f"/runs/run/bank?order={order}"))
        ] == values


def test_headings_sort_and_reverse(browser: TestClient):
    found = page(browser, "/runs/run/bank?task=room&page=1")
    sorted_by = {"scope": "col", "class": "number", "aria-sort": "descending"}
    assert ("th", sorted_by) in found.tags
    (link,) = [link for link in links(found) if "order=lift" in link]
    assert "task=room" in link
    assert "reverse=1" in link
    assert "page" not in link
    back = page(browser, link)
    assert ("th", sorted_by | {"aria-sort": "ascending"}) in back.tags
    assert set(lessons(back)) == set(lessons(found))


def test_search_and_filters(browser: TestClient):
    assert lessons(page(browser, "/runs/run/bank?q=SOUTHWEST")) == ["run/0/0/0#0"]
    assert "No experience matches" in page(browser, "/runs/run/bank?q=nowhere").text
    assert lessons(page(browser, "/runs/run/bank?kind=update")) == ["run/0/0/0#0"]
    (evicted,) = lessons(page(browser, "/runs/run/bank?status=evicted"))
    assert evicted not in lessons(page(browser, "/runs/run/bank"))
    assert evicted in lessons(page(browser, "/runs/run/bank?status=all"))


@pytest.mark.parametrize(
    "query",
    ["kind=x", "status=' OR 1", "order=written;", "page=0", "page=x", "max_age=-1",
     "min_credit=1e9", f"min_age={'9' * 5000}", f"q={'x' * 2000}", "by=magic", "page=%F0%9F"],
)  # fmt: skip
def test_wrong_parameters(browser: TestClient, query: str):
    page(browser, f"/runs/run/bank?{query}", 400)


def test_a_run_without_a_bank(browser: TestClient, root: Path):
    (root / "empty").mkdir()
    shutil.copy(root / "run" / "config.json", root / "empty")
    time.sleep(1.1)  # the list of runs is kept for a second
    for path in ("", "/lesson?uid=x", "/steps", "/diff?other=run", "/requests", "/text?uid=x"):
        assert "no bank" in page(browser, f"/runs/empty/bank{path}", 404).text
    shutil.rmtree(root / "empty")


# ── search by meaning ───────────────────────────────────────────────────────────────────────────


def test_search_by_meaning_is_that_of_the_command(browser: TestClient, root: Path):
    expected = parsed("search", root / "run", "walk to the southwest")
    found = page(browser, "/runs/run/bank?q=walk+to+the+southwest&by=meaning&status=all")
    assert lessons(found) == [entry["uid"] for entry in expected]
    for entry in expected:
        assert f"{entry['similarity']:.3f}" in found.texts
    only = page(browser, "/runs/run/bank?q=walk+to+the+southwest&by=meaning&task=maze")
    assert set(lessons(only)) == {entry["uid"] for entry in expected if entry["task"] == "maze"}


def test_nothing_is_loaded_before_the_first_search_by_meaning(root: Path):
    with browser_of(root) as client:
        meaning = client.app.state.site.meaning  # type: ignore[attr-defined]
        page(client, "/runs/run/bank?q=west")
        page(client, "/runs/run/bank?by=meaning")
        assert meaning._opened is None
        page(client, "/runs/run/bank?q=west&by=meaning")
        opened = meaning._opened
        assert opened is not None
        page(client, "/runs/other/bank?q=west&by=meaning")
        assert meaning._opened is opened, "runs with the same embedder share it"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "/no/such/encoder"}, "/no/such/encoder"),
        ({"model": "/no/such/encoder", "kind": "vllm"}, "crl bank search"),
    ],
)
def test_an_embedder_that_is_not_available(
    root: Path, tmp_path: Path, settings: dict[str, str], reason: str
):
    run = Path(shutil.copytree(root / "run", tmp_path / "runs" / "run"))
    change_embedder(run, settings)
    with browser_of(run.parent) as client:
        found = page(client, "/runs/run/bank?q=west&by=meaning")
        assert "The embedder of the run is not available" in found.text
        assert reason in found.text
        assert lessons(found) == []
        assert lessons(page(client, "/runs/run/bank?q=west"))


def change_embedder(run: Path, settings: dict[str, str]) -> None:
    saved = json.loads((run / "config.json").read_text())
    saved["config"]["embedder"] |= settings
    (run / "config.json").write_text(json.dumps(saved))


def test_no_text_and_no_key_is_sent_to_an_endpoint(root: Path, tmp_path: Path, monkeypatch):
    """The config of a run must not choose where the key of a user is sent."""
    run = Path(shutil.copytree(root / "run", tmp_path / "runs" / "run"))
    monkeypatch.setenv("SECRET", "key")
    with socket.create_server(("127.0.0.1", 0)) as endpoint, browser_of(run.parent) as client:
        endpoint.settimeout(0.2)
        url = f"http://127.0.0.1:{endpoint.getsockname()[1]}/v1"
        change_embedder(run, {"model": url, "name": "none", "key_env": "SECRET"})
        found = page(client, "/runs/run/bank?q=west&by=meaning")
        assert "sends no texts and no API keys to endpoints. Search by words" in found.text
        with pytest.raises(TimeoutError):
            endpoint.accept()


def test_other_sites_start_no_search_by_meaning(browser: TestClient):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert browser.get("/runs/run/bank?q=west", headers=link).status_code == 200
    assert browser.get("/runs/run/bank?q=west&by=meaning", headers=link).status_code == 403
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}
    assert browser.get("/runs/run/bank?q=west&by=meaning", headers=own).status_code == 200


def test_a_bank_without_vectors(tmp_path: Path):
    """The lessons are embedded for the search, unless they are very long."""
    bank_of(tmp_path / "run", ["Go west.", "Buy the lamp.", "Walk to the west."])
    with browser_of(tmp_path) as client:
        found = lessons(page(client, "/runs/run/bank?q=Go+west.&by=meaning"))
        assert found[0] == "run/0/0/0#0"
        assert len(found) == 3
    bank_of(tmp_path / "long", ["x" * 10 * 2**20])
    with browser_of(tmp_path) as client:
        assert "no vectors" in page(client, "/runs/long/bank?q=x&by=meaning").text


def test_vectors_of_another_embedder(root: Path, tmp_path: Path):
    run = Path(shutil.copytree(root / "run", tmp_path / "runs" / "run"))
    with closing(sqlite3.connect(run / "bank.sqlite")) as db:
        db.execute("UPDATE facts SET value = 'another-64' WHERE name = 'embedder'")
        db.commit()
    with browser_of(run.parent) as client:
        found = page(client, "/runs/run/bank?q=west&by=meaning")
    assert "cannot be compared" in found.text


# ── story of an experience ────────────────────────────────────────────────────────────────────────


def test_the_story_of_an_updated_lesson(browser: TestClient, root: Path):
    report = parsed("show", root / "run", "run/0/0/0#0")
    found = page(browser, "/runs/run/bank/lesson?uid=run/0/0/0%230")
    for version in report["lineage"]:
        assert f"{version['uid']}@{version['version']}" in found.texts
        assert version["text"] in found.texts
        assert f"{version['by']} (not recorded)" in found.text, "the run has recorded no episodes"
    for use in report["uses"]:
        assert (
            f"{use['episode']} (not recorded) {'won' if use['reward'] > 0 else 'lost'}"
            in found.text
        )
    titles = [a["aria-label"] or "" for tag, a in found.tags if tag == "svg" and "aria-label" in a]
    assert [title.partition(".")[0] for title in titles] == ["Won episodes", "Lift"]
    # episodes: won, lost at step 1, won at step 2; lifts: +0.25, +0.5
    assert "from 0.5 " in titles[0]
    assert "step 2: 0.667" in titles[0]
    assert "step 2: 0.375" in titles[1]
    assert lessons(page(browser, "/runs/run/bank/lesson?uid=0/0/0%230")) == lessons(found)


def test_a_long_curve_ends_with_its_last_value():
    points = [Point(x, x / 1000) for x in range(1000)]
    shown = some_of(points)
    assert 40 < len(shown) <= 60
    assert set(shown) <= set(points), "no means of values that are means already"
    assert shown[-1] == points[-1]
    assert some_of(points[:3]) == points[:3]
    assert some_of([]) == []


def test_lineage_of_a_merge_can_be_followed(browser: TestClient):
    (uid,) = lessons(page(browser, "/runs/merged/bank"))
    found = page(browser, f"/runs/merged/bank/lesson?uid={quote(uid, safe='')}")
    assert "merge after step 5" in found.text
    parents = list(dict.fromkeys(lessons(found)))
    assert parents == ["run/0/0/0#1", "run/0/0/0#0"] or set(parents) == {
        "run/0/0/0#0", "run/0/0/0#1",
    }  # fmt: skip
    parent = page(browser, f"/runs/merged/bank/lesson?uid={quote(parents[0], safe='')}")
    assert "merged" in parent.texts
    assert uid in lessons(parent), "the lesson that was made from it"
    discarded = page(browser, "/runs/merged/bank/lesson?uid=run/0/0/0%232")
    assert "discarded in a merge" in discarded.text


def test_answered_questions(browser: TestClient):
    found = page(browser, "/runs/asked/bank/lesson?uid=run/0/0/0%230")
    assert "Two rooms west." in found.text
    assert "run/train/1/4/0/1, version 1, after step 1" in found.text
    assert "run/1/4/0 (not recorded) won" in found.text
    assert browser.get("/runs/asked/bank/text?uid=run/train/1/4/0/1").text == "Two rooms west.\n"


def test_sources_that_are_not_in_the_bank(tmp_path: Path):
    bank_of(tmp_path / "run", ["Go west."])
    with closing(sqlite3.connect(tmp_path / "run" / "bank.sqlite")) as db:
        db.execute("""UPDATE log SET data = json_set(data, '$.parents', json('["gone#0@2"]'))""")
        db.commit()
    with browser_of(tmp_path) as client:
        found = page(client, "/runs/run/bank/lesson?uid=run/0/0/0%230")
    assert "gone#0@2 (not in this bank)" in found.text
    assert "import in another run" in found.text


@pytest.mark.parametrize("uid", ["", "none", "run/", "run/0/0/0#0@9", "%ED%A0%80", "\x00"])
def test_an_unknown_lesson(browser: TestClient, uid: str):
    page(browser, f"/runs/run/bank/lesson?uid={quote(uid, safe='%')}", 404)


# ── hostile banks ───────────────────────────────────────────────────────────────────────────────


def bank_of(run: Path, texts: list[str], uids: list[str] | None = None) -> None:
    run.mkdir(parents=True)
    counters = Counters(3, 1, 4, 2.0, 0, Lift(2, 0.5, 0.1))
    create_bank(
        run / "bank.sqlite",
        [
            Entry(
                uids[i] if uids else f"run/0/0/{i}#0", 1, text,
                Place(text[:2000] or "task", text[::-1][:2000] or "goal"),
                Provenance("run/0/0/0", (0, 1), (f"{text[:50]}@1",)),
                counters,
            )
            for i, text in enumerate(texts)
        ],
    )  # fmt: skip


TEXTS = [text.encode("utf-8", "ignore").decode() for text in HOSTILE.values()]
"""Hostile texts that a bank can hold: without lone surrogates."""

MARKUP = ("<script>alert", "<img src=x", "onerror=alert(1)>")


def check_hostile(response, started: float) -> None:
    assert len(response.content) < MAX_BYTES
    assert time.monotonic() - started < 20
    body = response.text
    assert not (FORBIDDEN & set(body)) - {"\r"}
    if response.headers["content-type"].startswith("text/html"):
        assert not any(text in body for text in MARKUP)
        found = Page(body)
        for tag, attributes in found.tags:
            assert not any(name.startswith("on") or name == "style" for name in attributes), tag
            assert (attributes.get("href") or "/").startswith(("/", "#"))
        assert {tag for tag, _ in found.tags} & {"iframe", "object", "base", "img"} == set()


def test_pages_name_experiences_as_the_docs_do(root: Path):
    """Experiences have one name in the texts of all pages, as in docs/concepts.md."""
    pages = [f"/runs/run/bank{path}" for path in (
        "", "?q=nowhere", "?status=all", "/lesson?uid=run/0/0/0%230", "/steps", "/diff?other=other",
        "/requests", "/prune", "/prune?max_entries=1", "/prune?unused_since=1",
    )]  # fmt: skip
    pages += ["/runs/merged/bank", "/runs/asked/bank/lesson?uid=run/0/0/0%230", "/runs/run"]
    with browser_of(root, write=True) as client:
        for path in pages:
            found = page(client, path).text.lower()
            assert not re.search(r"\blessons?\b|\bentr(y|ies)\b", found), path


def test_hostile_texts_on_every_page(tmp_path: Path):
    bank_of(tmp_path / "runs" / "run", TEXTS)
    bank_of(tmp_path / "runs" / "other", TEXTS[:-3])
    paths = [f"/runs/run/bank{path}" for path in (
        "", "?order=lesson", "?order=task&reverse=1", "/steps", "/diff?other=other", "/requests",
        "/prune?max_entries=1", "/prune", "?q=go&by=meaning",
    )]  # fmt: skip
    for i in range(len(TEXTS)):
        uid = quote(f"run/0/0/{i}#0", safe="")
        paths += [f"/runs/run/bank/lesson?uid={uid}", f"/runs/run/bank/text?uid={uid}&version=1"]
    paths += [f"/runs/run/bank?q={quote(text[:300])}" for text in HOSTILE.values()
              if text.isprintable()]  # fmt: skip
    with browser_of(tmp_path / "runs", write=True) as client:
        for path in paths:
            started = time.monotonic()
            response = client.get(path)
            assert response.status_code == 200, (path, response.text[:2000])
            check_hostile(response, started)
    assert sorted(os.listdir(tmp_path / "runs" / "run")) == ["bank.sqlite"]


def test_hostile_queries(browser: TestClient):
    for text in HOSTILE.values():
        value = quote(text[:900], safe="", errors="surrogatepass")
        for path in (
            f"/runs/run/bank?q={value}", f"/runs/run/bank?task={value}",
            f"/runs/run/bank/lesson?uid={value}", f"/runs/run/bank/diff?other={value}",
            f"/runs/run/bank/text?uid={value}&version=1", f"/runs/run/bank/steps?from={value}",
            f"/runs/run/episodes?task={value}", f"/runs/{value}/bank",
            f"/runs/run/episodes/{value}/0/0",
        ):  # fmt: skip
            started = time.monotonic()
            response = browser.get(path)
            assert response.status_code in (200, 400, 404), (path, response.text[:500])
            check_hostile(response, started)


def test_hostile_uids(tmp_path: Path):
    """A bank that was written by hand can have any text as a uid."""
    uids = [f"{text[:length]}{i}" for length in (200, 3000) for i, text in enumerate(TEXTS)]
    uids = list(dict.fromkeys(uids))
    bank_of(tmp_path / "run", ["Go west."] * len(uids), uids)
    with browser_of(tmp_path) as client:
        for path in ("", "/steps", "/requests"):
            started = time.monotonic()
            check_hostile(client.get(f"/runs/run/bank{path}"), started)
        found = lessons(page(client, "/runs/run/bank"))
        assert len(found) == sum(len(uid) <= 300 for uid in uids)
        for link in links(page(client, "/runs/run/bank")):
            if "lesson?uid=" in link:
                response = client.get(link)
                assert response.status_code == 200
                check_hostile(response, time.monotonic())


def test_a_long_text_is_read_in_parts(tmp_path: Path):
    whole = "".join(f"{i} \x1b[31m<b>\u202e\n" for i in range(PART_CHARACTERS // 8))
    bank_of(tmp_path / "run", [whole])
    with browser_of(tmp_path) as client:
        found = page(client, "/runs/run/bank/lesson?uid=run/0/0/0%230")
        (link,) = {link for link in links(found) if "version=1" in link}
        read, parts = "", 0
        while link:
            response = client.get(link)
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/plain; charset=utf-8"
            assert len(response.content) < MAX_BYTES
            part, _, _ = response.text.removesuffix("\n").partition("\n… part ")
            read, parts = read + part, parts + 1
            link = response.links.get("next", {}).get("url", "")
        text = "/runs/run/bank/text?uid=run/0/0/0%230&version=1"
        assert client.get(f"{text}&part=99").status_code == 404
    assert parts == -(-len(whole) // PART_CHARACTERS) > 1
    assert read == printable_lines(whole)


def test_a_long_goal_is_read_as_a_whole(tmp_path: Path):
    bank_of(tmp_path / "run", ["abc" * 1000])
    with browser_of(tmp_path) as client:
        found = page(client, "/runs/run/bank/lesson?uid=run/0/0/0%230")
        (link,) = {link for link in links(found) if "of=goal" in link}
        assert client.get(link).text == ("abc" * 1000)[::-1][:2000] + "\n"
        assert client.get("/runs/run/bank/text?uid=none&of=goal").status_code == 404


def test_a_damaged_bank(root: Path, tmp_path: Path):
    for content in (b"no bank", b"", (root / "run" / "bank.sqlite").read_bytes()[:9000]):
        run = tmp_path / "runs" / "run"
        run.mkdir(parents=True, exist_ok=True)
        (run / "bank.sqlite").write_bytes(content)
        with browser_of(run.parent) as client:
            for path in ("", "/lesson?uid=x", "/steps", "/requests", "?q=a&by=meaning"):
                assert "bank.sqlite" in page(client, f"/runs/run/bank{path}", 500).text
