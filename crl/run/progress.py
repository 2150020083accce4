"""Progress display while a bank is embedded or a model is evaluated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from crl.manager.settings import Progress
from crl.protocols import Monitor
from crl.run.models import print_to_stderr
from crl.wording import counted

EMBEDDING = "embedding the bank"
"""Stage in which the experiences of a bank are embedded."""


class StderrMonitor(Monitor):
    """`Monitor` of a command without a run. Notes are printed on stderr."""

    def note(self, text: str) -> None:
        print_to_stderr(text)


def embedding_progress(monitor: Monitor, *, progress_bar: bool = True) -> Progress:
    """Return a `Progress`: a bar on stderr if that is a terminal, otherwise one note.

    Pass `progress_bar` = False if something else uses the terminal. Then no bar is drawn. A bank
    that has vectors of another embedder is noted in any case. `monitor` also gets the stage.
    """

    @contextmanager
    def progress(total: int, change: str) -> Iterator[Callable[[int], object]]:
        bar = progress_bar and sys.stderr.isatty()
        if change or not bar:
            reason = f" again ({change})" if change else ""
            monitor.note(f"embedding {counted(total, 'experience')} of the bank{reason}")
        finished = 0
        with ExitStack() as stack:
            draw = stack.enter_context(_bar("embedding the bank", total)) if bar else None

            def advance(done: int) -> None:
                nonlocal finished
                finished += done
                monitor.progress(EMBEDDING, finished, total)
                if draw:
                    draw(finished)

            monitor.progress(EMBEDDING, 0, total)
            stack.callback(monitor.progress, EMBEDDING, total, total)
            yield advance

    return progress


@contextmanager
def evaluation_bar() -> Iterator[Callable[[int, int], object]]:
    """Show the progress of evaluations inside the context, if stderr is a terminal.

    The yielded function is called with the number of finished episodes and of all episodes.
    """
    with ExitStack() as stack:
        draw: Callable[[int], object] | None = None

        def report(done: int, total: int) -> None:
            nonlocal draw
            if done < total and sys.stderr.isatty():
                draw = draw or stack.enter_context(_bar("evaluation", total))
                draw(done)
            elif draw:
                draw = None
                stack.close()

        yield report


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """Draw a progress bar on stderr. The yielded function draws the number of finished parts."""
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    with ProgressBar(console=Console(stderr=True)) as display:
        task = display.add_task(name, total=total)
        yield lambda done: display.update(task, completed=done)
