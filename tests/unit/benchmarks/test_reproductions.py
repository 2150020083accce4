"""Runs that were made again: differences of means by hand and by scipy, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from support.paths import ROOT, benchmark

figures = benchmark("figures")
reproductions = benchmark("reproductions")

RESULTS = ROOT / "benchmarks" / "results" / "coevolution"
STORED = (0.5, 0.6, 0.7)


def row(stored: Sequence[float], again: Sequence[float], made: Sequence[bool]) -> Any:
    return reproductions.Row("seen", "room", "static", stored, again, made)


def test_the_change_is_that_of_the_paired_t_test() -> None:
    stored, again = (0.5, 0.6, 0.7, 0.4), (0.9, 0.5, 0.4, 0.8)
    change = row(stored, again, [True] * 4).change
    reference = ttest_rel(again, stored).confidence_interval()
    assert change.value == pytest.approx(0.1)
    ends = (change.value - change.half_width, change.value + change.half_width)
    assert ends == pytest.approx((reference.low, reference.high))


def test_seeds_that_were_not_made_again_do_not_count_in_the_change() -> None:
    change = row(STORED, (0.6, 0.6, 0.9), (True, False, True)).change
    assert (change.value, change.n) == (pytest.approx(0.15), 2)
    assert not row(STORED, (0.9, 0.6, 0.7), (True, False, False)).differs, "no interval"


@pytest.mark.parametrize(
    ("stored", "again", "within", "differs"),
    [
        # The interval of the stored values is 0.6 ± 0.248: 4.303 · 0.1 / √3.
        (STORED, (0.5, 0.6, 0.7), True, False),
        (STORED, (0.94, 0.95, 0.95), False, True),
        (STORED, (0.5, 0.9, 1.3), False, False),
        (STORED, (0.55, 0.66, 0.74), True, True),
        # A narrow stored interval: the new mean is outside, but itself uncertain.
        ((0.060, 0.065, 0.070), (-0.1, -0.05, 0.05), False, False),
    ],
)
def test_the_stored_interval_and_the_change_answer_different_questions(
    stored: Sequence[float], again: Sequence[float], within: bool, differs: bool
) -> None:
    found = row(stored, again, [True] * 3)
    assert (found.within, found.differs) == (within, differs)


CLAIMS = (figures.Claim("co-evolved", "none", "seen"),)


def results(**rates: tuple[float | None, ...]) -> Any:
    """Return runs of a figure with two arms, by their success in seen rooms."""
    arms = [name.replace("_", "-") for name in rates]
    figure = figures.Figure("", CLAIMS, ("room",), tuple(arms), (0, 1, 2), ("seen",))

    def run(rate: float | None) -> dict[str, Any]:
        known = {} if rate is None else {"eval/room/seen/success/free": rate}
        return {"metrics": [{"kind": "eval", **known}]}

    runs = {("room", arm): [run(r) for r in rates[arm.replace("-", "_")]] for arm in arms}
    return figures.Results(figure, runs)


def test_the_table_has_arms_and_paired_differences() -> None:
    stored = results(co_evolved=(0.5, 0.6, 0.7), none=(0.4, 0.5, 0.6))
    again = results(co_evolved=(0.5, 0.6, 0.7), none=(0.9, 0.9, 0.9))
    found = [*reproductions.rows(stored, again)]
    assert [row.arm for row in found] == ["co-evolved", "none", "co-evolved − none"]
    assert found[2].stored == pytest.approx([0.1, 0.1, 0.1])
    assert found[2].again == pytest.approx([-0.4, -0.3, -0.2])
    text = reproductions.table(found)
    assert "| seen | room | none | 0.500 ± 0.248 | 0.900 ± 0.000 | +0.400 ± 0.248 " in text
    assert "1 of 3 new means are within the stored intervals; 2 of 3 differ" in text


def test_verdicts_that_differ_are_marked() -> None:
    stored = results(co_evolved=(0.5, 0.6, 0.7), none=(0.4, 0.5, 0.6))
    again = results(co_evolved=(0.5, 0.6, 0.7), none=(0.9, 0.9, 0.9))
    assert reproductions.claims(stored, again).endswith(
        "| seen of co-evolved > that of none | 0.100 ± 0.000, agrees | "
        "-0.300 ± 0.248, **disagrees** |"
    )


def test_metrics_that_an_arm_does_not_have_are_left_out() -> None:
    stored, again = (results(co_evolved=(0.5, 0.6, 0.7), none=(None,) * 3) for _ in range(2))
    assert [row.arm for row in reproductions.rows(stored, again)] == ["co-evolved"]


def test_runs_that_were_not_made_again_keep_their_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = replace(figures.FIGURES["3b-d"], seeds=(20, 21))
    kept = RESULTS / "room"
    for arm in ("co-evolved", "no-split", "cross-group"):
        (tmp_path / "stored" / "room").mkdir(parents=True, exist_ok=True)
        (tmp_path / "stored" / "room" / arm).symlink_to(kept / arm)
    monkeypatch.setattr(reproductions, "RESULTS", tmp_path / "stored")
    folder = tmp_path / "again" / "room" / "no-split"
    folder.mkdir(parents=True)
    assert reproductions.read(figure, tmp_path / "again")[2] == []
    (folder / "21.json.xz").symlink_to(kept / "no-split" / "22.json.xz")
    stored, again, new = reproductions.read(figure, tmp_path / "again")
    assert [run.path for run in new] == [Path("room/no-split/21")]
    old, mixed = (runs.runs["room", "no split"] for runs in (stored, again))
    assert mixed[0] is old[0]
    assert mixed[1] != old[1]
    assert {row.arm for row in reproductions.rows(stored, again)} == {
        "no split", "co-evolved − no split",
    }  # fmt: skip
    text = reproductions.claims(stored, again)
    assert "no split" in text
    assert "cross-group" not in text


def test_a_figure_whose_runs_are_not_stored_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(reproductions, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["reproductions.py", "--figure", "3a"])
    with pytest.raises(SystemExit):
        reproductions.main()
    error = capsys.readouterr().err
    assert "Figure 3a has no stored run room/co-evolved/20. Choose other figures" in error
