"""Benchmark of rollout latency: the load of its arms, and its figures in the documentation."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import benchmark

latency_figures = benchmark("latency_figures")
latency_model = benchmark("latency_model")
report = benchmark("report")
rollout_latency = benchmark("rollout_latency")

ENVIRONMENTS, REPETITIONS = 8, 2


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the latency model fast and the bank small."""
    for rate in ("REQUEST_RATE", "TOTAL_RATE", "PREFILL_RATE"):
        monkeypatch.setattr(latency_model, rate, 1e7)
    monkeypatch.setattr(latency_model, "TICK_S", 0.001)
    monkeypatch.setattr(rollout_latency, "ENTRIES", 16)


@pytest.mark.usefixtures("fast")
async def test_every_rollout_with_experience_distils_the_previous_one(tmp_path: Path) -> None:
    async with rollout_latency.latency_model(1, tmp_path) as setup:
        measured = await rollout_latency.measure(setup, ENVIRONMENTS, REPETITIONS)
        stats = await setup.experience.manager.stats()
    with_experience = [name for name, arm in rollout_latency.ARMS.items() if arm.share]
    assert with_experience == ["on", "ask", "critic"]
    assert stats["ops/submit"] == len(with_experience) * REPETITIONS * ENVIRONMENTS
    for name, results in measured.items():
        distilled = ENVIRONMENTS if name in with_experience else 0
        assert results.distilled == [distilled] * REPETITIONS, name
        assert results.failed == 0


@pytest.mark.usefixtures("fast")
async def test_episodes_that_the_bank_knows_are_an_error(tmp_path: Path) -> None:
    arm, unused = rollout_latency.ARMS["on"], rollout_latency.Measurements()
    async with rollout_latency.latency_model(1, tmp_path) as setup:

        async def rollout(number: int, previous: Any) -> Any:
            return await rollout_latency.rollout(
                setup, arm, ENVIRONMENTS, 0, number, previous, unused
            )

        batch = await rollout(0, ())
        await rollout(1, batch)
        with pytest.raises(RuntimeError, match="rollout 2 distilled 0 episodes instead of 8"):
            await rollout(2, batch)


def test_an_interrupted_measurement_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, calls = tmp_path / "out.json", []

    async def measure_engine(engine: str, environments: int, *_: int) -> list[dict]:
        calls.append(environments)
        if calls == [16, 64]:
            raise KeyboardInterrupt
        return rows(engine, environments, on=1.0, critic=1.1, search_ms=5.0)

    monkeypatch.setattr(rollout_latency, "measure_engine", measure_engine)
    command = ["rollout_latency.py", "--engines", "tiny model", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*command, "--environments", "16", "64"])
    with pytest.raises(KeyboardInterrupt):
        rollout_latency.main()
    assert not out.exists()
    rollout_latency.main()
    assert calls == [16, 64, 64]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert [row["environments"] for row in json.loads(out.read_text())["rows"]] == [16] * 4 + [
        64
    ] * 4
    assert "### Figure 14b" in capsys.readouterr().out


def rows(engine: str, environments: int, *, on: float, critic: float, search_ms: float) -> list:
    """Return rows of two repetitions whose rollouts take 10 and 20 s without experience."""
    factors = {"off": 1.0, "on": on, "ask": 1.5, "critic": critic}
    search = {"p50": 1.0, "p95": 2.0, "max": search_ms}
    lag = {"p50": 1.0, "p99": 4.0, "max": 9.0}
    return [
        {
            "engine": engine,
            "environments": environments,
            "arm": arm,
            "rollout_s": [10 * factor, 20 * factor],
            "ratio": [factor - 0.001, factor + 0.001],
            "left_s": [0.5, 1.5],
            "distilled": [0 if arm == "off" else environments] * 2,
            "searches": 8,
            "search_ms": {} if arm == "off" else search,
            "search_ms_each": [] if arm == "off" else [{**search, "mean": 1.5}] * 2,
            "lag_ms": lag,
            "lag_ms_each": [lag] * 2,
        }
        for arm, factor in factors.items()
    ]


def results(*of_sizes: list) -> dict:
    """Return results of `rollout_latency.py`."""
    return {
        "machine": {"processor": "a processor", "cpus": 2},
        "repetitions": 2,
        "seconds": 1800.0,
        "rows": list(chain(*of_sizes)),
    }


def verdicts(stored: dict) -> dict[str, list[str]]:
    return {
        name: [judged.verdict for judged in figure.judge(stored["rows"]) if not judged.added]
        for name, figure in latency_figures.FIGURES.items()
    }


