"""`crl bank` commands that change a bank: retry of dead requests, pruning."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from crl.engines.scripted import ScriptedEngine
from crl.manager import ExperienceManager
from support.bank_commands import (
    bank,
    diverge,
    error_line,
    lines,
    open_bank,
    parsed,
    play_second_run,
    uids,
)
from support.doors import renderer
from support.managers import add, logged

# ── dead --retry ──────────────────────────────────────────────────────────────────────────────────


def test_dead_episodes_can_be_retried(bank_copy: Path):
    assert lines("dead", bank_copy, "--retry") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]
    assert [one["id"] for one in parsed("queue", bank_copy)] == ["run/0/0/3", "run/2/1/0"]
    assert parsed("dead", bank_copy) == []

    async def go_on() -> dict[str, int]:
        engine = ScriptedEngine(renderer(), lambda prompt: add("Go north."))
        manager = await open_bank(bank_copy, engine=engine)
        await manager.drain()
        metrics = await manager.stats()
        await manager.aclose()
        return metrics

    metrics = asyncio.run(go_on())
    assert (metrics["queue/pending"], metrics["queue/dead"], metrics["queue/done"]) == (0, 0, 9)
    assert lines("dead", bank_copy, "--retry") == ["there are no dead episodes"]


def test_some_dead_episodes_can_be_retried(bank_copy: Path):
    with sqlite3.connect(bank_copy) as db:
        db.execute("UPDATE requests SET state = 'dead', reason = 'busy' WHERE state = 'pending'")
    before = parsed("dead", bank_copy)
    assert [one["id"] for one in before] == ["run/0/0/3", "run/2/1/0"]
    unknown = error_line("dead", bank_copy, "--retry", "run/2/1/0", "nobody", "run/0/0/0", code=1)
    assert unknown == (
        f"error: {bank_copy}: no dead episodes have these ids: nobody, run/0/0/0. "
        "Nothing was changed. List the dead episodes with crl bank dead.\n"
    )
    assert "can only be given with --retry" in error_line("dead", bank_copy, "run/2/1/0")
    assert parsed("dead", bank_copy) == before
    assert lines("dead", bank_copy, "--retry", "run/2/1/0") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]
    assert [one["id"] for one in parsed("queue", bank_copy)] == ["run/2/1/0"]
    assert lines("dead", bank_copy, "run/0/0/3", "--retry") == [
        "queued 1 dead episode again; it waits until the run continues"
    ]


def test_an_episode_can_be_retried_twice(bank_copy: Path):
    async def die_again() -> None:
        manager = await open_bank(bank_copy)
        await manager.drain()
        await manager.aclose()

    for _ in range(2):
        lines("dead", bank_copy, "--retry")
        asyncio.run(die_again())
        assert len(parsed("dead", bank_copy)) == 1
    assert [origin for origin, _ in logged(bank_copy, "revive")] == ["run/0/0/3"] * 2


# ── prune ─────────────────────────────────────────────────────────────────────────────────────────


def test_prune_evicts_the_lowest_credit_and_keeps_the_history(bank_copy: Path):
    asyncio.run(diverge(bank_copy))  # credit: 0/0/0#0 −1, 0/1/0#0 −1
    assert lines("prune", bank_copy, "--max-entries", "4", "--yes") == ["evicted 1, still active 4"]
    assert uids(bank_copy, "--status", "evicted", "--sort", "age")[-1] == "run/0/0/0#1"
    assert lines("show", bank_copy, "0/1/0#0")[0].startswith(
        "run/0/1/0#0, version 1, evicted after step "
    )
    assert lines("show", bank_copy, "0/1/0#0")[0].endswith("by crl bank prune")
    assert lines("prune", bank_copy, "--max-entries", "4", "--yes") == [
        "nothing to evict among 4 active experiences"
    ]

    async def guiding() -> set[str]:
        manager = await open_bank(bank_copy)
        guides = set(manager._bank.entries)
        await manager.aclose()
        return guides

    assert "run/0/1/0#0" not in asyncio.run(guiding())


def test_prune_evicts_entries_unused_since_a_step(bank_copy: Path):
    assert lines("prune", bank_copy, "--unused-since", "2", "--yes") == [
        "evicted 2, still active 3"
    ]
    # The first entry was retrieved at step 2. The others were written then.
    assert set(uids(bank_copy)) == {
        "run/0/0/0#0",
        "run/2/0/0#0",
        "run/2/0/0#1",
    }


def test_uses_in_an_earlier_run_do_not_count(bank_run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(play_second_run(bank_run / "bank.sqlite", path))
    assert lines("prune", path, "--unused-since", "1", "--yes") == ["evicted 4, still active 2"]
    # The first entry was retrieved at step 1 of this run. The other was written then.
    assert set(uids(path)) == {
        "run/0/0/0#0",
        "again/1/0/0#0",
    }


def test_pruning_before_the_first_operation_uses_the_runs_clock(bank_run: Path, tmp_path: Path):
    path = tmp_path / "bank.sqlite"
    asyncio.run(ExperienceManager.start_from(bank_run / "bank.sqlite", path))
    assert lines("prune", path, "--max-entries", "4", "--yes") == ["evicted 1, still active 4"]
    assert (
        lines("show", path, "0/1/0#0")[0]
        == "run/0/1/0#0, version 1, evicted after step 0 by crl bank prune"
    )


def test_prune_asks_for_confirmation(bank_copy: Path):
    result = bank("prune", bank_copy, "--max-entries", "1", input="n\n")
    assert result.exit_code == 1
    assert "Evict 4 of 5 active experiences? [y/N]" in result.output
    assert "0/1/0#0" in result.output
    assert len(uids(bank_copy)) == 5
    assert bank("prune", bank_copy, "--max-entries", "1", input="").exit_code == 1, (
        "no answer at end of input"
    )
    assert len(uids(bank_copy)) == 5
    assert bank("prune", bank_copy, "--max-entries", "1", input="y\n").exit_code == 0
    assert uids(bank_copy) == ["run/0/0/0#0"]


def test_changes_can_be_printed_as_json(bank_copy: Path, tmp_path: Path):
    assert "prune = '--json': the output is JSON" in error_line(
        "prune", bank_copy, "--max-entries", "2", "--json"
    )
    assert parsed("prune", bank_copy, "--max-entries", "2", "--yes") == {"evicted": 3, "active": 2}
    assert parsed("prune", bank_copy, "--max-entries", "2", "--yes") == {"evicted": 0, "active": 2}
    (tmp_path / "lessons.jsonl").write_text(bank("export", bank_copy).stdout, "utf-8")
    new = tmp_path / "new.sqlite"
    assert parsed("import", new, tmp_path / "lessons.jsonl") == {
        "imported": 2,
        "new": 0,
        "left_out": 0,
        "bank": str(new),
    }


def test_an_unknown_order_is_refused(bank_copy: Path):
    assert "--sort = 'age2': is not one of the choices. Did you mean age? Available: lift, " in (
        error_line("ls", bank_copy, "--sort", "age2")
    )


def test_prune_needs_one_criterion(bank_copy: Path):
    assert "--max-entries, --unused-since = None: exactly one criterion is required" in error_line(
        "prune", bank_copy
    )
    assert "one criterion" in error_line(
        "prune", bank_copy, "--max-entries", "1", "--unused-since", "1"
    )
