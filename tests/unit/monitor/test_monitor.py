"""Run directory and monitors: contents, times and wording of their output."""

from __future__ import annotations

import io
import json
import math
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from crl.config.load import load
from crl.config.schema import MonitorSection
from crl.errors import ConfigError
from crl.monitor.fan_out import FanOut
from crl.monitor.files import FileMonitor, read_metrics
from crl.monitor.plain import PlainMonitor, render_line
from crl.monitor.run_dir import RunDir
from crl.monitor.sinks import SINKS, require_sinks, sinks
from crl.monitor.tensorboard import TensorBoardMonitor
from crl.monitor.wandb import WandbMonitor
from crl.protocols import Monitor
from crl.run.main import open_monitor
from crl.types import Task, TokenTrace, Trajectory
from support.paths import ROOT
from support.trajectories import build_trajectory

TASK = Task("room", 7, "train", "find the exit")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def refuse(constant: str):
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "one")


# ── the run directory ─────────────────────────────────────────────────────────────────────────────


def test_a_run_never_overwrites_another(tmp_path: Path):
    run = RunDir.create(tmp_path / "a" / "b")
    assert RunDir.create(run.path) == run, "an empty directory is free"
    run.config.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"run_dir = .*: exists and is not empty\. Choose another directory"
    ):
        RunDir.create(run.path)
    with pytest.raises(ConfigError, match="exists and is not a directory"):
        RunDir.create(run.config)
    with pytest.raises(ConfigError, match="cannot be created"):
        RunDir.create(run.config / "below")


def test_who_lives_where(run: RunDir):
    paths = (run.config, run.metrics, run.episodes, run.log, run.checkpoint(80))
    assert [str(p.relative_to(run.path)) for p in paths] == [
        "config.json",
        "metrics.jsonl",
        "episodes",
        "log.txt",
        "checkpoints/80",
    ]


# ── untrusted text ────────────────────────────────────────────────────────────────────────────────


def test_text_of_environments_is_escaped_on_the_screen_and_kept_in_the_log(run: RunDir):
    text = "OSError: \x1b]0;owned\x07\r\ud83d\n\tnext — line"
    stream = io.StringIO()
    for monitor in (PlainMonitor(stream=stream), FileMonitor(run)):
        monitor.note(text)
        monitor.close()
    run.append_to_log(text)
    assert stream.getvalue() == ("OSError: \\x1b]0;owned\\x07\\r\\ud83d\n        next — line\n")
    with run.log.open(encoding="utf-8", newline="") as file:
        assert file.read().count("OSError: \x1b]0;owned\x07\r\\ud83d\n\tnext — line\n") == 2


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def test_metrics_are_flat_and_there_as_soon_as_logged(run: RunDir):
    monitor = FileMonitor(run)
    monitor.log(
        3, "train", {"actor/loss": 0.25, "rollout/errors": 2, "note": "x", "actor/kl": None}
    )
    (line,) = lines(run.metrics)
    assert list(line) == [
        "step",
        "kind",
        "time",
        "actor/loss",
        "rollout/errors",
        "note",
        "actor/kl",
    ]
    assert line | {"time": 0} == {
        "step": 3,
        "kind": "train",
        "time": 0,
        "actor/loss": 0.25,
        "rollout/errors": 2,
        "note": "x",
        "actor/kl": None,
    }
    assert 0 <= line["time"] < 60
    monitor.log(4, "train", {})
    assert [line["step"] for line in lines(run.metrics)] == [3, 4]
    monitor.close()


def test_what_json_does_not_have_becomes_null(run: RunDir):
    monitor = FileMonitor(run)
    metrics = {
        "a": float("nan"),
        "b": float("inf"),
        "c": np.float32(0.5),
        "d": np.int64(3),
        "e": np.float64("nan"),
    }
    monitor.log(0, "train", metrics)  # pyright: ignore[reportArgumentType]
    text = run.metrics.read_text()
    line = json.loads(text, parse_constant=refuse)
    assert (line["a"], line["b"], line["c"], line["d"], line["e"]) == (None, None, 0.5, 3, None)


LINE = b'{"step": 1, "kind": "train", "time": 0.5}\n'


