"""Tests of the dashboard: folding of lines, drawing by window size, and restoring of the terminal.

The expected drawings are in tests/golden/*.txt. After an intended change, run
`CRL_GOLDEN=write pytest tests/unit/cli/test_dashboard.py` and read the diff.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from crl.cli.dashboard import Dashboard, LineStream, _experience, render
from crl.cli.draw import (
    GUIDED,
    LineGroup,
    allocate_lines,
    bar,
    duration,
    format_number,
    one_line,
    printable,
    sparkline,
)
from crl.cli.main import _is_terminal, _screen
from crl.config.load import load
from crl.monitor.plain import PlainMonitor
from crl.monitor.snapshot import (
    EXPERIENCES,
    HISTORY,
    NOTES,
    RateView,
    RunInfo,
    Series,
    Snapshot,
    SnapshotMonitor,
)
from crl.types import Counters, Experience, Lift, Provenance
from support.paths import GOLDEN


def experience(text: str, *, uid: str = "e1", task: str = "room", **counters: Any) -> Experience:
    return Experience(uid, 1, text, task, "", Provenance("g1", (0, 0)), Counters(**counters))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ── runs to look at ───────────────────────────────────────────────────────────────────────────────


def started(method: str, *tasks: str, clock: Clock | None = None) -> SnapshotMonitor:
    monitor = SnapshotMonitor(
        RunInfo(f"{'+'.join(tasks)}-{method}-1", method, tasks, 128), clock=clock or Clock()
    )
    monitor.note(
        f"run runs/{'+'.join(tasks)}-{method}-1\nactor  tiny-actor (bundled)\n       "
        f"156,000 parameters, 0.6 MiB; profile compact\n"
    )
    return monitor


def evaluation(task: str, share: float) -> dict[str, float]:
    metrics: dict[str, float] = {"time/eval": 2.5}
    for split, more in (("seen", 0.1), ("unseen", 0.0)):
        for condition, extra in (("free", 0.0), ("guided", 0.05)):
            name, rate = f"eval/{task}/{split}/success/{condition}", share + more + extra
            metrics |= {name: rate, f"{name}/low": rate - 0.06, f"{name}/high": rate + 0.06}
    return metrics


def training(step: int) -> dict[str, float | None]:
    return {
        "rollout/success": 0.25 + step / 200,
        "rollout/success/free": 0.25 + step / 200,
        "rollout/errors": 0,
        "actor/loss": -0.02 + step / 1000,
        "actor/ratio_mean": 1 + (-1) ** step / 1000,
        "actor/clip_fraction": None if step % 5 == 0 else 0.01 * (step % 3),
        "actor/approx_kl": 0.0011,
        "actor/entropy": 2 / (step + 1),
        "actor/learning_rate": 2e-4,
        "actor/updates": 2,
        "actor/version": step,
        "staleness/mean": 0.875,
        "staleness/max": 1,
        "time/wait": 6.1,
        "time/train": 4.2,
        "time/sync": 0.3,
        "perf/sampled_tokens_per_s": 1234.5,
        "perf/episodes_per_s": 12.25,
    }


def guided(step: int) -> dict[str, float | None]:
    rates = {
        "rollout/success/guided": 0.3 + step / 150,
        "rollout/success/used": 0.55,
        "rollout/gap": 0.05 + step / 600,
    }
    return {**training(step), **rates, "time/submit": 0.4, "time/bank": 2.0}


def update(step: int) -> dict[str, float]:
    return {
        "extractor/loss": 0.01 * step,
        "extractor/ratio_mean": 1.002,
        "extractor/clip_fraction": 0.02,
        "extractor/approx_kl": 0.0023,
        "extractor/entropy": 1.5,
        "extractor/reward": 0.2 + step / 100,
        "extractor/learning_rate": 1e-4,
        "extractor/updates": step,
        "extractor/version": step,
        "time/train": 3.4,
        "time/sync": 0.2,
    }


def bank(step: int) -> dict[str, float | None]:
    return {
        "bank/size": 10 * step,
        "bank/size/room": 6 * step,
        "bank/size/maze": 4 * step,
        "ops/add": 12,
        "ops/update": 3,
        "ops/return": 10,
        "ops/drop": 2,
        "queue/pending": 9,
        "queue/leased": 3,
        "queue/done": 5 * step,
        "queue/dead": 1,
        "buffer/ready": 4,
        "retrieval/hit_rate": 0.87,
        "retrieval/same_goal": 0.9,
        "lessons/correct": 0.75,
        "perf/search_p50_ms": 1.25,
        "perf/search_p95_ms": 3.5,
        "perf/embed_cache_hits": 0.93,
    }


LESSONS = [
    experience(
        "In Amber Hall the exit is in the north-east corner; go east along the wall, then north.",
        retrieved=41, credited=30, credit=12, lift=Lift(8, 0.25, 0.375),
    ),
    experience(
        "Doors in the maze open only\nfrom the south.", uid="e2", task="maze",
        retrieved=7, credited=4, credit=-2, lift=Lift(2, -0.25, 0.125),
    ),
    experience("A jackal follows you: fight it in a corridor, never in the open.", uid="e3"),
    *(
        experience(
            f"Lesson {n}: look before you leap.", uid=f"l{n}",
            retrieved=n, credited=n, credit=n / 2,
        )
        for n in range(1, 20)
    ),
    experience("Never go back.", uid="e4", retrieved=9, credited=9, credit=9, lift=Lift(9, 0.0)),
]  # fmt: skip


def complementary() -> Snapshot:
    clock = Clock()
    monitor = started("complementary", "room", "maze", clock=clock)
    clock.now += 5
    monitor.log(0, "eval", evaluation("room", 0.25) | evaluation("maze", 0.1))
    for step in range(1, 38):
        clock.now += 12.6
        monitor.log(step, "train", guided(step))
        monitor.log(step, "extractor", update(step))
        monitor.log(step, "bank", bank(step))
        monitor.experiences(LESSONS)
    monitor.log(
        37,
        "probe",
        {
            "probe/room/none": 0.25,
            "probe/room/right": 0.5,
            "probe/room/wrong": 0.125,
            "time/probe": 0.7,
        },
    )
    monitor.log(37, "eval", evaluation("room", 0.45) | evaluation("maze", 0.2))
    monitor.note("step 37: the extractor's queue was full")
    return monitor.snapshot()


def grpo() -> Snapshot:
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    monitor.log(0, "eval", {k: v for k, v in evaluation("room", 0.25).items() if "guided" not in k})
    for step in range(1, 8):
        clock.now += 10
        monitor.log(step, "train", {**training(step), "rollout/errors": step % 2})
    return monitor.snapshot()


def empty() -> Snapshot:
    return started("complementary", "room").snapshot()


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


def picture(snapshot: Snapshot, width: int, height: int, *, colour: bool = False) -> str:
    system, stream = "standard" if colour else None, io.StringIO()
    console = Console(
        file=stream,
        width=width,
        height=height,
        color_system=system,
        force_terminal=colour,
        legacy_windows=False,
        _environ={},
    )  # pyright: ignore[reportArgumentType]
    console.print(render(snapshot, width, height))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "make", "width", "height"),
    [
        ("complementary-80x24", complementary, 80, 24),
        ("complementary-140x40", complementary, 140, 40),
        ("complementary-60x20", complementary, 60, 20),
        ("grpo-80x24", grpo, 80, 24),
        ("empty-80x24", empty, 80, 24),
    ],
)
def test_drawings_equal_the_golden_files(name, make, width, height):
    drawn, path = picture(make(), width, height), GOLDEN / f"{name}.txt"
    if os.environ.get("CRL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn, "utf-8")
    assert drawn == path.read_text("utf-8")


def test_a_rate_with_one_evaluation_shows_no_change():
    monitor = started("complementary", "room")
    free, online = (f"eval/room/unseen/success/{name}" for name in ("free", "online"))
    monitor.log(0, "eval", {free: 0.25})
    assert "unseen  free 0.250  after step 0" in picture(monitor.snapshot(), 140, 40)
    monitor.log(9, "eval", {free: 0.25, online: 0.5})
    drawn = picture(monitor.snapshot(), 140, 40)
    assert "unseen  free 0.250 +0.000  online 0.500  after step 9" in drawn


def test_without_experience_the_dashboard_does_not_mention_it():
    text = picture(grpo(), 140, 40)
    for word in ("extractor", "bank", "guided", "experiences", "retrieval", "queue", "advice"):
        assert word not in text
    assert "1 in the last step" in text


def fits(text: str, width: int, height: int) -> bool:
    lines = text.split("\n")
    return (
        lines.pop() == ""
        and len(lines) <= height
        and all(cell_len(line) <= width for line in lines)
    )


SNAPSHOTS = {"complementary": complementary(), "grpo": grpo(), "empty": empty()}


@given(st.sampled_from(sorted(SNAPSHOTS)), st.integers(40, 200), st.integers(10, 60))
def test_a_drawing_fits_every_window(which, width, height):
    assert fits(picture(SNAPSHOTS[which], width, height), width, height)


def test_the_best_lift_is_shown_first():
    """Check the order by the lower end of lift.

    8 groups: half = 2.306004 · √1.375 / 8 = 0.338004; 9: 2.262157 / 9 = 0.251351; 2: 4.302653 ·
    √1.125 / 2 = 2.281826. The lower ends are −0.09, −0.25 and −1. The last
    experience has no group.
    """
    rows = (
        picture(complementary(), 140, 60)
        .split("experiences: retrieved, lift, task, text")[1]
        .splitlines()[1:5]
    )
    assert [row.split("  room")[0].split("  maze")[0].strip() for row in rows] == [
        "41  +0.25 ± 0.34", "9  +0.00 ± 0.25", "7  -0.25 ± 2.28", "0             –",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lift", "style"),
    [(Lift(1, 0.25), None), (Lift(40, 0.25), GUIDED), (Lift(40, -0.25), "red"), (None, None)],
)
def test_a_lift_has_a_colour_if_its_interval_excludes_zero(lift: Lift | None, style: str | None):
    line = _experience(experience("go east.", retrieved=9, lift=lift), 100)
    assert [span.style for span in line.spans if span.style in (GUIDED, "red")] == (
        [style] if style else []
    )


def test_a_small_window_leaves_out_the_least_important_sections():
    small, tall = picture(complementary(), 80, 10), picture(complementary(), 80, 60)
    assert "step" in small
    assert "guided" in small
    assert "Amber" not in small
    assert "Lesson 19" in tall
    assert len(tall.splitlines()) > 40


METRIC_VALUES = st.none() | st.floats() | st.integers(-(10**12), 10**12) | st.text(max_size=5)
NAMES = sorted(
    {
        *guided(1),
        *update(1),
        *bank(1),
        *evaluation("room", 0.5),
        "probe/room/none",
        "time/[x]",
        "rollout/errors",
    }
)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(NAMES), METRIC_VALUES),
    st.dictionaries(st.sampled_from(NAMES), METRIC_VALUES),
    st.integers(40, 160),
)
def test_any_metrics_can_be_drawn(first, second, width):
    monitor = started("complementary", "room")
    for step, metrics in enumerate((first, second)):
        for kind in ("train", "extractor", "bank", "eval", "probe", "other"):
            monitor.log(step, kind, metrics)
    assert fits(picture(monitor.snapshot(), width, 24), width, 24)


# ── hostile texts ─────────────────────────────────────────────────────────────────────────────────


def test_each_of_several_tasks_has_a_line():
    monitor = started("complementary", "room", "a-task-of-a-long-name")
    shares = {"rollout/room/success": 0.5, "rollout/room/turns": 3.25, "rollout/room/used": 0.75}
    monitor.log(1, "train", {**guided(1), **shares, "rollout/a-task-of-a-long-name/success": 0.25})
    lines = picture(monitor.snapshot(), 80, 24).splitlines()
    (room,) = (line for line in lines if line.startswith("room "))
    assert room.split() == ["room", "0.500", "▅", "turns", "3.2", "used", "75%"]
    (other,) = (line for line in lines if line.startswith("a-task-o…"))
    assert other.split() == ["a-task-o…", "0.250", "▃", "turns", "–"]


HOSTILE = [
    "[red]not red[/red] [link=http://x]",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J",
    "one\ntwo\r\nthree\ttab\x0bvertical",
    "広い文字" * 50,
    "👩‍👩‍👧‍👦 e\u0301\u0301 \u202edlrow\u202c \u200b\ufeff \ud800",
    "x" * 100_000,
    ":smile: {braces} %s \\[escaped]",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("colour", [False, True])
def test_hostile_texts_are_escaped(text, colour):
    monitor = started("complementary", "room")
    monitor.experiences([experience(text, task=text[:20])])
    monitor.note(text)
    monitor.log(1, "bank", {"bank/size/" + text[:30]: 3, "bank/size/room": 2})
    monitor.log(1, "train", {f"time/{text[:9]}": 1.0})
    monitor.log(1, "probe", {f"probe/{text[:9]}/none": 1.0})
    drawn = picture(monitor.snapshot(), 80, 30, colour=colour)
    assert not {"\r", "\t", "\x07", "\x9b", "\x0b", "\u202e", "\u200b", "\u200d"} & set(drawn)
    assert drawn.encode("utf-8")
    if not colour:
        assert "\x1b" not in drawn
        assert fits(drawn, 80, 30)
    assert "\x1b[31mred" not in drawn
    assert "\x1b]" not in drawn


def test_markup_is_shown_as_text():
    monitor = started("complementary", "room")
    monitor.experiences([experience("[bold]a[/bold] :smile: \x1b[2J b\nc")])
    assert "[bold]a[/bold] :smile: \\x1b[2J b c" in picture(monitor.snapshot(), 80, 24)


@given(st.text(), st.text(), st.integers(40, 100))
def test_no_text_breaks_the_window(text, task, width):
    monitor = started("complementary", "room")
    monitor.experiences([experience(text, task=task)])
    monitor.note(text)
    assert fits(picture(monitor.snapshot(), width, 20), width, 20)


# ── elements of the drawing ───────────────────────────────────────────────────────────────────────


def test_numbers():
    assert [format_number(v, "+.4f") for v in (None, 0.5, -1e30)] == ["–", "+0.5000", "-1.0e+30"]
    assert [duration(v) for v in (None, 0, 59.9, 61, 3723)] == [
        "–",
        "0:00",
        "0:59",
        "1:01",
        "1:02:03",
    ]
    assert printable("a\x1b\x00\u202e\ud800é") == r"a\x1b\x00\u202e\ud800é"
    assert one_line(" a\n\t b\x85c ", 100) == "a b c"


def test_sparklines():
    assert sparkline(Series((0.0, None, 0.5, 1.0)), 10, 0, 1) == "▁ ▅█"
    assert sparkline(Series((0.0, None, 0.5, 1.0)), 2, 0, 1) == "▅█"
    assert sparkline(Series((5.0, 5.0)), 10) == "▅▅", "a constant is in the middle"
    assert sparkline(Series((-1e308, 1e308)), 10) == "▁█"
    assert sparkline(Series((2.0, -1.0)), 10, 0, 1) == "█▁"
    assert [
        sparkline(Series(values), width) for values, width in (((), 5), ((None,), 5), ((1.0,), 0))
    ] == ["", "", ""]


def test_bars():
    assert bar([(1.0, "a", ""), (2.0, "b", ""), (1.0, "c", "")], 8).plain == "aabbbbcc"
    assert bar([(1.0, "a", ""), (0.0, "b", "")], 5).plain == "aaaaa"
    assert bar([(0.0, "a", "")], 5).plain == ""


def test_lines_are_allocated_by_priority():
    from rich.text import Text

    lines = [Text(str(n)) for n in range(9)]
    sections = {
        "a": LineGroup(lines, min_lines=2, title="A"),
        "b": LineGroup(lines, min_lines=1),
        "c": LineGroup(()),
    }
    share = {
        height: allocate_lines(sections, height, priority="abc", growth="bac")
        for height in (2, 3, 4, 13, 30)
    }
    assert [(s["a"], s["b"]) for s in share.values()] == [(0, 2), (2, 0), (2, 1), (3, 9), (9, 9)]
    assert [t.plain for t in LineGroup(lines, tail=True).draw(2, 10)] == ["7", "8"]
    assert [t.plain for t in LineGroup(lines, title="A").draw(1, 10)] == ["── A ─────", "0"]


# ── folding ───────────────────────────────────────────────────────────────────────────────────────


def test_values_of_metrics_are_appended_and_missing_ones_are_none():
    monitor = started("grpo", "room")
    for step, loss in enumerate((0.5, None, float("nan"), "x", 0.25), start=1):
        monitor.log(step, "train", {"actor/loss": loss, "actor/updates": 2, "extractor/loss": 9.0})
    monitor.log(6, "train", {"rollout/success": 1})
    s = monitor.snapshot()
    assert s.progress.step == 6
    actor = s.models.actor
    assert actor.loss.values == (0.5, None, None, None, 0.25), (
        "a line without the metric adds nothing"
    )
    assert actor.updates.count.values == (2, 4, 6, 8, 10, 10)
    assert (s.models.extractor, s.bank) == (None, None)


def test_every_kind_of_line_is_folded():
    s = complementary()
    actor, extractor = s.models.actor.updates, s.models.extractor
    assert extractor is not None
    assert s.bank is not None
    updates = extractor.updates
    assert (updates.count.last, updates.seconds.last, actor.seconds.last) == (37, 3.4, 4.2)
    assert (s.bank.size.last, s.bank.queue.size, s.bank.size_by_task) == (
        370,
        12,
        {"room": 222, "maze": 148},
    )
    assert s.evaluations.sets["room/unseen"].rates["free"] == RateView(
        0.45,
        pytest.approx(0.39),  # pyright: ignore[reportArgumentType]
        pytest.approx(0.51),  # pyright: ignore[reportArgumentType]
        0.25,
    )
    assert s.evaluations.sets["room/unseen"].step == 37
    probe = s.evaluations.probes["room"]
    assert (probe.none, probe.wrong) == (0.25, 0.125)
    step = {"wait": 6.1, "submit": 0.4, "train": 4.2, "sync": 0.3, "bank": 2.0}
    assert dict(s.progress.seconds) == step | {"eval": 2.5, "probe": 0.7}
    assert s.rollout.success.guided.last == pytest.approx(0.3 + 37 / 150)


def test_memory_is_bounded():
    monitor = started("grpo", "room")
    for step in range(3 * HISTORY):
        monitor.log(step, "train", {"rollout/success": step})
        monitor.note(f"note {step}\n\nmore")
    monitor.experiences([experience("x")] * 500)
    s = monitor.snapshot()
    success = s.rollout.success.mean
    assert (len(success.values), success.last) == (HISTORY, 3 * HISTORY - 1)
    assert (len(s.notes), s.notes[-2:]) == (NOTES, (f"note {step}", "more"))
    assert len(s.experiences) == EXPERIENCES


def test_the_remaining_time():
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    for step in (1, 2, 3):
        if step <= 2:
            assert monitor.snapshot().progress.remaining is None
        clock.now += 10
        monitor.log(step, "train", {})
    clock.now += 4
    progress = monitor.snapshot().progress
    assert (progress.elapsed, progress.remaining) == (34, 125 * 10 - 4)
    clock.now += 10_000
    assert monitor.snapshot().progress.remaining == 0


# ── the terminal ──────────────────────────────────────────────────────────────────────────────────

ENTER, LEAVE, SHOW, HIDE = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h", "\x1b[?25l"

APPLICATION = """
import asyncio, signal, sys, threading, time
from contextlib import closing
from crl.cli.dashboard import Dashboard
from crl.monitor.snapshot import RunInfo

