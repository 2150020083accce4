"""Hostile texts of models, environments, users and run directories on the dashboard."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from crl.cli.dashboard.frame import PAGES, View
from crl.monitor.snapshot import Snapshot, SnapshotMonitor
from crl.monitor.stages import Stage
from crl.types import Lift
from support.hostile_texts import FORBIDDEN, HOSTILE
from support.snapshots import experience, group, picture, started


def hostile_run(text: str) -> SnapshotMonitor:
    monitor = started("complementary", "room", "maze")
    monitor.experiences([experience(text, task=text[:20], retrieved=3, lift=Lift(3, 0.5))])
    monitor.trajectories(group(1, text))
    monitor.note(text)
    monitor.note(f"warning: {text}")
    monitor.progress(text[:200], 1, 3)
    monitor.log(1, "bank", {"bank/size": 3, "bank/size/" + text[:30]: 3, "dropped/" + text[:30]: 2})
    monitor.log(1, "train", {f"time/{text[:9]}": 1.0, f"actor/{text[:30]}": 2.0, "actor/loss": 1.0})
    monitor.log(1, "extractor", {f"extractor/{text[:30]}": 2.0})
    monitor.log(1, "eval", {f"eval/room/seen/success/{text[:30].replace('/', '')}": 0.5})
    monitor.log(1, "probe", {f"probe/{text[:9].replace('/', '')}/none": 1.0})
    return monitor


def fits(text: str, width: int, height: int) -> bool:
    lines = text.split("\n")
    return (
        lines.pop() == ""
        and len(lines) <= height
        and all(cell_len(line) <= width for line in lines)
    )


def require_harmless(snapshot: Snapshot, width: int, height: int) -> None:
    for number in range(len(PAGES)):
        for scroll in (0, 30):
            view = View(page=number, scroll=scroll)
            for colour in (False, True):
                drawn = picture(snapshot, width, height, view=view, colour=colour)
                assert not FORBIDDEN & set(drawn)
                assert drawn.encode("utf-8")
                assert "\x1b]" not in drawn
                assert "\x1b[31mred" not in drawn
                assert "\x1b[?" not in drawn
                if not colour:
                    assert "\x1b" not in drawn
                    assert fits(drawn, width, height)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped_on_every_page(name):
    require_harmless(hostile_run(HOSTILE[name]).snapshot(), 80, 30)


def test_long_texts_do_not_slow_the_screen():
    snapshot = hostile_run(HOSTILE["long"]).snapshot()
    started_at = time.perf_counter()
    for number in range(len(PAGES)):
        picture(snapshot, 80, 24, view=View(page=number))
    assert time.perf_counter() - started_at < 2.0  # a tenth of this on a machine without other work


def test_markup_is_shown_as_text():
    text = "[bold]a[/bold] :smile: \x1b[2J b\nc"
    monitor = hostile_run(text)
    for number, page in enumerate(PAGES):
        if page.name in ("overview", "bank"):
            drawn = picture(monitor.snapshot(), 100, 40, view=View(page=number))
            assert "[bold]a[/bold] :smile: \\x1b[2J b c" in drawn


@given(st.text(), st.text(), st.integers(40, 100), st.integers(0, len(PAGES) - 1))
def test_no_text_breaks_the_window(text, task, width, number):
    monitor = started("complementary", "room")
    monitor.experiences([experience(text, task=task, lift=Lift(2, 0.5))])
    monitor.trajectories(group(1, text, task))
    monitor.note(text)
    monitor.progress(text, 1, 2)
    snapshot = monitor.snapshot()
    assert snapshot.progress.stages == (Stage(text, 1, 2, 0.0, 0.0),)
    assert fits(picture(snapshot, width, 20, view=View(page=number)), width, 20)
