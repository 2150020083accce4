"""Lines that `crl bank` prints.

The contents of a bank are model output. Every character that a terminal would interpret is escaped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from crl.cli.draw import one_line
from crl.cli.output import filled, table, wrapped
from crl.cli.runs.episodes import EPISODE_ID
from crl.manager.inspection.failures import FailureView, ModeView
from crl.manager.inspection.reading import (
    WIN_RATE_BINS,
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
    pooled_lift,
)
from crl.wording import counted, lift_text, printable, times

MAX_LISTED = 10
"""Number of episodes, questions and versions that `show` lists."""

MAX_PERIODS = 8
"""Maximum number of periods that `show` divides an entry's history into."""

ShortUids = Mapping[str, str]
"""Printed uid by full uid."""

# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def won_of(won: int, credited: int) -> str:
    """Return for example "3/4", or "–" before the first credited episode."""
    return f"{won}/{credited}" if credited else "–"


def _completed(steps: int | None) -> str:
    """Return the completed steps at an operation, or "–" for an operation of another run."""
    return "–" if steps is None else str(steps)


def _when(completed: int | None) -> str:
    """Return the completed steps at an operation in words. None = in another run."""
    return "in an earlier run" if completed is None else f"after step {completed}"


def entry_table(
    entries: Sequence[EntryView], short: ShortUids, width: int | None, **more: Sequence[str]
) -> list[str]:
    """Return a table of entries. `more`: columns to the left of the others.

    Task and status are left out if they are equal in all rows. Votes are left out if there are
    none.
    """
    counters = [entry.counters for entry in entries]
    columns = {
        **more,
        "uid": [short[entry.uid] for entry in entries],
        "lift": [lift_text(c.lift) for c in counters],
        "won": [won_of(c.won, c.credited) for c in counters],
        "retrieved": [str(c.retrieved) for c in counters],
        "step": [_completed(entry.step) for entry in entries],
    }
    if any(c.votes for c in counters):
        columns["votes"] = [f"{c.votes:+d}" if c.votes else "0" for c in counters]
    differing = {name: [getattr(entry, name) for entry in entries] for name in ("task", "status")}
    columns |= {name: values for name, values in differing.items() if len(set(values)) > 1}
    return table(
        columns
        | {"goal": [entry.goal for entry in entries], "text": [entry.text for entry in entries]},
        width,
    )


def mode_table(modes: Sequence[ModeView], width: int | None) -> list[str]:
    """Return a table of failure modes."""
    return table(
        {
            "mode": [mode.mode for mode in modes],
            "failures": [f"{mode.failures:,}" for mode in modes],
            "goals": [f"{mode.goals:,}" for mode in modes],
            "last step": [_completed(mode.step) for mode in modes],
            "last lesson": [mode.lesson for mode in modes],
        },
        width,
    )


def failure_table(
    failures: Sequence[FailureView], short: ShortUids, width: int | None
) -> list[str]:
    """Return a table of failures."""
    return table(
        {
            "uid": [short[failure.uid] for failure in failures],
            "step": [_completed(failure.step) for failure in failures],
            "goal": [failure.goal for failure in failures],
            "lesson": [failure.note.lesson for failure in failures],
        },
        width,
    )


def request_table(
    requests: Sequence[RequestView], short: ShortUids, width: int | None
) -> list[str]:
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


def indented(text: str) -> Iterator[str]:
    """Yield the lines of a text, indented and with escapes."""
    for part in text.split("\n"):
        yield f"  {printable(part.expandtabs(4))}".rstrip()


def single_line(text: str) -> str:
    """Return a text on one line, without cutting it."""
    return one_line(text, len(text))


