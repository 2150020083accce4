"""Server-sent events of pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from crl.monitor.run_dir import RunDir
from crl.serve import events
from crl.serve.events import changes
from crl.serve.pages.parts import TITLES, row_versions, versions
from crl.serve.site import Site


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    monkeypatch.setattr("crl.serve.site.RESCAN_S", 0.0)


def content(event: Any) -> dict[str, str]:
    assert event.event == "parts"
    return json.loads(event.data)


async def test_the_first_event_has_all_versions_and_the_next_ones_what_changed():
    states = iter([{"a": "1", "b": "1"}, {"a": "1", "b": "1"}, {"a": "1", "b": "2", "c": "1"}])
    stream = changes(lambda: next(states), anyio.Event())
    assert content(await anext(stream)) == {"a": "1", "b": "1"}
    assert content(await anext(stream)) == {"b": "2", "c": "1"}


async def test_the_stream_ends_with_the_server():
    ending = anyio.Event()
    stream = changes(lambda: {"a": "1"}, ending)
    await anext(stream)
    ending.set()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


def changed(site: Site, run: Path, change: Any) -> set[str]:
    (found,) = site.runs()
    before = versions(site, found)
    assert list(before) == list(TITLES)
    change(RunDir(run))
    after = versions(site, found)
    return {name for name in after if after[name] != before[name]}


CHARTS = {"success", "time", "actor", "extractor", "bank"}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("metrics.jsonl", {"state"} | CHARTS),
        ("config.json", {"state"} | CHARTS),
        ("log.txt", {"state"}),
        ("progress.json", {"state"}),
        ("bank.sqlite", {"credit", "operations"}),
        ("bank.sqlite-wal", {"credit", "operations"}),
    ],
)
def test_a_file_changes_the_parts_that_show_it(tmp_path: Path, name: str, parts: set[str]):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").touch()

    def write(run: RunDir) -> None:
        (run.path / name).write_text("new")

    assert changed(Site(run), run, write) == parts


def test_the_start_and_the_end_of_a_run_are_changes(tmp_path: Path):
    (tmp_path / "config.json").touch()
    site = Site(tmp_path)
    before = row_versions(site)
    with RunDir(tmp_path).lock():
        under_way = row_versions(site)
        assert under_way != before
        assert "state" in versions(site, site.runs()[0])
    assert row_versions(site) == before


async def test_a_removed_part_is_named():
    states = iter([{"a": "1", "b": "1"}, {"b": "1"}])
    stream = changes(lambda: next(states), anyio.Event())
    await anext(stream)
    assert content(await anext(stream)) == {"a": None}


def test_new_runs_are_rows(tmp_path: Path):
    site = Site(tmp_path)
    assert row_versions(site) == {}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").touch()
    assert list(row_versions(site)) == ["new"]
