"""Command `crl eval`: evaluate a run or a model, or show saved evaluations.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.cli import completion
from crl.cli.command import chosen, command
from crl.errors import ConfigError
from crl.wording import printable_lines

if TYPE_CHECKING:
    from crl.evaluation.report import ReportRow
    from crl.evaluation.saved import SavedEvaluation

SOURCE_LABELS = {
    "none": "without experience",
    "bank": "with a bank that is only read",
    "online": "with a bank built online",
}

Subject = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|MODEL",
        autocompletion=completion.runs,
        help="Directory of a run, or model in Hugging Face format.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option(metavar="K", help="Checkpoint of the run (default: the last one)."),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        autocompletion=completion.tasks,
        help="Tasks to play (default: those of the run).",
    ),
]
Experience = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        autocompletion=completion.choices(SOURCE_LABELS),
        help="none (default), bank (only read), or online (a bank built during the evaluation).",
    ),
]
Samples = Annotated[
    int | None, typer.Option(metavar="N", help="Episodes of each game (default: 1).")
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="T", help="Sampling temperature; 0 = greedy (default: the run's)."),
]
BankFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Bank to read (default: the run's at the checkpoint)."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory for the results (default: RUN/eval)."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.presets,
        help="Preset of the settings of a MODEL (default: cpu).",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.assignments,
        help="Override a setting. Repeatable.",
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Show the saved evaluations.")]


@command
def evaluate(
    subject: Subject,
    step: Step = None,
    tasks: Tasks = None,
    experience: Experience = None,
    samples: Samples = None,
    temperature: Temperature = None,
    bank: BankFile = None,
    out: Out = None,
    preset: Preset = None,
    sets: Sets = None,
    show: Show = False,
) -> int:
    """Evaluate a run or a model. Without options, repeat the last evaluation of a run."""
    from crl.evaluation.samples import Source
    from crl.run.evaluating.request import Options, is_run, resolve

    options = Options(
        step=step,
        tasks=tasks,
        experience=None if experience is None else chosen(Source, "--experience", experience),
        samples=samples,
        temperature=temperature,
        bank=bank,
        preset=preset,
        sets=sets or (),
    )
    if show:
        _refuse_options_of_show({**options.given, **({"out": str(out)} if out else {})})
        return _show(subject / "eval" if is_run(subject) else subject)
    if is_run(subject) and not options.given and out is None:
        return _repeat(subject)
    request = resolve(subject, options, lambda text: typer.echo(printable_lines(text), err=True))
    from crl.evaluation.saved import read
    from crl.run.evaluating.evaluate import evaluate

    path = evaluate(request, out or _folder(subject, is_run(subject)))
    _print(read(path), path)
    return 0


def _repeat(run: Path) -> int:
    from crl.config.load import load_saved

    load_saved(run)  # report a damaged config immediately, before torch is imported
    from crl.run.main import evaluate_run

    return evaluate_run(run)


def _folder(subject: Path, of_run: bool) -> Path:
    """Return the default folder of the results: RUN/eval, or a new one for a model."""
    if of_run:
        return subject / "eval"
    return Path("evals") / f"{subject.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _refuse_options_of_show(given: dict[str, Any]) -> None:
    for name, value in given.items():
        reason = "does not apply to --show, which shows all saved evaluations"
        raise ConfigError(name, value, reason, "Leave it out")


def _show(folder: Path) -> int:
    from crl.evaluation.saved import read, saved_files

    files = saved_files(folder)
    if not files:
        raise ConfigError(
            "--show",
            str(folder),
            "contains no saved evaluation",
            "Make one, for example with crl eval RUN --samples 4",
        )
    for path in files:
        _print(read(path), path)
    return 0


def _print(evaluation: SavedEvaluation, path: Path) -> None:
    from crl.cli.output import print_lines, print_table

    rows = evaluation.rows
    conditions = {row.key[2] for row in rows}
    print_lines(_head(evaluation))
    ks = list(dict.fromkeys(k for row in rows for k in row.pass_at))
    graded = any("score" in row.means for row in rows)
    head = ["task", "split", *(["condition"] if len(conditions) > 1 else []), "games", "success"]
    head += [f"pass@{k}" for k in ks] + (["score"] if graded else []) + ["turns", "tokens"]
    body = [_cells(row, ks, graded=graded, condition=len(conditions) > 1) for row in rows]
    print_table(head, body)
    print_lines([*_notes(evaluation, rows), f"saved in {path} and {path.stem}.csv", ""])


def _head(evaluation: SavedEvaluation) -> Iterator[str]:
    about = evaluation.about
    step = about["step"]
    when = "" if step is None else f", step {step}"
    mode = f"temperature {about['temperature']:g}" if about["temperature"] else "greedy"
    samples = about["samples"]
    times = "1 sample" if samples == 1 else f"{samples} samples"
    experience = SOURCE_LABELS[about["experience"]]
    sets = "".join(f", {text}" for text in about["options"].get("set", []))
    yield f"{about['subject']}{when}: {experience}, {times} per game, {mode}{sets}"


def _cells(row: ReportRow, ks: Sequence[int], *, graded: bool, condition: bool) -> list[str]:
    from crl.evaluation.evaluate import CONDITION_LABELS

    task, split, name = row.key
    label = CONDITION_LABELS.get(name, name)
    cells = [
        task,
        split,
        *([SOURCE_LABELS["bank"] if name == "guided" else label] if condition else []),
        f"{row.games:,}",
    ]
    cells += [str(row.success), *(str(row.pass_at[k]) if k in row.pass_at else "" for k in ks)]
    if graded:
        cells.append(row.means["score"].text(1) if "score" in row.means else "")
    return [*cells, row.means["turns"].text(2), row.means["tokens"].text(1)]


def _notes(evaluation: SavedEvaluation, rows: Sequence[ReportRow]) -> Iterator[str]:
    from crl.config.schema import OVERALL
    from crl.wording import counted

    yield "[95 % intervals, clustered by goal; success is pass@1; turns and tokens per episode]"
    if errors := sum(row.errors for row in rows if row.key[0] != OVERALL):
        yield f"{counted(errors, 'episode')} ended with an error and count as failures"
    for task, note in evaluation.about["data_notes"].items():
        yield f"{task} is {note}"