# ── show ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Information on the generation that wrote an entry or an answer."""

    generation: GenerationView | None
    """Generation of the writer. None if it is not stored in this bank."""
    prompt: str | None = None
    """Decoded prompt. None if it could not be decoded."""
    answer: str | None = None
    """Decoded completion. None if it could not be decoded."""
    unreadable: str | None = None
    """Reason why prompt and answer could not be decoded."""

    def _generation_lines(self, width: int | None, replay: Replay) -> Iterator[str]:
        """Yield the lines about the generation. `width`, `replay`: as in `lines`."""
        generation = self.generation
        if generation is None:
            yield from wrapped(
                "The model's answer is not in this bank: it was not imported, or training no "
                "longer needs it.",
                width,
            )
            return
        last = "" if generation.trained_at is None else f", last {_when(generation.trained_at)}"
        yield from wrapped(
            f"written by {single_line(generation.id)}: model version {generation.extractor}, "
            f"{counted(len(generation.sampled), 'token')}, finish reason {generation.finish}",
            width,
        )
        yield from replay(generation.id)
        yield f"{_count_in_words('trained on', generation.trained)}{last}"
        if self.prompt is None or self.answer is None:
            reason = single_line(self.unreadable or "")
            yield from wrapped(f"The answer cannot be decoded: {reason}", width)
            return
        yield "prompt"
        yield from indented(self.prompt)
        yield "answer"
        yield from indented(self.answer)


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

    def lines(
        self, short: ShortUids, width: int | None = None, run: Path | None = None
    ) -> Iterator[str]:
        """Yield the output of `show`. `short`: printed uid by full uid.

        `width`: maximum number of terminal cells in a line, except in texts and commands. `run`:
        run with the episodes of the bank; None if it is unknown.
        """
        replay = _replay(run if self.entry.step is not None else None)
        for line in self._facts():
            yield from wrapped(line, width)
        table_width = width and width - 2
        title = _first_title(
            "lineage, newest first", min(MAX_LISTED, len(self.lineage)), len(self.lineage)
        )
        yield from _titled(title, _versions(self.lineage[:MAX_LISTED], short, table_width))
        if self.missing_parents:
            missing = ", ".join(map(single_line, self.missing_parents))
            yield from wrapped(f"  sources that are not in this bank: {missing}", width)
        yield from _titled(
            _latest_title("derived versions", len(self.offspring)),
            _versions(self.offspring[-MAX_LISTED:], short, table_width),
        )
        yield from _titled(
            "lift and credit over time (of all versions)", history(self.uses, self.lifts)
        )
        yield from _titled(
            _latest_title("guided episodes", len(self.uses)), _uses(self.uses[-MAX_LISTED:])
        )
        yield from _replay_last(self.uses, run)
        yield from _titled(
            _latest_title("answered questions", len(self.refinements)),
            _refinements(self.refinements[-MAX_LISTED:], table_width),
        )
        yield ""
        yield from self._generation_lines(width, replay)

    def _facts(self) -> Iterator[str]:
        """Yield the lines above the tables."""
        entry, counters = self.entry, self.entry.counters
        yield f"{single_line(entry.uid)}, version {entry.version}, {self._status()}"
        yield f"task  {single_line(entry.task)}"
        yield f"goal  {single_line(entry.goal)}"
        if entry.place.variation:
            yield f"variation  {single_line(entry.place.variation)}"
        yield "text"
        yield from indented(entry.text)
        yield ""
        last = f", last {_when(counters.last_returned_step)}" if counters.retrieved else ""
        yield f"{_count_in_words('retrieved', counters.retrieved)}{last}"
        yield (
            f"won {counters.won} of {counted(counters.credited, 'credited episode')} "
            "(of this version)"
            if counters.credited
            else "never credited"
        )
        if lift := counters.lift:
            groups = f"{lift.groups:,} groups" if lift.groups > 1 else "one group"
            yield (
                f"lift {lift_text(lift)} over {groups}: success rate of guided minus free "
                "members (of this version)"
            )
        elif counters.credited:
            yield (
                "lift unknown: no group that it guided has free members to compare with "
                "(of this version)"
            )
        if counters.votes:
            yield f"{counters.votes:+d} votes of the extractor (of this version)"

    @property
    def missing_parents(self) -> list[str]:
        """Versions that the lineage names but that are not in the bank, as after an import."""
        there = {f"{version.uid}@{version.version}" for version in self.lineage}
        return sorted({parent for version in self.lineage for parent in version.parents} - there)

    def _status(self) -> str:
        """Return the status, and for an evicted entry the step and the reason."""
        if self.eviction is None:
            return self.entry.status
        if self.eviction.why == "bounds" and self.eviction.by is None:
            return (
                f"evicted {_when(self.eviction.step)} to meet the bounds of "
                "the run that opened the bank"
            )
        cause = {
            "bounds": "to free space for",
            "votes": "by votes, the last from",
            "discarded": "by",
            "pruned": "by",
        }[self.eviction.why]
        return (
            f"evicted {_when(self.eviction.step)} {cause} "
            f"{single_line(self.eviction.by or 'crl bank prune')}"
        )


