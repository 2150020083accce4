"""Pages about runs: complete, under way, damaged, and with hostile texts."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from crl.serve.pages.parts import TITLES
from crl.serve.security import MAX_BYTES
from support.hostile_texts import FORBIDDEN, HOSTILE

Change = Callable[[dict], None]

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages show every change at once."""
    monkeypatch.setattr("crl.serve.site.RESCAN_S", 0.0)
    monkeypatch.setattr("crl.serve.cache.LEAST_S", 0.0)
    monkeypatch.setattr("crl.serve.cache.COST_SHARE", 0.0)


def text(client: TestClient, address: str, status: int = 200) -> str:
    response = client.get(address)
    assert response.status_code == status, response.text
    return response.text


def change_config(run: Path, change: Change) -> None:
    saved = json.loads((run / "config.json").read_text())
    change(saved["config"])
    (run / "config.json").write_text(json.dumps(saved))


# ── list ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_has_the_state_of_each_run(client: TestClient, run: Path):
    html = text(client, "/")
    assert '<a href="/runs/first">first</a>' in html
    for words in ("finished", "complementary", "3 of 3", "room"):
        assert words in html
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    for condition in ("free", "guided"):
        rate = last[f"eval/room/seen/success/{condition}"]
        assert f'data-value="{rate}"' in html


def test_the_end_of_long_metrics_is_enough_for_the_list(
    client: TestClient, run: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = text(client, "/rows/first")
    monkeypatch.setattr("crl.serve.pages.parts.TAIL_BYTES", 20_000)
    with (run / "metrics.jsonl").open("r+") as file:
        lines = file.read()
        file.seek(0)
        file.write('{"step": 0, "kind": "other", "time": null}\n' * 10_000 + lines)
    assert text(client, "/rows/first").partition("<td>")[2] == whole.partition("<td>")[2]


def test_a_damaged_run_leaves_the_others_in_the_list(client: TestClient, run: Path):
    other = run.parent / "other"
    other.mkdir()
    (other / "config.json").write_text("{")
    html = text(client, "/")
    assert "finished" in html
    assert "other" in html
    assert "config.json" in html
    text(client, "/runs/other")


def test_an_empty_directory(client: TestClient, run: Path):
    shutil.rmtree(run)
    assert "There is no run in this directory yet." in text(client, "/")
    text(client, "/runs/first", 404)


# ── one run ───────────────────────────────────────────────────────────────────────────────────────


def test_the_page_of_a_run_has_all_charts(client: TestClient):
    html = text(client, "/runs/first")
    for title in TITLES.values():
        assert f">{title}</h2>" in html
    for title in ("room, seen places", "room, training episodes", "Wall time by part", "Entropy",
                  "Experiences in the bank", "Lift of the experiences"):  # fmt: skip
        assert f"<figcaption>{title}" in html
    assert "trained both models on room" in html
    assert "step 3 of 3" in html
    assert re.findall('data-part="([a-z]*)"[^>]* hidden>', html) == ["extractor"]


def test_parts_are_those_of_the_page(client: TestClient):
    html = text(client, "/runs/first")
    for name in TITLES:
        assert text(client, f"/runs/first/parts/{name}") in html
    text(client, "/runs/first/parts/none", 404)


def test_a_run_without_a_bank_and_without_metrics(client: TestClient, run: Path):
    for name in ("metrics.jsonl", "bank.sqlite", "log.txt"):
        (run / name).unlink()
    html = text(client, "/runs/first")
    assert "not started" in html
    assert html.count('" hidden>') == len(TITLES) - 1
    assert "The run has no log." in text(client, "/runs/first/log")


def test_a_bank_without_a_run(client: TestClient, run: Path):
    (run / "config.json").unlink()
    html = text(client, "/runs/first")
    assert "A bank without a run" in html
    assert "Lift of the experiences" in html
    assert "lost" not in html
    for page in ("settings", "log", "episodes"):
        assert f'href="/runs/first/{page}"' not in html
    row = text(client, "/rows/first")
    assert "Bank without a run" in row
    assert "checkbox" not in row


def test_a_run_whose_files_lie_elsewhere_is_listed_with_the_reason(
    client: TestClient, run: Path, tmp_path: Path
):
    other = run.parent / "other"
    other.mkdir()
    (tmp_path / "config.json").touch()
    (other / "config.json").symlink_to(tmp_path / "config.json")
    reason = f"config.json is a link that leads out of {run.parent}"
    assert reason in text(client, "/")
    assert reason in text(client, "/rows/other")
    assert reason in text(client, "/runs/other", 403)


def test_an_error_of_a_bank_keeps_the_navigation_of_the_run(client: TestClient, run: Path):
    (run / "bank.sqlite").write_bytes(b"no bank")
    html = text(client, "/runs/first/bank", 500)
    assert 'href="/runs/first/episodes"' in html
    assert "Error 500" in html


def test_a_run_under_way(client: TestClient, run: Path):
    """Step, stages, remaining time and warnings of a run that a process trains."""
    config = json.loads((run / "config.json").read_text())["config"]
    directory = RunDir(run)
    (run / "metrics.jsonl").unlink()
    with directory.lock():
        monitor = FileMonitor(directory)
        monitor.log(0, "eval", {"eval/room/seen/success/free": 0.25, "time/eval": 2.0})
        for step in (1, 2):
            monitor.log(step, "train", {"rollout/success": 0.5, "time/train": 1.0})
        monitor.note("warning: the reward <b>collapsed</b>")
        monitor.progress("evaluation", 3, 8)
        html = text(client, "/runs/first/parts/state")
        assert "under way" in html
        assert f"step 2 of {config['run']['steps']}" in html
        assert "Estimated remaining time" in html
        assert "evaluation" in html
        assert "3 of 8" in html
        assert "the reward &lt;b&gt;collapsed&lt;/b&gt;" in html
        assert "under way" in text(client, "/rows/first")
        monitor.close()
    html = text(client, "/runs/first/parts/state")
    assert re.search(r'class="badge">unfinished<', html)
    assert "The run ended before its last evaluation. It may have been killed." in html
    assert "3 of 8" not in html


def test_a_resumed_run_is_shown_from_its_new_start(client: TestClient, run: Path):
    assert "step 3 of 3" in text(client, "/runs/first/parts/state")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < 2]
    change_config(run, lambda config: config["run"].update(steps=9))
    (run / "new").write_text("".join(kept))
    (run / "new").replace(run / "metrics.jsonl")
    assert "step 1 of 9" in text(client, "/runs/first/parts/state")