@pytest.mark.parametrize(
    ("content", "complete", "damaged"),
    [
        (b"", 0, 0),
        (LINE * 2, 2, 0),
        (LINE + LINE[:-1], 2, 0),
        pytest.param(LINE + LINE[:20], 1, 0, id="a cut last line"),
        pytest.param(LINE + b"\n" + LINE, 2, 0, id="an empty line"),
        pytest.param(LINE[:20] + LINE + LINE, 1, 1, id="a cut line in the middle"),
        pytest.param(LINE + b"\0" * 50 + b"\n" + LINE[:20] + b"\n", 1, 2, id="zeros, complete end"),
        pytest.param(LINE.replace(b"train", b"\xff") + LINE, 1, 1, id="no UTF-8"),
        pytest.param(b"[1]\n" + b'{"step": "1"}\n' + b"[" * 100_000 + b"\n", 0, 3, id="no metrics"),
        pytest.param(LINE.replace(b"train", "a\u2028b\x85".encode()), 1, 0, id="line separators"),
    ],
)
def test_damaged_lines_of_metrics_are_counted(
    run: RunDir, content: bytes, complete: int, damaged: int
):
    run.metrics.write_bytes(content)
    metrics = read_metrics(run.metrics)
    assert (len(metrics.lines), metrics.damaged) == (complete, damaged)


def test_missing_metrics_have_no_lines(run: RunDir):
    metrics = read_metrics(run.metrics)
    assert (metrics.lines, metrics.damaged) == ([], 0)


@pytest.mark.parametrize(("last_bytes", "complete"), [(len(LINE), 1), (len(LINE) + 5, 1), (500, 3)])
def test_the_end_of_metrics_begins_with_a_complete_line(
    run: RunDir, last_bytes: int, complete: int
):
    run.metrics.write_bytes(LINE * 3)
    metrics = read_metrics(run.metrics, last_bytes)
    assert (len(metrics.lines), metrics.damaged) == (complete, 0)


def test_a_deterministic_run_writes_no_time(run: RunDir):
    FileMonitor(run, deterministic=True).log(0, "train", {"a": 1})
    assert lines(run.metrics) == [{"step": 0, "kind": "train", "time": None, "a": 1}]


def test_a_metric_may_not_hide_a_field(run: RunDir):
    with pytest.raises(ValueError, match="step"):
        FileMonitor(run).log(0, "train", {"step": 1})


def trajectory(*traces: TokenTrace, **fields) -> Trajectory:
    return build_trajectory(
        TASK,
        step=2,
        group=5,
        member=1,
        condition=fields.pop("condition", "free"),
        traces=traces,
        **fields,
    )


def test_notes_go_to_the_log_and_files_are_continued(run: RunDir):
    for text in ("one", "two"):
        monitor = FileMonitor(run)
        monitor.note(text)
        monitor.close()
    assert [line.split(" ", 2)[2] for line in run.log.read_text().splitlines()] == ["one", "two"]


# ── console lines ─────────────────────────────────────────────────────────────────────────────────


def test_a_train_line():
    metrics = {
        "rollout/success": 0.4140625,
        "actor/loss": -0.01234,
        "actor/learning_rate": 2e-4,
        "actor/approx_kl": 0.0011,
        "actor/clip_fraction": None,
        "staleness/mean": 0.875,
        "time/wait": 1.0,
        "time/submit": 0.125,
        "time/train": 0.5,
        "time/sync": 0.25,
        "time/bank": 2.0,
        "rollout/turns": 3.2,
    }
    line = render_line(7, "train", metrics, steps=80)
    assert (
        line == "train  7/80  success 0.414  loss -0.0123  lr 2.0e-04  kl 0.0011  clip –  "
        "stale 0.88  3.9 s"
    )
    assert render_line(7, "train", {"rollout/success": 0.5}) == "train 7  success 0.500"


def test_an_eval_line():
    metrics = {
        "eval/room/seen/success/free": 0.25,
        "eval/room/seen/success/free/low": 0.2,
        "eval/room/seen/success/free/high": 0.3,
        "eval/room/seen/episodes": 256,
        "eval/room/unseen/success/guided": 0.5,
        "time/eval": 3.0,
    }
    line = render_line(0, "eval", metrics, steps=80)
    assert line == "eval   0/80  room/seen 0.250 [0.200, 0.300]  room/unseen guided 0.500  3.0 s"
    unknown = dict.fromkeys([name for name in metrics if "/free/" in name], math.nan)
    line = render_line(0, "eval", {"eval/room/seen/success/free": 1.0, **unknown})
    assert line == "eval  0  room/seen 1.000 [–, –]"


