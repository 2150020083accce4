"""Parts of pages that are updated live.

A part has a version, which changes with the files that it shows. Pages contain the versions of
their parts, and `events.py` sends new ones.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from crl.config.schema import OVERALL
from crl.errors import ConfigError, CrlError
from crl.evaluation.report import Estimate
from crl.manager.inspection.reading import STEP_SQL, require_bank
from crl.manager.storage.database import as_store_errors, connect_to_read
from crl.monitor.follow import RunFollower
from crl.monitor.run_dir import RunDir
from crl.report.charts import Chart
from crl.report.document import SECTIONS, run_judgements
from crl.report.figures import FIGURES, Arms, arms_of_runs
from crl.report.lessons import LessonCounts, read_counts
from crl.report.run_record import RunRecord
from crl.serve.cache import Version, version_of
from crl.serve.site import FoundRun, Site
from crl.wording import OPERATION_WORDS

TITLES: Mapping[str, str] = {
    "state": "State",
    **SECTIONS,
    "credit": "Credit of the experiences",
    "operations": "Last operations of the bank",
}
"""Titles of the parts of a run's page, in their order."""

CLOCK_S = 5
"""Seconds after which the times of a run under way are shown anew."""

TAIL_BYTES = 256 * 1024
"""Bytes at the end of the metrics that the list of runs reads, if they have an evaluation."""

MAX_OPERATIONS = 15
"""Maximum number of operations that are listed."""

MAX_LOG_ROWS = 5000
"""Number of last rows of a bank's log in which they are looked for."""

OPERATIONS = (
    "add", "update", "merge", "discard", "evict", "drop", "malformed", "refine", "dead", "import",
)  # fmt: skip
"""Kinds of the operations that are listed."""


# ── versions ──────────────────────────────────────────────────────────────────────────────────────


def version(name: str, run: RunDir) -> Version:
    """Return the version of the files that a part shows."""
    if name in ("credit", "operations"):
        return version_of(_bank_files(run))
    if name == "state":
        active = run.is_locked()
        clock = int(time.time() / CLOCK_S) if active else None
        files = (run.config, run.metrics, run.log, run.progress)
        return (active, clock, *version_of(files))
    return version_of((run.config, run.metrics))


def row_version(site: Site, run: FoundRun) -> Version:
    """Return the version of the files that a row of the list of runs shows."""
    if refusal := site.refusal(run):
        return (refusal,)
    return (run.dir.is_locked(), *version_of((run.dir.config, run.dir.metrics)))


def versions(site: Site, run: FoundRun) -> dict[str, str]:
    """Return the names of the versions of all parts of a run's page, by part."""
    return {
        name: site.cache.expected((name, run.dir.path), version(name, run.dir)) for name in TITLES
    }


def row_versions(site: Site) -> dict[str, str]:
    """Return the names of the versions of all rows of the list of runs, by the id of the run."""
    return {
        run.id: site.cache.expected(("row", run.dir.path), row_version(site, run))
        for run in site.runs()
    }


def _bank_files(run: RunDir) -> tuple[Path, Path]:
    return run.bank, run.bank.with_name(f"{run.bank.name}-wal")


# ── parts of a run's page ─────────────────────────────────────────────────────────────────────────


def part(site: Site, run: FoundRun, name: str) -> Markup:
    """Return a part of a run's page as HTML."""
    content, shown = site.cache.live(
        (name, run.dir.path), version(name, run.dir), lambda: _content(site, run, name)
    )
    return site.fragment("part.html", name=name, version=shown, title=TITLES[name], content=content)


def _content(site: Site, run: FoundRun, name: str) -> Markup:
    """Return the content of a part; empty if the run has nothing to show in it."""
    if name == "state":
        return _state(site, run)
    if name == "operations":
        return _operations(site, run)
    if name == "credit":
        return drawn(site, lambda: found.charts if (found := lessons(site, run)) else [])
    try:
        read = record(site, run)
    except ConfigError:
        return Markup("")  # the part "state" has the reason
    return drawn_figures(site, name, arms_of_runs([read]))


def drawn_figures(site: Site, name: str, arms: Arms) -> Markup:
    """Return the charts of a subject as HTML. Those of success explain the conditions."""
    return drawn(site, lambda: FIGURES[name](arms), conditions=name == "success")


def drawn(site: Site, draw: Callable[[], Sequence[Chart]], *, conditions: bool = False) -> Markup:
    """Return charts as HTML, or the reason why they cannot be drawn; empty if there are none.

    `conditions`: explain the conditions of episodes above the charts.
    """
    try:
        charts = draw()
        if not charts:
            return Markup("")
        return site.fragment("charts.html", charts=charts, conditions=conditions)
    except Exception as error:  # damaged files raise errors of many types
        return site.fragment("fault.html", fault=_reason(error))