def test_operations_link_to_the_lessons(client: TestClient, run: Path):
    html = text(client, "/runs/first/parts/operations")
    db = sqlite3.connect(run / "bank.sqlite")
    ((uid,),) = db.execute(
        "SELECT data ->> 'uid' FROM log WHERE kind = 'add' ORDER BY seq DESC LIMIT 1"
    )
    db.close()
    assert f"/runs/first/bank/lesson?uid={quote(uid, safe='')}" in html
    assert "added" in html


@pytest.mark.parametrize("content", [b"no bank", b"", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_bank_leaves_the_rest_of_the_page(client: TestClient, run: Path, content: bytes):
    (run / "bank.sqlite").write_bytes(content)
    html = text(client, "/runs/first")
    assert "The bank cannot be read" in html
    assert "step 3 of 3" in html
    assert "Wall time by part" in html


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1%s, "kind": "train", "time": 1.0, "actor/loss": 1}' % ("0" * 4000),
        '{"step": 1, "kind": "eval", "time": 1, "eval/room/seen/success/free": 1%s}' % ("0" * 4000),
        '{"step": 3, "kind": "train", "time": NaN, "actor/loss": Infinity}',
        '{"step": 3, "kind": "train", "time": "text", "actor/loss": -1e999}',
        '{"step": 3, "kind": ["eval"], "time": 1.0}',
        '{"step": 3, "kind": "eval", "time": 1.0, "eval/room/seen/success/free": "text"}',
        "[" * 100_000,
        '{"step": true, "kind": "train", "time": 1.0}',
        '{"step": -5, "kind": "train", "time": -1.0}',
    ],
    ids=range(9),
)
def test_damaged_metrics_leave_pages(client: TestClient, run: Path, line: str):
    """A line that no run writes makes no page fail."""
    shutil.copytree(run, run.parent / "whole")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert "3 of 3" in text(client, "/")
    html = text(client, "/runs/first")
    assert "Lift of the experiences" in html
    text(client, "/runs/first/settings")
    html = text(client, "/compare?run=first&run=whole")
    assert "Wall time by part" in html