SEVERAL = {
    "eval/room/seen/success/free": 0.336, "eval/room/seen/success/free/low": 0.281,
    "eval/room/seen/success/free/high": 0.396,
    "eval/room/seen/episodes/free": 256,
    "eval/room/unseen/success/free": 0.418,
    "eval/shop/unseen/success/free": 0.07,
    "eval/shop/unseen/success/online": None, "eval/shop/unseen/success/online/visit1": 0.1,
    "eval/overall/unseen/success/free": 0.244, "eval/overall/unseen/success/free/low": 0.2,
    "eval/overall/unseen/success/free/high": 0.3,
    "eval/room/lessons/correct": 0.145, "eval/errors": 0, "time/eval": 173.125,
}  # fmt: skip


def test_an_eval_of_several_tasks_is_a_table():
    assert render_line(0, "eval", SEVERAL, steps=100).splitlines() == [
        "eval    0/100  seen                  unseen                unseen online  173.1 s",
        "  room         0.336 [0.281, 0.396]  0.418                 –",
        "  shop         –                     0.070                 –",
        "  overall      –                     0.244 [0.200, 0.300]  –",
    ]
    long = {
        name.replace("shop", "a-shop-of-1000-products"): value for name, value in SEVERAL.items()
    }
    head, *_, shop, _ = render_line(0, "eval", long).splitlines()
    assert head.startswith("eval  0                    seen  ")
    assert shop == "  a-shop-of-1000-products  –                     0.070                 –"


def test_a_probe_line():
    room = {
        "none": 0.3125,
        "right": 0.859375,
        "wrong": None,
        "right_minus_none": 0.5469,
        "right_minus_none/half_width": 0.09441,
    }
    metrics = {**{f"probe/room/{name}": value for name, value in room.items()}, "time/probe": 4.242}
    line = (
        "probe   0/100  room/none 0.312  room/right 0.859  room/wrong –  "
        "room/right − none +0.547 ± 0.094  4.2 s"
    )
    assert render_line(0, "probe", metrics, steps=100) == line
    metrics |= {f"probe/maze/{name}": value for name, value in {**room, "wrong": 0.25}.items()}
    assert render_line(20, "probe", metrics, steps=100).splitlines() == [
        "probe  20/100  none   right  wrong  right − none    4.2 s",
        "  room         0.312  0.859  –      +0.547 ± 0.094",
        "  maze         0.312  0.859  0.250  +0.547 ± 0.094",
    ]


def test_a_train_line_tells_of_each_of_several_tasks():
    rates = {
        "rollout/success": 0.5, "rollout/success/guided": 0.75, "rollout/success/free": 0.25,
        "rollout/maze/success": 0.125, "rollout/maze/success/guided": 0.0,
        "rollout/room/success": 0.875, "actor/loss": 0.0,
    }  # fmt: skip
    line = "train 1  success 0.500 (maze 0.125, room 0.875)  guided 0.750  free 0.250  loss +0.0000"
    assert render_line(1, "train", rates) == line


def test_a_train_line_tells_guided_from_free_where_there_are_both():
    rates = {"rollout/success": 0.5, "rollout/success/guided": 0.75, "rollout/success/free": 0.25}
    assert render_line(1, "train", rates) == "train 1  success 0.500  guided 0.750  free 0.250"
    del rates["rollout/success/guided"]
    assert render_line(1, "train", rates) == "train 1  success 0.500"


def test_a_train_line_tells_of_critiques_that_could_not_be_read():
    shares = {
        "critic/accept": 1.0,
        "critic/refine": 0.0,
        "critic/reject": 0.0,
        "critic/malformed": 0.25,
    }
    accepted = "train 1  accepted 1.00  refined 0.00  rejected 0.00"
    assert render_line(1, "train", shares) == f"{accepted}  malformed 0.25"
    assert render_line(1, "train", {**shares, "critic/malformed": 0.0}) == accepted