def _state(site: Site, run: FoundRun) -> Markup:
    """Return state, progress, warnings and summary of a run."""
    if run.is_bank:
        reason = "A bank without a run: its directory has no config.json."
        return site.fragment("fault.html", fault=reason, kind="quiet")
    try:
        follower = site.cache.get(
            ("follower", run.dir.path), [run.dir.config], partial(RunFollower, run.dir.path)
        )
        follower.update()
        snapshot = follower.snapshot()
        read = record(site, run)
        found, fault = None, ""
        try:
            found = lessons(site, run)
        except Exception as error:  # damaged files raise errors of many types
            fault = _reason(error)
        return site.fragment(
            "state.html", snapshot=snapshot, record=read, judgements=run_judgements(read),
            lessons=found, fault=fault,
        )  # fmt: skip
    except Exception as error:
        return site.fragment("fault.html", fault=_reason(error))


def record(site: Site, run: FoundRun) -> RunRecord:
    """Return a run with all its metrics. Raise `ConfigError` if its config cannot be read."""
    key = (run.dir.path, run.dir.is_locked())
    files = (run.dir.config, run.dir.metrics)
    return site.records.get(key, files, partial(RunRecord.read, run.name, run.dir))


def lessons(site: Site, run: FoundRun) -> LessonCounts | None:
    """Return the numbers of experiences of a run's bank, or None if it has no bank."""
    key = ("lessons", run.dir.path)
    files = version_of(_bank_files(run.dir))
    return site.records.live(key, files, partial(read_counts, run.dir.bank))[0]


def _operations(site: Site, run: FoundRun) -> Markup:
    if not run.dir.bank.is_file():
        return Markup("")
    try:
        return site.fragment("operations.html", run=run, rows=operations(run.dir.bank))
    except CrlError as error:
        return site.fragment("fault.html", fault=str(error))


def operations(bank: Path) -> list[Mapping[str, Any]]:
    """Return the last operations of a bank, the newest first.

    Raise `ConfigError` or `StoreError` if the bank cannot be read.
    """
    kinds = ", ".join("?" * len(OPERATIONS))
    sql = (
        f"SELECT {STEP_SQL} AS step, kind, substr(origin, 1, 400) AS origin, "
        "substr(data ->> 'uid', 1, 400) AS uid, substr(data ->> 'text', 1, 400) AS text, "
        "substr(data ->> 'reason', 1, 400) AS reason "
        f"FROM log NOT INDEXED WHERE kind IN ({kinds}) "
        f"AND seq > (SELECT MAX(seq) FROM log) - {MAX_LOG_ROWS} "
        f"ORDER BY seq DESC LIMIT {MAX_OPERATIONS}"
    )
    require_bank(bank)
    with as_store_errors(bank), closing(connect_to_read(bank)) as db:
        db.row_factory = sqlite3.Row
        rows = db.execute(sql, OPERATIONS).fetchall()
    return [
        {
            "step": row["step"],
            "what": OPERATION_WORDS[row["kind"]],
            "uid": row["origin"] if row["kind"] == "evict" else row["uid"],
            "text": row["text"] or row["reason"] or "",
        }
        for row in rows
    ]


# ── rows of the list ──────────────────────────────────────────────────────────────────────────────


def row(site: Site, run: FoundRun) -> Markup:
    """Return the row of a run in the list of runs as HTML."""
    content, shown = site.cache.live(
        ("row", run.dir.path), row_version(site, run), lambda: _cells(site, run)
    )
    return site.fragment("row.html", run=run, version=shown, content=content)


def _cells(site: Site, run: FoundRun) -> Markup:
    if refusal := site.refusal(run):
        return site.fragment("cells.html", run=run, record=None, fault=refusal, kind="lost")
    if run.is_bank:
        return site.fragment(
            "cells.html", run=run, record=None, fault="Bank without a run", kind="quiet"
        )
    try:
        read = RunRecord.read(run.name, run.dir, TAIL_BYTES)
        if not read.of("eval"):
            read = RunRecord.read(run.name, run.dir)
        rates = (last_success(read, "free"), last_success(read, "guided"))
        return site.fragment("cells.html", run=run, record=read, rates=rates)
    except Exception as error:  # damaged files raise errors of many types
        return site.fragment("cells.html", run=run, record=None, fault=_reason(error), kind="lost")


def last_success(run: RunRecord, condition: str) -> Estimate | None:
    """Return the success in seen places in the last evaluation; None if there is none.

    Several tasks have that of all tasks together.
    """
    if not run.evaluations:
        return None
    last = run.evaluations[max(run.evaluations)]
    task = OVERALL if len(run.tasks) > 1 else run.tasks[0]
    return last.get((task, "seen", condition))


def _reason(error: Exception) -> str:
    """Return the text of an error; that of an unexpected one has its type."""
    return str(error) if isinstance(error, CrlError) else f"{type(error).__name__}: {error}"
