"""Progress display while a bank is embedded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crl.manager.settings import Progress


def embedding_progress(note: Callable[[str], object], *, progress_bar: bool = True) -> Progress:
    """Return a `Progress`: a bar on stderr if that is a terminal, otherwise one line by `note`.

    Pass `progress_bar` = False if something else uses the terminal. Then no bar is drawn. A bank
    that has vectors of another embedder is reported in any case.
    """

    @contextmanager
    def progress(total: int, change: str) -> Iterator[Callable[[int], object]]:
        bar = progress_bar and sys.stderr.isatty()
        if change or not bar:
            reason = f" again ({change})" if change else ""
            note(f"embedding {total:,} experiences of the bank{reason}")
        if not bar:
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import Progress as ProgressBar

        with ProgressBar(console=Console(stderr=True)) as display:
            task = display.add_task("embedding the bank", total=total)
            yield lambda done: display.advance(task, done)

    return progress
