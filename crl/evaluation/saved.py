"""Saved evaluations: one JSON file with settings and episodes, and a CSV file with the results."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from crl.errors import ConfigError
from crl.evaluation.report import Estimate, ReportRow, report_rows
from crl.evaluation.samples import SavedEpisode, Source

FORMAT = 1
"""Version of the files."""

_EPISODES = TypeAdapter(list[SavedEpisode])


class About(BaseModel):
    """Fields of `SavedEvaluation.about` that commands read."""

    subject: str
    step: int | None
    experience: Source
    samples: int
    temperature: float
    seed: int
    options: dict[str, Any]
    data_notes: dict[str, str]
    prompts: dict[str, str] | None = None
    """SHA-256 of the texts of prompts, by name. Evaluations of earlier versions have none."""


@dataclass(frozen=True)
class SavedEvaluation:
    """Content of a file."""

    about: Mapping[str, Any]
    """Model, step, options, settings, versions and time. It has the fields of `About`."""
    episodes: Sequence[SavedEpisode]

    @property
    def rows(self) -> list[ReportRow]:
        return report_rows(self.episodes)


def require_writable(folder: Path) -> None:
    """Create `folder`. Raise `ConfigError` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("out", str(folder), reason, "Choose another directory") from error


def save(evaluation: SavedEvaluation, folder: Path, name: str) -> Path:
    """Write NAME.json and NAME.csv to `folder` and return the path of the JSON file.

    An existing file is never replaced: the next free name of NAME-2, NAME-3, … is used. A file is
    written completely or not at all.
    """
    rows = evaluation.rows
    record = {
        "format": FORMAT,
        "about": evaluation.about,
        "results": [_row_record(row) for row in rows],
        "episodes": _EPISODES.dump_python(list(evaluation.episodes), mode="json"),
    }
    require_writable(folder)
    path = _reserved(folder, name)
    write_csv(rows, path.with_suffix(".csv"))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)
    return path


def read(path: Path) -> SavedEvaluation:
    """Return the content of a file. Raise `ConfigError` if it is not a saved evaluation."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
        episodes = _EPISODES.validate_python(record["episodes"], strict=False)
        About.model_validate(record["about"])
        return SavedEvaluation(dict(record["about"]), episodes)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        reason = f"is not a saved evaluation ({type(error).__name__}: {error})"
        raise ConfigError("eval", str(path), reason, "Run crl eval again") from error


def saved_files(folder: Path) -> list[Path]:
    """Return the files of evaluations in `folder`, the oldest first."""
    files = filter(_is_evaluation, folder.glob("*.json"))
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _is_evaluation(path: Path) -> bool:
    """Return whether a JSON file is an evaluation, or too damaged to tell."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(record, dict) and {"format", "episodes"} <= record.keys()


def write_csv(rows: Iterable[ReportRow], path: Path) -> None:
    """Write one line for each row. Unknown values are empty."""
    lines = [_flat(_row_record(row)) for row in rows]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _row_record(row: ReportRow) -> dict[str, Any]:
    task, split, condition = row.key
    return {
        "task": task,
        "split": split,
        "condition": condition,
        "games": row.games,
        "episodes": row.episodes,
        "errors": row.errors,
        "success": _estimate_record(row.success),
        **{name: _estimate_record(mean) for name, mean in row.means.items()},
        **{f"pass@{k}": _estimate_record(rate) for k, rate in row.pass_at.items()},
    }


def _estimate_record(estimate: Estimate) -> dict[str, float | None]:
    return {
        name: None if math.isnan(value) else value
        for name, value in dataclasses.asdict(estimate).items()
    }


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the columns NAME, NAME_low and NAME_high for an estimate."""
    line: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            line |= {
                name: value["value"],
                f"{name}_low": value["low"],
                f"{name}_high": value["high"],
            }
        else:
            line[name] = value
    return line


def _reserved(folder: Path, name: str) -> Path:
    """Return the path of a new JSON file, and create the CSV file beside it to reserve the name."""
    for number in itertools.count(1):
        path = folder / f"{name}{f'-{number}' if number > 1 else ''}.json"
        if path.exists():
            continue
        try:
            path.with_suffix(".csv").open("x").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the numbers have no end")