drawn = threading.Event()

class Watched(Dashboard):
    def _frame(self):
        drawn.set()
        return super()._frame()

def wait():
    print("waiting")  # is buffered, like the notes
    time.sleep(120)

async def stopped():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("waiting")
    await asyncio.wait_for(stop.wait(), 120)
    screen.note("stopped")

def fail():
    sys.stderr.write("a warn")
    sys.stderr.write("ing\\n")
    raise RuntimeError("it broke")

with closing(Watched(RunInfo("one", "grpo", ("room",), 5))) as screen:
    screen.note("the [bold]header[/bold]\\n  of the run")
    screen.log(1, "train", {"rollout/success": 0.5})
    for _ in range(2):  # when the second frame from here begins, the first is on the screen
        drawn.clear()
        drawn.wait(60)
    {action}
    screen.note("the summary")
print("after")
"""


@contextlib.contextmanager
def in_terminal(*command: str, **environment: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """Start a process in a pseudo-terminal of 80×24.

    Yield the process and the descriptor of its output.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    surroundings = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    surroundings |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=surroundings,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def read(descriptor: int, until: str | None = None) -> str:
    """Return the output of the terminal, to its end or until it contains `until`."""
    seen, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline and (
        until is None or until not in seen.decode("utf-8", "ignore")
    ):
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # EIO: the other side is closed
            break
        seen += chunk
    return seen.decode("utf-8").replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("action", "number", "code", "says"),
    [
        ("pass", None, 0, "the [bold]header[/bold]\n  of the run\nthe summary\nafter\n"),
        ("fail()", None, 1, "the [bold]header[/bold]\n  of the run\na warning\nTraceback"),
        (
            "wait()",
            signal.SIGINT,
            -signal.SIGINT,
            "the [bold]header[/bold]\n  of the run\nwaiting\nTraceback",
        ),
        (
            "asyncio.run(stopped())",
            signal.SIGTERM,
            0,
            "the [bold]header[/bold]\n  of the run\nwaiting\nstopped\nthe summary\nafter\n",
        ),
    ],
    ids=["the end", "an error", "Ctrl-C", "SIGTERM"],
)
def test_the_terminal_is_restored(action, number, code, says):
    with in_terminal(sys.executable, "-c", APPLICATION.replace("{action}", action)) as (
        process,
        terminal,
    ):
        seen = ""
        if number:
            seen = read(terminal, until="waiting")
            process.send_signal(number)
        seen += read(terminal)
        assert process.wait(120) == code
    assert seen.index(ENTER) < seen.rindex(LEAVE)
    assert seen.count(ENTER) == 1
    assert seen.rindex(HIDE) < seen.rindex(SHOW)
    live, after = seen[: seen.rindex(LEAVE)], seen[seen.rindex(LEAVE) + len(LEAVE) :]
    assert after.removeprefix(SHOW).startswith(says)
    assert "0.500" in live
    assert seen.startswith(ENTER), "nothing was printed before"
    assert "\x1b" not in after.replace(SHOW, "").replace(LEAVE, "").split("Traceback")[0]


