"""Positions of a run's records."""

from __future__ import annotations

from pathlib import Path

from crl.monitor.run_dir import RunDir
from crl.records.position import discard, missing_metrics, position


def test_an_incomplete_last_line_is_after_the_position(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert position(run) == {"metrics.jsonl": 0}
    for content, length in ((b"", 0), (b'{"st', 0), (b'{"step": 1}\n', 12), (b'{}\n{"st', 3)):
        run.metrics.write_bytes(content)
        assert position(run) == {"metrics.jsonl": length}
    discard(run, position(run), 0, tmp_path / "discarded")
    assert run.metrics.read_bytes() == b"{}\n"
    assert (tmp_path / "discarded" / "metrics.jsonl").read_bytes() == b'{"st'


def test_an_incomplete_line_is_taken_back_from_a_file_that_is_too_short(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_bytes(b'{}\n{"st')
    discard(run, {"metrics.jsonl": 100}, 0, tmp_path / "discarded")
    assert run.metrics.read_bytes() == b"{}\n"
    assert (tmp_path / "discarded" / "metrics.jsonl").read_bytes() == b'{"st'


def test_missing_lines_are_noticed(tmp_path: Path) -> None:
    run, saved = RunDir(tmp_path), {"metrics.jsonl": 3}
    warning = f"warning: {run.metrics} has 0 bytes instead of 3: lines are missing"
    assert missing_metrics(run, saved) == warning
    run.metrics.write_bytes(b"{}\n")
    assert missing_metrics(run, saved) == ""
