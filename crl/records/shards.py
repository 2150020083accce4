"""Shards: two files in RUN/episodes with the episodes of one training step.

* STEP.jsonl.gz: one JSON object per episode, without token columns. Compressed with gzip.
* STEP.npz: token columns of all training samples of the step, one after the other, in the format of
  `numpy.savez_compressed`: ids (int32), mask (uint8), logprobs (float32) and versions (int32). The
  field `tokens` of an episode has the lengths of its samples. After truncated sampling there are
  two more columns: kept_counts (int32) has the size of each token's kept set, and kept (int32) the
  ids of all kept sets.

STEP has six digits or more, and counts from 1. Each file is written under a temporary name,
synchronised to disk and renamed, STEP.jsonl.gz last: a shard without this file does not exist.

`write_shard` runs in a thread beside the event loop. It converts one sample at a time and leaves
the interpreter lock while it compresses, so that the event loop never waits for it for long.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import IO, Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

import numpy as np

from crl.errors import ConfigError
from crl.types import (
    Activity,
    EpisodeAddress,
    ExperienceUse,
    Guidance,
    Outcome,
    Segment,
    Task,
    TokenTrace,
    Trajectory,
    kept_counts,
    split_kept,
)

TEXTS = ".jsonl.gz"
TOKENS = ".npz"
PARTIAL = ".part"
"""End of the name of a file that is being written."""

COLUMNS: Mapping[str, type[np.generic]] = {
    "ids": np.int32,
    "mask": np.uint8,
    "logprobs": np.float32,
    "versions": np.int32,
}
"""Token columns and their types. The names are those of `TokenTrace`."""

SLICE = 16_384
"""Tokens that are converted at once, which takes less than a millisecond."""

Record = dict[str, Any]
"""Episode as JSON."""

FIELDS: Mapping[str, type | UnionType] = {
    **dict.fromkeys(("step", "group", "member", "seed", "turns"), int),
    **dict.fromkeys(("overtime_turns", "invalid_actions", "sampled_tokens"), int),
    **dict.fromkeys(("condition", "task", "goal", "split"), str),
    **dict.fromkeys(("success", "truncated"), bool),
    **dict.fromkeys(("params", "rewards"), dict),
    **dict.fromkeys(("turn_rewards", "segments", "used", "shown", "rejected", "tokens"), list),
    "reward": int | float,
    "score": int | float | None,
    "error": str | None,
}
"""Fields of an episode as JSON, with their types."""


def write_shard(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Write the episodes of a step, from 1. Replace an existing shard of the step.

    Raise `OSError` if a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    traces = [trace for trajectory in trajectories for trace in trajectory.traces]
    _write_file(folder / f"{step:06d}{TOKENS}", lambda file: _write_tokens(file, traces))
    _write_file(folder / f"{step:06d}{TEXTS}", lambda file: _write_texts(file, trajectories))


def shards(folder: Path) -> dict[int, Path]:
    """Return the path of the texts of every shard, by step, in the order of the steps."""
    paths = (path for path in folder.glob(f"*{TEXTS}") if path.name.split(".")[0].isdigit())
    return dict(sorted((int(path.name.split(".")[0]), path) for path in paths))


def shard_files(folder: Path) -> dict[Path, int]:
    """Return the step of every file of a shard, complete or not.

    The token columns of a step come last, so that a process that removes the files in this order
    and is killed leaves no shard without them.
    """
    files = [path for path in folder.glob("*.*") if path.name.lstrip(".").split(".")[0].isdigit()]
    return {
        path: int(path.name.lstrip(".").split(".")[0])
        for path in sorted(files, key=lambda path: (path.name.endswith(TOKENS), path.name))
    }


def read_records(path: Path) -> Iterator[Record]:
    """Yield the episodes of a shard as JSON, without token columns.

    `path` is the path of its texts. Raise `ConfigError` if it is damaged.
    """
    with _readable(path), gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield _checked(json.loads(line))


def read_shard(path: Path) -> Iterator[Trajectory]:
    """Yield the episodes of a shard with their token columns.

    `path` is the path of its texts. Raise `ConfigError` if a file is missing or damaged.
    """
    tokens = path.with_name(path.name.removesuffix(TEXTS) + TOKENS)
    with _readable(tokens), np.load(tokens, allow_pickle=False) as file:
        columns = {name: file[name] for name in COLUMNS}
        counts = file["kept_counts"] if "kept_counts" in file else np.zeros_like(columns["ids"])
        kept = split_kept(file["kept"].tobytes() if "kept" in file else b"", counts.tolist())
    start = 0
    for record in read_records(path):
        traces: list[TokenTrace] = []
        for length in record["tokens"]:
            span = slice(start, start + length)
            part = {name: tuple(column[span].tolist()) for name, column in columns.items()}
            start += length
            with _readable(tokens):
                traces.append(TokenTrace(**part, kept=kept[span]))
                if len(traces[-1].ids) != length:
                    raise ValueError(f"it has only {columns['ids'].size:,} tokens")
        yield trajectory_of(record, traces)


def _checked(record: Record) -> Record:
    """Return a record. Raise `TypeError`, `KeyError` or `ValueError` if a field is wrong."""
    for name, kind in FIELDS.items():
        if not isinstance(record, dict) or name not in record:
            raise ValueError(f"an episode has no field {name}")
        if not isinstance(record[name], kind):
            raise TypeError(f"the field {name} of an episode is {type(record[name]).__name__}")
    trajectory = trajectory_of(record)
    uses = (*trajectory.guidance.used, *trajectory.guidance.rejected)
    texts = (segment.text for segment in trajectory.segments)
    parts = (
        (str, (*texts, *(use.uid for use in uses), *record["shown"])),
        (int | float, (*record["rewards"].values(), *trajectory.activity.turn_rewards)),
        (int, record["tokens"]),
    )
    for kind, values in parts:
        if not all(isinstance(value, kind) for value in values):
            raise TypeError(f"a field of an episode does not contain {kind}")
    return record


# ── episodes as JSON ──────────────────────────────────────────────────────────────────────────────


def episode_record(trajectory: Trajectory) -> Record:
    """Return an episode as JSON, without its token columns."""
    address, guidance = trajectory.address, trajectory.guidance
    return {
        "step": address.step + 1,  # from 1, as in metrics.jsonl: the step that trains on it
        "group": address.group,
        "member": address.member,
        "condition": trajectory.condition,
        "task": trajectory.task.name,
        "goal": trajectory.task.goal,
        "seed": trajectory.task.seed,
        "split": trajectory.task.split,
        "params": dict(trajectory.task.params),
        "success": trajectory.success,
        "score": trajectory.outcome.score,
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "turns": trajectory.turns,
        "turn_rewards": [_finite(reward) for reward in trajectory.turn_rewards],
        "overtime_turns": trajectory.activity.overtime_turns,
        "invalid_actions": trajectory.activity.invalid_actions,
        "sampled_tokens": trajectory.activity.sampled_tokens,
        "truncated": trajectory.truncated,
        "error": trajectory.error,
        "segments": [
            {"role": s.role, "origin": s.origin, "text": s.text} for s in trajectory.segments
        ],
        "used": [dataclasses.asdict(use) for use in guidance.used],
        "shown": list(guidance.shown),
        "rejected": [dataclasses.asdict(use) for use in guidance.rejected],
        "tokens": [len(trace.ids) for trace in trajectory.traces],
    }


def trajectory_of(record: Record, traces: Iterable[TokenTrace] = ()) -> Trajectory:
    """Return the episode of a record of `episode_record`, with these token columns."""
    return Trajectory(
        Task(record["task"], record["seed"], record["split"], record["goal"], record["params"]),
        EpisodeAddress(record["step"] - 1, record["group"], record["member"]),
        record["condition"],
        tuple(Segment(**segment) for segment in record["segments"]),
        tuple(traces),
        Outcome(
            rewards=record["rewards"],
            **{name: record[name] for name in ("success", "score", "truncated", "error")},
        ),
        Activity(
            tuple(math.nan if reward is None else reward for reward in record["turn_rewards"]),
            **{
                name: record[name]
                for name in ("overtime_turns", "invalid_actions", "sampled_tokens")
            },
        ),
        Guidance(
            tuple(ExperienceUse(**use) for use in record["used"]),
            tuple(record["shown"]),
            tuple(ExperienceUse(**use) for use in record["rejected"]),
        ),
    )


def _finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def _write_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file under a temporary name, synchronise it to disk, and rename it to `path`."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_texts(file: IO[bytes], trajectories: Sequence[Trajectory]) -> None:
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as texts:
        for trajectory in trajectories:
            line = json.dumps(episode_record(trajectory), ensure_ascii=False, allow_nan=False)
            # A lone surrogate is not valid in UTF-8. Its escape is valid in JSON.
            texts.write(line.encode("utf-8", "backslashreplace") + b"\n")


def _write_tokens(file: IO[bytes], traces: Sequence[TokenTrace]) -> None:
    """Write the token columns. Level 1 compresses them nearly as well as higher levels."""
    tokens = sum(len(trace.ids) for trace in traces)
    with ZipFile(file, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        for name, dtype in COLUMNS.items():
            values = (getattr(trace, name) for trace in traces)
            _write_column(archive, name, dtype, tokens, values)
        if any(any(trace.kept) for trace in traces):
            kept = sum(sum(kept_counts(trace.kept)) for trace in traces)
            counts = (kept_counts(trace.kept) for trace in traces)
            _write_column(archive, "kept_counts", np.int32, tokens, counts)
            ids = (np.frombuffer(b"".join(trace.kept), np.int32) for trace in traces)
            _write_column(archive, "kept", np.int32, kept, ids)


def _write_column(
    archive: ZipFile, name: str, dtype: type[np.generic], length: int, parts: Iterable[Any]
) -> None:
    """Write an array of `length` values, one part after the other."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as column:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(column, header)
        for values in parts:
            for start in range(0, len(values), SLICE):
                column.write(np.array(values[start : start + SLICE], dtype).data)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `ConfigError` for an error in reading the file `path`."""
    try:
        yield
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RecursionError,
        zlib.error, BadZipFile,
    ) as error:  # fmt: skip
        raise ConfigError(
            "episodes",
            str(path),
            f"cannot be read ({error})",
            "Restore this file from a copy, or choose other steps",
        ) from error
