"""Files of saved evaluations."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path

import pytest

from crl.errors import ConfigError
from crl.evaluation.saved import read, require_writable, save, saved_files
from support.evaluations import episode, evaluation


def test_a_saved_evaluation_is_read_back(tmp_path: Path) -> None:
    saved = evaluation(
        *(episode(game, n, score=50.0, success=n == 0) for game in range(3) for n in range(2))
    )
    path = save(saved, tmp_path / "eval", "step3")
    again = read(path)
    assert (again.about, list(again.episodes), again.rows) == (
        saved.about,
        list(saved.episodes),
        saved.rows,
    )
    record = json.loads(path.read_text())
    assert record["results"][0]["pass@2"]["value"] == 1.0
    assert len(record["episodes"]) == 6


def test_unknown_values_are_null_and_empty(tmp_path: Path) -> None:
    path = save(evaluation(episode(0, 0)), tmp_path, "one")
    (row,) = json.loads(path.read_text())["results"]
    assert row["turns"] == {"value": 3, "low": None, "high": None}
    (line,) = csv.DictReader(path.with_suffix(".csv").open())
    assert (line["turns"], line["turns_low"], line["success"]) == ("3.0", "", "1.0")


def test_csv_has_one_line_for_each_row(tmp_path: Path) -> None:
    saved = evaluation(
        episode(0, 0, task="room"), episode(0, 0, task="webshop", score=20.0, success=False)
    )
    lines = list(csv.DictReader(save(saved, tmp_path, "two").with_suffix(".csv").open()))
    assert [(line["task"], line["success"], line["score"]) for line in lines] == [
        ("room", "1.0", ""),
        ("webshop", "0.0", "20.0"),
        ("overall", "0.5", ""),
    ]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    paths = [save(evaluation(temperature=t), tmp_path, "step3") for t in (0.0, 0.5, 1.0)]
    assert [path.name for path in paths] == ["step3.json", "step3-2.json", "step3-3.json"]
    assert [read(path).about["temperature"] for path in saved_files(tmp_path)] == [0.0, 0.5, 1.0]


def test_evaluations_at_the_same_time_get_different_names(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save, args=(evaluation(temperature=float(i)), tmp_path, "same"))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {read(path).about["temperature"] for path in saved_files(tmp_path)} == set(range(8))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for folder in (file, file / "below", Path("/proc/none")):
        with pytest.raises(ConfigError, match=r"out = .*cannot be written"):
            require_writable(folder)
    require_writable(new := tmp_path / "a" / "b")
    assert list(new.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', '{"format": 1, "episodes": [1]}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a saved evaluation"):
        read(path)
