"""Pages "actor" and "extractor": all metrics of a trained model, with their histories."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from crl.cli.dashboard.parts import Body, history_table
from crl.cli.draw import DIM
from crl.monitor.snapshot import Series, Snapshot

FIRST = (
    "reward", "loss", "approx_kl", "reference_kl", "ratio_mean", "ratio_max", "clip_fraction",
    "entropy", "grad_norm", "learning_rate", "updates", "version", "skipped_updates",
)  # fmt: skip
"""Metrics that are shown first, in this order. The others follow in the order of the log."""


def actor(s: Snapshot, width: int, height: int) -> Body:
    """Return the page of the actor: one value per step."""
    extra = ("rollout/sampled_tokens", "rollout/groups_with_signal", "staleness/mean",
             "staleness/max", "time/train", "time/sync")  # fmt: skip
    return _model(s, width, "actor", "train", extra, "The actor has not been trained yet.")


def extractor(s: Snapshot, width: int, height: int) -> Body:
    """Return the page of the extractor: one value per training step."""
    text = "The extractor has not been trained in this run so far."
    return _model(s, width, "extractor", "extractor", ("time/train", "time/sync"), text)


def _model(
    s: Snapshot, width: int, model: str, kind: str, extra: tuple[str, ...], missing: str
) -> Body:
    """Return the page of a model. `kind`: kind of the lines with its metrics."""
    rows = [*_rows(s, model, kind)]
    if not rows:
        return Body([Text(missing, DIM)])
    rows += [(name, s.series(kind, name)) for name in extra if s.series(kind, name).values]
    heading, *lines = history_table(rows, width)
    return Body(lines, pinned=[heading])


def _rows(s: Snapshot, model: str, kind: str) -> Iterator[tuple[str, Series]]:
    """Yield the names and the histories of the metrics of a model."""
    known = {
        name.removeprefix(f"{model}/"): series
        for name, series in s.metrics.get(kind, {}).items()
        if name.startswith(f"{model}/")
    }
    order = [name for name in FIRST if name in known]
    yield from ((name, known[name]) for name in [*order, *(n for n in known if n not in FIRST)])
