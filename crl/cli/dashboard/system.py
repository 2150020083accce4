"""Page "system": time of each part of a step, speed, and work in progress."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from crl.cli.dashboard.parts import Body, glyph, history_table, part_order, rule, time_bar
from crl.cli.draw import DIM, one_line
from crl.monitor.snapshot import Series, Snapshot
from crl.monitor.stages import Stage
from crl.wording import duration

MACHINE = ("perf/process_memory_gib", "perf/machine_memory", "perf/cpu_load", "perf/gpu/")
"""Starts of the names of the metrics of the machine."""

PREFIXES = ("perf/", "env/", "total/", "staleness/")
"""Starts of the names of the metrics on this page."""


def system(s: Snapshot, width: int, height: int) -> Body:
    """Return the page."""
    lines = list(time_bar(s, width))
    if s.progress.stages:
        lines.append(rule("under way", width))
        lines += [_stage(stage, width) for stage in s.progress.stages]
    times = sorted(
        (name for name in s.metrics.get("train", {}) if name.startswith("time/")),
        key=lambda name: part_order(name.removeprefix("time/")),
    )
    if times:
        lines.append(rule("seconds of a step", width))
        rows = [(name.removeprefix("time/"), s.series("train", name)) for name in times]
        lines += _with_glyphs(list(history_table(rows, width - 2)), [name for name, _ in rows])
    rows = list(_rows(s))
    machine = [(name.removeprefix("perf/"), series) for name, series in rows if _of_machine(name)]
    if machine:
        lines.append(rule("machine", width))
        lines += history_table(machine, width)
    if others := [(name, series) for name, series in rows if not _of_machine(name)]:
        lines.append(rule("speed and totals", width))
        lines += history_table(others, width)
    return Body(lines or [Text("No step is finished yet.", DIM)])


def _of_machine(name: str) -> bool:
    return name.startswith(MACHINE)


def _with_glyphs(table: list[Text], parts: list[str]) -> Iterator[Text]:
    """Yield the lines of a table with the glyphs of the bar before the parts of the time."""
    yield Text.assemble("  ", table[0])
    for line, part in zip(table[1:], parts, strict=True):
        yield Text.assemble(glyph(part), " ", line)


def _stage(stage: Stage, width: int) -> Text:
    """Return a line about a stage."""
    parts = f"{stage.done:,}/{stage.total:,}".rjust(14) if stage.total > 1 else " " * 14
    return Text.assemble(
        one_line(stage.name, 60).ljust(34),
        parts,
        "  ",
        duration(stage.elapsed).ljust(8),
        ("left ", DIM),
        duration(stage.remaining),
    )


def _rows(s: Snapshot) -> Iterator[tuple[str, Series]]:
    """Yield the names and histories of metrics about speed and totals."""
    for kind in ("train", "extractor", "bank"):
        for name, series in s.metrics.get(kind, {}).items():
            if name.startswith(PREFIXES) or (kind != "train" and name.startswith("time/")):
                shown = f"{kind} {name}" if kind != "train" else name
                yield shown, series