@dataclass(frozen=True)
class RefinementReport(GenerationReport):
    """Information on an answer to a question."""

    refinement: RefinementView
    uses: Sequence[UseView]

    def lines(
        self, short: ShortUids, width: int | None = None, run: Path | None = None
    ) -> Iterator[str]:
        """Yield the output of `show`. The arguments are those of `EntryReport.lines`."""
        refinement = self.refinement
        yield f"{single_line(refinement.id)}, answer to a question {_when(refinement.step)}"
        uid = short.get(refinement.uid, refinement.uid)
        yield f"source  {single_line(uid)}@{refinement.version}"
        if refinement.text is None:
            yield "The agent received the retrieved experience unchanged."
        else:
            yield "text"
            yield from indented(refinement.text)
        yield from _titled("guided episode", _uses(self.uses))
        yield from _replay_last(self.uses, run)
        yield ""
        yield from self._generation_lines(width, _replay(None))


Replay = Callable[[str], Iterator[str]]
"""Function that yields the line with the command that shows an episode, by its id."""


def _replay(run: Path | None) -> Replay:
    """Return the function that yields the commands. `run` = None: it yields nothing."""

    def lines(episode: str) -> Iterator[str]:
        if run is not None and EPISODE_ID.fullmatch(episode):
            yield f"  show the episode: crl replay {shlex.quote(str(run))} {shlex.quote(episode)}"

    return lines


def _replay_last(uses: Sequence[UseView], run: Path | None) -> Iterator[str]:
    """Yield the line with the command that shows the last guided episode of the run."""
    episodes = [use.episode for use in uses if use.step is not None]
    if episodes:
        yield from _replay(run)(episodes[-1])


