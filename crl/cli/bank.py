"""Commands of `crl bank`: inspect, export, import and prune a bank.

The bank of a running run can be inspected too.

Modules that need more than typer are imported inside the commands.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from crl.cli import completion
from crl.cli.command import Command, chosen, command, metavar
from crl.cli.output import (
    AsJson,
    Limit,
    json_text,
    print_json,
    print_lines,
    report_count,
    terminal_width,
)
from crl.errors import ConfigError
from crl.types import Counters, Lift, lift_order
from crl.wording import counted, printable

if TYPE_CHECKING:
    from crl.cli.bank_text import EntryReport, RefinementReport, ShortUids
    from crl.manager.inspection.reading import (
        BankReader,
        EntryView,
        GenerationView,
        KeyVectors,
        QueueState,
    )

Row = TypeVar("Row")

app = typer.Typer(
    help="Inspect or edit an experience bank.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        readable=False,
        autocompletion=completion.runs,
        help="A run directory, or a bank.sqlite file.",
    ),
]
"""Path of a bank.

typer does not check that it is readable (`readable=False`), so that commands can report the error
themselves.
"""
TaskName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only experiences of this task.")
]


PREVIEW_ROWS = 10
"""Number of experiences that `prune` shows before it asks for confirmation."""


class Sort(StrEnum):
    """Sort orders of `ls`."""

    lift, credit, retrieved, age = "lift", "credit", "retrieved", "age"


class Status(StrEnum):
    """Filters of `ls` by status."""

    active, evicted, merged, all = "active", "evicted", "merged", "all"


class Format(StrEnum):
    """Formats of `export`."""

    jsonl, markdown, skills = "jsonl", "markdown", "skills"


SORT_KEYS: dict[Sort, Callable[[Counters], Any]] = {
    Sort.lift: lambda counters: (lift_order(counters.lift), -counters.credit),
    Sort.credit: lambda counters: -counters.credit,
    Sort.retrieved: lambda counters: -counters.retrieved,
    Sort.age: lambda counters: 0,
}
"""Sort key of an experience in each order of `ls`, by its counters."""


# ── inspection ──────────────────────────────────────────────────────────────────────────────────


@app.command("ls", cls=Command)
@command
def list_entries(
    run: Run,
    sort: Annotated[
        str,
        typer.Option(
            metavar=metavar(Sort),
            autocompletion=completion.choices(Sort),
            help=(
                "Best lift (the lower end of its 95 % interval), best credit (won − lost "
                "episodes), most often retrieved, or newest first."
            ),
        ),
    ] = Sort.lift,
    reverse: Annotated[
        bool,
        typer.Option(
            "--reverse",
            help="Reverse the order. By lift: the lowest upper end of the interval first.",
        ),
    ] = False,
    task: TaskName = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Only experiences whose goal contains this text (any case)."
        ),
    ] = None,
    status: Annotated[
        str,
        typer.Option(
            metavar=metavar(Status),
            autocompletion=completion.choices(Status),
            help="Only experiences with this status.",
        ),
    ] = Status.active,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List experiences."""
    from crl.cli.bank_text import entry_table
    from crl.manager.inspection.reading import open_reader, short_uids

    order, shown = chosen(Sort, "--sort", sort), chosen(Status, "--status", status)
    with open_reader(_bank_file(run)) as bank:
        entries, short = bank.entries(None), short_uids(bank.uids())
    matching = [
        entry
        for entry in reversed(entries)
        if shown in (Status.all, entry.status)
        and task in (None, entry.task)
        and (goal or "").lower() in entry.goal.lower()
    ]
    matching.sort(key=lambda entry: SORT_KEYS[order](entry.counters))
    if reverse:
        matching.reverse()
        if order is Sort.lift:  # by the upper end of the interval; unknown lifts stay last
            lifts = {entry.uid: entry.counters.lift for entry in matching}
            matching.sort(key=lambda entry: lift_order((lift := lifts[entry.uid]) and -lift))
    _print_rows(matching, limit, as_json, lambda rows: entry_table(rows, short, terminal_width()))
    _report_tasks(task, {entry.task for entry in entries})


