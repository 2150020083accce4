"""Position of a run's records at a checkpoint: how far metrics and episodes were written.

A run that is resumed takes back what was written after its checkpoint. Later lines of metrics and
later shards of episodes are moved to another directory, so nothing is lost.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from crl.monitor.run_dir import RunDir
from crl.protocols import State
from crl.records.shards import shard_files


def position(run: RunDir) -> State:
    """Return the length of the complete lines of the metrics in bytes, by name of the file.

    The last line is incomplete if the disk was full.
    """
    return {run.metrics.name: _complete_length(run.metrics)}


def missing_metrics(run: RunDir, saved: State) -> str:
    """Return a warning if lines of metrics before the position `saved` are missing, else ""."""
    length = run.metrics.stat().st_size if run.metrics.exists() else 0
    if length >= saved[run.metrics.name]:
        return ""
    return (
        f"warning: {run.metrics} has {length:,} bytes instead of {saved[run.metrics.name]:,}: "
        "lines are missing"
    )


def discard(run: RunDir, saved: State, step: int, target: Path) -> None:
    """Move metrics after the position `saved` and episodes of steps after `step` to `target`.

    Lines are in `target`, a new directory, before they are removed here. A process that is killed
    in between leaves them in both places. Raise `OSError` if a file cannot be written.
    """
    later = [path for path, of_step in shard_files(run.episodes).items() if of_step > step]
    for path in later:
        (folder := target / run.episodes.name).mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    length = _complete_length(run.metrics, saved[run.metrics.name])
    if not run.metrics.exists() or run.metrics.stat().st_size <= length:
        return
    target.mkdir(parents=True, exist_ok=True)
    with run.metrics.open("r+b") as file, (target / run.metrics.name).open("wb") as discarded:
        file.seek(length)
        while block := file.read(1 << 20):
            discarded.write(block)
        discarded.flush()
        os.fsync(discarded.fileno())
        file.truncate(length)


def _complete_length(path: Path, limit: int | None = None) -> int:
    """Return the length of the complete lines among the first `limit` bytes of a file."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.rfind(b"\n", 0, len(content) if limit is None else limit) + 1