def _titled(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield an empty line, the title and the indented lines.

    Yield nothing if there are no lines.
    """
    if lines:
        yield ""
        yield title
        yield from (f"  {text}" for text in lines)


def _versions(versions: Sequence[VersionView], short: ShortUids, width: int | None) -> list[str]:
    """Return a table of versions, or nothing if there are none."""
    if not versions:
        return []
    columns = {
        "after step": [_completed(version.step) for version in versions],
        "how": [version.kind for version in versions],
        "uid": [f"{short.get(version.uid, version.uid)}@{version.version}" for version in versions],
        "by": [version.by for version in versions],
        "text": [version.text for version in versions],
    }
    return table(columns, width)


def _uses(uses: Sequence[UseView]) -> list[str]:
    """Return a table of credited episodes, or nothing if there are none."""
    columns = {
        "step": [_episode_step(use) for use in uses],
        "episode": [use.episode for use in uses],
        "version": [str(use.version) for use in uses],
        "reward": [f"{use.reward:+g}" for use in uses],
    }
    return table(columns, None) if uses else []


def _episode_step(use: UseView) -> str:
    """Return the step of a credited episode, or "–" for an episode of another run."""
    return "–" if use.step is None else str(use.step + 1)


def _refinements(refinements: Sequence[RefinementView], width: int | None) -> list[str]:
    """Return a table of answers to questions, or nothing if there are none."""
    columns = {
        "after step": [_completed(refinement.step) for refinement in refinements],
        "answer": [refinement.id for refinement in refinements],
        "version": [str(refinement.version) for refinement in refinements],
        "text": [
            "(unchanged)" if refinement.text is None else refinement.text
            for refinement in refinements
        ],
    }
    return table(columns, width) if refinements else []


def _latest_title(title: str, total: int) -> str:
    """Return the title, with the number of listed items if only the last ones are listed."""
    return f"{title} (the last {MAX_LISTED} of {total:,})" if total > MAX_LISTED else title


def history(uses: Sequence[UseView], lifts: Sequence[LiftView] = ()) -> list[str]:
    """Return a table of lift and won episodes over time.

    Each row is a period of consecutive steps. There are at most `MAX_PERIODS` of them, and
    one more for all earlier runs.
    """
    earlier = [use for use in uses if use.step is None]
    steps = [
        list(group) for step, group in groupby(uses, key=lambda use: use.step) if step is not None
    ]
    size = max(1, -(-len(steps) // MAX_PERIODS))
    periods = [earlier] if earlier else []
    periods += [
        [use for step in steps[i : i + size] for use in step] for i in range(0, len(steps), size)
    ]
    names = [_period(period[0].step, period[-1].step) for period in periods]
    if not periods:
        return []
    period_steps = [{use.step for use in period} for period in periods]
    columns = {
        "when": names,
        "lift": [
            lift_text(pooled_lift(view.lift for view in lifts if view.step in steps))
            for steps in period_steps
        ],
        "won": [won_of(sum(use.reward > 0 for use in period), len(period)) for period in periods],
    }
    return table(columns, None)


def _period(first: int | None, last: int | None) -> str:
    """Return the name of a period. `first` = None: earlier runs.

    Episodes are credited in their step, so their step is that after the completed ones.
    """
    if first is None or last is None:
        return "earlier runs"
    return f"step {first + 1}" if first == last else f"steps {first + 1}–{last + 1}"


def _count_in_words(action: str, n: int) -> str:
    """Return how often something happened, in words."""
    return f"{action} {times(n)}" if n else f"never {action}"


# ── stats ───────────────────────────────────────────────────────────────────────────────────────


def stats_lines(stats: Mapping[str, Any], width: int | None) -> Iterator[str]:
    """Yield the output of `stats`. `stats`: result of `BankReader.stats`.

    `width`: maximum number of terminal cells in a line; None: nothing is broken.
    """
    used = stats["used"]
    voted = f", {used['voted']:,} voted on" if used["voted"] else ""
    last = "" if stats["step"] is None else f", last {_when(stats['step'])}"
    earlier = f", and {stats['earlier']:,} in earlier runs" if stats["earlier"] else ""
    rows = {
        "bank": [
            f"{single_line(stats['bank'])}:",
            f"{stats['bytes'] / 2**20:,.1f} MiB, "
            f"{counted(stats['log'], 'operation')}{last}{earlier}",
        ],
        "vectors": _key_text(stats["keys"]).split(" "),
        "used": [
            f"{used['retrieved']:,} of {counted(used['active'], 'active experience')} retrieved,",
            f"{used['credited']:,} credited{voted}",
        ],
        "operations": _counts(stats["ops"]) or ["–"],
        "refused": _counts(stats["dropped"]) or ["–"],
        "queue": _counts(stats["queue"]),
        "training": _counts(
            {"stored answers": stats["generations"], "credit units ready": stats["ready"]}
        ),
    }
    for name, parts in rows.items():
        separator = " " if name in ("bank", "vectors", "used") else "  "
        for number, line in enumerate(filled(parts, width and width - 12, separator)):
            yield f"{'' if number else name:<10}  {line}"
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


def _counts(counts: Mapping[str, int]) -> list[str]:
    """Return counts with their names."""
    return [f"{single_line(name)} {number:,}" for name, number in counts.items()]


def _key_text(keys: str | None) -> str:
    """Return the name of the keys of a search (`KeyVectors.name`) in words."""
    if keys is None:
        return "none yet: the run that opens the bank computes them"
    embedder, _, formula = single_line(keys).partition(": ")
    formula = formula.removesuffix(" text")
    weight = formula.removeprefix("goal + ")
    key = f"goal, plus {weight} × text" if weight != formula else formula or "text"
    return f"search key: {key} (embedder {embedder})"


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
        low, high = (100 * edge // WIN_RATE_BINS for edge in (i, i + 1))
        rows.append(f"{low:>3}–{high:>3} %  {count:>{widest},}  {bar}".rstrip())
    return rows


# ── diff ────────────────────────────────────────────────────────────────────────────────────────


def diff_lines(
    found: Comparison, a: Path, b: Path, limit: int | None, width: int | None
) -> Iterator[str]:
    """Yield the output of `diff`.

    `limit`: maximum number of rows per table. `width`: as in `table`.
    """
    yield f"A {single_line(str(a))}"
    yield f"B {single_line(str(b))}"
    yield (
        f"only in A {len(found.only_a):,}, only in B {len(found.only_b):,}, in "
        f"both {len(found.both):,}"
    )
    credited = [pair for pair in found.both if all(lesson.credited for lesson in pair)]
    if credited:
        won_a, won_b = (
            won_of(sum(lesson.won for lesson in side), sum(lesson.credited for lesson in side))
            for side in zip(*credited, strict=True)
        )
        yield (f"credited in both {len(credited):,}, episodes won: A {won_a}, B {won_b}")
    table_width = width and width - 2
    for title, lessons in {"only in A": found.only_a, "only in B": found.only_b}.items():
        rows = lessons[:limit]
        yield from _titled(
            _first_title(title, len(rows), len(lessons)), _lessons({"": rows}, table_width)
        )
    rows = found.both[:limit]
    title = _first_title("in both, largest difference in lift first", len(rows), len(found.both))
    yield from _titled(
        title,
        _lessons({"A": [pair[0] for pair in rows], "B": [pair[1] for pair in rows]}, table_width),
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


def _first_title(title: str, shown: int, total: int) -> str:
    """Return the title, with the number of shown rows if rows are left out."""
    return title if shown == total else f"{title} (the first {shown:,} of {total:,})"
