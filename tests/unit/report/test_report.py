"""The report of runs on the disk: complete, under way, killed, and with hostile texts."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crl.manager.inspection.reading import LiftView, open_reader
from crl.monitor.run_dir import RunDir
from crl.report.charts import LineChart
from crl.report.document import report
from crl.report.figures import arms_of_runs
from crl.report.figures import success as success_charts
from crl.report.lessons import Lessons, lift_curve
from crl.report.run_record import read_runs, unique_names
from crl.types import Lift
from support.html_pages import Page
from support.report_runs import train_for_report
from support.whole_runs import crl

HOSTILE = (
    "<script>alert(1)</script> \" onload='x' </style>]]> {{ 7 * 7 }} \x1b[31m \x00 \u202e \ud800 &"
)
"""Text that a page, a template or a terminal could interpret."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_for_report(tmp_path_factory.mktemp("report") / "first")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def written(*runs: Path, out: Path | None = None) -> str:
    result = crl("report", *runs, *(("--out", out) if out else ()))
    assert (result.exit_code, result.stderr) == (0, "")
    return (out or runs[0] / "report.html").read_text("utf-8")


def test_report_of_a_run(run: Path):
    html = written(run)
    page = Page(html)
    assert len(html) < 5 * 2**20
    assert "run trained both models on room with the method complementary and seed 0" in page.text
    assert "3 of 3 steps" in page.text
    assert "It is finished." in page.text
    for title in ("Success", "Time", "Training of the actor", "Bank", "Experiences", "Episodes",
                  "Log"):  # fmt: skip
        assert title in page.texts
    assert "a copy of the bank that is also written during the evaluation" in page.text
    named = page.text.replace("Right lessons", "")
    assert not re.search(r"\b(lessons?|entry|entries)\b", named, re.IGNORECASE)
    for setting in ("rollout.group_size", "tasks.room.stream.places"):
        assert setting in page.texts
    titles = re.findall(r"(Guided|Free): (won|lost) Episode", page.text)
    assert [who for who, _ in titles] == ["Guided", "Free"] * (len(titles) // 2)
    assert titles
    entries = json.loads(crl("bank", "ls", run, "--json", "--limit", "0").stdout)
    measured = [entry for entry in entries if entry["lift"]]
    assert measured
    assert all(entry["text"] in page.texts for entry in measured)


def test_results_are_those_of_the_summary(run: Path):
    record = json.loads((run / "summary.json").read_text())
    page = Page(written(run))
    rate = next(r for r in record["success"] if (r["split"], r["condition"]) == ("seen", "guided"))
    assert {"free", "guided", "online", "alone"} == {r["condition"] for r in record["success"]}
    for name, spec in (("first", ".3f"), ("last", ".3f"), ("change", "+.3f")):
        value, low, high = (format(rate[name][end], spec) for end in ("value", "low", "high"))
        assert f"{value} [{low}, {high}]" in page.texts
    gap = record["experience"]["gap"]
    half = gap["high"] - gap["value"]
    assert f"{gap['value']:+.3f} ± {half:.3f} over {gap['n']} groups in" in page.text
    bank = record["experience"]["bank"]
    assert f"{bank['queue/done']} episodes distilled: {bank['ops/add']} added, " in page.text
    assert f"{record['totals']['total/env_turns']:,} environment turns" in page.text
    assert all(sentence in page.text for sentence in record["judgements"])
    assert f"crl resume {run} --steps 6" in page.texts


@pytest.mark.parametrize(
    ("lifts", "note"),
    [
        ([], ""),
        ([Lift(1, 0.5), Lift(2, 0.5)], "No experience is shown to help: all intervals include 0."),
        ([Lift(40, 0.5)], "1 of 1 listed is shown to help: the interval excludes 0."),
        (
            [Lift(40, 0.5), Lift(40, 0.25), Lift(1, 0.5)],
            "2 of 3 listed are shown to help: the interval excludes 0.",
        ),
    ],
)
def test_the_best_experiences_say_how_many_are_shown_to_help(lifts: list[Lift], note: str):
    stories: Any = [
        SimpleNamespace(entry=SimpleNamespace(counters=SimpleNamespace(lift=lift)))
        for lift in lifts
    ]
    assert Lessons({}, [], stories, []).best_note == note


def test_a_run_that_was_killed_has_no_results(run: Path):
    (run / "summary.json").unlink()
    page = Page(written(run))
    assert "The run has no summary.json. It is finished." in page.texts
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:1]))
    page = Page(written(run))
    assert "The run has no summary.json. The run ended before its last evaluation." in page.text
    assert "Wall time by part" not in page.text, "no step is completed"


