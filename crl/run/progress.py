"""Progress display while a bank is embedded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crl.manager.settings import Progress


def embedding_progress(note: Callable[[str], object], *, bar: bool = True) -> Progress:
    """Return a `Progress`: a bar on stderr if that is a terminal, otherwise one line by `note`.

    Pass `bar` = False if something else uses the terminal. Then no bar is drawn.
    """

    @contextmanager
    def progress(total: int) -> Iterator[Callable[[int], object]]:
        if not (bar and sys.stderr.isatty()):
            note(f"embedding the bank's experiences, {total:,}")
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True)) as shown:
            task = shown.add_task("embedding the bank", total=total)
            yield lambda done: shown.advance(task, done)

    return progress
