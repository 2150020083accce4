"""Records of a run at a checkpoint: how far its files of metrics and episodes were written.

A run that is resumed takes back what was written after its checkpoint. The lines after the recorded
length are moved to another directory, so nothing is lost.
"""

from __future__ import annotations

import os
from pathlib import Path

from crl.monitor.run_dir import RunDir
from crl.protocols import State


class Records:
    """Files of a run to which lines are appended."""

    def __init__(self, run: RunDir) -> None:
        self._files = (run.metrics, run.trajectories)

    def state(self) -> State:
        """Write the files to the disk. Return their lengths in bytes, by name.

        A file that does not exist has length 0.
        """
        lengths: State = {path.name: 0 for path in self._files}
        for path in filter(Path.exists, self._files):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            lengths[path.name] = path.stat().st_size
        return lengths

    def discard(self, state: State, target: Path) -> None:
        """Move what was written after `state` to files in the new directory `target`.

        The lines are in `target` before they are removed here. A process that is killed in between
        leaves them in both places. Raise `OSError` if a file cannot be written.
        """
        for path in self._files:
            length = state[path.name]
            if not path.exists() or path.stat().st_size <= length:
                continue
            target.mkdir(parents=True, exist_ok=True)
            with path.open("r+b") as file, (target / path.name).open("wb") as discarded:
                file.seek(length)
                while block := file.read(1 << 20):
                    discarded.write(block)
                discarded.flush()
                os.fsync(discarded.fileno())
                file.truncate(length)
