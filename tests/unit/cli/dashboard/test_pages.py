"""Tests of the pages of the dashboard: drawings by window size, contents, scrolling and keys.

The expected drawings are in tests/golden/*.txt. After an intended change, run
`CRL_GOLDEN=write pytest tests/unit/cli/dashboard/test_pages.py` and read the diff.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from crl.cli.dashboard.frame import PAGES, View, draw, pressed
from crl.cli.dashboard.parts import experience_line, number
from crl.cli.draw import GUIDED
from crl.monitor.snapshot import Snapshot
from crl.types import Lift
from support.paths import GOLDEN
from support.snapshots import (
    bank,
    complementary,
    empty,
    evaluation,
    experience,
    grpo,
    guided,
    of_tasks,
    picture,
    started,
    update,
)

SNAPSHOTS = {"complementary": complementary(), "grpo": grpo(), "empty": empty()}

NUMBERS = {page.name: number for number, page in enumerate(PAGES)}


def page(snapshot: Snapshot, name: str, width: int = 80, height: int = 24) -> str:
    return picture(snapshot, width, height, view=View(page=NUMBERS[name]))


# ── drawings ──────────────────────────────────────────────────────────────────────────────────────

DRAWINGS = [
    ("complementary", "overview", 60, 20),
    ("grpo", "overview", 80, 24),
    ("empty", "overview", 80, 24),
    *(("complementary", name, 80, 24) for name in NUMBERS),
    *(("complementary", name, 160, 50) for name in NUMBERS),
]


@pytest.mark.parametrize(("run", "name", "width", "height"), DRAWINGS)
def test_drawings_equal_the_golden_files(run, name, width, height):
    drawn = page(SNAPSHOTS[run], name, width, height)
    path = GOLDEN / f"{run}-{name}-{width}x{height}.txt"
    if os.environ.get("CRL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn, "utf-8")
    assert drawn == path.read_text("utf-8")


def fits(text: str, width: int, height: int) -> bool:
    lines = text.split("\n")
    return (
        lines.pop() == ""
        and len(lines) <= height
        and all(cell_len(line) <= width for line in lines)
    )


@given(
    st.sampled_from(sorted(SNAPSHOTS)),
    st.integers(40, 200),
    st.integers(10, 60),
    st.integers(0, len(PAGES) - 1),
    st.integers(-5, 500),
    st.booleans(),
)
def test_a_drawing_fits_every_window(which, width, height, number, scroll, help):
    view = View(page=number, scroll=scroll, help=help)
    assert fits(picture(SNAPSHOTS[which], width, height, view=view), width, height)


METRIC_VALUES = st.none() | st.floats() | st.integers(-(10**12), 10**12) | st.text(max_size=5)
NAMES = sorted(
    {
        *guided(1), *update(1), *bank(1), *of_tasks(1), *evaluation("room", 0.5),
        "probe/room/none", "time/[x]", "rollout/errors", "dropped/no text",
    }
)  # fmt: skip


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(NAMES), METRIC_VALUES),
    st.dictionaries(st.sampled_from(NAMES), METRIC_VALUES),
    st.integers(40, 160),
    st.integers(0, len(PAGES) - 1),
)
def test_any_metrics_can_be_drawn(first, second, width, number):
    monitor = started("complementary", "room", "maze")
    for step, metrics in enumerate((first, second)):
        for kind in ("train", "extractor", "bank", "eval", "probe", "other"):
            monitor.log(step, kind, metrics)
    drawn = picture(monitor.snapshot(), width, 24, view=View(page=number))
    assert fits(drawn, width, 24)


# ── contents ──────────────────────────────────────────────────────────────────────────────────────


def test_a_rate_with_one_evaluation_shows_no_change():
    monitor = started("complementary", "room")
    free, online = (f"eval/room/unseen/success/{name}" for name in ("free", "online"))
    monitor.log(0, "eval", {free: 0.25})
    assert "unseen  free 0.250  after step 0" in picture(monitor.snapshot(), 140, 40)
    monitor.log(9, "eval", {free: 0.25, online: 0.5})
    drawn = picture(monitor.snapshot(), 140, 40)
    assert "unseen  free 0.250 +0.000  online 0.500  after step 9" in drawn


@pytest.mark.parametrize("name", ["overview", "tasks", "system", "episode", "log"])
def test_without_experience_the_dashboard_does_not_mention_it(name):
    text = "\n".join(
        line for line in page(grpo(), name, 140, 40).splitlines() if " 1 overview" not in line
    )
    for word in ("extractor", "bank", "guided", "experience", "retrieval", "queue", "advice"):
        assert word not in text
    if name == "overview":
        assert "1 in the last step" in text


def test_the_overview_shows_all_tasks_together_and_the_page_of_tasks_each_of_them():
    monitor = started("complementary", "room", "maze")
    metrics = evaluation("room", 0.25) | evaluation("maze", 0.5) | evaluation("overall", 0.375)
    monitor.log(0, "eval", metrics)
    overview, tasks = (page(monitor.snapshot(), name, 80, 40) for name in ("overview", "tasks"))
    assert [line for line in overview.splitlines() if "free" in line] == [
        "eval      seen    free 0.475 [0.415, 0.535]  guided 0.525 [0.465, 0.585]",
        "          unseen  free 0.375 [0.315, 0.435]  guided 0.425 [0.365, 0.485]",
    ]
    for rate in ("0.350", "0.600", "0.475"):
        assert f"seen    free {rate}" in tasks


def test_experiences_with_a_lift_are_shown_and_the_others_counted():
    """Check the order by the lower end of lift.

    8 groups: half = 2.306004 · √1.375 / 8 = 0.338004; 9: 2.262157 / 9 = 0.251351; 2: 4.302653 ·
    √1.125 / 2 = 2.281826. The lower ends are −0.09, −0.25 and −1.
    """
    for name in ("overview", "bank"):
        rows = (
            page(complementary(), name, 80, 60).split("lift, task, goal, text")[1].splitlines()[1:5]
        )
        assert [row.split("  room")[0].split("  maze")[0].strip() for row in rows] == [
            "41  +0.25 [-0.09, +0.59]",
            "9  +0.00 [-0.25, +0.25]",
            "7  -0.25 [-1.00, +1.00]",
            "367 of 370 experiences of the bank have no lift yet",
        ]


@pytest.mark.parametrize(
    ("lift", "style"),
    [(Lift(1, 0.25), None), (Lift(40, 0.25), GUIDED), (Lift(40, -0.25), "red"), (None, None)],
)
def test_a_lift_has_a_colour_if_its_interval_excludes_zero(lift: Lift | None, style: str | None):
    line = experience_line(experience("go east.", retrieved=9, lift=lift), 100)
    assert [span.style for span in line.spans if span.style in (GUIDED, "red")] == (
        [style] if style else []
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_experience_has_its_goal(width: int):
    line = experience_line(experience("Go west.", retrieved=9), width, 4 if width > 60 else 0)
    assert " Room: Amber" in line.plain
    assert "Go west." in line.plain[:width]


def test_a_very_narrow_window_has_the_numbers_of_evaluations():
    monitor = started("complementary", "room")
    monitor.log(0, "eval", evaluation("room", 0.375))
    for height in (20, 40):
        drawn = picture(monitor.snapshot(), 40, height).splitlines()
        assert any(line.split()[:4] == ["eval", "seen", "free", "0.475"] for line in drawn)


def test_a_small_window_leaves_out_the_least_important_sections():
    small, tall = picture(complementary(), 80, 10), picture(complementary(), 80, 60)
    assert "step" in small
    assert "guided" in small
    assert "Amber" not in small
    assert "Never go back" in tall


def test_each_of_several_tasks_has_a_line():
    monitor = started("complementary", "room", "a-task-of-a-long-name")
    shares = {"rollout/room/success": 0.5, "rollout/room/turns": 3.25, "rollout/room/used": 0.75}
    monitor.log(1, "train", {**guided(1), **shares, "rollout/a-task-of-a-long-name/success": 0.25})
    lines = picture(monitor.snapshot(), 80, 24).splitlines()
    (room,) = (line for line in lines if line.startswith("room "))
    assert room.split() == ["room", "0.500", "━━━━━━━━━━──────────", "▅", "turns", "3.2",
                            "used", "75%"]  # fmt: skip
    (other,) = (line for line in lines if line.startswith("a-task-o…"))
    assert other.split() == ["a-task-o…", "0.250", "━━━━━───────────────", "▃", "turns", "–"]


def test_a_warning_stays_on_every_page():
    monitor = started("grpo", "room")
    monitor.note("warning: one\nand more")
    monitor.note("x.py:7: UserWarning: two")
    monitor.note("warning: one")
    for n in range(600):
        monitor.note(f"line {n}")
    for name in NUMBERS:
        drawn = page(monitor.snapshot(), name)
        assert "warning: 2 warnings, the last: one" in drawn
    lines = page(monitor.snapshot(), "log").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("── warnings"))
    assert lines[start + 1 : start + 3] == ["UserWarning: two", "one"]


def test_stages_show_their_progress_and_what_is_left():
    drawn = page(complementary(), "overview")
    assert drawn.splitlines()[2] == "rollouts 4/16 ━━━━──────────── 0:03  left 0:09"
    assert "rollouts" in page(complementary(), "system").split("under way")[1]


def test_the_system_page_shows_the_machine():
    monitor = started("grpo", "room")
    for step in (1, 2):
        gpu = {f"perf/gpu/{n}/{name}": n + step for n in (0, 1) for name in ("memory_gib", "load")}
        memory = {"perf/process_memory_gib": 1.5 * step, "perf/episodes_per_s": 40.0}
        monitor.log(step, "train", {**memory, "perf/cpu_load": 0.5, **gpu})
    machine, others = page(monitor.snapshot(), "system").split("machine")[1].split("speed and")
    for name in ("process_memory_gib", "cpu_load", "gpu/0/memory_gib", "gpu/1/memory_gib"):
        assert f"\n{name} " in machine
    assert "3" in machine.split("process_memory_gib")[1].split()[0]
    assert "episodes_per_s" in others
    assert "episodes_per_s" not in machine


def test_the_members_of_the_last_group_can_be_read():
    view = View(page=NUMBERS["episode"])
    first = picture(complementary(), 80, 40, view=view)
    assert "step 38, group 5, member 0: room, guided" in first
    assert "go <east>, then north." in first
    second = picture(complementary(), 80, 40, view=pressed(view, "n", 40))
    assert "member 1: room, free" in second
    assert "east" not in second
    assert picture(complementary(), 80, 40, view=pressed(view, "p", 40)) == second


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (-3.0, "-3"), (1e6, "1,000,000"), (1e30, "1.00e+30"),
     (0.25, "0.2500"), (1e-7, "1.00e-07"), (1234.56, "1,234.6"), (-123456.7, "-123,456.7"),
     (999.99999, "1000.0000"), (-1.5e-12, "-1.50e-12")],
)  # fmt: skip
def test_numbers_of_any_size_are_short(value, text):
    assert number(value) == text
    assert len(text) <= 10


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


def test_keys_select_pages():
    view = View()
    steps = {
        "3": "actor", "right": "extractor", "tab": "bank", "left": "extractor",
        "1": "overview", "shift tab": "log", "2": "tasks",
    }  # fmt: skip
    for key, name in steps.items():
        view = pressed(view, key, 24)
        assert PAGES[view.page].name == name
        assert f" {view.page + 1} {name} " in picture(SNAPSHOTS["complementary"], 80, 24, view=view)
    for key in ("9", "0", "x", "\x00", "²", "escape"):
        assert pressed(view, key, 24) == view


def scrolled(view: View, *keys: str, snapshot: Snapshot, height: int = 24) -> tuple[View, str]:
    for key in keys:
        view = draw(snapshot, pressed(view, key, height), 80, height)[1]
    return view, picture(snapshot, 80, height, view=view)


def test_a_long_page_scrolls_within_its_bounds():
    snapshot = SNAPSHOTS["complementary"]
    top = View(page=NUMBERS["tasks"])
    assert "more below ↓" in picture(snapshot, 80, 24, view=top)
    bottom, drawn = scrolled(top, *["down"] * 50, snapshot=snapshot)
    assert "more above ↑" in drawn
    assert "below" not in drawn
    assert scrolled(top, "end", snapshot=snapshot) == (bottom, drawn)
    assert scrolled(bottom, "up", "down", snapshot=snapshot) == (bottom, drawn)
    assert scrolled(bottom, "home", snapshot=snapshot)[0] == top
    assert scrolled(bottom, "page up", "page up", "page up", snapshot=snapshot)[0] == top
    assert pressed(bottom, "5", 24).scroll == 0


def test_the_log_shows_its_end_first():
    monitor = started("grpo", "room")
    for n in range(100):
        monitor.note(f"line {n}.")
    snapshot, view = monitor.snapshot(), View(page=NUMBERS["log"])
    assert "line 99." in picture(snapshot, 80, 24, view=view)
    first, drawn = scrolled(view, "home", snapshot=snapshot)
    assert "run runs/room-grpo-1" in drawn
    assert scrolled(first, "end", snapshot=snapshot)[0] == view
    up, drawn = scrolled(view, "up", snapshot=snapshot)
    assert "line 99." not in drawn
    assert "line 98." in drawn
    assert scrolled(up, "down", snapshot=snapshot)[0] == view


def test_the_help_names_pages_and_keys():
    view = pressed(View(), "?", 24)
    drawn = picture(SNAPSHOTS["complementary"], 80, 30, view=view)
    for text in (*NUMBERS, "PgUp", "Ctrl-C", "the run continues", "also written during"):
        assert text in drawn
    assert pressed(view, "?", 24) == pressed(view, "escape", 24) == View()
    assert pressed(view, "2", 24) == View(page=1)


def test_the_last_line_has_hints():
    assert picture(empty(), 80, 24).splitlines()[23] == (
        "1–8 ← → page  ↑ ↓ scroll  q close  ? help"
    )
    assert picture(empty(), 34, 24).splitlines()[23] == "1–8 page  q close  ? help"
