"""`crl bank` commands that change a bank: retry of dead requests, pruning."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.manager import ExperienceManager
from support.bank_commands import (
    bank,
    copy_of,
    diverge,
    error_line,
    finished_run,
    lines,
    open_bank,
    parsed,
    play_second_run,
    uids,
)
from support.doors import renderer
from support.managers import add, logged


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run. No test changes it."""
    return finished_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return copy_of(run, tmp_path)


# ── dead --retry ──────────────────────────────────────────────────────────────────────────────────


def test_dead_episodes_can_be_retried(copy: Path):
    assert lines("dead", copy, "--retry") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]
    assert [one["id"] for one in parsed("queue", copy)] == ["run/0/0/3", "run/2/1/0"]
    assert parsed("dead", copy) == []

    async def go_on() -> dict[str, int]:
        engine = ScriptedEngine(renderer(), lambda prompt: add("Go north."))
        manager = await open_bank(copy, engine=engine)
        await manager.drain()
        metrics = await manager.stats()
        await manager.aclose()
        return metrics

    metrics = asyncio.run(go_on())
    assert (metrics["queue/pending"], metrics["queue/dead"], metrics["queue/done"]) == (0, 0, 9)
    assert lines("dead", copy, "--retry") == ["there are no dead episodes"]


def test_some_dead_episodes_can_be_retried(copy: Path):
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE requests SET state = 'dead', reason = 'busy' WHERE state = 'pending'")
    before = parsed("dead", copy)
    assert [one["id"] for one in before] == ["run/0/0/3", "run/2/1/0"]
    unknown = error_line("dead", copy, "--retry", "run/2/1/0", "nobody", "run/0/0/0", code=1)
    assert unknown == (
        f"error: {copy}: no dead episodes have these ids: nobody, run/0/0/0. "
        "Nothing was changed. List the dead episodes with crl bank dead.\n"
    )
    assert "can only be given with --retry" in error_line("dead", copy, "run/2/1/0")
    assert parsed("dead", copy) == before
    assert lines("dead", copy, "--retry", "run/2/1/0") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]
    assert [one["id"] for one in parsed("queue", copy)] == ["run/2/1/0"]
    assert lines("dead", copy, "run/0/0/3", "--retry") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]


def test_an_episode_can_be_retried_twice(copy: Path):
    async def die_again() -> None:
        manager = await open_bank(copy)
        await manager.drain()
        await manager.aclose()

    for _ in range(2):
        lines("dead", copy, "--retry")
        asyncio.run(die_again())
        assert len(parsed("dead", copy)) == 1
    assert [origin for origin, _ in logged(copy, "revive")] == ["run/0/0/3"] * 2


# ── prune ─────────────────────────────────────────────────────────────────────────────────────────


def test_prune_evicts_the_lowest_credit_and_keeps_the_history(copy: Path):
    asyncio.run(diverge(copy))  # credit: 0/0/0#0 −1, 0/1/0#0 −1
    assert lines("prune", copy, "--max-entries", "4", "--yes") == ["evicted 1, still active 4"]
    assert uids(copy, "--status", "evicted", "--sort", "age")[-1] == "run/0/0/0#1"
    assert lines("show", copy, "0/1/0#0")[0].startswith("run/0/1/0#0, version 1, evicted at step ")
    assert lines("show", copy, "0/1/0#0")[0].endswith("by crl bank prune")
    assert lines("prune", copy, "--max-entries", "4", "--yes") == [
        "nothing to evict among 4 active experiences"
    ]

    async def guiding() -> set[str]:
        manager = await open_bank(copy)
        guides = set(manager._bank.entries)
        await manager.aclose()
        return guides

    assert "run/0/1/0#0" not in asyncio.run(guiding())


def test_prune_evicts_entries_unused_since_a_step(copy: Path):
    assert lines("prune", copy, "--unused-since", "2", "--yes") == ["evicted 2, still active 3"]
    # The first entry was retrieved at step 2. The others were written then.
    assert set(uids(copy)) == {
        "run/0/0/0#0",
        "run/2/0/0#0",
        "run/2/0/0#1",
    }


def test_uses_in_an_earlier_run_do_not_count(run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(play_second_run(run / "bank.sqlite", path))
    assert lines("prune", path, "--unused-since", "1", "--yes") == ["evicted 4, still active 2"]
    # The first entry was retrieved at step 1 of this run. The other was written then.
    assert set(uids(path)) == {
        "run/0/0/0#0",
        "again/1/0/0#0",
    }


def test_pruning_before_the_first_operation_uses_the_runs_clock(run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(ExperienceManager.start_from(run / "bank.sqlite", path))
    assert lines("prune", path, "--max-entries", "4", "--yes") == ["evicted 1, still active 4"]
    assert (
        lines("show", path, "0/1/0#0")[0]
        == "run/0/1/0#0, version 1, evicted at step 0 by crl bank prune"
    )


def test_prune_asks_for_confirmation(copy: Path):
    result = bank("prune", copy, "--max-entries", "1", input="n\n")
    assert result.exit_code == 1
    assert "Evict 4 of 5 active experiences? [y/N]" in result.output
    assert "0/1/0#0" in result.output
    assert len(uids(copy)) == 5
    assert bank("prune", copy, "--max-entries", "1", input="").exit_code == 1, (
        "no answer at end of input"
    )
    assert len(uids(copy)) == 5
    assert bank("prune", copy, "--max-entries", "1", input="y\n").exit_code == 0
    assert uids(copy) == ["run/0/0/0#0"]


def test_changes_can_be_printed_as_json(copy: Path, tmp_path: Path):
    assert "prune = '--json': the output is JSON" in error_line(
        "prune", copy, "--max-entries", "2", "--json"
    )
    assert parsed("prune", copy, "--max-entries", "2", "--yes") == {"evicted": 3, "active": 2}
    assert parsed("prune", copy, "--max-entries", "2", "--yes") == {"evicted": 0, "active": 2}
    (tmp_path / "lessons.jsonl").write_text(bank("export", copy).stdout, "utf-8")
    new = tmp_path / "new.sqlite"
    assert parsed("import", new, tmp_path / "lessons.jsonl") == {
        "imported": 2,
        "new": 0,
        "left_out": 0,
        "bank": str(new),
    }


def test_an_unknown_order_is_refused(copy: Path):
    assert "--sort = 'age2': is not one of the choices. Did you mean age? Available: lift, " in (
        error_line("ls", copy, "--sort", "age2")
    )


def test_prune_needs_one_criterion(copy: Path):
    assert "--max-entries, --unused-since = None: exactly one criterion is required" in error_line(
        "prune", copy
    )
    assert "one criterion" in error_line("prune", copy, "--max-entries", "1", "--unused-since", "1")
