"""Exports as JSON lines.

The first line is {"crl_bank": 5, "entries": 1}: the version of the format and the number of
entries. Each other line holds one active entry (shown here on several lines):

    {"task": "room", "goal": "Reach the stairs down.", "variation": "", "text": "Go west.",
     "uid": "run/0/0/0#0", "version": 1, "parents": [], "reward": 1.0, "retrieved": 5,
     "credited": 4, "credit": 2.0, "votes": 1, "lift": {"groups": 3, "mean": 0.25, "m2": 0.125}}

Only crl_bank, task, goal and text are required. A text must not be longer than an extractor may
write it. An exported bank does not contain evicted entries, the log, training data of the
extractor, or vectors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from crl.errors import ConfigError
from crl.manager.distillation.ops import OpLimits
from crl.manager.inspection.reading import EntryView
from crl.manager.records import Entry
from crl.types import Counters, Lift, Place, Provenance

FORMAT_VERSION = 5
"""Version of the exported lines.

Version 1 had no votes, version 2 no lift, version 3 no variation, version 4 no reward.
"""

ROUNDING = 1e-6
"""Tolerance for rounding errors in sums of floating-point numbers."""

# ── export ────────────────────────────────────────────────────────────────────────────────────────


def export_lines(entries: Sequence[EntryView]) -> Iterator[dict[str, Any]]:
    """Yield the lines of an exported bank."""
    yield {"crl_bank": FORMAT_VERSION, "entries": len(entries)}
    for entry in entries:
        fields, lift = entry.flat(), entry.counters.lift
        line = {name: fields[name] for name in _ExportedEntry.model_fields}
        yield line | {"lift": lift and asdict(lift)}


# ── import ────────────────────────────────────────────────────────────────────────────────────────


def _not_blank(text: str) -> str:
    """Return `text`. Raise `ValueError` if it is empty or blank."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _version_reference(parent: str) -> str:
    """Return `parent`. Raise `ValueError` if it does not have the form uid@version."""
    uid, _, version = parent.rpartition("@")
    if not (uid and version.isascii() and version.isdigit() and len(version) < 10):
        raise ValueError("must have the form uid@version")
    return parent


class _ExportedLift(BaseModel):
    """Lift in an exported bank."""

    model_config = ConfigDict(strict=True, extra="forbid")

    groups: Annotated[int, Field(ge=1, lt=2**31)]
    mean: Annotated[float, Field(ge=-1, le=1)]
    m2: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _check_totals(self) -> _ExportedLift:
        if self.m2 > self.groups * (1 - self.mean**2) + ROUNDING:
            raise ValueError(
                f"an m2 of {self.m2:g} is too large for {self.groups} differences in [−1, 1] "
                "with this mean"
            )
        return self