def test_a_dashboard_that_was_never_started_writes_nothing():
    stream = io.StringIO()
    screen = Dashboard(RunInfo("one", "grpo", ("room",), 5), stream=stream)
    screen.close()
    screen.close()
    assert stream.getvalue() == ""
    screen.note("late\x1b[2J")
    assert stream.getvalue() == "late\\x1b[2J\n"


def test_a_line_stream_passes_on_complete_lines():
    seen: list[str] = []
    stream = LineStream(sys.__stdout__, seen.append)  # pyright: ignore[reportArgumentType]
    print("a", "b", file=stream, end="")
    print("c\nd\n\ne", file=stream)
    stream.write("10 %\r20 %\r\n")
    stream.write("rest")
    assert seen == ["a bc", "d", "", "e", "20 %"]
    stream.close()
    assert seen[-1] == "rest"


# ── dashboard or plain lines ──────────────────────────────────────────────────────────────────────


class Terminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore[reportAssignmentType]

    def isatty(self) -> bool:
        return True


def test_the_dashboard_is_for_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = load(["room"], sets=["actor.model=tiny-actor"])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(_screen(config, tmp_path, plain=False), PlainMonitor)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(_screen(config, tmp_path, plain=False), Dashboard)
    assert isinstance(_screen(config, tmp_path, plain=True), PlainMonitor)
    monkeypatch.setenv("TERM", "dumb")
    assert not _is_terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    assert not _is_terminal()