def test_rates_in_the_report_are_those_of_the_run(run: Path):
    html = written(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    rate = last["eval/room/seen/success/guided"]
    low, high = (last[f"eval/room/seen/success/guided/{end}"] for end in ("low", "high"))
    assert f"with the run&#39;s bank, step 3: {rate:.3g} [{low:.3g}, {high:.3g}]" in html


def test_the_page_loads_and_runs_nothing_else(run: Path):
    page = Page(written(run))
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert not {"src", "data", "srcset"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_structure_for_screen_readers(run: Path):
    page = Page(written(run))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if tag == "section" and "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in ids
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    assert ("html", {"lang": "en"}) in page.tags


def test_a_run_that_was_killed_in_the_middle_of_a_line(run: Path):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    upto = next(i for i, line in enumerate(lines) if '"kind": "train"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: upto + 1]) + lines[-1][:40])
    text = Page(written(run)).text
    assert "1 of 3 steps" in text
    assert "The run ended before its last evaluation. It may have been killed." in text


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("2026-01-01 00:00:00 interrupted: writing a checkpoint\n", "The run was interrupted."),
        ("Traceback (most recent call last):\nValueError\n", "The run failed: see its log."),
    ],
)
def test_a_run_without_its_last_step_says_how_it_ended(run: Path, log: str, sentence: str):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    upto = next(i for i, line in enumerate(lines) if '"kind": "train"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: upto + 1]))
    with (run / "log.txt").open("a") as file:
        file.write(log)
    assert sentence in Page(written(run)).text


def test_a_run_without_any_step(run: Path):
    for name in ("metrics.jsonl", "bank.sqlite", "log.txt"):
        (run / name).unlink()
    shutil.rmtree(run / "episodes")
    text = Page(written(run)).text
    assert "0 of 3 steps" in text
    assert "The run has no bank." in text


def test_a_run_under_way(run: Path):
    with RunDir(run).lock():
        assert read_runs([run])[0].state == "under way"
    assert read_runs([run])[0].state == "finished"


def test_hostile_texts_are_escaped(run: Path):
    """Texts of games, models and notes come from episodes, bank, log and settings."""
    shard = max((run / "episodes").glob("*.jsonl.gz"))
    with gzip.open(shard, "rt") as file:
        records = [json.loads(line) for line in file]
    for record in records:
        record["goal"] = HOSTILE
        record["segments"] = [s | {"text": HOSTILE * 1000} for s in record["segments"]]
    with gzip.open(shard, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    with (run / "log.txt").open("a", errors="backslashreplace") as file:
        file.write(HOSTILE)
    with (run / "metrics.jsonl").open("a") as file:
        line = {"step": 3, "kind": "eval", "time": 1.0, f"eval/{HOSTILE}/seen/success/free": 0.5}
        file.write(json.dumps(line).replace("</script>", "") + "\n")
    html = written(run)
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "<script>alert" not in html
    assert "{{ 7 * 7 }}" in page.text, "texts are no templates"
    assert not {"\x1b", "\x00", "\u202e"} & set(html)
    assert "\\x1b[31m \\x00 \\u202e" in page.text
    assert len(html) < 5 * 2**20
    assert "more characters)" in page.text


def test_a_lesson_of_ten_megabytes_and_one_with_markup(run: Path):
    import sqlite3

    db = sqlite3.connect(run / "bank.sqlite")
    with db:
        uids = [uid for (uid,) in db.execute("SELECT uid FROM entries ORDER BY uid")]
        assert len(uids) > 1
        db.execute("UPDATE entries SET text = ?", (HOSTILE.replace("\ud800", ""),))
        db.execute("UPDATE entries SET text = ? WHERE uid = ?", ("x" * 10 * 2**20, uids[0]))
    db.close()
    html = written(run)
    assert "<script>alert" not in html
    assert len(html) < 5 * 2**20


def test_hostile_texts_of_many_runs_share_one_limit(run: Path, tmp_path: Path):
    """Every character of these texts becomes ten. A report cuts the texts of all runs equally."""
    import sqlite3

    long = "\U000e0001" * 5_000
    with sqlite3.connect(run / "bank.sqlite") as db:
        db.execute("UPDATE entries SET text = ?, goal = ?", (long, long))
        db.execute("UPDATE log SET data = json_set(data, '$.text', ?) WHERE kind = 'add'", (long,))
    db.close()
    for shard in (run / "episodes").glob("*.jsonl.gz"):
        with gzip.open(shard, "rt") as file:
            records = [json.loads(line) for line in file]
        for record in records:
            record["segments"] = [s | {"text": long} for s in record["segments"]] * 5
        with gzip.open(shard, "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    (run / "log.txt").write_text(long)
    runs = [run, *(Path(shutil.copytree(run, tmp_path / f"copy{i}")) for i in range(7))]
    result = crl("report", *runs, "--out", tmp_path / "all.html")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: seed 0 occurs 8 times in ")
    html = (tmp_path / "all.html").read_text("utf-8")
    assert 1_000_000 < len(html.encode()) < 5_000_000
    page = Page(html)
    (share,) = re.findall(r"have at most (\d+) % of their usual length", page.text)
    assert 0 < int(share) < 100
    assert page.text.count("more characters)") > 8 * 10
    alone = Page(written(run)).text
    shares = re.findall(r"have at most (\d+) % of their usual length", alone)
    assert not shares or int(shares[0]) > int(share), "one run has more space"


def test_a_report_with_short_texts_is_complete(run: Path):
    assert "of their usual length" not in Page(written(run)).text


def test_a_story_has_the_lift_by_step(run: Path):
    html = written(run)
    with open_reader(run / "bank.sqlite") as bank:
        entries = [entry for entry in bank.entries() if entry.counters.lift]
        views = {entry.uid: bank.lifts(entry.uid) for entry in entries}
    assert "Lift by step" in html
    curves = {uid: lift_curve(found) for uid, found in views.items()}
    assert all(curves.values())
    for curve in curves.values():
        assert f"{curve[-1].y:.3g} after step {curve[-1].x}, of all versions</dd>" in html


def test_the_curve_of_a_lift_adds_the_groups_of_a_step():
    """Differences 1, 0 after step 2, then −1 after step 4: means 1/2 and 0."""
    views = [
        LiftView(step, f"run/{step}/{i}", 1, guided, free)
        for i, (step, guided, free) in enumerate([(2, 1.0, 0.0), (2, 0.5, 0.5), (4, 0.0, 1.0)])
    ]
    assert [(point.x, point.y) for point in lift_curve(views)] == [(2, 0.5), (4, 0.0)]
    earlier = LiftView(None, "old/1/1", 1, 1.0, 0.0)
    assert lift_curve([earlier]) == [], "the step of another run is unknown"
    points = lift_curve([earlier, *views])
    assert [point.x for point in points] == [2, 4]
    assert [point.y for point in points] == pytest.approx([2 / 3, 1 / 4])


@pytest.mark.parametrize(
    ("actor", "extractor", "text"),
    [
        (0.0, 1e-3, "trained the extractor on room"),
        (1e-3, 0.0, "trained the actor on room"),
        (0.0, 0.0, "trained no model on room"),
    ],
)
def test_a_model_with_learning_rate_0_is_not_trained(
    run: Path, actor: float, extractor: float, text: str
):
    saved = json.loads((run / "config.json").read_text())
    for role, rate in (("actor", actor), ("extractor", extractor)):
        saved["config"][role]["optimizer"]["learning_rate"] = rate
    (run / "config.json").write_text(json.dumps(saved))
    (run / "summary.json").unlink()
    summary = Page(written(run).partition("</section>")[0]).text
    assert text in summary
    assert ("The actor was not trained." in summary) == (actor == 0)
    judged = re.search(r"(training (raised|lowered) success|no effect of training)", summary)
    assert bool(judged) == (actor > 0)


def test_runs_of_two_arms(run: Path, trained: Path, tmp_path: Path):
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    saved = json.loads((other / "config.json").read_text())
    saved["config"]["actor"]["optimizer"]["learning_rate"] = 0.125
    (other / "config.json").write_text(json.dumps(saved))
    page = Page(written(run, other, out=tmp_path / "both.html"))
    assert "actor.optimizer.learning_rate" in page.texts
    assert "0.125" in page.texts
    assert "Differences of success after the last step" in page.texts
    assert "B − A" in page.texts
    first, second = (text for text in page.texts if re.match(r"[AB]: 1 run \(seed 0\)", text))
    rates = json.loads((run / "summary.json").read_text())["success"]
    rate = next(r for r in rates if (r["split"], r["condition"]) == ("seen", "guided"))["last"]
    interval = f"{rate['value']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]"
    assert "method complementary, 3 steps. Trained both models on room." in first
    assert f"; seen with the run's bank {interval}; " in first
    assert first[1:] == second[1:]


def test_runs_of_two_seeds_are_averaged(run: Path, trained: Path, tmp_path: Path):
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    saved = json.loads((other / "config.json").read_text())
    saved["config"]["run"]["seed"] = 1
    (other / "config.json").write_text(json.dumps(saved))
    html = report(read_runs([run, other]))
    assert "95 % intervals of the mean over seeds." in html
    assert "Not all runs have all steps" not in html
    assert "<p>2 runs (seeds 0, 1), method complementary, 3 steps. Trained both models" in html
    assert "Differences of success" not in html


def test_a_run_without_its_last_evaluation_is_left_out_of_the_mean(
    run: Path, trained: Path, tmp_path: Path
) -> None:
    others = []
    for seed in (1, 2, 3):
        other = Path(shutil.copytree(trained, tmp_path / f"seed{seed}"))
        saved = json.loads((other / "config.json").read_text())
        saved["config"]["run"]["seed"] = seed
        (other / "config.json").write_text(json.dumps(saved))
        lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [x for x in lines if (json.loads(x)["kind"], json.loads(x)["step"]) != ("eval", 3)]
        (other / "metrics.jsonl").write_text("".join(kept))
        others.append(other)
    html = report(read_runs([run, *others]))
    assert "4 runs (seeds 0, 1, 2, 3; 1 finished), method" in html
    assert "Not all runs have all steps" in html
    success = re.search(r"Success after the last step: (.*?)\. The banks", html)
    assert success
    intervals = set(re.findall(r"\[(.*?)\]", success[1]))
    assert intervals == {"–, –"}, "an interval over seeds needs two of them"
    charts = success_charts(arms_of_runs(read_runs([run, *others])))
    online = [c for c in charts if isinstance(c, LineChart) and "unseen places" in c.title]
    assert online
    assert all(math.isnan(line.last.low) for chart in online for line in chart.lines)


def test_a_copy_of_a_run_is_no_second_seed(run: Path, trained: Path, tmp_path: Path):
    for command in (("compare",), ("plot",), ("report", "--out", tmp_path / "both.html")):
        result = crl(*command, run, trained)
        assert result.exit_code == 0
        start = f"warning: seed 0 occurs twice in {run}, {trained}: "
        assert result.stderr.startswith(start)
        assert result.stderr.count("\n") == 1


def test_a_name_that_a_terminal_would_interpret_is_escaped(run: Path):
    hostile = run.rename(run.with_name("\x1b[31m\u202erun"))
    for command in (("report",), ("plot", "--out", hostile / "plot.svg")):
        result = crl(*command, hostile)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "\\x1b[31m\\u202erun" in result.stdout
        assert not {"\x1b", "\u202e"} & set(result.stdout)


def test_values_that_are_not_finite_are_left_out(run: Path):
    """Metrics of a run that diverged: a chart has the other values."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train" and line["step"] == 2:
            line |= {"actor/loss": float("nan"), "time/train": float("nan"),
                     "time/wait": float("inf"), "rollout/success/free": float("nan")}  # fmt: skip
        if line["kind"] == "eval" and line["step"] == 3:
            line["eval/room/seen/success/free"] = float("nan")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for what in ("success", "time", "actor"):
        result = crl("plot", run, "--what", what)
        assert (result.exit_code, result.stderr) == (0, "")
        assert not re.search(r"\b(nan|inf)\b", result.stdout)
    pictures = re.findall(r"<svg.*?</svg>", report(read_runs([run])), re.DOTALL)
    assert pictures
    assert not re.search(r"\b(nan|inf)\b", " ".join(pictures))


def test_runs_that_are_not_finished_are_no_result(run: Path, trained: Path, tmp_path: Path):
    """The second arm has a finished run and one whose last evaluation is that before training."""
    runs = [run]
    for seed in (1, 2):
        other = Path(shutil.copytree(trained, tmp_path / f"seed{seed}"))
        saved = json.loads((other / "config.json").read_text())
        saved["config"]["run"]["seed"] = seed
        saved["config"]["actor"]["optimizer"]["learning_rate"] = 0.125
        (other / "config.json").write_text(json.dumps(saved))
        runs.append(other)
    lines = (runs[2] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[2] / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] < 2)
    )
    html = report(read_runs(runs))
    assert "Without runs that are not finished: seed2." in html
    assert "over episodes: without the spread between seeds" in html, "one run against one"
    assert "Not all runs have all steps" in html


def test_training_curves_are_those_of_the_task(run: Path, trained: Path, tmp_path: Path):
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"room"', '"maze"'))
    page = Page(report(read_runs([run, other])))
    for task in ("room", "maze"):
        (label,) = [
            attributes["aria-label"] or ""
            for tag, attributes in page.tags
            if tag == "svg"
            and (attributes.get("aria-label") or "").startswith(f"{task}, training episodes, free")
        ]
        assert label.count("step 3") == 1, "one run has this task"


def test_names_differ_and_are_no_numbers():
    paths = [Path("/runs/a/20"), Path("/runs/b/20")]
    assert unique_names(paths) == ["a/20", "b/20"]
    assert unique_names([Path("/x/a/20"), Path("/y/a/20")]) == ["x/a/20", "y/a/20"]
    assert unique_names([Path("/runs/first")]) == ["first"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("bank.sqlite", b"no bank", "The bank cannot be read"),
        ("bank.sqlite", b"", "The bank cannot be read"),
        ("episodes/000003.jsonl.gz", b"\x1f\x8b", "The episodes cannot be read"),
    ],
)
def test_a_damaged_file_leaves_the_rest_of_the_report(
    run: Path, name: str, content: bytes, text: str
):
    (run / name).write_bytes(content)
    page = Page(written(run))
    assert text in page.text
    assert "3 of 3 steps" in page.text


@pytest.mark.parametrize("runs", [1, 4], ids=["one run", "a table of runs"])
def test_damaged_lines_of_metrics_are_reported(run: Path, tmp_path: Path, runs: int):
    copies = [Path(shutil.copytree(run, tmp_path / f"copy{n}")) for n in range(1, runs)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ki\n[]\n{"step": 3, "kind"')
    page = Page(report(read_runs([run, *copies])))
    note = "run: the metrics cannot be read in full. metrics.jsonl: 2 damaged lines are left out"
    assert page.text.count(note) == 1
    assert page.text.count("cannot be read in full") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("{run}", "{run}"), "is given twice"),
        (("{run}/none",), "is not a run directory"),
        (("{run}", "{trained}"), "--out = None: is required for several runs. Give a file"),
        (("{run}", "--out", "{run}/no/folder.html"), "cannot be written"),
    ],
)
def test_errors(run: Path, trained: Path, arguments: tuple[str, ...], reason: str):
    result = crl("report", *(text.format(run=run, trained=trained) for text in arguments))
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not re.search(r"\bTraceback\b", result.stderr)