def test_lines_about_experience_are_short():
    update = {
        "extractor/reward": 0.25,
        "extractor/loss": None,
        "extractor/version": 4,
        "extractor/updates": 4,
        "time/train": 1,
        "time/sync": 0.5,
    }
    assert (
        render_line(7, "extractor", update, steps=80)
        == "extractor  7/80  reward +0.250  loss –  updates 4  1.5 s"
    )
    bank = {
        "bank/size": 12,
        "bank/size/room": 12,
        "ops/add": 3.0,
        "queue/pending": 2,
        "queue/dead": 0,
        "perf/search_p95_ms": 1.234,
    }
    assert render_line(7, "bank", bank) == "bank  7  size 12  add 3  pending 2  dead 0  p95 ms 1.2"


def test_any_other_line_shows_its_metrics():
    assert render_line(3, "disk", {"disk/free": 12, "state": "ok"}) == "disk  3  free 12  state ok"


def test_the_plain_monitor_prints_lines_and_notes():
    stream = io.StringIO()
    monitor = PlainMonitor(steps=9, stream=stream)
    monitor.log(1, "train", {"rollout/success": 0.5})
    monitor.note("hello")
    assert stream.getvalue() == "train 1/9  success 0.500\nhello\n"


def test_a_line_on_the_bank_is_printed_once():
    """The bank is measured after the last step and again at the end of the run."""
    stream = io.StringIO()
    monitor = PlainMonitor(steps=2, stream=stream)
    for step, size in ((1, 5), (2, 5), (2, 5), (2, 6)):
        monitor.log(step, "bank", {"bank/size": size})
    assert stream.getvalue() == "bank  1/2  size 5\nbank  2/2  size 5\nbank  2/2  size 6\n"


# ── other monitors ────────────────────────────────────────────────────────────────────────────────


class Recorder(Monitor):
    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[tuple] = []
        self.fails = fails

    def log(self, step, kind, metrics) -> None:
        self.calls.append((step, kind, dict(metrics)))

    def trajectories(self, trajectories) -> None:
        self.calls.append(("trajectories", len(trajectories)))

    def experiences(self, experiences) -> None:
        self.calls.append(("experiences", len(experiences)))

    def note(self, text) -> None:
        self.calls.append(("note", text))

    def close(self) -> None:
        self.calls.append(("close",))
        if self.fails:
            raise OSError("disk full")


def test_the_fan_out_reaches_everybody_and_closes_all():
    one, two = Recorder(fails=True), Recorder()
    both = FanOut(one, {"screen": two})
    both.log(1, "train", {"a": 1})
    both.trajectories([trajectory()])
    both.experiences([])
    both.note("x")
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert (
        one.calls
        == two.calls
        == [
            (1, "train", {"a": 1}),
            ("trajectories", 1),
            ("experiences", 0),
            ("note", "x"),
            ("close",),
        ]
    )


@pytest.mark.parametrize("method", ["log", "trajectories", "experiences", "note", "close"])
def test_a_sink_that_fails_is_dropped_with_one_warning(method: str, run: RunDir):
    class Failing(Recorder):
        closed = False

        def close(self) -> None:
            self.closed = True

    def fail(*args: object) -> None:
        raise ConnectionError("no route\nto host")

    failing, other = Failing(), Recorder()
    setattr(failing, method, fail)
    all_three = FanOut(FileMonitor(run), {"wandb": failing, "screen": other})
    for step in (1, 2):
        all_three.log(step, "train", {"a": step})
        all_three.trajectories([trajectory()])
        all_three.experiences([])
        all_three.note(f"note {step}")
    all_three.close()
    assert [line["step"] for line in lines(run.metrics)] == [1, 2]
    warning = (
        "warning: the sink wandb failed and gets no further metrics (ConnectionError: no route to "
        "host). The files of the run are complete"
    )
    assert run.log.read_text("utf-8").count(warning) == 1
    assert failing.closed or method == "close"
    notes = [call[1] for call in other.calls if call[0] == "note"]
    assert [note for note in notes if note != warning] == ["note 1", "note 2"]
    assert len([call for call in other.calls if call[-1] == {"a": 2}]) == 1


