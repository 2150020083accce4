"""`crl plot`: charts as text and as pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from crl.cli.runs.plot import chart_lines
from crl.report.charts import BarChart, Line, LineChart, Point
from crl.report.figures import FIGURES
from support.whole_runs import crl


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The config of a run, and metrics of five steps with evaluations before and after."""
    run = tmp_path / "run"
    config = crl(
        "train", "--tasks", "room", "--steps", "0", "--run-dir", run, "--method", "grpo",
        "--set", "eval.probe_every=0", "--set", "tasks.room.eval.seen=2",
        "--set", "tasks.room.eval.unseen=2",
    )  # fmt: skip
    assert config.exit_code == 0, config.stderr
    lines = [
        {"step": step, "kind": "eval", "time": 1.0, "eval/room/seen/success/free": rate,
         "eval/room/seen/success/free/low": rate - 0.1,
         "eval/room/seen/success/free/high": rate + 0.1}
        for step, rate in ((0, 0.25), (5, 0.75))
    ] + [
        {"step": step, "kind": "train", "time": step, "rollout/success/free": step / 5,
         "actor/loss": -step, "time/wait": 2.0, "time/train": 1.0}
        for step in range(1, 6)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_lines_of_charts():
    """0 is the lowest of eight blocks, 1 the highest, and 0.5 the fifth."""
    lines = LineChart("t", "share", [Line("a", [Point(0, 0), Point(1, 0.5), Point(2, 1)])])
    bars = BarChart("b", "s", {"long": 4.0, "none": 0.0})
    title, curve, _, bars_title, long, none, _ = chart_lines([lines, bars])
    assert (title, bars_title) == ("t (share)", "b (s)")
    assert curve.split() == ["a", "0", "▁▅█", "step", "2:", "1"]
    assert long.split() == ["long", "█" * 40, "4"]
    assert none.split() == ["none", "0"]


def test_curves_are_shorter_in_a_narrow_terminal():
    points = [Point(i, i / 100, 0.1, 0.9) for i in range(101)]
    lines = LineChart("t" * 70, "share", [Line("with the run's bank", points)])
    bars = BarChart("b", "s per step", {"a part with a long name": 4.0, "other": 0.0})
    for width in (70, 80, 100):
        shown = list(chart_lines([lines, bars], width))
        assert max(map(len, shown)) <= width
    assert max(map(len, chart_lines([bars], 60))) == 60


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("success", ["room, seen places (success)", "step 5: 0.75 [0.65, 0.85]", "free members"]),
        ("time", ["Wall time by part (s per step)", "wait", "█  2\n", "train"]),
        ("actor", ["Loss", "step 5: -5"]),
    ],
)
def test_plots_in_the_terminal(run: Path, what: str, texts: list[str]):
    result = crl("plot", run, "--what", what)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [text for text in texts if text not in result.stdout] == []


def test_curves_of_one_arm_have_no_name(run: Path):
    result = crl("plot", run, "--what", "actor")
    (curve,) = (line for line in result.stdout.splitlines() if "step 5: -5" in line)
    assert curve.split()[0] == "-1"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures(run: Path, tmp_path: Path, suffix: str, start: bytes):
    file = tmp_path / f"plot.{suffix}"
    result = crl("plot", run, "--out", file)
    assert (result.exit_code, result.stderr, result.stdout) == (0, "", f"{file}\n")
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--what", "fun"), "--what = 'fun': is not a plot. Choose success, time, actor,"),
        (("--what", "extractor"), "has no values for a plot of extractor yet"),
        (("--out", "plot.gif"), "is not the name of a picture"),
        (("--out", "{run}/no/plot.svg"), "cannot be written"),
    ],
)
def test_errors(run: Path, options: tuple[str, ...], reason: str):
    result = crl("plot", run, *(text.format(run=run) for text in options))
    assert result.exit_code == 2
    assert reason in result.stderr


def test_a_picture_needs_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    result = crl("plot", run, "--out", "plot.svg")
    assert result.exit_code == 2
    assert "it needs the extra 'plot'" in result.stderr


def test_every_plot_is_named_in_the_help():
    text = " ".join(crl("plot", "--help").stdout.split())
    assert all(name in text for name in FIGURES)


def test_damaged_lines_of_metrics_are_reported(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    result = crl("plot", run)
    assert result.exit_code == 0
    assert result.stderr == f"warning: {run}/metrics.jsonl: 1 damaged line is left out\n"
