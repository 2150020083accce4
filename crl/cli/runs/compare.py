"""Command `crl compare`: differences between runs.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crl.cli import completion
from crl.cli.command import command

if TYPE_CHECKING:
    from crl.evaluation.comparison import Comparison
    from crl.evaluation.evaluate import EvalKey


@command
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs.", autocompletion=completion.runs
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="NAME",
            help="Compare RUN/eval/NAME.json of each run (default: the run's last evaluation).",
        ),
    ] = None,
) -> None:
    """Compare the success of runs, paired over seeds if possible."""
    from crl.cli.output import print_lines, warn_of_damage, warn_of_repeated_seeds
    from crl.evaluation.comparison import compare, read_run
    from crl.monitor.run_dir import RunDir

    results = [read_run(run, name) for run in runs]
    comparison = compare(results)
    for result in results:
        warn_of_damage(RunDir(result.path).metrics, result.damaged_lines)
    warn_of_repeated_seeds(results)
    print_lines(_arms(comparison))
    _print_results(comparison)


def _arms(comparison: Comparison) -> list[str]:
    """Return the lines on the arms and on the settings in which they differ."""
    lines = []
    for arm in comparison.arms:
        runs = ", ".join(f"{run.path} (seed {run.seed})" for run in arm.runs)
        lines.append(f"{arm.name}: {runs}")
    lines += [""] if comparison.differing else []
    for key, values in comparison.differing.items():
        texts = (f"{arm.name} {value}" for arm, value in zip(comparison.arms, values, strict=True))
        lines.append(f"{key}: {', '.join(texts)}")
    return [*lines, ""]


def _print_results(comparison: Comparison) -> None:
    from crl.cli.output import print_table

    arms = comparison.arms
    head = ["task", "split", "condition", *(arm.name for arm in arms)]
    body = [
        [*_key_cells(key), *(str(mean) if mean else "–" for mean in means)]
        for key, means in comparison.means.items()
    ]
    typer.echo(
        "mean success of each arm [95 % interval over its runs; with one run, that of the run]"
    )
    print_table(head, body)
    if comparison.differences:
        typer.echo("")
        head = ["task", "split", "condition", "arms", "difference", "interval"]
        typer.echo("difference of success [95 % interval]")
        body = [
            [*_key_cells(difference.key), difference.arms, str(difference), difference.method]
            for difference in comparison.differences
        ]
        print_table(head, body)


def _key_cells(key: EvalKey) -> list[str]:
    from crl.evaluation.evaluate import CONDITION_LABELS

    task, split, condition = key
    return [task, split, CONDITION_LABELS.get(condition, condition)]
