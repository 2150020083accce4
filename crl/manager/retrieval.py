"""Choice among similar entries: diversity (CRL eq. 6), or the best record with a share of trials. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from crl.algo.experience import diversity_score
from crl.manager.records import Entry

Choice = Literal["diverse", "credit"]

EQUAL = 1e-6
"""Similarities this close are one rank: float32 products differ in their last bits."""

KNOWN_PRIOR = 0.3
"""Success of the one episode that every entry begins with when the best-known one is looked for."""


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """candidates: N·K nearest entries that are looked at. margin, min_similarity: in cosine; **ours**: only candidates within
    `margin` of the best take part, and below `min_similarity` nothing is returned. lam, recent_steps: λ and the window of
    eq. 6, in rank places per log count and in actor steps. per: members of a group share one pick, or each rollout has its own.
    trials: with `choice = "credit"`, share of searches that return the least retrieved entry.

    batch, max_wait, workers: B, t_max in seconds and W of CRL appendix C.2. exact: large banks too are compared entry by entry, so
    that what is found does not depend on when an index was built.
    """

    choice: Choice = "diverse"
    per: Literal["group", "rollout"] = "group"
    trials: float = 0.0
    candidates: int = 16
    margin: float = 0.05
    min_similarity: float = 0.1
    lam: float = 0.4
    recent_steps: int = 1
    batch: int = 16
    max_wait: float = 0.001
    workers: int = 4
    exact: bool = False

    def __post_init__(self) -> None:
        least = min(self.margin, self.lam, self.recent_steps, self.max_wait)
        if (
            min(self.candidates, self.batch, self.workers) < 1
            or least < 0
            or not 0 <= self.trials <= 1
        ):
            raise ValueError(f"bad retrieval settings: {self}")


class Candidate(NamedTuple):
    entry: Entry
    similarity: float


def pick(
    candidates: Sequence[Candidate],
    step: int,
    rng: Callable[[], random.Random],
    settings: RetrievalSettings,
    *,
    trial: bool = False,
) -> Entry | None:
    """Return the entry that guides an episode, or None where nothing is similar enough.

    candidates: the most similar first; step: completed actor steps; rng: makes the generator that
    breaks ties; trial: with `choice = "credit"`, return the least retrieved entry instead of the
    best-known one.
    """
    if not candidates or candidates[0].similarity < settings.min_similarity:
        return None
    floor = max(candidates[0].similarity - settings.margin - EQUAL, settings.min_similarity)
    equals = [candidate for candidate in candidates if candidate.similarity >= floor]
    scores: list[float]
    if settings.choice == "diverse":
        scores = list(diverse_scores(equals, step, settings))
    elif trial:
        scores = [-float(entry.retrieved) for entry, _ in equals]
    else:
        scores = [known_score(entry.credited, entry.credit) for entry, _ in equals]
    best = max(scores)
    # Entries without a score cannot win.
    tied = [entry for (entry, _), score in zip(equals, scores, strict=False) if score == best]
    return rng().choice(tied) if len(tied) > 1 else tied[0]


def is_trial(index: int, share: float, phase: float) -> bool:
    """Return whether search number `index` of a group is a trial, when `share` of all searches are.

    Trials are spread evenly over a group. phase: drawn from [0, 1) for each group, so that any share
    is met over many groups.
    """
    return math.floor((index + 1) * share + phase) > math.floor(index * share + phase)


def diverse_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSettings
) -> Iterator[float]:
    """s(m) of CRL eq. 6 of each, as far as one may be the highest: it is s_rank at most. candidates: the most similar first.

    **Ours**: s_rank = −(number of candidates that are more similar), so that equals have one rank.
    """
    rank, best = 0, -math.inf
    for entry, similarity in candidates:
        while candidates[rank].similarity > similarity + EQUAL:
            rank += 1
        if -rank < best:
            return
        score = diversity_score(
            -float(rank),
            entry.retrieved,
            is_recent(entry, step, settings.recent_steps),
            lam=settings.lam,
        )
        best = max(best, score)
        yield score


def is_recent(entry: Entry, step: int, recent_steps: int) -> bool:
    """Returned within the last `recent_steps` actor steps, the one that is running included.

    A step that is still to come was counted in another run, which the bank was copied from: not recent.
    """
    return (
        entry.last_returned_step is not None and 0 <= step - entry.last_returned_step < recent_steps
    )


def known_score(credited: int, credit: float) -> float:
    """Return (won + 0.3) / (n + 1), by which `choice = "credit"` and `bank.evict = "credit"` rank entries. **Ours**.

    credited: n episodes that the entry's version guided; credit: Σ r = ±1 over them.
    """
    return ((credit + credited) / 2 + KNOWN_PRIOR) / (credited + 1)
