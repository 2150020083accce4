"""Search benchmark: it runs and returns the documented rows. Times are not checked."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import get_args

import pytest

from crl.embedders.hash import HashEmbedder
from support.paths import benchmark


@pytest.fixture(scope="module")
def search_latency():
    return benchmark("search_latency")


@pytest.fixture(scope="module")
def rows(search_latency):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)  # as if not installed
        return asyncio.run(search_latency.bank_latency(50, [1, 20], 0.0))


def test_there_is_a_row_for_every_load_and_embedder(search_latency, rows):
    kinds = [
        (load, what)
        for load in get_args(search_latency.Load)
        for what in ("asyncio", "numpy", "known")
    ] + [("idle", "encoder")]
    assert {(row["waiting"], row["load"], row["what"]) for row in rows} == {
        (waiting, *kind) for waiting in (1, 20) for kind in kinds
    }
    assert len(rows) == 2 * len(kinds)
    for row in rows:
        assert row["bank"] == 50
        assert 0 < row["p50"] <= row["p95"] <= row["max"]
        assert row["searches/s"] > 0
        assert ("ratio" in row) == (row["what"] == "known")


async def test_updates_and_merges_are_applied_and_the_size_of_the_bank_stays_constant(
    search_latency, tmp_path
):
    """Check both rounds. Before the second one, all entries were updated, merged or added."""
    embeddings = search_latency.LookupEmbedder(HashEmbedder())
    keys, episodes = (
        await search_latency.write_bank(tmp_path / "bank.sqlite", 20, embeddings),
        search_latency.BurstRequests(20),
    )
    await embeddings.store([search_latency.goal(0), search_latency.goal(1)])
    async with search_latency.open_manager(tmp_path / "bank.sqlite", embeddings) as manager:
        for waiting, load in itertools.product((1, 20), ("writes", "merge")):
            op, before = search_latency.LOAD_OPS[load], await manager.stats()
            results = await search_latency.measure(
                manager, embeddings, keys, episodes, waiting, load, 0.3
            )
            assert results["known"][f"{op}s/s"] >= 0
            assert (await manager.stats())[f"ops/{op}"] > before.get(f"ops/{op}", 0)
            assert 16 <= len(manager._bank.entries) <= 22


def test_without_matplotlib_there_is_no_plot(search_latency, rows, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # as if not installed
        search_latency.write_plot(search_latency.plot, rows, tmp_path / "results.json")
    assert capsys.readouterr().out == "no plot: matplotlib is not installed\n"
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_loads_compares_them_with_the_idle_bank(search_latency, rows):
    lines = search_latency.load_table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["p95", "50"] * 3
    p95 = {(row["waiting"], row["load"]): row["p95"] for row in rows if row["what"] == "known"}
    assert float(lines[1].split()[1]) == pytest.approx(p95[1, "writes"] / p95[1, "idle"], abs=0.005)


def test_the_plot_is_drawn(search_latency, rows, tmp_path):
    search_latency.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
