"""Choice by similarity and diversity (CRL eq. 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from crl.algo.experience import diversity_score
from crl.config.retrieval import RetrievalPolicy
from crl.config.schema import RetrievalSection
from crl.manager.records import Entry
from crl.manager.retrieval.choice import SIMILARITY_TOLERANCE, Candidate


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


POLICY = RetrievalPolicy(diverse_scores, "similarity and diversity (eq. 6)", trials=False)
