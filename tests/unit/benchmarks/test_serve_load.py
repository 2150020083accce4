"""Benchmark of searches with open pages: it runs and counts. Times are not checked."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from support.paths import benchmark


@pytest.fixture(scope="module")
def serve_load():
    return benchmark("serve_load")


def test_searches_are_measured_with_and_without_pages(serve_load, tmp_path, monkeypatch, capsys):
    measured = asyncio.run(serve_load.measure(50, 2, 2.0, 1))
    for kind in ("without", "with"):
        assert measured[kind]["searches"] >= 2 * serve_load.WAITING
        assert 0 < measured[kind]["p50"] <= measured[kind]["p95"] <= measured[kind]["max"]
    assert measured["ratio"] == pytest.approx(measured["with"]["p95"] / measured["without"]["p95"])
    assert measured["responses"] > 0

    async def measure(*_: object) -> dict:
        return measured

    monkeypatch.setattr(serve_load, "measure", measure)
    serve_load.main(["--quick", "--out", str(tmp_path / "out.json")])
    assert "p95 with / without pages" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["ratio"] == measured["ratio"]


def test_noise_is_the_quotient_of_halves(serve_load):
    phases = [[np.array([value] * 4)] for value in (0.1, 0.2, 0.1, 0.2)]
    assert serve_load.noise(phases) == pytest.approx(2)
    assert serve_load.noise(phases[:1]) is None
