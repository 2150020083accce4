"""The runs of a directory and their ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from crl.errors import ConfigError
from crl.serve.site import MAX_RUNS, Site, find_runs, run_id


def new_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_runs_are_found_at_every_depth(tmp_path: Path):
    runs = [new_run(tmp_path / name) for name in ("a", "b/c", "b/d e")]
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "bank.sqlite").touch()
    new_run(tmp_path / ".hidden" / "run")
    new_run(tmp_path / "a" / "checkpoints" / "1")
    site = Site(tmp_path)
    assert {run.name: run.id for run in site.runs()} == {
        "a": "a",
        "b/c": run_id("b/c"),
        "b/d e": run_id("b/d e"),
        "bank": "bank",
    }
    assert [site.found(run.id).dir.path for run in site.runs()][:3] == runs


def test_a_site_of_one_run(tmp_path: Path):
    run = new_run(tmp_path / "my run")
    (found,) = Site(run).runs()
    assert (found.name, found.dir.path) == ("my run", run)


def test_new_runs_are_found_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crl.serve.site.RESCAN_S", 0.0)
    site = Site(tmp_path)
    assert site.runs() == []
    new_run(tmp_path / "new")
    assert [run.name for run in site.runs()] == ["new"]


def test_links_do_not_lead_outside(tmp_path: Path):
    outside = new_run(tmp_path / "outside")
    root = tmp_path / "root"
    new_run(root / "own")
    (root / "link").symlink_to(outside)
    (root / "folder").mkdir()
    (root / "folder" / "config.json").symlink_to(outside / "config.json")
    log = new_run(root / "log")
    (log / "log.txt").symlink_to("/etc/passwd")
    inside = new_run(root / "inside")
    (inside / "log.txt").symlink_to(root / "own" / "config.json")
    episodes = new_run(root / "episodes-of-others") / "episodes"
    episodes.symlink_to(tmp_path)
    checkpoints = new_run(root / "large-disk") / "checkpoints"
    checkpoints.symlink_to(tmp_path)
    site = Site(root)
    foreign = {run.name: run.foreign for run in site.runs() if run.foreign}
    assert foreign == {
        "episodes-of-others": "episodes", "folder": "config.json", "log": "log.txt",
    }  # fmt: skip
    assert {run.name for run in site.runs()} - foreign.keys() == {"inside", "large-disk", "own"}
    for name in foreign:
        with pytest.raises(HTTPException, match="is a link that leads out of") as caught:
            site.found(name)
        assert caught.value.status_code == 403


def test_links_of_episodes_do_not_lead_outside(tmp_path: Path):
    run = new_run(tmp_path / "root" / "run")
    (run / "episodes").mkdir()
    site = Site(tmp_path / "root")
    assert site.found("run")
    (run / "episodes" / "000001.jsonl.gz").symlink_to("/etc/passwd")
    with pytest.raises(HTTPException, match=r"000001\.jsonl\.gz is a link"):
        site.found("run")


def test_a_directory_that_cannot_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Permissions do not stop root, so the error of the system is raised here."""
    own, closed = new_run(tmp_path / "own"), new_run(tmp_path / "closed")
    stat = os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert find_runs(tmp_path) == [own]


def test_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("crl.serve.site.MAX_RUNS", 3)
    assert MAX_RUNS > 100
    for number in range(5):
        new_run(tmp_path / str(number))
    assert len(find_runs(tmp_path)) == 3


def test_a_path_that_is_no_directory(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a directory"):
        Site(tmp_path / "none")


@given(st.text())
def test_ids_are_safe_in_addresses(name: str):
    assert set(run_id(name)) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
    )


@given(st.text(min_size=1), st.text(min_size=1))
def test_ids_differ(one: str, other: str):
    assert (run_id(one) == run_id(other)) == (one == other)


def test_every_found_id_names_its_run(tmp_path: Path):
    """Also a run whose name is the id of another one."""
    new_run(tmp_path / "a b")
    new_run(tmp_path / run_id("a b"))
    site = Site(tmp_path)
    assert len(site.runs()) == 2
    for run in site.runs():
        assert site.found(run.id).dir.path == run.dir.path == tmp_path / run.name
