"""Choice of one entry among similar ones. Pure functions.

The choice is by diversity (CRL eq. 6), or by the best success record with a share of trials.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from crl.algo.experience import diversity_score
from crl.config.schema import RetrievalSection
from crl.manager.records import Entry

SIMILARITY_TOLERANCE = 1e-6
"""Tolerance for equal similarities, because float32 products differ in their last bits."""

PRIOR_SUCCESS_RATE = 0.3
"""Prior success rate in `success_score`, with the weight of one episode."""


class Candidate(NamedTuple):
    """Entry near a query, with the cosine of query and key."""

    entry: Entry
    similarity: float


def choose_entry(
    candidates: Sequence[Candidate],
    step: int,
    rng: Callable[[], random.Random],
    settings: RetrievalSection,
    *,
    trial: bool = False,
) -> Entry | None:
    """Return the entry that guides an episode, or None if no candidate is similar enough.

    * candidates: the most similar first.
    * step: completed actor steps.
    * rng: function that creates the random generator for breaking ties.
    * trial: with `choice = "credit"`, return the least retrieved entry instead of the one with the
      highest `success_score`.
    """
    if not candidates or candidates[0].similarity < settings.min_similarity:
        return None
    threshold = max(
        candidates[0].similarity - settings.margin - SIMILARITY_TOLERANCE, settings.min_similarity
    )
    eligible = [candidate for candidate in candidates if candidate.similarity >= threshold]
    scores: list[float]
    if settings.choice == "diverse":
        scores = list(diverse_scores(eligible, step, settings))
    elif trial:
        scores = [-float(entry.counters.retrieved) for entry, _ in eligible]
    else:
        counters = [entry.counters for entry, _ in eligible]
        scores = [success_score(c.credited, c.credit) for c in counters]
    best = max(scores)
    # `diverse_scores` omits candidates that cannot have the highest score.
    tied = [entry for (entry, _), score in zip(eligible, scores, strict=False) if score == best]
    return rng().choice(tied) if len(tied) > 1 else tied[0]


def is_trial(index: int, share: float, phase: float) -> bool:
    """Return whether search number `index` of a group is a trial.

    `share` is the share of trials among all searches. Trials are spread evenly over a group.
    `phase` is drawn from [0, 1) for each group, so that the average over many groups equals any
    `share`.
    """
    return math.floor((index + 1) * share + phase) > math.floor(index * share + phase)


def diverse_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> Iterator[float]:
    """Yield s(m) of CRL eq. 6 for the first candidates, in order.

    `candidates` has the most similar first. Stop at the first candidate whose s_rank is below the
    best score so far: s(m) ≤ s_rank, so that no later candidate can have the highest score.

    **Ours**: s_rank = −(number of candidates that are more similar), so that equally similar
    candidates have the same rank.
    """
    rank, best = 0, -math.inf
    for entry, similarity in candidates:
        while candidates[rank].similarity > similarity + SIMILARITY_TOLERANCE:
            rank += 1
        if -rank < best:
            return
        score = diversity_score(
            -float(rank),
            entry.counters.retrieved,
            is_recent(entry, step, settings.recent_steps),
            count_penalty=settings.count_penalty,
        )
        best = max(best, score)
        yield score


def is_recent(entry: Entry, step: int, recent_steps: int) -> bool:
    """Return whether the entry was retrieved in the last `recent_steps` actor steps.

    The running step is included. A step in the future belongs to another run that the bank was
    copied from; it is not recent.
    """
    last = entry.counters.last_returned_step
    return last is not None and 0 <= step - last < recent_steps


def success_score(credited: int, credit: float) -> float:
    """Return (won + 0.3) / (n + 1). **Ours**.

    `choice = "credit"` and `bank.evict = "credit"` rank entries by this score. `credited` is n, the
    number of credited episodes that the entry's version guided. `credit` is Σ r over them, r = ±1.
    """
    return ((credit + credited) / 2 + PRIOR_SUCCESS_RATE) / (credited + 1)
