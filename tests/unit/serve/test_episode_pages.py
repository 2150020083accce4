"""Pages about episodes: list, viewer, whole texts, and hostile records."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from crl.records.shards import Record, read_records, shards
from crl.serve.pages.episodes import ROWS_PER_PAGE, view
from crl.serve.security import MAX_BYTES
from crl.wording import printable_lines
from support.browsed_banks import browser_of
from support.hostile_texts import FORBIDDEN, HOSTILE
from support.html_pages import Page


def page(client: TestClient, path: str, status: int = 200) -> Page:
    response = client.get(path)
    assert response.status_code == status, response.text
    return Page(response.text)


def links(found: Page, part: str) -> list[str]:
    return [a["href"] or "" for tag, a in found.tags if tag == "a" and part in (a["href"] or "")]


def records(run: Path) -> list[Record]:
    return [record for path in shards(run / "episodes").values() for record in read_records(path)]


def change(run: Path, step: int, edit: Callable[[list[Record]], Any]) -> None:
    """Change the records of a step on the disk."""
    path = shards(run / "episodes")[step]
    found = list(read_records(path))
    edit(found)
    with gzip.open(path, "wt", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(record) + "\n" for record in found)


def listed(client: TestClient, query: str = "") -> list[str]:
    """Return the ids of the episodes on all pages of the list."""
    found, path = [], f"/runs/first/episodes{query}"
    while path:
        shown = page(client, path)
        found += [link.partition("/episodes/")[2] for link in links(shown, "/episodes/")]
        path = next((a["href"] for tag, a in shown.tags if a.get("rel") == "next"), "")
    return found


def name(record: Record) -> str:
    return f"{record['step']}/{record['group']}/{record['member']}"


# ── list ────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_has_all_episodes_the_last_step_first(client: TestClient, run: Path):
    expected = sorted(records(run), key=lambda r: (-r["step"], r["group"], r["member"]))
    assert len(expected) == 48
    assert listed(client) == [name(record) for record in expected]


@pytest.mark.parametrize(
    ("query", "keep"),
    [
        ("?outcome=won", lambda r: r["success"] and not r["error"]),
        ("?outcome=lost", lambda r: not r["success"] and not r["error"]),
        ("?outcome=failed", lambda r: r["error"]),
        ("?condition=guided", lambda r: r["condition"] == "guided"),
        ("?condition=free&step=2", lambda r: r["condition"] == "free" and r["step"] == 2),
        ("?task=room&step=1", lambda r: r["step"] == 1),
        ("?task=webshop", lambda r: False),
        ("?step=99", lambda r: False),
    ],
)
def test_filters(client: TestClient, run: Path, query: str, keep: Callable[[Record], bool]):
    assert set(listed(client, query)) == {name(r) for r in records(run) if keep(r)}


def test_pages_go_on_where_the_last_one_ended(client: TestClient, run: Path, monkeypatch):
    whole = listed(client)
    for rows, steps in ((7, 20), (50, 1), (1, 1), (16, 2)):
        monkeypatch.setattr("crl.serve.pages.episodes.ROWS_PER_PAGE", rows)
        monkeypatch.setattr("crl.serve.pages.episodes.MAX_STEPS_READ", steps)
        assert listed(client) == whole
    assert ROWS_PER_PAGE == 50


def test_a_changed_step_is_read_again(client: TestClient, run: Path):
    assert "Another goal" not in page(client, "/runs/first/episodes").text
    change(run, 3, lambda found: [r.update(goal="Another goal") for r in found])
    assert "Another goal" in page(client, "/runs/first/episodes").text


def test_a_damaged_step_leaves_the_others(client: TestClient, run: Path):
    shards(run / "episodes")[3].write_bytes(b"\x1f\x8b")
    found = page(client, "/runs/first/episodes")
    assert "A step cannot be read" in found.text
    assert {link.split("/")[4] for link in links(found, "/episodes/")} == {"2", "1"}
    page(client, "/runs/first/episodes/3/0/0", 500)
    page(client, links(found, "/episodes/2/")[0])


def test_a_run_without_episodes(client: TestClient, run: Path):
    shutil.rmtree(run / "episodes")
    assert "recorded no episodes" in page(client, "/runs/first/episodes").text
    page(client, "/runs/first/episodes/1/0/0", 404)


# ── viewer ──────────────────────────────────────────────────────────────────────────────────────


def test_an_episode_with_all_its_turns(client: TestClient, run: Path):
    """Without JavaScript, all turns are visible and the buttons are not."""
    record = next(r for r in records(run) if r["used"] and r["turns"] > 1)
    found = page(client, f"/runs/first/episodes/{name(record)}")
    for segment in record["segments"]:
        assert printable_lines(segment["text"]) in found.texts
    turns = [a for tag, a in found.tags if tag == "li" and a.get("class") == "turn"]
    assert len(turns) >= record["turns"]
    assert not any("hidden" in turn for turn in turns)
    assert [a["class"] for tag, a in found.tags if "hidden" in a and tag != "input"] == [
        "stepper", "quiet ended",
    ]  # fmt: skip
    for number, reward in enumerate(record["turn_rewards"], start=1):
        assert f"Turn {number}: reward {reward:g}" in found.text
    guidance = [a for tag, a in found.tags if tag == "div" and a.get("class") == "message guidance"]
    assert len(guidance) == sum(s["origin"] == "experience" for s in record["segments"]) > 0
    uid = record["used"][0]["uid"]
    assert f"/runs/first/bank/lesson?uid={quote(uid, safe='')}" in links(found, "lesson")


def test_lessons_link_to_the_episodes_they_came_from_and_guided(client: TestClient, run: Path):
    """A step of the bank counts from 0, and the step of a recorded episode from 1."""
    record = next(r for r in records(run) if r["used"])
    use = record["used"][0]
    found = page(client, f"/runs/first/bank/lesson?uid={quote(use['uid'], safe='')}")
    targets = {link.partition("/episodes/")[2] for link in links(found, "/episodes/")}
    guided = {name(r) for r in records(run) if use["uid"] in {u["uid"] for u in r["used"]}}
    assert guided <= targets
    step, group, member = use["generation"].split("/")[1:]
    assert f"{int(step) + 1}/{group}/{member}" in targets
    assert targets <= set(found.texts), "links have the numbers of the viewer"
    assert any(a.get("title") == use["generation"] for _, a in found.tags)
    for target in targets:
        page(client, f"/runs/first/episodes/{target}")
    origin = page(client, f"/runs/first/episodes/{int(step) + 1}/{group}/{member}")
    assert "Experiences from it" in origin.texts
    assert f"/runs/first/bank/lesson?uid={quote(use['uid'], safe='')}" in links(origin, "lesson")


def test_a_guided_episode_without_a_lesson(client: TestClient, run: Path):
    change(run, 1, lambda found: found[0].update(condition="guided", used=[], rejected=[]))
    record = records(run)[0]
    text = page(client, f"/runs/first/episodes/{name(record)}").text
    assert f"Member {record['member']}, guided, no experience found:" in text


def test_members_of_a_group_side_by_side(client: TestClient, run: Path):
    record = next(r for r in records(run) if r["condition"] == "guided")
    group = [
        r for r in records(run) if name(r).rpartition("/")[0] == name(record).rpartition("/")[0]
    ]
    path = f"/runs/first/episodes/{name(record)}"
    found = page(client, path)
    assert len(group) == 4
    free = min(r["member"] for r in group if r["condition"] == "free")
    assert f"{path}?beside={free}" in links(found, "beside")
    assert {f"Member {r['member']}" for r in group if r != record} <= set(found.texts)
    pair = page(client, f"{path}?beside={free}")
    columns = [a["aria-label"] for tag, a in pair.tags if a.get("class") == "episode"]
    assert columns == [f"Member {record['member']}", f"Member {free}"]
    page(client, f"{path}?beside=9", 404)


@pytest.mark.parametrize(
    "path", ["9/0/0", "1/99/0", "1/0/99", "x/0/0", "-1/0/0", f"{'9' * 5000}/0/0", "1/0/²", "1/0/0x"]
)
def test_an_unknown_episode(client: TestClient, path: str):
    page(client, f"/runs/first/episodes/{path}", 404)


def test_an_episode_that_ended_with_an_error(client: TestClient, run: Path):
    change(run, 1, lambda found: found[0].update(error="env: <b>it broke</b>"))
    record = records(run)[0]
    text = page(client, f"/runs/first/episodes/{name(record)}").text
    assert "ended with an error" in text
    assert "env: <b>it broke</b>" in text


def test_long_episodes_are_cut_to_a_bounded_page(run: Path):
    record = next(r for r in records(run) if r["turns"] > 1)
    answer = next(s for s in record["segments"] if s["origin"] == "policy")
    record["segments"] = [answer | {"text": "y" * 5_000}] * 1000
    shown = view(record)
    texts = [text for turn in shown.turns for text in turn]
    assert len(texts) + shown.left_out == 1000
    assert sum(len(text.shown) for text in texts) < 400_000
    assert all(text.left_out == 5_000 - len(text.shown) for text in texts)


def test_hostile_episodes(run: Path):
    texts = list(HOSTILE.values())

    def edit(found: list[Record]) -> None:
        for i, record in enumerate(found):
            text = texts[i % len(texts)]
            record.update(goal=text, task=text[:100], error=text if i % 2 else None)
            record["segments"] = [s | {"text": text} for s in record["segments"][:2]]
            record["used"] = [use | {"uid": text[:500]} for use in record["used"]]
            record["params"] = {text[:100]: text[:100]}
            record["rewards"] = {text[:1000]: 1.0}

    change(run, 3, edit)
    with browser_of(run.parent) as client:
        paths = ["/runs/first/episodes"]
        for r in read_records(shards(run / "episodes")[3]):
            path = f"/runs/first/episodes/{name(r)}"
            paths += [
                path,
                f"{path}?beside=0",
                f"{path}/text?of=goal",
                f"{path}/text?text=1",
                f"{path}/text?text=1&part=2",
            ]
        for path in paths:
            started = time.monotonic()
            response = client.get(path)
            assert time.monotonic() - started < 20
            assert response.status_code == 200 or "part=2" in path
            assert len(response.content) < MAX_BYTES
            assert not (FORBIDDEN & set(response.text)) - {"\r"}
            if response.headers["content-type"].startswith("text/html"):
                assert "<script>alert" not in response.text
                for tag, attributes in Page(response.text).tags:
                    assert not any(key.startswith("on") or key == "style" for key in attributes), (
                        tag
                    )
                    assert (attributes.get("href") or "/").startswith(("/", "#"))
    texts_of = [a for a in paths if "/text" in a]
    assert texts_of
