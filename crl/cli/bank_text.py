"""Lines that `crl bank` prints.

The contents of a bank are model output. Every character that a terminal would interpret is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from crl.cli.draw import one_line, printable
from crl.intervals import plus_minus
from crl.manager.reading import (
    BINS,
    Comparison,
    EntryView,
    Eviction,
    GenerationView,
    Lesson,
    LiftView,
    RefinementView,
    RequestView,
    UseView,
    VersionView,
    pooled,
)
from crl.types import Lift

LAST = 10
"""Number of episodes, questions and versions that `show` lists."""

PERIODS = 8
"""Maximum number of periods that `show` divides an entry's history into."""

LEFT = frozenset(
    {
        "uid",
        "task",
        "status",
        "goal",
        "text",
        "state",
        "episode",
        "guided by",
        "outcome",
        "reason",
        "how",
        "by",
        "answer",
        "when",
    }
)
"""Columns of text, which are aligned on the left. All other columns contain numbers."""

Short = Mapping[str, str]
"""Printed uid by full uid."""

# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def table(columns: Mapping[str, Sequence[str]], width: int | None) -> list[str]:
    """Return a header line and one line per row. `columns`: cells by column name.

    `width`: maximum number of terminal cells in a line. Only the last two columns are cut, and
    together they keep at least 20 cells. None: nothing is cut.
    """
    cells = [
        [name, *(one_line(cell, len(cell)) for cell in column)] for name, column in columns.items()
    ]
    widths = [max(map(cell_len, column)) for column in cells]
    if width is not None:
        *fixed, second, last = widths
        room = max(20, width - sum(fixed) - 2 * (len(widths) - 1))
        second = min(second, max(room - last, room * 2 // 5))
        widths = [*fixed, second, min(last, room - second)]
    padded = [
        [_fitted(cell, width, name in LEFT) for cell in column]
        for name, column, width in zip(columns, cells, widths, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _fitted(text: str, width: int, left: bool) -> str:
    """Return a text of exactly `width` cells: cut with an ellipsis, or padded with spaces."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    padding = " " * (width - cell_len(text))
    return text + padding if left else padding + text


def won_of(won: int, credited: int) -> str:
    """Return for example "3/4", or "–" before the first credited episode."""
    return f"{won}/{credited}" if credited else "–"


def lift_text(lift: Lift | None) -> str:
    """Return a lift ± half its 95 % interval, or "–" if the lift is unknown."""
    return plus_minus(lift.mean, lift.half, 2) if lift else "–"


def _step(step: int | None) -> str:
    """Return the step, or "–" for a step of another run."""
    return "–" if step is None else str(step)


def _when(step: int | None) -> str:
    """Return the step in words. None = in another run."""
    return "in an earlier run" if step is None else f"at step {step}"


def entry_table(
    entries: Sequence[EntryView], short: Short, width: int | None, **more: Sequence[str]
) -> list[str]:
    """Return a table of entries. `more`: columns to the left of the others.

    Task and status are left out if they are equal in all rows. Votes are left out if there are
    none.
    """
    columns = {
        **more,
        "uid": [short[entry.uid] for entry in entries],
        "lift": [lift_text(entry.lift) for entry in entries],
        "won": [won_of(entry.won, entry.credited) for entry in entries],
        "uses": [str(entry.retrieved) for entry in entries],
        "step": [_step(entry.step) for entry in entries],
    }
    if any(entry.votes for entry in entries):
        columns["votes"] = [f"{entry.votes:+d}" if entry.votes else "0" for entry in entries]
    differing = {name: [getattr(entry, name) for entry in entries] for name in ("task", "status")}
    columns |= {name: values for name, values in differing.items() if len(set(values)) > 1}
    return table(
        columns
        | {"goal": [entry.goal for entry in entries], "text": [entry.text for entry in entries]},
        width,
    )


def request_table(requests: Sequence[RequestView], short: Short, width: int | None) -> list[str]:
    """Return a table of requests.

    Dead requests are shown with their reasons, which are never cut.
    """
    columns: dict[str, Sequence[str]] = {
        "episode": [request.id for request in requests],
        "state": [request.state for request in requests],
        "outcome": ["won" if request.success else "lost" for request in requests],
        "guided by": [
            ", ".join(short.get(uid, uid) for uid in request.guided) or "–" for request in requests
        ],
        "task": [request.task for request in requests],
        "goal": [request.goal for request in requests],
    }
    if any(request.state == "dead" for request in requests):
        del columns["state"], columns["guided by"]
        return table(columns | {"reason": [request.reason or "" for request in requests]}, None)
    return table(columns, width)


def block(text: str) -> Iterator[str]:
    """Yield the lines of a text, indented and with escapes."""
    for part in text.split("\n"):
        yield f"  {printable(part.expandtabs(4))}".rstrip()


def line(text: str) -> str:
    """Return a text on one line, without cutting it."""
    return one_line(text, len(text))


# ── show ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Information on the generation that wrote an entry or an answer."""

    generation: GenerationView | None
    """Generation of the extractor. None if it is not stored in this bank."""
    prompt: str | None = None
    """Decoded prompt. None if it could not be decoded."""
    answer: str | None = None
    """Decoded completion. None if it could not be decoded."""
    unreadable: str | None = None
    """Reason why prompt and answer could not be decoded."""

    def _written(self) -> Iterator[str]:
        """Yield the lines about the generation."""
        made = self.generation
        if made is None:
            yield (
                "The answer that wrote it is not here: it came from elsewhere, or there is "
                "nothing more to learn from it."
            )
            return
        last = "" if made.trained_at is None else f", for the last time at step {made.trained_at}"
        yield (
            f"written by {line(made.id)}: extractor version {made.extractor}, {len(made.sampled)} "
            f"tokens, finish {made.finish}"
        )
        yield f"{_often('trained on', made.trained)}{last}"
        if self.prompt is None or self.answer is None:
            yield f"Its text cannot be told: {line(self.unreadable or '')}"
            return
        yield "prompt"
        yield from block(self.prompt)
        yield "answer"
        yield from block(self.answer)


@dataclass(frozen=True)
class EntryReport(GenerationReport):
    """Information on an entry."""

    entry: EntryView
    lineage: Sequence[VersionView]
    offspring: Sequence[VersionView]
    uses: Sequence[UseView]
    lifts: Sequence[LiftView]
    refinements: Sequence[RefinementView]
    eviction: Eviction | None

    def lines(self, short: Short) -> Iterator[str]:
        """Yield the output of `show`. `short`: printed uid by full uid."""
        entry = self.entry
        yield f"{line(entry.uid)}, version {entry.version}, {self._status()}"
        yield f"task  {line(entry.task)}"
        yield f"goal  {line(entry.goal)}"
        yield "text"
        yield from block(entry.text)
        yield ""
        last = f", for the last time {_when(entry.last_returned_step)}" if entry.retrieved else ""
        yield f"{_often('retrieved', entry.retrieved)}{last}"
        yield (
            f"won {entry.won} of {entry.credited} credited episodes (of this version)"
            if entry.credited
            else "never credited"
        )
        if entry.lift:
            groups = f"{entry.lift.groups:,} groups" if entry.lift.groups > 1 else "one group"
            yield (
                f"lift {lift_text(entry.lift)} over {groups}: success of their guided − of their "
                "free members (of this version)"
            )
        elif entry.credited:
            yield (
                "lift unknown: no group that it guided has free members to "
                "compare with (of this version)"
            )
        if entry.votes:
            yield f"{entry.votes:+d} votes of the extractor (of this version)"
        title = _first("lineage, the newest first", min(LAST, len(self.lineage)), len(self.lineage))
        yield from _titled(title, _versions(self.lineage[:LAST], short))
        if self.absent:
            yield f"  came from what is not in this bank: {', '.join(map(line, self.absent))}"
        title = (
            f"{_last('versions', len(self.offspring))} that came of it"
            if len(self.offspring) > LAST
            else "what came of it"
        )
        yield from _titled(title, _versions(self.offspring[-LAST:], short))
        yield from _titled(
            "lift and credit over time (of all versions)", history(self.uses, self.lifts)
        )
        yield from _titled(
            f"{_last('episodes', len(self.uses))} that it guided", _uses(self.uses[-LAST:])
        )
        yield from _titled(
            f"{_last('questions', len(self.refinements))} that it answered",
            _refinements(self.refinements[-LAST:]),
        )
        yield ""
        yield from self._written()

    @property
    def absent(self) -> list[str]:
        """Versions that the lineage names but that are not in the bank, as after an import."""
        there = {f"{version.uid}@{version.version}" for version in self.lineage}
        return sorted({parent for version in self.lineage for parent in version.parents} - there)

    def _status(self) -> str:
        """Return the status, and for an evicted entry the step and the reason."""
        if self.eviction is None:
            return self.entry.status
        if self.eviction.why == "room" and self.eviction.by is None:
            return (
                f"evicted {_when(self.eviction.step)} to fit the bounds of "
                "the run that opened the bank"
            )
        how = {
            "room": "to make room for",
            "votes": "by the votes up to",
            "discarded": "by",
            "pruned": "by",
        }[self.eviction.why]
        return (
            f"evicted {_when(self.eviction.step)} {how} "
            f"{line(self.eviction.by or 'crl bank prune')}"
        )


@dataclass(frozen=True)
class RefinementReport(GenerationReport):
    """Information on an answer to a question."""

    refinement: RefinementView
    uses: Sequence[UseView]

    def lines(self, short: Short) -> Iterator[str]:
        """Yield the output of `show`. `short`: printed uid by full uid."""
        told = self.refinement
        yield f"{line(told.id)}, an answer to a question {_when(told.step)}"
        yield f"made from  {line(short.get(told.uid, told.uid))}@{told.version}"
        if told.text is None:
            yield "The agent was told what was found, as it stood."
        else:
            yield "text"
            yield from block(told.text)
        yield from _titled("the episode that it guided", _uses(self.uses))
        yield ""
        yield from self._written()


def _titled(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield an empty line, the title and the indented lines.

    Yield nothing if there are no lines.
    """
    if lines:
        yield ""
        yield title
        yield from (f"  {text}" for text in lines)


def _versions(versions: Sequence[VersionView], short: Short) -> list[str]:
    """Return a table of versions, or nothing if there are none."""
    if not versions:
        return []
    columns = {
        "step": [_step(version.step) for version in versions],
        "how": [version.kind for version in versions],
        "uid": [f"{short.get(version.uid, version.uid)}@{version.version}" for version in versions],
        "by": [version.by for version in versions],
        "text": [version.text for version in versions],
    }
    return table(columns, None)


def _uses(uses: Sequence[UseView]) -> list[str]:
    """Return a table of credited episodes, or nothing if there are none."""
    columns = {
        "step": [_step(use.step) for use in uses],
        "episode": [use.episode for use in uses],
        "version": [str(use.version) for use in uses],
        "reward": [f"{use.reward:+g}" for use in uses],
    }
    return table(columns, None) if uses else []


def _refinements(refinements: Sequence[RefinementView]) -> list[str]:
    """Return a table of answers to questions, or nothing if there are none."""
    columns = {
        "step": [_step(told.step) for told in refinements],
        "answer": [told.id for told in refinements],
        "version": [str(told.version) for told in refinements],
        "text": ["(as it stood)" if told.text is None else told.text for told in refinements],
    }
    return table(columns, None) if refinements else []


def _last(what: str, n: int) -> str:
    """Return a title that says whether only the last items are listed."""
    return f"the last {LAST} of the {n:,} {what}" if n > LAST else f"the {what}"


def history(uses: Sequence[UseView], lifts: Sequence[LiftView] = ()) -> list[str]:
    """Return a table of lift and won episodes over time.

    Each row is a period of consecutive steps. There are at most PERIODS of them, and one more for
    all earlier runs.
    """
    earlier = [use for use in uses if use.step is None]
    steps = [
        list(group) for step, group in groupby(uses, key=lambda use: use.step) if step is not None
    ]
    size = max(1, -(-len(steps) // PERIODS))
    periods = [earlier] if earlier else []
    periods += [
        [use for step in steps[i : i + size] for use in step] for i in range(0, len(steps), size)
    ]
    names = [_period(period[0].step, period[-1].step) for period in periods]
    if not periods:
        return []
    when = [{use.step for use in period} for period in periods]
    columns = {
        "when": names,
        "lift": [
            lift_text(pooled(one.lift for one in lifts if one.step in steps)) for steps in when
        ],
        "won": [won_of(sum(use.reward > 0 for use in period), len(period)) for period in periods],
    }
    return table(columns, None)


def _period(first: int | None, last: int | None) -> str:
    """Return the name of a period. `first` = None: earlier runs."""
    if first is None:
        return "earlier runs"
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _often(what: str, n: int) -> str:
    """Return how often something happened, in words."""
    return f"never {what}" if n == 0 else f"{what} once" if n == 1 else f"{what} {n:,} times"


# ── stats ───────────────────────────────────────────────────────────────────────────────────────


def stats_lines(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the output of `stats`. `stats`: result of `BankReader.stats`."""
    used = stats["used"]
    voted = f", {used['voted']:,} voted on" if used["voted"] else ""
    last = "" if stats["step"] is None else f", the last at step {stats['step']}"
    earlier = f", after {stats['earlier']:,} of earlier runs" if stats["earlier"] else ""
    rows = {
        "bank": (
            f"{line(stats['bank'])}: {stats['bytes'] / 2**20:,.1f} MiB, "
            f"{stats['log']:,} operations{last}{earlier}"
        ),
        "found by": line(stats["keys"] or "nothing yet: the run that opens it makes the vectors"),
        "used": (
            f"of {used['active']:,} active experiences {used['retrieved']:,} were ever retrieved, "
            f"{used['credited']:,} credited{voted}"
        ),
        "operations": _counts(stats["ops"]) or "–",
        "dropped": _counts(stats["dropped"]) or "–",
        "queue": _counts(stats["queue"]),
        "training": _counts({"answers kept": stats["generations"], "units ready": stats["ready"]}),
    }
    yield from (f"{name:<10}  {text}" for name, text in rows.items())
    yield ""
    tasks = stats["entries"]
    columns = {
        name: [f"{sizes[name]:,}" for sizes in tasks.values()]
        for name in ("active", "evicted", "merged", "goals")
    }
    yield from table({"task": list(tasks), **columns}, None)
    if used["credited"]:
        yield from _titled(
            "active experiences by the 95 % interval of their lift", _lift_counts(stats["lift"])
        )
        yield from _titled(
            "active experiences by the share of their credited episodes that were won",
            _histogram(stats["won"]),
        )


def _counts(counts: Mapping[str, int]) -> str:
    """Return counts by name on one line."""
    return "  ".join(f"{line(name)} {number:,}" for name, number in counts.items())


def _lift_counts(counts: Mapping[str, int]) -> list[str]:
    """Return one line per class of lift."""
    names = {"above": "above 0", "around": "around 0", "below": "below 0", "unknown": "unknown"}
    widest = len(f"{max(counts.values()):,}")
    return [f"{text:<8}  {counts[name]:>{widest},}" for name, text in names.items()]


def _histogram(counts: Sequence[int]) -> list[str]:
    """Return one line with a bar per bin of the share of won episodes."""
    widest, longest = len(f"{max(counts):,}"), max(counts)
    rows = []
    for i, count in enumerate(counts):
        bar = "█" * -(-40 * count // longest)
        rows.append(
            f"{100 * i // BINS:>3}–{100 * (i + 1) // BINS:>3} %  {count:>{widest},}  {bar}".rstrip()
        )
    return rows


# ── diff ────────────────────────────────────────────────────────────────────────────────────────


def diff_lines(
    found: Comparison, a: Path, b: Path, limit: int | None, width: int | None
) -> Iterator[str]:
    """Yield the output of `diff`.

    `limit`: maximum number of rows per table. `width`: as in `table`.
    """
    yield f"A {line(str(a))}"
    yield f"B {line(str(b))}"
    yield (
        f"only in A {len(found.only_a):,}, only in B {len(found.only_b):,}, in "
        f"both {len(found.both):,}"
    )
    credited = [pair for pair in found.both if all(lesson.credited for lesson in pair)]
    if credited:
        of_a, of_b = (
            won_of(sum(one.won for one in side), sum(one.credited for one in side))
            for side in zip(*credited, strict=True)
        )
        yield (
            f"the {len(credited):,} that were credited in both won {of_a} "
            f"episodes of A, {of_b} of B"
        )
    inside = width and width - 2
    for title, lessons in {"only in A": found.only_a, "only in B": found.only_b}.items():
        rows = lessons[:limit]
        yield from _titled(_first(title, len(rows), len(lessons)), _lessons({"": rows}, inside))
    rows = found.both[:limit]
    title = _first("in both: those whose lifts differ most first", len(rows), len(found.both))
    yield from _titled(
        title, _lessons({"A": [pair[0] for pair in rows], "B": [pair[1] for pair in rows]}, inside)
    )


def _lessons(sides: Mapping[str, Sequence[Lesson]], width: int | None) -> list[str]:
    """Return a table of lessons.

    `sides`: lessons by the label of their bank; all sides list the same lessons.
    """
    columns: dict[str, Sequence[str]] = {}
    for side, lessons in sides.items():
        columns[f"lift {side}".rstrip()] = [lift_text(lesson.lift) for lesson in lessons]
        columns[f"won {side}".rstrip()] = [
            won_of(lesson.won, lesson.credited) for lesson in lessons
        ]
    rows = next(iter(sides.values()))
    columns |= {"goal": [lesson.goal for lesson in rows], "text": [lesson.text for lesson in rows]}
    return table(columns, width) if rows else []


def _first(title: str, shown: int, of: int) -> str:
    """Return the title, with the number of shown rows if rows are left out."""
    return title if shown == of else f"{title} (the first {shown:,} of {of:,})"
