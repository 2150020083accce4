"""Verdicts on claims of the paper, and rows of the tables that hold them.

A claim is judged by the 95 % interval of a difference (Student's t, paired).

* agrees: the interval is on the claimed side of 0.
* disagrees: it is on the other side.
* not shown: it contains 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.intervals import Mean

AGREES, DISAGREES, NOT_SHOWN = "agrees", "disagrees", "not shown"
NOT_RUN = "not run yet"


def verdict(advantages: Sequence[float]) -> str:
    """Return whether the interval of the advantages is above 0, below 0, or around it."""
    mean = Mean.of(advantages)
    if mean.value > mean.half_width:
        return AGREES
    return DISAGREES if mean.value < -mean.half_width else NOT_SHOWN


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict on several claims: the common one, else how many claims have each."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    counts = {name: verdicts.count(name) for name in (DISAGREES, NOT_SHOWN, AGREES)}
    plural = {DISAGREES: "disagree", NOT_SHOWN: NOT_SHOWN, AGREES: "agree"}
    return ", ".join(
        f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count
    )


def claim_line(text: str, judged: str, *, added: bool) -> str:
    """Return the line of a list with a claim, its numbers and its verdict."""
    return f"- {text}. **{judged}**{' *Added after the runs.*' if added else ''}"


def markdown_row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
