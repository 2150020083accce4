"""Writer of a run's episodes, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crl.records.shards import shard_files, write_shard
from crl.types import Trajectory


class EpisodeWriter:
    """Writer of the shards in `folder` (RUN/episodes). A thread writes one shard at a time.

    `keep`: number of the last steps whose shards are kept; 0 = all.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "episode writer")
        self._writing: asyncio.Future[None] | None = None

    async def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Begin to write the episodes of a step, from 1, after those of the step before.

        Raise `OSError` if those could not be written.
        """
        await self.flush()
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._thread, self._write, step, trajectories)

    async def flush(self) -> None:
        """Wait until everything is on the disk. Raise `OSError` if it could not be written."""
        if writing := self._writing:
            await asyncio.shield(writing)
            if self._writing is writing:  # the next step's episodes may be under way
                self._writing = None

    async def aclose(self) -> None:
        """Wait as `flush` does, and end the thread."""
        try:
            await self.flush()
        finally:
            self._thread.shutdown(wait=False)

    def _write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        write_shard(self._folder, step, trajectories)
        if self._keep:
            for path, of_step in shard_files(self._folder).items():
                if of_step <= step - self._keep:
                    path.unlink()