@app.command(cls=Command)
@command
def show(
    run: Run,
    uid: Annotated[
        str,
        typer.Argument(
            metavar="UID",
            help=(
                "Uid of an experience as printed by ls, or an unambiguous prefix of it; or the id "
                "of an answer to a question."
            ),
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show one experience with its history.

    The output contains its text and lineage, and its lift and credit over time. It lists the
    episodes that the experience guided and the questions that it answered. It ends with the
    extractor's answer that wrote the experience.

    For an answer to a question, the output contains the text that the agent read, the source
    experience, and the reward of the episode.
    """
    from crl.manager.inspection.reading import open_reader, short_uids

    _require_unicode("uid", uid)
    file = _bank_file(run)
    with open_reader(file) as bank:
        report, short = _report_on(bank, uid), short_uids(bank.uids())
    if report.generation:
        report = _with_decoded_texts(report, report.generation, file)
    if as_json:
        _print_json(report)
    else:
        has_episodes = (file.parent / "episodes").is_dir()
        print_lines(report.lines(short, terminal_width(), file.parent if has_episodes else None))


@app.command(cls=Command)
@command
def search(
    run: Run,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="Text to search for, such as a task's goal.")
    ],
    task: TaskName = None,
    limit: Limit = 10,
    as_json: AsJson = False,
) -> None:
    """Search experiences like retrieval does.

    Active experiences are listed, the highest cosine similarity first.
    """
    from crl.cli.bank_text import entry_table
    from crl.manager.inspection.reading import open_reader, short_uids

    _require_unicode("text", text)
    if not text.strip():
        raise ConfigError("text", text, "is empty", "Give a text, such as the goal of a task")
    file = _bank_file(run)
    with open_reader(file) as bank:
        keys, active, short = bank.keys(), bank.entries(), short_uids(bank.uids())
    entries = [entry for entry in active if task in (None, entry.task)]
    cosines = asyncio.run(_similarities(text, entries, keys, file))
    found = sorted(zip(cosines, entries, strict=True), key=lambda pair: -pair[0])
    rows = found[: limit or None]
    if as_json:
        _print_json(
            [{"similarity": similarity, **_to_json_types(entry)} for similarity, entry in rows]
        )
    elif rows:
        column = [f"{similarity:.3f}" for similarity, _ in rows]
        print_lines(
            entry_table([entry for _, entry in rows], short, terminal_width(), cosine=column)
        )
    report_count(len(rows), len(found))
    _report_tasks(task, {entry.task for entry in active})


@app.command(cls=Command)
@command
def stats(run: Run, as_json: AsJson = False) -> None:
    """Print sizes, retrievals, lift, credit and the queue."""
    from crl.cli.bank_text import stats_lines
    from crl.manager.inspection.reading import open_reader

    with open_reader(_bank_file(run)) as bank:
        metrics = bank.stats()
    if as_json:
        _print_json(metrics)
    else:
        print_lines(stats_lines(metrics, terminal_width()))


@app.command(cls=Command)
@command
def failures(
    run: Run,
    mode: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List the failures of this mode, the newest first."),
    ] = None,
    task: TaskName = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List failure modes of a run with --method role_agent.

    A failure is an active note on a failed episode of the run. For a bank without a run, all notes
    are listed.
    """
    from crl.cli.bank_text import failure_table, mode_table
    from crl.manager.failure_notes import ALL_MODES
    from crl.manager.inspection.failures import failure_views, mode_views
    from crl.manager.inspection.reading import open_reader, short_uids

    if mode is not None and mode not in ALL_MODES:
        modes = ", ".join(ALL_MODES)
        raise ConfigError("--mode", mode, "is not a failure mode", f"Choose one of: {modes}")
    file = _bank_file(run)
    with open_reader(file) as bank:
        found = _failures(file, bank.entries())
        views = failure_views(entry for entry in found if task in (None, entry.task))
        short = short_uids(bank.uids())
    if mode is None:
        _print_rows(mode_views(views), limit, as_json, lambda v: mode_table(v, terminal_width()))
        return
    of_mode = [view for view in reversed(views) if view.note.mode == mode]
    _print_rows(of_mode, limit, as_json, lambda v: failure_table(v, short, terminal_width()))


@app.command(cls=Command)
@command
def queue(run: Run, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the episodes in the distillation queue.

    They wait for distillation or are being distilled. They are listed in queue order.
    """
    _print_requests(run, ("leased", "pending"), limit, as_json)


@app.command(cls=Command)
@command
def dead(
    run: Run,
    episodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="EPISODE", help="Episodes for --retry (default: all)."),
    ] = None,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry",
            help=(
                "Queue the episodes again. They wait until the run continues. Refused while the "
                "run is in progress."
            ),
        ),
    ] = False,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List episodes whose distillation failed."""
    if not retry:
        if episodes:
            raise ConfigError(
                "dead",
                " ".join(episodes),
                "episodes can only be given with --retry",
                "Add --retry, or leave the episodes out",
            )
        _print_requests(run, ("dead",), limit, as_json)
        return
    from crl.manager.inspection.upkeep import retry_dead

    retried = asyncio.run(retry_dead(_bank_file(run), episodes or None))
    if as_json:
        _print_json({"retried": retried})
    else:
        words = ("episode", "it waits") if retried == 1 else ("episodes", "they wait")
        print_lines(
            [
                f"queued {retried:,} dead {words[0]} again; {words[1]} until the run continues"
                if retried
                else "there are no dead episodes"
            ]
        )


@app.command(cls=Command)
@command
def diff(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_A",
            readable=False,
            autocompletion=completion.runs,
            help="A run directory, or a bank.sqlite file.",
        ),
    ],
    other: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_B",
            readable=False,
            autocompletion=completion.runs,
            help="Another bank.",
        ),
    ],
    limit: Limit = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the active experiences of two banks.

    Experiences are the same if their task, goal and text are equal. The counts of equal experiences
    in a bank are added up.
    """
    from crl.cli.bank_text import diff_lines
    from crl.manager.inspection.reading import Comparison, compare_banks

    found = compare_banks(_bank_file(run), _bank_file(other))
    if as_json:
        end = limit or None
        shown = Comparison(found.only_a[:end], found.only_b[:end], found.both[:end])
        _print_json(shown)
        report_count(shown.lessons, found.lessons)
    else:
        print_lines(diff_lines(found, run, other, limit or None, terminal_width()))


# ── changes ─────────────────────────────────────────────────────────────────────────────────────


@app.command("export", cls=Command)
@command
def export_entries(
    run: Run,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar=metavar(Format),
            autocompletion=completion.choices(Format),
            help=(
                "JSON lines, one Markdown file for readers, or a directory of Agent Skills "
                "(SKILL.md) for coding agents."
            ),
        ),
    ] = Format.jsonl,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="File or directory to write (default: print; not for skills)."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export at PATH.")
    ] = False,
) -> None:
    """Export active experiences as JSON lines, Markdown or Agent Skills."""
    from crl.manager.exchange.files import write_file, write_skills_folder
    from crl.manager.exchange.jsonl import export_lines
    from crl.manager.exchange.markdown import write_markdown
    from crl.manager.exchange.origin import origin_of
    from crl.manager.exchange.skills import write_skills
    from crl.manager.inspection.reading import open_reader

    chosen_format = chosen(Format, "--format", form)
    if out is None and (overwrite or chosen_format is Format.skills):
        reason = "is required for skills and for --overwrite"
        raise ConfigError("--out", None, reason, "Give the path to write with --out")
    file = _bank_file(run)
    with open_reader(file) as bank:
        entries, step = bank.entries(), bank.step()
    if chosen_format is Format.skills and out:
        files = write_skills(entries, origin_of(file, step))
        write_skills_folder(out, files, overwrite=overwrite)
        skills = counted(len({Path(name).parts[0] for name in files}), "skill")
        print_lines([f"exported {counted(len(entries), 'experience')} as {skills} to {out}"])
        return
    lines = (
        write_markdown(entries, origin_of(file, step))
        if chosen_format is Format.markdown
        else map(json_text, export_lines(entries))
    )
    if out is None:
        for line in lines:
            typer.echo(line)
    else:
        write_file(out, "".join(f"{line}\n" for line in lines), overwrite=overwrite)
        print_lines([f"exported {counted(len(entries), 'experience')} to {out}"])


@app.command("import", cls=Command)
@command
def import_entries(
    bank: Annotated[Path, typer.Argument(metavar="BANK", help="Path of the new bank.sqlite.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Output of export: JSON lines, a Markdown file (.md), or a directory of skills.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Create a new bank from exported or hand-written experiences.

    A run can start from it with bank.init.
    """
    from crl.manager.exchange.formats import read_export
    from crl.manager.inspection.upkeep import create_bank

    found = read_export(file)
    create_bank(bank, found.entries)
    if as_json:
        counts = {"imported": len(found.entries), "new": found.new, "left_out": found.left_out}
        print_json(counts | {"bank": str(bank)})
        return
    print_lines([f"imported {counted(len(found.entries), 'experience')} into {bank}"])
    if found.new:
        print_lines([f"without counters: {found.new:,} that were written by hand or edited"])
    if found.left_out:
        print_lines([f"left out: {found.left_out:,} whose text was edited or removed"])


@app.command(cls=Command)
@command
def prune(
    run: Run,
    max_entries: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the N experiences with the best credit."),
    ] = None,
    unused_since: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            min=0,
            help=(
                "Evict experiences that were neither written nor retrieved after this step "
                "(0 = from the start) in this run."
            ),
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evict experiences by one criterion.

    Evicted experiences remain in the history. The bank must not be open in a run.
    """
    from crl.manager.inspection.reading import open_reader, short_uids
    from crl.manager.inspection.upkeep import evict, lowest_credit, not_used_since, require_closed

    if (max_entries is None) == (unused_since is None):
        given = None if max_entries is None else f"{max_entries}, {unused_since}"
        raise ConfigError(
            "--max-entries, --unused-since",
            given,
            "exactly one criterion is required",
            "Give --max-entries or --unused-since",
        )
    if as_json and not yes:
        raise ConfigError(
            "prune",
            "--json",
            "the output is JSON, so the command cannot ask for confirmation",
            "Add --yes",
        )
    file = _bank_file(run)
    with open_reader(file) as bank:
        entries, short = bank.entries(), short_uids(bank.uids())
    require_closed(file)
    to_evict = (
        not_used_since(entries, unused_since)
        if unused_since is not None
        else lowest_credit(entries, max_entries or 0)
    )
    if to_evict and not yes:
        _confirm_eviction(to_evict, short, active=len(entries))
    evicted = asyncio.run(evict(file, [entry.unit for entry in to_evict])) if to_evict else 0
    if as_json:
        _print_json({"evicted": evicted, "active": len(entries) - evicted})
    elif to_evict:
        print_lines([f"evicted {evicted:,}, still active {len(entries) - evicted:,}"])
    else:
        print_lines([f"nothing to evict among {len(entries):,} active experiences"])


def _confirm_eviction(to_evict: Sequence[EntryView], short: ShortUids, *, active: int) -> None:
    """Print a preview and ask for confirmation. Abort the command if the answer is no.

    `short`: short forms of uids. `active`: number of active entries.
    """
    from crl.cli.bank_text import entry_table

    print_lines(entry_table(to_evict[:PREVIEW_ROWS], short, terminal_width()))
    if len(to_evict) > PREVIEW_ROWS:
        print_lines([f"… and {len(to_evict) - PREVIEW_ROWS:,} more"])
    typer.confirm(f"Evict {len(to_evict):,} of {active:,} active experiences?", abort=True)


# ── shared helpers ──────────────────────────────────────────────────────────────────────────────


def _bank_file(run: Path) -> Path:
    """Return the bank file of a run directory, or `run` itself if it is not a directory.

    Raise `ConfigError` if the run has no bank.
    """
    from crl.config.load import load_saved
    from crl.monitor.run_dir import RunDir

    # `Path.is_dir` would raise an error for a path without permission.
    if not os.path.isdir(run):
        return run
    file = RunDir(run).bank
    if not os.path.exists(file) and os.path.isfile(run / "config.json"):
        config = load_saved(run).config
        if not config.with_bank:
            reason = f"has no bank: {config.method} does not use one with the settings of this run"
            raise ConfigError("run", str(run), reason, "Give another run")
    return file


def _require_unicode(name: str, text: str) -> None:
    """Raise `ConfigError` under `name` if the text contains lone surrogates."""
    from crl.manager.distillation.ops import is_encodable

    if not is_encodable(text):
        raise ConfigError(name, text, "is not valid Unicode", "Give it in UTF-8")


def _print_json(value: Any) -> None:
    print_json(_to_json_types(value))


def _to_json_types(value: Any) -> Any:
    """Return a value as JSON types. A lift gets the half width of its interval."""
    from crl.manager.inspection.reading import EntryView

    if isinstance(value, EntryView):
        return {name: _to_json_types(part) for name, part in value.flat().items()}
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _to_json_types(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Lift):
            plain["half_width"] = value.half_width
        return plain
    return [_to_json_types(item) for item in value] if isinstance(value, list | tuple) else value


def _print_requests(run: Path, states: Sequence[QueueState], limit: int, as_json: bool) -> None:
    """Print the requests in one of `states`."""
    from crl.cli.bank_text import request_table
    from crl.manager.inspection.reading import open_reader, short_uids

    with open_reader(_bank_file(run)) as bank:
        requests = bank.requests(*states)
        short = short_uids(bank.uids())
    _print_rows(requests, limit, as_json, lambda rows: request_table(rows, short, terminal_width()))


def _print_rows(
    found: list[Row], limit: int, as_json: bool, table: Callable[[list[Row]], list[str]]
) -> None:
    """Print the first `limit` rows as JSON or as a table.

    0 = all rows. The total is reported on stderr if rows are left out.
    """
    rows = found[: limit or None]
    if as_json:
        _print_json(rows)
    elif rows:
        print_lines(table(rows))
    report_count(len(rows), len(found))


def _report_tasks(task: str | None, tasks: Collection[str]) -> None:
    """Report on stderr which tasks the bank has if it has no experience of `task`."""
    if task is not None and tasks and task not in tasks:
        names = ", ".join(sorted(tasks))
        typer.echo(printable(f"--task {task}: the bank has experiences of {names}"), err=True)


def _failures(file: Path, entries: Iterable[EntryView]) -> list[EntryView]:
    """Return the entries that are notes on failed episodes of the run of a bank.

    These are all entries if there is no config.json beside the bank. Raise `ConfigError` if the
    run has another method.
    """
    from crl.config.load import load_saved

    if not (file.parent / "config.json").is_file():
        return list(entries)
    config = load_saved(file.parent).config
    notes = config.spec.notes
    if notes is None or notes.prompt != "failure":
        reason = f"its method is {config.method}, which keeps no failures"
        raise ConfigError("run", str(file.parent), reason, "Give a run of role_agent")
    return [entry for entry in entries if entry.step is not None]


async def _similarities(
    text: str, entries: Sequence[EntryView], keys: KeyVectors, file: Path
) -> list[float]:
    """Return the cosine similarity of the query and the key of each entry of a bank."""
    from crl.embedders import open_embedder
    from crl.report.search import embedder_of, similarities

    async with open_embedder(embedder_of(file, keys)) as embedder:
        return await similarities(text, entries, keys, embedder)


def _report_on(bank: BankReader, name: str) -> EntryReport | RefinementReport:
    """Return a report on the experience, or on the answer to a question, with the id `name`."""
    from crl.cli.bank_text import EntryReport, RefinementReport

    if refinement := bank.refinement(name):
        return RefinementReport(
            refinement, bank.uses(refinement.id), generation=bank.generation(refinement.unit)
        )
    entry = bank.find(name)
    return EntryReport(
        entry,
        lineage=bank.lineage(entry.unit),
        offspring=bank.offspring(entry.uid),
        uses=bank.uses(entry.uid),
        lifts=bank.lifts(entry.uid),
        refinements=bank.refinements(entry.uid),
        generation=bank.generation(entry.unit),
        eviction=bank.eviction(entry.uid),
    )


def _with_decoded_texts(
    report: EntryReport | RefinementReport, generation: GenerationView, file: Path
) -> EntryReport | RefinementReport:
    """Return the report with the decoded prompt and answer of its generation.

    If they cannot be decoded, return the report with the reason.
    """
    from dataclasses import replace

    try:
        decode = _decoder(file)
    except ConfigError as error:
        return replace(report, unreadable=str(error))
    return replace(report, prompt=decode(generation.prompt), answer=decode(generation.sampled))


def _decoder(file: Path) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes the writer's tokens. Only the tokenizer is loaded.

    Raise `ConfigError` if the tokenizer is missing or cannot be read.
    """
    from tokenizers import Tokenizer

    from crl.config.load import load_saved
    from crl.config.models import resolve_model
    from crl.modeling.gguf import described

    config = load_saved(file.parent).config
    key = f"{config.writer}.model"
    model = described(resolve_model(getattr(config, config.writer).model, key), key)
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            key,
            str(model),
            "the directory contains no tokenizer.json",
            "Copy the files of the tokenizer there",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific type
        raise ConfigError(
            key, str(path), f"cannot be read ({error})", "Restore the file"
        ) from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