def test_damaged_lines_of_metrics_are_reported(client: TestClient, run: Path):
    shutil.copytree(run, run.parent / "whole")
    note = "metrics.jsonl: 2 damaged lines are left out"
    pages = ("/runs/first", "/compare?run=first&run=whole")
    for page in pages:
        assert "damaged" not in text(client, page)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ki\n[]\n{"step": 3, "kind"')
    for page in pages:
        assert text(client, page).count(note) == 1
    assert note not in text(client, "/runs/whole")


def test_operations_with_huge_texts(client: TestClient, run: Path):
    """The last operations of a bank: their uids and texts are long, but the page is not."""
    texts = {name: name[0] * 2**22 for name in ("uid", "text", "reason")}
    huge = json.dumps({"version": 1, **texts})
    with closing(sqlite3.connect(run / "bank.sqlite")) as db:
        for kind in ("add", "drop", "evict"):
            db.execute(
                "INSERT INTO log SELECT MAX(seq) + 1, MAX(step), 0, ?, ?, 0, ? FROM log",
                (kind, "o" * 2**22, huge),
            )
        db.commit()
    html = text(client, "/runs/first")
    assert len(html) < 2**20
    assert "u" * 200 not in html.replace("t" * 200, "")
    assert "Last operations of the bank" in html


def test_settings(client: TestClient):
    html = text(client, "/runs/first/settings")
    assert "rollout.group_size" in html
    assert "Different from the preset cpu" in html
    assert "crl train" in html


def test_the_log_is_shown_in_parts(client: TestClient, run: Path, monkeypatch):
    monkeypatch.setattr("crl.serve.pages.runs.LOG_BYTES", 1000)
    lines = [f"line {number:04}" for number in range(500)]
    (run / "log.txt").write_text("\n".join(lines))
    found: list[str] = []
    address = "/runs/first/log"
    while address:
        html = text(client, address)
        found = html.partition('<pre tabindex="0">')[2].partition("</pre>")[0].split() + found
        link = html.partition('href="?to=')[2].partition('"')[0]
        address = f"/runs/first/log?to={link}" if link else ""
    assert found == " ".join(lines).split()
    for number in ("x", "-1", "1" * 20, "٣"):
        text(client, f"/runs/first/log?to={number}", 400)
    text(client, "/runs/first/log?to=99999999")


# ── comparison ────────────────────────────────────────────────────────────────────────────────────


def test_runs_of_two_arms_are_compared(client: TestClient, run: Path):
    other = Path(shutil.copytree(run, run.parent / "other"))
    change_config(other, lambda c: c["actor"]["optimizer"].update(learning_rate=0.125))
    html = text(client, "/compare?run=first&run=other")
    assert "actor.optimizer.learning_rate" in html
    assert "0.125" in html
    assert "B − A" in html
    assert 'href="/runs/first/bank/diff?other=other"' in html
    assert "room, seen places, without experience" in html


def test_runs_of_two_seeds_are_averaged(client: TestClient, run: Path):
    other = Path(shutil.copytree(run, run.parent / "other"))
    change_config(other, lambda c: c["run"].update(seed=1))
    html = text(client, "/compare?run=first&run=other")
    assert "95 % intervals of the mean over seeds." in html
    assert "agree but for the seed" in html


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("run=first", 303),
        ("run=first&run=first", 303),
        ("run=first&run=none", 404),
        ("run=none", 404),
        ("&".join(f"run=x{number}" for number in range(30)), 400),
    ],
)
def test_comparisons_that_cannot_be_made(client: TestClient, query: str, status: int):
    response = client.get(f"/compare?{query}", follow_redirects=False)
    assert response.status_code == status


# ── hostile texts ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped(client: TestClient, run: Path, name: str):
    """In the log, warnings, settings, metrics, stages, operations, and in the name of the run."""
    hostile = HOSTILE[name]
    encodable = hostile.encode("utf-8", "replace").decode()
    with (run / "log.txt").open("a", errors="backslashreplace") as file:
        file.write(f"\n2026-01-01 00:00:00 warning: {hostile}\n{hostile}\n")
    with (run / "metrics.jsonl").open("a") as file:
        line = {"step": 3, "kind": "eval", "time": 1.0, "eval/room/seen/success/free": 0.5}
        key = f"eval/{hostile[:1000].replace('/', '')}/seen/success/free"
        file.write(json.dumps(line | {key: 0.5}) + "\n")
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"command": hostile}))
    stage = {"stage": hostile, "done": 1, "total": 2, "elapsed": 1.0, "remaining": 1.0}
    (run / "progress.json").write_text(json.dumps({"stages": [stage]}))
    db = sqlite3.connect(run / "bank.sqlite")
    with db:
        db.execute(
            "UPDATE log SET data = json_set(data, '$.text', ?) WHERE kind = 'add'", (encodable,)
        )
    db.close()
    with RunDir(run).lock():
        addresses = ["/", "/runs/first", "/runs/first/settings", "/runs/first/log"]
        pages = [client.get(address).text for address in addresses]
    assert "under way" in pages[1]
    for address, html in zip(addresses, pages, strict=True):
        assert "<script>alert" not in html, address
        assert "<img src=x" not in html, address
        assert not FORBIDDEN & set(html), address
        assert len(html.encode()) < MAX_BYTES, address
        assert "{{" not in html, address


@pytest.mark.parametrize(
    "name", ["<b onclick=x>", "a\x1b[31m", "\u202eevil", "%2e%2e", "a&run=b", "x" * 200, "'\"`;"]
)
def test_hostile_names_of_runs(client: TestClient, run: Path, name: str):
    run.rename(run.parent / name)
    html = text(client, "/")
    assert "<b onclick" not in html
    assert not FORBIDDEN & set(html)
    assert "\x1b" not in html
    id = html.partition('href="/runs/')[2].partition('"')[0]
    assert "step 3 of 3" in text(client, f"/runs/{id}")
    assert "rollout.group_size" in text(client, f"/runs/{id}/settings")


def test_names_of_undecodable_bytes(client: TestClient, run: Path):
    import os

    os.rename(run, os.fsencode(run.parent) + b"/\xff\xfe")
    id = text(client, "/").partition('href="/runs/')[2].partition('"')[0]
    assert "step 3 of 3" in text(client, f"/runs/{id}")