def test_a_sink_that_cannot_be_opened_is_dropped_with_the_same_warning(run: RunDir):
    def fail() -> Monitor:
        raise ConnectionError("no route\nto host")

    screen = Recorder()
    monitor = FanOut(FileMonitor(run), {"screen": screen})
    second = Recorder()
    monitor.add("wandb", fail)
    monitor.add("tensorboard", lambda: second)
    monitor.log(1, "train", {"a": 1})
    monitor.close()
    assert second.calls[-2:] == [(1, "train", {"a": 1}), ("close",)]
    warning = (
        "warning: the sink wandb failed and gets no further metrics (ConnectionError: no route to "
        "host). The files of the run are complete"
    )
    assert screen.calls[0] == ("note", warning)
    assert run.log.read_text("utf-8").count(warning) == 1


def test_a_sink_whose_extra_is_missing_ends_the_run(run: RunDir):
    def fail() -> Monitor:
        raise ConfigError("monitor.wandb", "mine", "wandb cannot be imported", "Install it")

    monitor = FanOut(FileMonitor(run), {})
    with pytest.raises(ConfigError):
        monitor.add("wandb", fail)


def test_a_tensorboard_folder_that_is_a_file_does_not_end_the_run(run: RunDir):
    pytest.importorskip("tensorboard")
    (run.path / "tensorboard").write_text("")
    screen = Recorder()
    monitor = open_monitor(load(["room"], sets=["monitor.tensorboard=true"]), run, screen, 0.0)
    monitor.close()
    assert "warning: the sink tensorboard failed" in screen.calls[0][1]


def test_the_files_of_a_run_are_required(run: RunDir):
    other = Recorder()
    both = FanOut(Recorder(fails=True), {"screen": other})
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert other.calls == [("close",)]


def test_tensorboard_gets_the_metrics(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = TensorBoardMonitor(tmp_path)
    monitor.log(1, "train", {"actor/loss": 0.5, "text": "x", "nothing": float("nan")})
    monitor.log(2, "train", {"actor/loss": 0.25, "time/train": 3.0})
    monitor.log(2, "extractor", {"time/train": 1.0})
    monitor.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["actor/loss", "time/train", "extractor/time/train"]
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for completed_steps, steps in ((None, range(1, 7)), (2, range(3, 5))):
        monitor = TensorBoardMonitor(tmp_path, completed_steps)
        for step in steps:
            value = step + (0.5 if completed_steps else 0)
            monitor.log(step, "train", {"actor/loss": value})
        monitor.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.5),
        (4, 4.5),
    ]


def test_wandb_gets_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list = []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: None, log=seen.append, finish=lambda: seen.append("finished")
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: seen.append(kwargs) or run)
    )
    monitor = WandbMonitor("mine", tmp_path / "one", {"seed": 0})
    monitor.log(1, "train", {"a": 0.5})
    monitor.log(1, "extractor", {"a": 1.5, "perf/sync_bytes": 8})
    monitor.close()
    assert seen == [
        {"project": "mine", "name": "one", "dir": str(tmp_path / "one"), "config": {"seed": 0}},
        {"step": 1, "a": 0.5},
        {"step": 1, "a": 1.5, "extractor/perf/sync_bytes": 8},
        "finished",
    ]


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'crl\[wandb\]'"):
        WandbMonitor("mine", tmp_path, {})
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'crl\[tensorboard\]'"):
        TensorBoardMonitor(tmp_path)


def test_every_sink_has_a_setting_and_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(SINKS) == set(MonitorSection.model_fields)
    assert set(SINKS) <= set(extras["optional-dependencies"])


def test_sinks_that_are_on_are_required_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, run = load(["room"]), RunDir(tmp_path)
    require_sinks(config.monitor)
    assert sinks(config, run) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    for setting in ("tensorboard=true", "wandb=mine"):
        name = setting.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"monitor\.{name} = .* needs the extra '{name}'"):
            require_sinks(load(["room"], sets=[f"monitor.{setting}"]).monitor)
    monkeypatch.setattr("crl.monitor.tensorboard.TensorBoardMonitor", lambda *args: args)
    config = load(["room"], sets=["monitor.tensorboard=true"])
    for step in (None, 3):
        opened = {name: open_sink() for name, open_sink in sinks(config, run, step).items()}
        assert opened == {"tensorboard": (tmp_path / "tensorboard", step)}