def test_claims_on_times_follow_the_interval_and_searches_the_maximum() -> None:
    good = rows("e", 16, on=1.0, critic=1.1, search_ms=999.0)
    assert verdicts(results(good)) == {"9c": ["agrees"], "12": ["agrees"], "14b": ["agrees"]}
    bad = rows("f", 16, on=1.1, critic=1.05, search_ms=1001.0)
    assert verdicts(results(good, bad)) == {
        "9c": ["agrees", "disagrees"],
        "12": ["disagrees"],
        "14b": ["agrees", "not shown"],
    }
    # The ratio of a repetition is the mean over the sizes: (1.0 + 1.2) / 2.
    larger = rows("e", 64, on=1.2, critic=1.1, search_ms=1.0)
    assert verdicts(results(good, larger))["9c"] == ["disagrees"]
    judged = latency_figures.FIGURES["9c"].judge([*good, *larger])
    assert judged[0].text == "on at most 5 % slower than off, e: ratio 1.100 ± 0.013"
    # Claims about `ask` (factor 1.5) were added after the runs.
    assert [(added.text[:3], added.verdict) for added in judged if added.added] == [
        ("ask", "disagrees")
    ]


def test_sections_have_claim_numbers_command_machine_and_time() -> None:
    stored = results(
        rows("e", 16, on=1.0, critic=1.1, search_ms=5.0),
        rows("e", 1024, on=1.0, critic=1.2, search_ms=870.0),
    )
    text = {name: latency_figures.section(name, stored) for name in latency_figures.FIGURES}
    for section in text.values():
        assert "*Claim:*" in section
        assert "25 November 2026" in section
        assert latency_figures.COMMAND in section
        assert "0.5 hours (a processor, 2 CPUs)" in section
        assert "|  | 16 | 1,024 |" in section
        assert max(map(len, section.splitlines())) <= 100
    assert "| ask: ratio to off | 1.500 ± 0.000 | 1.500 ± 0.000 |" in text["9c"]
    assert "| critic: search max (ms) | 5.000 | 870.000 |" in text["12"]
    assert "870 ms, in the arm on (e, 1,024" in text["12"].replace("\n  ", " ")
    assert "| critic: ratio to on | 1.100 ± 0.000 | 1.200 ± 0.000 |" in text["14b"]
    assert "| off: lag p99 (ms) | 4.000 ± 0.000 |" in latency_figures.background(stored)


def test_the_documentation_has_the_figures_and_their_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = results(rows("e", 16, on=1.0, critic=1.0, search_ms=5.0))
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(stored), "utf-8")
    monkeypatch.setattr(latency_figures, "LATENCY", path)
    folder = tmp_path / "results"
    folder.mkdir()
    summary, page = folder / "figures.md", folder / "speed.md"
    summary.write_text(f"{report.BEGIN}\n{report.END}\n", "utf-8")
    page.write_text(
        f"## Rollout latency\n\n{report.LATENCY_BEGIN}\nearlier text\n{report.LATENCY_END}\n"
        "The end.\n",
        "utf-8",
    )
    for _ in range(2):
        report.document({}, folder)
    text = page.read_text("utf-8")
    assert "earlier text" not in text
    assert text.endswith("The end.\n")
    assert "| [Figure 14b](speed.md#figure-14b) | The actor as critic slows" in summary.read_text()
    for name, figure in latency_figures.FIGURES.items():
        assert text.count(f"### Figure {name}\n") == 1
        assert text.count(f"![Figure {name}](../images/figures/{name}.svg)") == 1
        svg = (tmp_path / "images" / "figures" / f"{name}.svg").read_text("utf-8")
        for arm in figure.arms:
            assert f"<!-- {arm} -->" in svg


def test_a_picture_shows_every_repetition() -> None:
    from matplotlib.figure import Figure

    panel = Figure().add_subplot()
    figure = latency_figures.FIGURES["9c"]
    columns = {16: {row["arm"]: row for row in rows("e", 16, on=2.0, critic=1.0, search_ms=5.0)}}
    latency_figures.draw_panel(panel, figure.quantities[0], columns, figure.arms)
    points = [
        np.asarray(line.get_ydata()).tolist() for line in panel.lines if line.get_marker() == "."
    ]
    assert points == [[10, 20], [20, 40], [15, 30]]


def test_results_whose_arms_did_not_distil_are_not_used(tmp_path: Path) -> None:
    stored = results(rows("e", 16, on=1.0, critic=1.0, search_ms=5.0))
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(stored), "utf-8")
    assert latency_figures.load(path) == stored
    stored["rows"][1]["distilled"] = [16, 0]
    path.write_text(json.dumps(stored), "utf-8")
    assert latency_figures.load(path) is None
    del stored["rows"][1]["distilled"]
    path.write_text(json.dumps(stored), "utf-8")
    assert latency_figures.load(path) is None