class _ExportedEntry(BaseModel):
    """Entry in an exported bank."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task: Annotated[str, AfterValidator(_not_blank)]
    goal: str
    variation: str = ""
    text: Annotated[str, Field(max_length=OpLimits().max_chars), AfterValidator(_not_blank)]
    uid: str = ""
    version: Annotated[int, Field(ge=1, lt=2**31)] = 1
    parents: tuple[Annotated[str, AfterValidator(_version_reference)], ...] = ()
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    retrieved: Annotated[int, Field(ge=0, lt=2**31)] = 0
    credited: Annotated[int, Field(ge=0, lt=2**31)] = 0
    credit: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    votes: Annotated[int, Field(gt=-(2**31), lt=2**31)] = 0
    lift: _ExportedLift | None = None

    @model_validator(mode="after")
    def _check_totals(self) -> _ExportedEntry:
        if abs(self.credit) > self.credited:
            raise ValueError(
                f"a credit of {self.credit:g} is not possible with {self.credited} credited "
                "episodes of 1 or −1 each"
            )
        return self


def parse_export(path: Path) -> list[Entry]:
    """Return the entries of an exported bank.

    Raise `ConfigError`, which names the file and the line, for the first line that is wrong.
    """
    return parse_lines(path, read_bytes(path).split(b"\n"))


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file. Raise `ConfigError` if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        remedy = "Give a file that crl bank export wrote"
        raise ConfigError("file", str(path), reason, remedy) from error


def parse_lines(path: Path, lines: Sequence[bytes], first: int = 1) -> list[Entry]:
    """Return the entries in lines of an exported bank, of which the first is the header.

    `path`, `first`: file and number of the first line, for messages. Raise `ConfigError` for the
    first line that is wrong.
    """
    expected = _read_header(path, first, lines[0] if lines else b"")
    entries: dict[str, Entry] = {}
    line_numbers: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=first + 1):
        if not line.strip():
            continue
        entry = _parse_entry(path, number, line)
        if entry.uid in entries:
            reason = f"line {line_numbers[entry.uid]} has the same uid"
            remedy = "Give each experience a different uid"
            raise line_error(path, number, ".uid", entry.uid, reason, remedy)
        entries[entry.uid], line_numbers[entry.uid] = entry, number
    if expected not in (None, len(entries)):
        remedy = (
            "Export the bank again. If you added or removed lines on purpose, correct this "
            "number or remove it"
        )
        reason = f"the file holds {len(entries)}, so it may be cut off"
        raise line_error(path, first, ".entries", expected, reason, remedy)
    return list(entries.values())


def _read_header(path: Path, number: int, line: bytes) -> int | None:
    """Return the number of entries that the header announces, or None if it announces none."""
    remedy = (
        f'The first line must be {{"crl_bank": {FORMAT_VERSION}}}, as crl bank export writes it'
    )
    try:
        header = json.loads(line)
        version, entries = header["crl_bank"], header.get("entries")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise line_error(path, number, "", line, "this is not an exported bank", remedy) from error
    if type(version) is not int or version < 1:  # bool is a subclass of int
        raise line_error(
            path, number, ".crl_bank", version, "is not a version of the format", remedy
        )
    if version > FORMAT_VERSION:
        reason = f"is newer than this crl's {FORMAT_VERSION}"
        raise line_error(path, number, ".crl_bank", version, reason, "Upgrade crl")
    if not (entries is None or (type(entries) is int and entries >= 0)):
        raise line_error(
            path, number, ".entries", entries, "is not a number of experiences", remedy
        )
    return entries


def _parse_entry(path: Path, number: int, line: bytes) -> Entry:
    remedy = (
        "Each line after the first must be a JSON object with the keys "
        f"{', '.join(_ExportedEntry.model_fields)}. Only task, goal and text are required"
    )
    with _field_errors(path, number, line, remedy):
        parsed = _ExportedEntry.model_validate_json(line)
    uid = parsed.uid or f"import/0/0/{number}#0"
    counters = Counters(
        retrieved=parsed.retrieved,
        credited=parsed.credited,
        credit=parsed.credit,
        votes=parsed.votes,
        lift=Lift(**parsed.lift.model_dump()) if parsed.lift else None,
    )
    provenance = Provenance("import", (0, 0), parsed.parents, parsed.reward)
    return Entry(
        uid, parsed.version, parsed.text,
        Place(parsed.task, parsed.goal, parsed.variation), provenance, counters,
    )  # fmt: skip


def new_entry(path: Path, number: int, uid: str, fields: Mapping[str, str]) -> Entry:
    """Return an entry without counters. `fields`: its task, goal and text.

    `path`, `number`: file and line of the text, for messages. Raise `ConfigError` if a bank cannot
    hold the entry.
    """
    with _field_errors(path, number, b"", "Correct the text at this line"):
        parsed = _ExportedEntry.model_validate(dict(fields))
    provenance = Provenance("import", (0, 0))
    return Entry(uid, 1, parsed.text, Place(parsed.task, parsed.goal), provenance, Counters())


@contextmanager
def _field_errors(path: Path, number: int, line: bytes, remedy: str) -> Iterator[None]:
    """Raise pydantic's first error in the context as a `ConfigError` about a line."""
    try:
        yield
    except ValidationError as error:
        first = sorted(
            error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden"
        )[0]
        key = "".join(f".{part}" for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        value = None if first["type"] == "missing" else first["input"] if first["loc"] else line
        reason = reason[0].lower() + reason[1:]
        raise line_error(path, number, key, value, reason, remedy) from None


def line_error(
    path: Path, number: int, key: str, value: object, reason: str, remedy: str
) -> ConfigError:
    """Return an error about `key`, such as ".text", in a line of a file. Cut a long value."""
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    value = f"{value[:60]}…" if isinstance(value, str) and len(value) > 60 else value
    return ConfigError(f"{path}:{number}{key}", value, reason, remedy)
