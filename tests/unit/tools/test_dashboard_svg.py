"""tools/dashboard_svg.py draws the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from crl.config.load import dump, load
from crl.manager.exchange.jsonl import parse_export
from crl.manager.inspection.upkeep import create_bank
from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from support.paths import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "tools"))
    import dashboard_svg  # pyright: ignore[reportMissingImports]


def finished_run(path: Path) -> RunDir:
    run = RunDir.create(path)
    dump(load(["room"], options={"run.steps": 3}), run.config)
    monitor = FileMonitor(run, deterministic=True)
    monitor.log(0, "eval", {"eval/room/seen/success/free": 0.25})
    for step in (1, 2, 3):
        monitor.log(step, "bank", {"bank/size": 10 * step})
        monitor.log(step, "train", {"rollout/success/guided": 0.625, "rollout/success/free": 0.5})
    monitor.close()
    return run


def drawing(run: Path, out: Path) -> str:
    with pytest.raises(typer.Exit) as end:
        dashboard_svg.main(run, out)
    assert end.value.exit_code == 0
    return out.read_text("utf-8").replace("&#160;", " ")


def test_the_picture_has_metrics_and_experiences_of_the_run(tmp_path: Path):
    run, lessons = finished_run(tmp_path / "mine"), tmp_path / "lessons.jsonl"
    lesson = {"task": "room", "goal": "Room: the small arch.", "text": "go <east>."}
    lesson |= {"retrieved": 7, "lift": {"groups": 2, "mean": 0.5, "m2": 0.0}}
    lines = [{"crl_bank": 3, "entries": 1}, lesson]
    lessons.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    create_bank(run.bank, parse_export(lessons))
    svg = drawing(run.path, tmp_path / "images" / "dashboard.svg")
    for text in ("mine", "3/3", "0.625", "0.250", "go &lt;east&gt;."):
        assert text in svg
    assert "font-face" not in svg


def test_a_run_without_a_bank_can_be_drawn(tmp_path: Path):
    svg = drawing(finished_run(tmp_path / "mine").path, tmp_path / "dashboard.svg")
    assert "lift, task, text" not in svg


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as end:
        dashboard_svg.main(tmp_path, tmp_path / "dashboard.svg")
    assert end.value.exit_code == 2
    assert "is not a run directory" in capsys.readouterr().err
