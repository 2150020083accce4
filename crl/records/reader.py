"""Readers of a run's episodes."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from crl.errors import ConfigError
from crl.monitor.run_dir import RunDir
from crl.records.shards import Record, read_records, read_shard, shards
from crl.types import Trajectory


def read_episodes(run: Path, steps: Container[int] | None = None) -> Iterator[Trajectory]:
    """Yield the training episodes of a run with their token columns, in the order of the steps.

    `steps` are the training steps to read, from 1; None reads all. At most one step is in memory.
    Log-probs have the precision of float32. Raise `ConfigError` if the run has no episodes, or if a
    file is damaged.
    """
    for path in episode_shards(run, steps).values():
        yield from read_shard(path)


def read_episode_records(run: Path, steps: Container[int] | None = None) -> Iterator[Record]:
    """Yield the training episodes of a run as JSON, without token columns, which is faster.

    The arguments and errors are those of `read_episodes`.
    """
    for path in episode_shards(run, steps).values():
        yield from read_records(path)


def episode_shards(run: Path, steps: Container[int] | None = None) -> dict[int, Path]:
    """Return the path of the texts of every shard of a run, by step.

    Raise `ConfigError` if there is none.
    """
    found = shards(RunDir(run).episodes)
    chosen = {
        step: path for step, path in found.items() if steps is None or step in steps
    }  # fmt: skip
    if not chosen:
        reason = "has no episodes of these steps" if found else "has no episodes"
        remedy = (
            f"Its episodes are of the steps {min(found)} to {max(found)}"
            if found
            else "Use the directory of a run that has trained at least one step"
        )
        raise ConfigError("run", str(run), reason, remedy)
    return chosen
